#include "net/store_client.hpp"

#include "net/gate.hpp"

#include <accelerate/base/text.hpp>

namespace accelerate::net {
namespace {

using std::chrono::milliseconds;
using Kind = StoreMessage::Kind;

constexpr std::size_t kMostIdle = 4;

}  // namespace

StoreClient::StoreClient(std::string host, int port, std::string secret, int rank,
                         Clock::time_point deadline)
    : host_(std::move(host)), port_(port), secret_(std::move(secret)), rank_(rank) {
  idle_.push_back(enter(host_, port_, secret_, Purpose::store, rank_, deadline));
}

StoreMessage StoreClient::ask(StoreMessage request, milliseconds patience) {
  const std::string bytes = encode(request);
  if (bytes.size() > kMostMessageBytes) {
    throw std::invalid_argument(text::concat(
        "a message of ", text::format_bytes(static_cast<std::int64_t>(bytes.size())),
        " is too large for the store, which takes up to ", text::format_bytes(kMostMessageBytes)));
  }
  auto deadline = Clock::now() + patience;
  Descriptor connection = take(deadline);
  if (request.kind == Kind::get || request.kind == Kind::wait)
    deadline += milliseconds(request.number);
  send_all(connection, bytes, deadline);
  const std::size_t length = announced_length(receive(connection, kLengthBytes, deadline));
  StoreMessage answer;
  if (length > kMostMessageBytes || !decode(receive(connection, length, deadline), answer))
    throw ConnectionError(ConnectionError::Kind::stranger, "what the store answered is no answer");
  give_back(std::move(connection));
  if (answer.kind == Kind::impossible) {
    throw std::invalid_argument(
        text::concat("the store cannot do that: ", answer.parts.empty() ? "" : answer.parts[0]));
  }
  return answer;
}

Descriptor StoreClient::take(Clock::time_point deadline) {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      Descriptor connection = std::move(idle_.back());
      idle_.pop_back();
      return connection;
    }
  }
  return enter(host_, port_, secret_, Purpose::store, rank_, deadline);
}

void StoreClient::give_back(Descriptor connection) {
  const std::lock_guard lock(mutex_);
  if (idle_.size() < kMostIdle) idle_.push_back(std::move(connection));
}

}  // namespace accelerate::net
