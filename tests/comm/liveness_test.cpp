// Several ranks in one process, each with a watch of its own.
#include "comm/liveness.hpp"
#include "comm/rendezvous.hpp"
#include "net/gate.hpp"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <poll.h>

#include <atomic>
#include <thread>

namespace accelerate::comm {
namespace {

using std::chrono::milliseconds;

Rendezvous met() {
  Rendezvous met;
  met.store = c10::make_intrusive<c10d::HashStore>();
  met.host = "127.0.0.1";
  met.place = net::place_of(met.host, true);
  met.secret = "the secret of the test, long enough";
  return met;
}

template <class Play>
void play(const Rendezvous& met, int ranks, Play each, milliseconds silence = milliseconds(8000)) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Liveness liveness(met, rank, ranks, silence, milliseconds(20'000));
      each(liveness, rank);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(Liveness, NobodyWhoSaysGoodbyeIsLost) {
  std::atomic<int> losses{0};
  for (int round = 0; round < 30; ++round) {
    play(met(), 6, [&](Liveness& liveness, int) {
      liveness.say_goodbye(milliseconds(10'000));
      liveness.leave();
      if (liveness.loss()) ++losses;
    });
  }
  EXPECT_EQ(losses, 0);
}

/// Keeps the watch's thread busy for a while, as a machine with too much to do may.
class Busy : public LivenessListener {
 public:
  void peer_lost(const Loss&) override {}
  void tick() override {
    inside = true;
    std::this_thread::sleep_for(milliseconds(100));
    inside = false;
  }
  std::atomic<bool> inside{false};
};

// The thread that sends the goodbye was ended before it came to it, once in some 150 runs on a busy
// machine. The others then took the rank for lost, and left without finalizing MPI.
TEST(Liveness, AGoodbyeIsSentHoweverBusyTheThreadIs) {
  for (const int last : {0, 1}) {
    play(
        met(), 2,
        [&](Liveness& liveness, int rank) {
          const auto busy = std::make_shared<Busy>();
          if (rank == last) {
            liveness.subscribe(busy);
            while (liveness.departures().empty() || !busy->inside) std::this_thread::yield();
          }
          liveness.say_goodbye(milliseconds(10'000));
          liveness.leave();
          EXPECT_FALSE(liveness.loss().has_value()) << rank << " of " << last;
        },
        milliseconds(2000));
  }
}

TEST(Liveness, AFailureIsToldWithItsReason) {
  for (const int culprit : {0, 2}) {
    play(met(), 3, [&](Liveness& liveness, int rank) {
      if (rank == culprit) {
        liveness.say_failure("its process ended with exit code 7");
        liveness.leave();
        return;
      }
      const auto loss = liveness.wait_for_loss(milliseconds(5000));
      ASSERT_TRUE(loss.has_value());
      EXPECT_EQ(loss->rank, culprit);
      EXPECT_EQ(loss->reason, "its process ended with exit code 7");
    });
  }
}

TEST(Liveness, StrangersAreNeitherLetInNorBlamed) {
  const Rendezvous run = met();
  std::atomic<bool> over{false};
  std::vector<net::Descriptor> silent;
  std::thread attacker([&] {
    run.store->setTimeout(milliseconds(5000));
    const int port = std::stoi(run.store->get_to_str("liveness/port"));
    const auto deadline = [] { return net::Clock::now() + milliseconds(1000); };
    try {
      for (int i = 0; i < 50; ++i) {
        silent.push_back(net::connect_to(net::resolve("127.0.0.1"), port, deadline()));
        if (i % 2 == 0)
          net::send_all(silent.back(), std::string(80, static_cast<char>(i)), deadline());
      }
      // As rank 1, without the secret.
      EXPECT_THROW(net::enter("127.0.0.1", port, "", net::Purpose::liveness, 1, deadline()),
                   net::ConnectionError);
    } catch (const net::ConnectionError&) {
      // Once all ranks have come nobody listens any more.
    }
    over = true;
  });
  play(run, 3, [&](Liveness& liveness, int rank) {
    while (!over) std::this_thread::sleep_for(milliseconds(5));
    EXPECT_FALSE(liveness.wait_for_loss(milliseconds(300)).has_value()) << rank;
    liveness.say_goodbye(milliseconds(5000));
  });
  attacker.join();
}

}  // namespace
}  // namespace accelerate::comm
