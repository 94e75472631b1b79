#pragma once

#include "comm/launcher_watch.hpp"
#include "net/socket.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace accelerate::comm {

struct Rendezvous;

/// The first rank that was lost, and how that was noticed ("its process ended").
struct Loss {
  int rank = -1;
  std::string reason;
  /// It is this rank, which said so itself.
  bool own = false;
};

/// Is told, on the watch's own thread, what the watch finds out.
class LivenessListener {
 public:
  virtual ~LivenessListener() = default;
  /// A rank was lost a while ago: what it sent before has arrived, and nothing more will.
  virtual void peer_lost(const Loss& loss) = 0;
  /// Comes every so often, for what has to happen after a while.
  virtual void tick() = 0;
};

/// Knows which processes of the run are alive. Every rank keeps one connection to rank 0 and sends
/// a beat along it; rank 0 tells all who was lost. The end of a process closes its connection and
/// is noticed at once; one that hangs or whose machine is gone is noticed by its silence. Apart
/// from the store, which may be torchrun's. Only those who hold the run's secret are connected to.
class Liveness {
 public:
  /// Rank 0 listens and leaves its port in the store; the others connect to it. `silence` is how
  /// long a rank may say nothing; zero: as long as it likes.
  Liveness(const Rendezvous& met, int rank, int world_size, std::chrono::milliseconds silence,
           std::chrono::milliseconds connect_timeout, LauncherWatch launcher = LauncherWatch({}));
  ~Liveness();
  Liveness(const Liveness&) = delete;
  Liveness& operator=(const Liveness&) = delete;

  void subscribe(const std::shared_ptr<LivenessListener>& listener);

  /// Who was lost, as soon as it is known.
  std::optional<Loss> loss() const;
  /// The same from when listeners are told of it.
  std::optional<Loss> final_loss() const;
  /// Waits up to `patience` for somebody to be found lost.
  std::optional<Loss> wait_for_loss(std::chrono::milliseconds patience) const;
  /// How long it takes at most until a silent rank is found lost.
  std::chrono::milliseconds patience() const noexcept;
  /// The ranks that left of their own accord, and when.
  struct Departure {
    int rank;
    std::chrono::steady_clock::time_point when;
  };
  std::vector<Departure> departures() const;

  /// Counts operations on the group of all ranks, so that those who fell behind can be named.
  void count_operation() noexcept { ++operations_; }
  /// The ranks (the first few) that have started the fewest operations, when fewer than this one.
  std::vector<int> behind() const;

  /// Tells the others that an error ended a backward pass on this rank, which will not take part in
  /// what theirs still wait for.
  void say_failed_pass();
  /// Those of `ranks` that told of more failed passes than this one, and since when.
  std::vector<Departure> failed_alone(const std::vector<int>& ranks) const;
  /// Whether each of `ranks` has told of as many failed passes as this one, or within `patience`
  /// does.
  bool all_failed(const std::vector<int>& ranks, std::chrono::milliseconds patience) const;

  /// Tells the others that this rank goes of its own accord, then waits up to `patience` for them
  /// to go too.
  void say_goodbye(std::chrono::milliseconds patience);
  /// Tells the others that this rank fails, and why ("it ended with exit code 1").
  void say_failure(const std::string& reason);
  /// Ends the watch.
  void leave() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Message;
  struct Peer {
    int rank = -1;
    net::Descriptor socket;
    Clock::time_point heard;
    /// Its silence has been said.
    bool noticed = false;
    std::uint64_t operations = 0;
    std::vector<std::uint8_t> received;
  };

  void accept_everyone(const Rendezvous& met, std::chrono::milliseconds timeout);
  void connect(const Rendezvous& met, std::chrono::milliseconds timeout);
  void run();
  void read(Peer& peer);
  void handle(Peer& peer, const Message& message);
  void judge_silence(Clock::time_point now);
  void look_after_launcher();
  void tell_of_loss(Clock::time_point now);
  void say_failed_passes();
  void say_farewell();
  void fail(const std::string& reason);
  void beat();
  void wake() const;
  void say(const Peer& peer, const Message& message) const;
  void say_all(const Message& message) const;
  void declare_lost(int rank, const std::string& reason);
  void declare_departed(int rank);
  void declare_failed_pass(int rank, std::uint64_t count);
  bool has_departed(int rank) const;
  std::vector<std::shared_ptr<LivenessListener>> listeners();

  const int rank_;
  const int world_size_;
  const std::chrono::milliseconds silence_;
  const std::chrono::milliseconds interval_;
  const LauncherWatch launcher_;
  net::Descriptor wake_;
  // Rank 0: one for each other rank. Others: rank 0 alone. Touched by the thread only.
  std::vector<Peer> peers_;
  std::atomic<std::uint64_t> operations_{0};
  std::atomic<bool> stop_{false};
  std::atomic<bool> goodbye_{false};
  bool said_farewell_ = false;  // touched by the thread only

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<Loss> loss_;
  Clock::time_point lost_at_;
  bool loss_is_final_ = false;
  // Why this rank fails, until that is said.
  std::string failure_;
  std::vector<Departure> departures_;
  struct FailedPasses {
    std::uint64_t count = 0;
    Clock::time_point last;
  };
  std::vector<FailedPasses> failed_passes_;  // by rank
  std::uint64_t failed_passes_said_ = 0;
  // Not rank 0: rank 0 has closed the connection, nothing more will be heard.
  bool deaf_ = false;
  std::vector<int> behind_;
  std::uint64_t least_operations_ = 0;
  std::vector<std::weak_ptr<LivenessListener>> listeners_;

  std::thread thread_;
};

}  // namespace accelerate::comm
