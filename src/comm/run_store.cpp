#include "comm/run_store.hpp"

#include <accelerate/base/text.hpp>

#include <torch/csrc/distributed/c10d/exception.h>

namespace accelerate::comm {
namespace {

using std::chrono::milliseconds;
using Kind = net::StoreMessage::Kind;
using Bytes = std::vector<std::uint8_t>;

/// What a server under load may need for an answer that waits for nobody.
constexpr milliseconds kPatience{60'000};

std::string text_of(const Bytes& bytes) { return std::string(bytes.begin(), bytes.end()); }
Bytes bytes_of(const std::string& text) { return Bytes(text.begin(), text.end()); }

class RunStore final : public c10d::Store {
 public:
  RunStore(std::shared_ptr<net::StoreClient> client, std::shared_ptr<net::StoreServer> server,
           milliseconds timeout)
      : Store(timeout), server_(std::move(server)), client_(std::move(client)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<RunStore>(client_, server_, timeout_);
  }

  using Store::set;
  void set(const std::string& key, const Bytes& value) override {
    ask({Kind::set, 0, {key, text_of(value)}});
  }
  using Store::compareSet;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return bytes_of(
        ask({Kind::compare_set, 0, {key, text_of(expected), text_of(desired)}}).parts.at(0));
  }
  Bytes get(const std::string& key) override {
    return bytes_of(ask({Kind::get, timeout_.count(), {key}}).parts.at(0));
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return ask({Kind::add, value, {key}}).number;
  }
  bool deleteKey(const std::string& key) override {
    return ask({Kind::erase, 0, {key}}).number > 0;
  }
  bool check(const std::vector<std::string>& keys) override {
    return ask({Kind::check, 0, keys}).number > 0;
  }
  std::int64_t getNumKeys() override { return ask({Kind::count, 0, {}}).number; }
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    ask({Kind::wait, timeout.count(), keys});
  }
  void append(const std::string& key, const Bytes& value) override {
    ask({Kind::append, 0, {key, text_of(value)}});
  }
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    std::vector<Bytes> values;
    for (const std::string& value : ask({Kind::get, timeout_.count(), keys}).parts)
      values.push_back(bytes_of(value));
    return values;
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    TORCH_CHECK_VALUE(keys.size() == values.size(), "multiSet was given ", keys.size(),
                      " keys and ", values.size(), " values");
    net::StoreMessage request{Kind::set, 0, {}};
    for (std::size_t i = 0; i < keys.size(); ++i) {
      request.parts.push_back(keys[i]);
      request.parts.push_back(text_of(values[i]));
    }
    ask(std::move(request));
  }
  bool hasExtendedApi() const override { return true; }

 private:
  net::StoreMessage ask(net::StoreMessage request) {
    net::StoreMessage answer;
    const auto waits = request.kind == Kind::get || request.kind == Kind::wait ? request.number : 0;
    try {
      answer = client_->ask(std::move(request), kPatience);
    } catch (const net::ConnectionError& error) {
      C10D_THROW_ERROR(DistNetworkError,
                       "The connection to the store, which rank 0 keeps, failed: ", error.what(),
                       ".");
    } catch (const std::invalid_argument& error) {
      C10D_THROW_ERROR(DistStoreError, "The store refused a request: ", error.what(), ".");
    }
    if (answer.kind == Kind::timed_out) {
      C10D_THROW_ERROR(DistStoreError, "The store's wait timeout of ", waits, " ms is over, and ",
                       text::join(answer.parts), " did not come.");
    }
    return answer;
  }

  // Rank 0 only. It goes after the client.
  const std::shared_ptr<net::StoreServer> server_;
  const std::shared_ptr<net::StoreClient> client_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> make_run_store(std::shared_ptr<net::StoreClient> client,
                                               std::shared_ptr<net::StoreServer> server,
                                               milliseconds timeout) {
  return c10::make_intrusive<RunStore>(std::move(client), std::move(server), timeout);
}

}  // namespace accelerate::comm
