// The run's store and its gate, and what strangers can do to them.
#include "net/gate.hpp"
#include "net/place.hpp"
#include "net/store_client.hpp"
#include "net/store_server.hpp"

#include <accelerate/base/text.hpp>

#include <gtest/gtest.h>

#include <poll.h>
#include <sys/resource.h>

#include <atomic>
#include <random>
#include <thread>

namespace accelerate::net {
namespace {

using std::chrono::milliseconds;
using Kind = StoreMessage::Kind;

const std::string kSecret = "the secret of the test, long enough";

std::vector<Address> loopback() { return resolve("127.0.0.1"); }
Clock::time_point soon(int in_milliseconds = 5000) {
  return Clock::now() + milliseconds(in_milliseconds);
}

class Store : public testing::Test {
 protected:
  StoreServer server_{listen_at(loopback(), 0), kSecret, 4};

  std::shared_ptr<StoreClient> client(const std::string& secret = kSecret) {
    return std::make_shared<StoreClient>("127.0.0.1", server_.port(), secret, 1, soon());
  }
  Descriptor stranger() { return connect_to(loopback(), server_.port(), soon()); }
  /// Whether the run's own processes are served, and soon.
  void expect_served() {
    const auto start = Clock::now();
    const auto own = client();
    own->ask({Kind::set, 0, {"own", "value"}}, milliseconds(5000));
    EXPECT_EQ(own->ask({Kind::get, 1000, {"own"}}, milliseconds(5000)).parts.at(0), "value");
    EXPECT_LT(Clock::now() - start, milliseconds(2000));
  }
};

/// True when the other side closes within the time.
bool closed_within(const Descriptor& socket, int in_milliseconds) {
  const auto deadline = soon(in_milliseconds);
  char byte = 0;
  while (ready(socket, POLLIN, deadline)) {
    const auto got = ::recv(socket.number(), &byte, 1, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
  }
  return false;
}

TEST_F(Store, TheSecretIsNeededAndIsEnough) {
  expect_served();
  try {
    client("another secret, as long as that one");
    FAIL() << "another secret was accepted";
  } catch (const ConnectionError& error) {
    EXPECT_EQ(error.kind(), ConnectionError::Kind::refused) << error.what();
  }
  EXPECT_THROW(client(""), ConnectionError);
  // What is signed for one purpose is worth nothing for another.
  EXPECT_THROW(enter("127.0.0.1", server_.port(), kSecret, Purpose::liveness, 1, soon()),
               ConnectionError);
  expect_served();
}

TEST_F(Store, ItSaysNothingToStrangers) {
  // Everything that a stranger learns is a random number, another one each time.
  std::string before;
  for (int i = 0; i < 3; ++i) {
    const Descriptor socket = stranger();
    const std::string greeting = receive(socket, 40, soon());
    EXPECT_NE(greeting, before);
    before = greeting;
    // An answer that was right once is not right again.
    send_all(socket, "accel/1\n" + std::string(68, 'x'), soon());
    EXPECT_EQ(receive(socket, 33, soon()), std::string(33, '\0'));
    EXPECT_TRUE(closed_within(socket, 2000));
  }
}

TEST_F(Store, AListenerDoesNotBelieveOneWhoReflects) {
  // A stranger in the place of the store sends the visitor's own words back.
  auto listening = listen_at(loopback(), 0);
  const int port = port_of(listening.front());
  std::thread mirror([&] {
    if (!ready(listening.front(), POLLIN, soon())) return;
    const Descriptor socket(::accept(listening.front().number(), nullptr, nullptr));
    send_all(socket, "accel/1\n" + std::string(32, 'n'), soon());
    const std::string answer = receive(socket, 76, soon());
    send_all(socket, '\1' + answer.substr(44), soon());
    closed_within(socket, 2000);
  });
  try {
    enter("127.0.0.1", port, kSecret, Purpose::store, 1, soon(300));
    ADD_FAILURE() << "the reflection was believed";
  } catch (const ConnectionError& error) {
    EXPECT_NE(error.kind(), ConnectionError::Kind::refused) << error.what();
  }
  listening.clear();
  mirror.join();
}

TEST_F(Store, GarbageClosesTheConnectionAndNothingElse) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    const Descriptor socket = stranger();
    std::string bytes(std::uniform_int_distribution<std::size_t>(1, 300)(random), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    if (i % 3 == 0) bytes = "GET / HTTP/1.1\r\nHost: example\r\n\r\n";
    if (i % 3 == 1) bytes = "accel/1\n" + bytes;
    try {
      send_all(socket, bytes, soon());
    } catch (const ConnectionError&) {
      // It was faster.
    }
  }
  expect_served();
}

TEST_F(Store, SilentStrangersKeepNobodyOut) {
  std::vector<Descriptor> silent;
  for (int i = 0; i < 400; ++i) silent.push_back(stranger());
  // Some with half an answer.
  for (int i = 0; i < 50; ++i) {
    try {
      send_all(silent[silent.size() - 1 - static_cast<std::size_t>(i)], "accel/1\nabc", soon());
    } catch (const ConnectionError&) {
      // Those who came first have had to go.
    }
  }
  expect_served();
  EXPECT_TRUE(closed_within(silent.front(), 100));
}

TEST_F(Store, MoreConnectionsThanDescriptors) {
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const auto own = client();
  {
    rlimit few = before;
    few.rlim_cur = 64;
    ::setrlimit(RLIMIT_NOFILE, &few);
    std::vector<Descriptor> silent;
    try {
      for (int i = 0; i < 200; ++i) silent.push_back(stranger());
    } catch (const ConnectionError&) {
      // This process, which is the server's, has none left.
    }
    EXPECT_EQ(own->ask({Kind::add, 2, {"n"}}, milliseconds(5000)).number, 2);
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
  std::this_thread::sleep_for(milliseconds(300));
  expect_served();
}

TEST_F(Store, HugeLengthsAndNonsenseFromMembersAreRefused) {
  const auto member = [&] {
    return enter("127.0.0.1", server_.port(), kSecret, Purpose::store, 1, soon());
  };
  const auto says = [&](const std::string& bytes) {
    const Descriptor socket = member();
    send_all(socket, bytes, soon());
    return closed_within(socket, 2000);
  };
  EXPECT_TRUE(says(std::string("\xff\xff\xff\xff", 4)));
  EXPECT_TRUE(says(std::string("\x01\x00\x00\x00\x00", 5)));
  StoreMessage no_key{Kind::add, 1, {}};
  EXPECT_TRUE(says(encode(no_key)));
  StoreMessage answer{Kind::done, 1, {}};
  EXPECT_TRUE(says(encode(answer)));
  std::string many = encode({Kind::get, 0, {"key"}});
  many[4 + 1 + 8] = '\xff';  // more parts than bytes
  EXPECT_TRUE(says(many));
  // A message that never ends holds up nobody.
  const Descriptor slow = member();
  send_all(slow, encode({Kind::set, 0, {"key", std::string(1000, 'v')}}).substr(0, 500), soon());
  expect_served();
  const auto own = client();
  EXPECT_THROW(
      own->ask({Kind::set, 0, {"key", std::string(kMostMessageBytes, 'v')}}, milliseconds(5000)),
      std::invalid_argument);
  own->ask({Kind::set, 0, {"word", "no number"}}, milliseconds(5000));
  EXPECT_THROW(own->ask({Kind::add, 1, {"word"}}, milliseconds(5000)), std::invalid_argument);
}

TEST_F(Store, AThreadThatWaitsHoldsUpNobody) {
  const auto own = client();
  std::thread waiter([&] {
    EXPECT_EQ(own->ask({Kind::get, 5000, {"late"}}, milliseconds(5000)).parts.at(0), "now");
  });
  std::this_thread::sleep_for(milliseconds(50));
  own->ask({Kind::set, 0, {"late", "now"}}, milliseconds(5000));
  waiter.join();
}

TEST_F(Store, ManyKeysASecond) {
  const auto own = client();
  const auto start = Clock::now();
  for (int i = 0; i < 2000; ++i) own->ask({Kind::add, 1, {"n"}}, milliseconds(5000));
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  RecordProperty("requests_per_second", static_cast<int>(2000 / seconds));
  EXPECT_EQ(own->ask({Kind::add, 0, {"n"}}, milliseconds(5000)).number, 2000);
  EXPECT_LT(seconds, 2.0);
}

TEST_F(Store, ClientsThatDieWhileTheyWaitAreForgotten) {
  for (int i = 0; i < 20; ++i) {
    const Descriptor socket =
        enter("127.0.0.1", server_.port(), kSecret, Purpose::store, 1, soon());
    send_all(socket, encode({Kind::wait, 60'000, {"never", "late"}}), soon());
  }
  const auto own = client();
  own->ask({Kind::set, 0, {"late", "now"}}, milliseconds(5000));
  own->ask({Kind::set, 0, {"never", "now"}}, milliseconds(5000));
  expect_served();
}

TEST(Messages, ADamagedOneIsNone) {
  const std::string good = encode({Kind::set, 7, {"key", "value", "", "x"}}).substr(kLengthBytes);
  StoreMessage message;
  ASSERT_TRUE(decode(good, message));
  EXPECT_EQ(message.parts.size(), 4u);
  EXPECT_EQ(message.number, 7);
  for (std::size_t size = 0; size < good.size(); ++size)
    EXPECT_FALSE(decode(good.substr(0, size), message)) << size;
  EXPECT_FALSE(decode(good + "x", message));
  std::mt19937 random(2);
  for (int i = 0; i < 20000; ++i) {
    std::string changed = good;
    changed[random() % changed.size()] = static_cast<char>(random());
    decode(changed, message);  // must not read past the end; the sanitizers look
  }
}

TEST(Places, LoopbackInterfaceOrAll) {
  EXPECT_TRUE(place_of("127.0.0.1", false).loopback);
  EXPECT_TRUE(place_of("localhost", false).loopback);
  EXPECT_TRUE(place_of("127.1.2.3", false).loopback);
  // Nobody here has it (TEST-NET-1 of RFC 5737).
  const Place foreign = place_of("192.0.2.1", true);
  EXPECT_FALSE(foreign.loopback);
  EXPECT_TRUE(foreign.addresses.empty());
  EXPECT_THROW(place_of("no.such.host.invalid", false), ConnectionError);
  // An interface of this machine's own.
  const std::string own = address_toward("192.0.2.1");
  if (own.empty()) GTEST_SKIP() << "this machine has loopback only";
  const Place place = place_of(own, false);
  EXPECT_FALSE(place.loopback);
  ASSERT_EQ(place.addresses.size(), 1u);
  EXPECT_EQ(place.addresses.front().text(), own);
  // What listens there is not reached by loopback.
  const auto listening = listen_at(place.addresses, 0);
  EXPECT_THROW(connect_to(loopback(), port_of(listening.front()), soon(500)), ConnectionError);
  EXPECT_NO_THROW(connect_to(place.addresses, port_of(listening.front()), soon(500)));
}

TEST(Places, ATakenPortIsSaid) {
  const auto first = listen_at(loopback(), 0);
  try {
    listen_at(loopback(), port_of(first.front()));
    FAIL();
  } catch (const ConnectionError& error) {
    EXPECT_EQ(error.kind(), ConnectionError::Kind::taken);
  }
}

TEST(Gates, ARunsSecretsAreNotEqual) {
  EXPECT_EQ(draw_secret().size(), 64u);
  EXPECT_NE(draw_secret(), draw_secret());
}

}  // namespace
}  // namespace accelerate::net
