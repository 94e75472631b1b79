#pragma once

#include <accelerate/comm/group.hpp>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::comm {

/// A row of numbers for each rank of a group, which that rank writes and every rank reads, and one
/// notice for all. The ranks of a machine share the memory: writing is a store, reading a load.
/// Between machines one rank of each carries the rows over the store where the ranks met.
///
/// A rank that reads a number also sees what its owner wrote before to numbers of lower index, or
/// something newer. The opposite order is not kept.
class Board {
 public:
  using Word = std::atomic<std::int64_t>;
  /// Whose memory it is: one for each machine, or one for each rank, as if each had a machine of
  /// its own.
  enum class Shared { by_machine, by_nobody };

  /// Collective over `group`, which has at least two ranks. `words` is the length of a row, alike
  /// on every rank. All numbers are zero.
  Board(const Group& group, int words, Shared shared = Shared::by_machine);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  Word& word(int rank, int index) const noexcept;

  /// Puts up a notice for all, unless there is one of this number or a higher one. Numbers begin
  /// at 1. Returns whether this call put it up. Longer texts are cut.
  bool post(std::int64_t number, const std::string& text);
  /// Whether there is a notice of this number.
  bool has_notice(std::int64_t number) const noexcept;
  std::string notice() const;

  /// Two threads of a rank can sleep until somebody rings: the one that computes, and one that does
  /// what is to be done meanwhile. A ring wakes the second only while the first does not sleep.
  enum class Sleeper { caller, watcher };
  /// To be called before the look at the board after which the thread sleeps. Returns what `sleep`
  /// is to be given.
  std::uint32_t get_ready(Sleeper sleeper) noexcept;
  /// Nothing is to wake it any more.
  void get_up(Sleeper sleeper) noexcept;
  /// How often it was woken.
  std::uint32_t rings(Sleeper sleeper) const noexcept;
  /// Returns when it was woken since there were so many `rings`, or after `most`.
  void sleep(Sleeper sleeper, std::uint32_t rings, std::chrono::microseconds most) noexcept;
  /// Wakes one thread of each other rank of this machine, if one is ready, and publishes.
  void ring() noexcept;
  /// Has what this rank wrote carried to other machines, if there are any.
  void publish() noexcept;
  /// Wakes this rank's caller, if it is ready.
  void ring_caller() noexcept;
  /// Wakes this rank's watcher, ready or not.
  void ring_watcher() noexcept { wake(row_bell(group_.rank(), Sleeper::watcher)); }

  /// Whether this rank carries rows between machines; its watcher then calls `carry` again and
  /// again.
  bool carries() const noexcept { return carries_; }
  /// Sends what is new here and takes what is new elsewhere. Returns whether anything was.
  bool carry();

  /// Throws PeerLostError when a rank of the group was lost, or has left.
  void check_peers(const char* operation) const;
  /// Whether a rank of the run is known to be lost.
  bool knows_loss() const;
  /// Throws PeerLostError when a rank of the run is known to be lost, or soon becomes known where
  /// another rank knows it.
  void check_cause(const char* operation, bool known_elsewhere) const;

 private:
  struct Bell {
    std::atomic<std::uint32_t> state{0};  // away, ready or rung
    std::atomic<std::uint32_t> rings{0};
  };
  struct Row;
  struct Head;

  Head& head() const noexcept;
  Row& row(int rank) const noexcept;
  Bell& row_bell(int rank, Sleeper sleeper) const noexcept;
  static void wake(Bell& bell) noexcept;
  static bool ring(Bell& bell) noexcept;
  bool put_up(std::int64_t number, const std::string& text);
  std::string agreed(std::int64_t number, const std::string& text) const;
  std::string pack() const;
  void unpack(const std::string& packed);

  Group group_;
  int words_;
  std::size_t row_bytes_ = 0;
  std::shared_ptr<void> memory_;
  std::vector<int> here_;  // the ranks that share this memory; the first carries
  bool apart_ = false;
  // Where notices are agreed on, when there are other machines.
  c10::intrusive_ptr<c10d::Store> store_;
  std::string folder_;
  // Of the rank that carries.
  bool carries_ = false;
  std::string key_, sent_;
  std::vector<std::pair<std::string, std::string>> others_;  // key, and what was read there last
};

}  // namespace accelerate::comm
