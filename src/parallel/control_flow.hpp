#pragma once

#include "comm/board.hpp"

#include <accelerate/comm/group.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace accelerate::parallel {

/// Has the ranks of a sharded module do the same with its units. A rank announces each collective
/// of a unit on a board that all read, and the collective starts on every rank once all of them
/// have announced the same one: nobody gets another unit's data. Announcing waits for nobody, so
/// what is gathered ahead stays ahead; a thread starts what was agreed on while the rank computes.
///
/// Gathers are in one order on every rank and so are reductions, but how the two interleave differs
/// between ranks that use different parameters of a unit.
///
/// When ranks differ, every rank that waits for another throws the same ShardingError. So it does
/// when one rank has called `fail`. From then on nothing is agreed on, until every rank has come to
/// `begin_pass` again.
class ControlFlow {
 public:
  enum class Event { gather, reduce, end_of_backward };
  /// What is done with a unit.
  enum class Act { in_pass, in_group, whole };
  /// Stands for a unit where the norm of all gradients is reduced.
  static constexpr int kNorm = -1;
  struct Step {
    Event event = Event::gather;
    int unit = 0;
    Act act = Act::in_pass;
  };
  using Launch = std::function<comm::Work()>;
  class Ticket;
  using Handle = std::shared_ptr<Ticket>;

  struct Options {
    /// Gathers are over so many consecutive ranks of the group, reductions concern all.
    int gather_ranks = 1;
    /// No rank announces more gathers than this before the first of them has started.
    int window = 2;
    comm::Board::Shared shared = comm::Board::Shared::by_machine;
  };

  /// Collective over `group`. In a group of one every collective starts at once.
  ControlFlow(const comm::Group& group, std::vector<std::string> units, const Options& options);
  ~ControlFlow();
  ControlFlow(const ControlFlow&) = delete;
  ControlFlow& operator=(const ControlFlow&) = delete;

  /// Announces a collective, which `launch` starts on any thread. `tensor` is one that it uses: on
  /// a device it starts after what the current stream has to do now.
  Handle start(const Step& step, const at::Tensor& tensor, Launch launch);
  /// Returns the collective when it has been started. Throws ShardingError when the ranks differ or
  /// one of them has failed, PeerLostError when one has gone, and TimeoutError.
  comm::Work wait(const Handle& ticket);
  /// Whether every rank has announced it, so that nobody is waited for any more.
  static bool has_started(const Handle& ticket);

  /// Tells the other ranks that this one cannot go on, and why ("rank 1 failed in its backward
  /// pass:
  /// ..."). One that waits for this rank, or comes to wait, throws a ShardingError with these
  /// words; one that gets through its pass without this rank does so at its next step. To be called
  /// from any thread when an error leaves a pass on this rank. Does not wait. Of several calls
  /// before the next pass the first counts.
  void fail(const std::string& message);
  /// To be called when a pass begins. After a failure that this rank has met it waits until every
  /// rank has met it and come here, forgets what was announced and not started, and returns true.
  bool begin_pass();
  bool has_failed() const { return board_ && board_->has_notice(epoch_); }
  /// Throws the failure's error, if there is one.
  void check();

  /// A forward begins whose gradients are recorded.
  void begin_forward();
  /// This rank's backward pass is over. Returns whether another rank had none and joined in, which
  /// every rank learns from the collectives that it waited for in the pass.
  bool end_backward();
  /// What a rank does that follows the others through their backward pass.
  struct Follower {
    /// Announces what the others have announced. Must not wait for it: another rank may be about to
    /// announce something else first.
    std::function<void(const Step&)> serve;
    /// Whether something that was served can be ended, and ends it.
    std::function<bool()> can_finish;
    std::function<void()> finish;
  };
  /// For a rank whose backward pass met no unit: follows the others through theirs. Returns what
  /// they did. With `keeps`, this rank has gradients that wait for a reduction.
  enum class Others { none, passed, keep };
  Others join(bool keeps, const Follower& follower);

 private:
  enum class How : std::int64_t { ended = 1, joined = 2, joined_with_gradients = 3 };
  struct Queue {
    std::mutex mutex;  // of `pending` and of the counts
    std::deque<Handle> pending;
    std::int64_t started = 0;
    std::mutex launching;
    std::atomic<int> asked{0};
  };
  struct Range {
    int first, last;
  };
  struct Next {
    std::optional<Step> step;  // none when all have ended their pass
    Others others = Others::none;
  };

  // The ranks that take part when `rank` does.
  Range members(Event event, int rank) const;
  comm::Board::Word& word(int rank, int index) const { return board_->word(rank, index); }
  comm::Board::Word& entry(int rank, Event event, std::int64_t number) const;
  comm::Board::Word& started(int rank, Event event) const;
  Queue& queue(Event event) { return queues_[static_cast<std::size_t>(event)]; }
  std::int64_t count(Event event);

  bool complete(const Ticket& ticket);
  void pump(Event event);
  void pump_all();
  bool pending();
  void announce_end(How how);
  bool look_at_others(std::int64_t round, bool keeps, Next& next);
  struct Wait {
    std::string what;
    Event event = Event::gather;
    std::int64_t number = -1;  // none: nobody can be said to be late
    bool heeds_failure = true;
  };
  void wait_until(const std::function<bool()>& done, const Wait& wait);
  void find_circle();
  [[noreturn]] void time_out(const Wait& wait);
  void differ(int rank, const std::string& one, int other, const std::string& two);
  std::string in_words(Event event, std::int64_t code) const;
  [[noreturn]] void raise();
  void recover();
  void settle(std::int64_t epoch);
  void watch();
  int world_rank(int rank) const;

  comm::Group group_;
  std::vector<std::string> units_;
  int gather_ranks_;
  int kept_;
  std::unique_ptr<comm::Board> board_;  // none in a group of one
  std::array<Queue, 3> queues_;         // by event
  std::int64_t forwards_ = 0;
  std::atomic<bool> settling_{false};
  std::atomic<std::int64_t> epoch_{1};
  std::atomic<bool> told_{false};
  std::atomic<bool> stop_{false};
  std::thread watcher_;
};

/// One collective that was announced.
class ControlFlow::Ticket {
 private:
  friend class ControlFlow;
  void run();
  void drop();

  Event event = Event::gather;
  std::int64_t number = 0;
  std::int64_t code = 0;
  Launch launch;
  at::Device device = at::kCPU;
  std::optional<c10::Event> after;
  comm::Work work;
  std::exception_ptr error;
  std::atomic<bool> started{false};
};

}  // namespace accelerate::parallel
