#include "parallel/control_flow.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/comm/native.hpp>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

namespace accelerate::parallel {

namespace {

using Event = ControlFlow::Event;

/// No rank is further behind another than this many events of one kind.
constexpr std::int64_t kKept = 256;

std::string in_words(Event event, const std::string& unit) {
  switch (event) {
    case Event::gather:
      return text::concat("gathers the unit '", unit, "'");
    case Event::reduce:
      return text::concat("reduces the gradients of the unit '", unit, "'");
    case Event::end_of_backward:
      break;
  }
  return "ended its backward pass";
}

std::string started_key(Event event, std::int64_t number, int rank) {
  return text::concat("control_flow/", static_cast<int>(event), "/", number, "/", rank);
}

std::string waits_key(int rank) { return text::concat("control_flow/waits/", rank); }

}  // namespace

ControlFlow::ControlFlow(comm::Group group) : group_(std::move(group)) {}

std::int64_t ControlFlow::start(Event event, const std::string& unit) {
  if (group_.size() == 1) return 0;
  const auto store = comm::process_group(group_)->getStore();
  std::int64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = started_[static_cast<std::size_t>(event)]++;
  }
  store->set(started_key(event, number, group_.rank()), unit);
  if (number >= kKept) store->deleteKey(started_key(event, number - kKept, group_.rank()));
  return number;
}

void ControlFlow::wait(Event event, std::int64_t number, const std::string& unit) {
  if (group_.size() == 1) return;
  using Clock = std::chrono::steady_clock;
  const auto store = comm::process_group(group_)->getStore();
  const auto deadline = Clock::now() + group_.timeout();
  bool waits = false;
  const auto say = [&] {
    store->set(waits_key(group_.rank()),
               text::concat(static_cast<int>(event), " ", number, " ", unit));
  };
  auto pause = std::chrono::microseconds(100);
  try {
    while (!check(event, number, unit) && Clock::now() < deadline) {
      if (!std::exchange(waits, true)) say();
      std::this_thread::sleep_for(pause);
      pause = std::min(pause * 2, std::chrono::microseconds(10000));
    }
    // Not deleted: a rank that just saw it there would read nothing, or wait for it.
    if (waits) store->set(waits_key(group_.rank()), std::string());
  } catch (const Error&) {
    say();  // and leave it standing, for the other ranks to find that out too
    throw;
  } catch (const std::exception&) {
    // The store is rank 0's, which is gone; the collective that is waited for next says who was
    // lost.
  }
}

/// Whether every rank has started it.
bool ControlFlow::check(Event event, std::int64_t number, const std::string& unit) {
  const auto store = comm::process_group(group_)->getStore();
  bool all = true;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank == group_.rank()) continue;
    const std::string key = started_key(event, number, rank);
    if (store->check({key})) {
      const std::string theirs = store->get_to_str(key);
      if (theirs != unit) differ(in_words(event, unit), rank, in_words(event, theirs));
      continue;
    }
    all = false;
    const auto read_waits = [&] {
      const std::string its = waits_key(rank);
      return store->check({its}) ? store->get_to_str(its) : std::string();
    };
    const std::string waits = read_waits();
    if (waits.empty()) continue;
    std::istringstream fields(waits);
    int kind = 0;
    std::int64_t awaited = 0;
    fields >> kind >> awaited;
    std::string their_unit;
    std::getline(fields.ignore(), their_unit);
    const auto their_event = static_cast<Event>(kind);
    const std::string own = started_key(their_event, awaited, group_.rank());
    if (store->check({own})) {
      const std::string own_unit = store->get_to_str(own);
      if (own_unit == their_unit) continue;
      differ(in_words(their_event, own_unit), rank, in_words(their_event, their_unit));
    }
    // It may have gone on between the two looks.
    if (store->check({key}) || read_waits() != waits) continue;
    differ(in_words(event, unit), rank, in_words(their_event, their_unit));
  }
  return all;
}

void ControlFlow::differ(const std::string& mine, int other, const std::string& theirs) const {
  const auto& ranks = group_.global_ranks();
  throw ShardingError(text::concat(
      "The ranks went different ways: rank ", ranks[static_cast<std::size_t>(group_.rank())],
      " (this one) ", mine, " while rank ", ranks[static_cast<std::size_t>(other)], " ", theirs,
      ". Every rank must run the same modules in the same order."));
}

}  // namespace accelerate::parallel
