// The run's own store does what c10d's TCPStore does, to the letter where users of c10d can see it.
#include "comm/run_store.hpp"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <functional>
#include <random>
#include <thread>

namespace accelerate::comm {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Bytes = std::vector<std::uint8_t>;

constexpr int kClients = 3;

Bytes bytes(const std::string& text) { return Bytes(text.begin(), text.end()); }
std::string text(const Bytes& bytes) { return std::string(bytes.begin(), bytes.end()); }

std::vector<StorePtr> own_stores() {
  const std::string secret = "the secret of the test, long enough";
  auto server = std::make_shared<net::StoreServer>(net::listen_at(net::resolve("127.0.0.1"), 0),
                                                   secret, kClients);
  std::vector<StorePtr> stores;
  for (int rank = 0; rank < kClients; ++rank) {
    auto client = std::make_shared<net::StoreClient>("127.0.0.1", server->port(), secret, rank,
                                                     net::Clock::now() + milliseconds(5000));
    stores.push_back(make_run_store(std::move(client), server, milliseconds(3000)));
  }
  return stores;
}

std::vector<StorePtr> tcp_stores() {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = milliseconds(3000);
  const auto server = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::vector<StorePtr> stores{server};
  options.isServer = false;
  options.port = server->getPort();
  for (int rank = 1; rank < kClients; ++rank)
    stores.push_back(c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options));
  return stores;
}

/// What one random operation gives, in words. The same random numbers give the same operation.
std::string operate(const std::vector<StorePtr>& stores, std::mt19937& random) {
  const auto any = [&](int below) {
    return static_cast<int>(random() % static_cast<unsigned>(below));
  };
  auto& store = *stores[static_cast<std::size_t>(any(kClients))];
  const auto key = [&] { return "key" + std::to_string(any(6)); };
  const auto number_key = [&] { return "number" + std::to_string(any(3)); };
  const auto value = [&] {
    std::string made(static_cast<std::size_t>(any(40)), '\0');
    for (char& byte : made) byte = static_cast<char>(random());
    return made;
  };
  try {
    switch (any(11)) {
      case 0: {
        const auto where = key();
        store.set(where, bytes(value()));
        return "set";
      }
      case 1: {
        const auto where = key();
        return store.check({where}) ? text(store.get(where)) : "absent";
      }
      case 2: {
        const auto where = number_key();
        return std::to_string(store.add(where, any(2000) - 1000));
      }
      case 3:
        return std::to_string(store.deleteKey(any(2) == 0 ? key() : number_key()));
      case 4: {
        const auto one = key();
        return std::to_string(store.check({one, key()}));
      }
      case 5: {
        // Often what is there, so that both outcomes come.
        const auto where = key();
        const bool right = any(2) == 0 && store.check({where});
        const auto expected = right ? store.get(where) : bytes(any(2) == 0 ? "" : value());
        return text(store.compareSet(where, expected, bytes(value())));
      }
      case 6: {
        const auto where = key();
        store.append(where, bytes(value()));
        return text(store.get(where));
      }
      case 7: {
        const auto one = key();
        const auto other = "other" + one;
        store.multiSet({one, other}, {bytes(value()), bytes(value())});
        const auto both = store.multiGet({other, one});
        return text(both.at(0)) + "|" + text(both.at(1));
      }
      case 8: {
        const auto where = key();
        if (!store.check({where})) return "not waited for";
        store.wait({where}, milliseconds(1000));
        return "came";
      }
      case 9: {
        const auto where = number_key();
        return store.check({where}) ? text(store.get(where)) : "no number";
      }
      default:
        return store.hasExtendedApi() ? "extended" : "plain";
    }
  } catch (const std::exception& error) {
    return std::string("error: ") + error.what();
  }
}

