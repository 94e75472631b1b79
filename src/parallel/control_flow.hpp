#pragma once

#include <accelerate/comm/group.hpp>

#include <array>
#include <cstdint>
#include <mutex>
#include <string>

namespace accelerate::parallel {

/// Compares what the ranks do with their units while they do it, through the store where the ranks
/// met. Saying what is started waits for nobody: gathers are in one order on every rank and so are
/// reductions, but how the two interleave differs between ranks that use different parameters of a
/// unit.
class ControlFlow {
 public:
  enum class Event { gather, reduce, end_of_backward };

  /// Compares nothing in a group of one rank.
  explicit ControlFlow(comm::Group group);
  /// Says what this rank starts. Returns its number among the events of its kind.
  std::int64_t start(Event event, const std::string& unit = "");
  /// Waits until every rank has started the event of this kind and number. Throws ShardingError
  /// when another rank's is of another unit, or when another rank waits for something that this
  /// one has not started: then both would wait forever. Returns after the group's timeout at the
  /// latest, for the collective that is waited for next to say so.
  void wait(Event event, std::int64_t number, const std::string& unit = "");

 private:
  [[noreturn]] void differ(const std::string& mine, int other, const std::string& theirs) const;
  bool check(Event event, std::int64_t number, const std::string& unit);

  comm::Group group_;
  std::mutex mutex_;
  std::array<std::int64_t, 3> started_{};
};

}  // namespace accelerate::parallel