TEST(RunStore, DoesWhatTheTcpStoreDoes) {
  const auto own = own_stores();
  const auto tcp = tcp_stores();
  const auto keys_before = tcp[0]->getNumKeys();  // it has some of its own
  std::mt19937 one(7), other(7);
  for (int i = 0; i < 3000; ++i) ASSERT_EQ(operate(own, one), operate(tcp, other)) << i;
  EXPECT_EQ(own[1]->getNumKeys(), tcp[1]->getNumKeys() - keys_before);
}

TEST(RunStore, SeveralClientsAtTheSameTime) {
  const auto stores = own_stores();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kClients; ++rank) {
    threads.emplace_back([&, rank] {
      // A store of its own and one shared by all, from two threads each.
      for (int i = 0; i < 200; ++i) {
        stores[static_cast<std::size_t>(rank)]->add("sum", rank + 1);
        stores[0]->append("text", bytes("x"));
        const std::string round = std::to_string(i) + "/";
        stores[static_cast<std::size_t>(rank)]->set(round + std::to_string(rank), bytes("here"));
        if (i % 20 == 0)
          stores[0]->wait({round + "0", round + "1", round + "2"}, milliseconds(5000));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(stores[2]->add("sum", 0), 200 * (1 + 2 + 3));
  EXPECT_EQ(stores[1]->get("text").size(), 600u);
}

TEST(RunStore, WaitsEndInTime) {
  const auto stores = own_stores();
  for (const auto& store : {stores[0], tcp_stores()[0]}) {
    const auto start = net::Clock::now();
    EXPECT_THROW(store->wait({"never"}, milliseconds(100)), c10d::DistStoreError);
    store->setTimeout(milliseconds(100));
    EXPECT_THROW(store->get("never"), c10d::DistStoreError);
    EXPECT_THROW(store->wait({"never"}), c10d::DistStoreError);
    EXPECT_THROW(store->multiGet({"never"}), c10d::DistStoreError);
    const auto spent = net::Clock::now() - start;
    EXPECT_GE(spent, milliseconds(390));
    EXPECT_LT(spent, milliseconds(3000));
  }
}

TEST(RunStore, ALaterSetEndsAWait) {
  const auto stores = own_stores();
  std::thread setter([&] {
    std::this_thread::sleep_for(milliseconds(50));
    stores[1]->set("one", bytes("1"));
    stores[1]->deleteKey("one");
    stores[2]->set("two", bytes("2"));
    stores[2]->set("one", bytes("again"));
  });
  EXPECT_EQ(text(stores[0]->multiGet({"one", "two"}).at(0)), "again");
  setter.join();
}

TEST(RunStore, ClonesAndPrefixes) {
  const auto stores = own_stores();
  const auto prefixed = c10::make_intrusive<c10d::PrefixStore>("group", stores[1]);
  prefixed->set("key", bytes("value"));
  EXPECT_EQ(text(prefixed->clone()->get("key")), "value");
  EXPECT_TRUE(stores[2]->check({"group/key"}));
  EXPECT_EQ(stores[0]->clone()->getTimeout(), milliseconds(3000));
}

TEST(RunStore, SaysThatRankZeroIsGone) {
  auto stores = own_stores();
  const std::string secret = "the secret of the test, long enough";
  auto server =
      std::make_shared<net::StoreServer>(net::listen_at(net::resolve("127.0.0.1"), 0), secret, 1);
  const auto store =
      make_run_store(std::make_shared<net::StoreClient>("127.0.0.1", server->port(), secret, 1,
                                                        net::Clock::now() + milliseconds(5000)),
                     nullptr, milliseconds(20'000));
  std::thread end([&] {
    std::this_thread::sleep_for(milliseconds(50));
    server.reset();
  });
  const auto start = net::Clock::now();
  EXPECT_THROW(store->get("never"), c10d::DistNetworkError);
  EXPECT_LT(net::Clock::now() - start, milliseconds(3000));
  end.join();
}

}  // namespace
}  // namespace accelerate::comm
