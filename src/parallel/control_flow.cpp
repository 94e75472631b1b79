#include "parallel/control_flow.hpp"

#include "comm/agreed_call.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <thread>
#include <utility>

namespace accelerate::parallel {

namespace {

using comm::Board;
using Clock = std::chrono::steady_clock;
using Event = ControlFlow::Event;
using std::chrono::microseconds;

constexpr std::array kEvents{Event::gather, Event::reduce, Event::end_of_backward};
constexpr int kActs = 3;
// How long a rank that is told of a failure waits for what it may come to all the same.
constexpr std::chrono::seconds kGrace(1);

// A row of the board, in the order in which it is written. First come the last `kept` entries of
// each event: which unit, or how a backward pass ended. The other rings say how many gathers,
// reductions and forwards had been started when it ended.
enum Ring { kGathersAtEnd = 3, kReductionsAtEnd = 4, kForwardsAtEnd = 5, kRings = 6 };
enum Single {
  kStarted = 0,               // by event
  kFinal = kStarted + 3,      // by event, of this epoch and the one before in turns
  kArrived = kFinal + 2 * 3,  // the epoch that this rank has come to
  kForwards = kArrived + 1,   // that record gradients
  kWaits = kForwards + 1,     // for what its pass waits: 1 + event, and 4 times the number
  kSingles = kWaits + 1
};

std::int64_t code_of(const ControlFlow::Step& step) {
  return (step.unit + 1) * kActs + static_cast<int>(step.act);
}

ControlFlow::Step step_of(Event event, std::int64_t code) {
  return {event, static_cast<int>(code / kActs) - 1, static_cast<ControlFlow::Act>(code % kActs)};
}

}  // namespace

void ControlFlow::Ticket::run() {
  // Ranks may start what they agreed on in another order, of gathers and of reductions.
  const comm::AgreedCall agreed;
  try {
    if (after) {
      // Behind what its tensors need, but not behind what was queued since.
      const c10::impl::VirtualGuardImpl guard(device.type());
      const c10::Stream side = guard.getStreamFromGlobalPool(device);
      after->block(side);
      const c10::StreamGuard on_side(side);
      work = launch();
    } else {
      work = launch();
    }
  } catch (...) {
    error = std::current_exception();
  }
  launch = nullptr;
  started.store(true);
}

void ControlFlow::Ticket::drop() {
  error = std::make_exception_ptr(
      ShardingError("The collective never began, because the ranks had gone different ways."));
  launch = nullptr;
  started.store(true);
}

ControlFlow::ControlFlow(const comm::Group& group, std::vector<std::string> units,
                         const Options& options)
    : group_(group),
      units_(std::move(units)),
      gather_ranks_(options.gather_ranks),
      kept_(static_cast<int>(std::bit_ceil(static_cast<unsigned>(2 * (options.window + 4))))) {
  if (group_.size() == 1) return;
  board_ = std::make_unique<Board>(group_, kRings * kept_ + kSingles, options.shared);
  watcher_ = std::thread([this] { watch(); });
}

ControlFlow::~ControlFlow() {
  if (!board_) return;
  stop_ = true;
  board_->ring_watcher();
  watcher_.join();
}

int ControlFlow::world_rank(int rank) const {
  return group_.global_ranks()[static_cast<std::size_t>(rank)];
}

ControlFlow::Range ControlFlow::members(Event event, int rank) const {
  if (event != Event::gather) return {0, group_.size()};
  const int first = rank / gather_ranks_ * gather_ranks_;
  return {first, first + gather_ranks_};
}

Board::Word& ControlFlow::entry(int rank, Event event, std::int64_t number) const {
  return word(rank, static_cast<int>(event) * kept_ + static_cast<int>(number % kept_));
}

Board::Word& ControlFlow::started(int rank, Event event) const {
  return word(rank, kRings * kept_ + kStarted + static_cast<int>(event));
}

std::int64_t ControlFlow::count(Event event) {
  const std::lock_guard lock(queue(event).mutex);
  return queue(event).started;
}

ControlFlow::Handle ControlFlow::start(const Step& step, const at::Tensor& tensor, Launch launch) {
  auto ticket = std::make_shared<Ticket>();
  ticket->event = step.event;
  ticket->code = code_of(step);
  ticket->launch = std::move(launch);
  const Range all = members(step.event, group_.rank());
  if (!board_ || all.last - all.first == 1) {
    ticket->run();
    return ticket;
  }
  if (!tensor.is_cpu()) {
    ticket->device = tensor.device();
    const c10::impl::VirtualGuardImpl guard(ticket->device.type());
    ticket->after.emplace(ticket->device.type());
    ticket->after->record(guard.getStream(ticket->device));
  }
  Queue& queue = this->queue(step.event);
  {
    const std::lock_guard lock(queue.mutex);
    ticket->number = queue.started++;
    queue.pending.push_back(ticket);
    entry(group_.rank(), step.event, ticket->number).store(ticket->code);
    started(group_.rank(), step.event).store(queue.started);
  }
  board_->publish();
  pump(step.event);
  if (!ticket->started) {
    board_->get_ready(Board::Sleeper::watcher);
    pump(step.event);
  }
  return ticket;
}

comm::Work ControlFlow::wait(const Handle& ticket) {
  if (!ticket->started) {
    wait_until([&] { return ticket->started.load(); },
               {in_words(ticket->event, ticket->code), ticket->event, ticket->number});
    if (!pending()) board_->get_up(Board::Sleeper::watcher);
  }
  if (ticket->error) std::rethrow_exception(ticket->error);
  return std::move(ticket->work);
}

// Whether every rank has announced it.
bool ControlFlow::complete(const Ticket& ticket) {
  bool all = true;
  const int self = group_.rank();
  const Range members = this->members(ticket.event, self);
  for (int rank = members.first; rank < members.last; ++rank) {
    if (rank == self) continue;
    if (started(rank, ticket.event).load() <= ticket.number) {
      all = false;
      continue;
    }
    const std::int64_t theirs = entry(rank, ticket.event, ticket.number).load();
    if (theirs == ticket.code) continue;
    differ(self, in_words(ticket.event, ticket.code), rank, in_words(ticket.event, theirs));
    return false;
  }
  return all;
}

// Starts what all have announced, in order. Any thread; whoever finds another at it leaves it to
// that one.
void ControlFlow::pump(Event event) {
  Queue& queue = this->queue(event);
  queue.asked.fetch_add(1);
  while (queue.asked.load() > 0) {
    const std::unique_lock launching(queue.launching, std::try_to_lock);
    if (!launching) return;
    queue.asked.store(0);
    while (!settling_) {
      Handle next;
      {
        const std::lock_guard lock(queue.mutex);
        if (queue.pending.empty()) break;
        next = queue.pending.front();
      }
      if (!complete(*next)) break;
      board_->ring();
      next->run();
      {
        const std::lock_guard lock(queue.mutex);
        queue.pending.pop_front();
      }
      if (std::this_thread::get_id() == watcher_.get_id()) board_->ring_caller();
    }
  }
}

void ControlFlow::pump_all() {
  pump(Event::gather);
  pump(Event::reduce);
}

bool ControlFlow::pending() {
  return std::any_of(queues_.begin(), queues_.end(), [](Queue& queue) {
    const std::lock_guard lock(queue.mutex);
    return !queue.pending.empty();
  });
}

void ControlFlow::wait_until(const std::function<bool()>& done, const Wait& wait) {
  const auto begin = Clock::now();
  std::optional<Clock::time_point> told_at;
  auto& waits = word(group_.rank(), kRings * kept_ + kWaits);
  if (wait.number >= 0) {
    waits.store(1 + static_cast<int>(wait.event) + 4 * wait.number);
    board_->publish();
  }
  const auto leave = [&] {
    board_->get_up(Board::Sleeper::caller);
    if (wait.number >= 0) waits.store(0);
    pump_all();  // what rang last may have been for the watcher
  };
  try {
    auto pause = microseconds(1000);
    while (true) {
      const std::uint32_t rings = board_->get_ready(Board::Sleeper::caller);
      pump_all();
      if (done()) break;
      if (wait.heeds_failure && board_->has_notice(epoch_)) {
        // Where all ranks fail alike, each comes to its own error: what the one that was first had
        // announced still starts when the slower ones have announced it, too.
        if (!told_at) told_at = Clock::now();
        if (board_->notice().front() != 'F' || Clock::now() - *told_at > kGrace) raise();
      }
      const auto waited = Clock::now() - begin;
      if (waited > microseconds(1000)) {
        board_->check_peers(wait.event == Event::gather ? "all_gather" : "reduce_scatter");
        find_circle();
      }
      if (waited > group_.timeout()) time_out(wait);
      board_->sleep(Board::Sleeper::caller, rings, pause);
      pause = std::min(pause * 2, microseconds(50'000));
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

// Whether ranks wait for each other, this one among them. A rank that waits announces nothing, so
// what is seen here stays so: first for what each waits is read, then what each has announced.
void ControlFlow::find_circle() {
  const auto size = static_cast<std::size_t>(group_.size());
  std::vector<std::int64_t> waits(size);
  std::vector<std::array<std::int64_t, 3>> begun(size);
  for (std::size_t r = 0; r < size; ++r)
    waits[r] = word(static_cast<int>(r), kRings * kept_ + kWaits).load();
  for (std::size_t r = 0; r < size; ++r) {
    for (const Event event : kEvents)
      begun[r][static_cast<std::size_t>(event)] = started(static_cast<int>(r), event).load();
  }
  const auto self = static_cast<std::size_t>(group_.rank());
  std::vector<char> seen(size);
  const std::function<bool(std::size_t)> leads_here = [&](std::size_t rank) {
    if (waits[rank] == 0 || std::exchange(seen[rank], 1) != 0) return false;
    const auto event = static_cast<Event>(waits[rank] % 4 - 1);
    const std::int64_t number = waits[rank] / 4;
    const Range all = members(event, static_cast<int>(rank));
    for (auto other = static_cast<std::size_t>(all.first);
         other < static_cast<std::size_t>(all.last); ++other) {
      if (other == rank || begun[other][static_cast<std::size_t>(event)] > number) continue;
      if (other == self || leads_here(other)) {
        if (rank == self) {
          const auto words = [&](std::size_t r) {
            const auto its = static_cast<Event>(waits[r] % 4 - 1);
            return in_words(its, entry(static_cast<int>(r), its, waits[r] / 4).load());
          };
          differ(group_.rank(), words(self), static_cast<int>(other), words(other));
        }
        return true;
      }
    }
    return false;
  };
  leads_here(self);
}

void ControlFlow::time_out(const Wait& wait) {
  std::vector<int> late;
  const Range all = members(wait.event, group_.rank());
  for (int rank = all.first; rank < all.last && wait.number >= 0; ++rank) {
    if (started(rank, wait.event).load() <= wait.number) late.push_back(world_rank(rank));
  }
  const std::string who =
      late.empty() ? std::string("the others") : text::concat("rank ", text::join(late));
  board_->post(
      epoch_,
      text::concat("T", "Rank ", world_rank(group_.rank()), " ", wait.what,
                   " and waited longer than the timeout of ",
                   text::format_seconds(std::chrono::duration<double>(group_.timeout()).count()),
                   " for ", who,
                   " to do so too. Every rank must run the same modules in the "
                   "same order."));
  raise();
}

std::string ControlFlow::in_words(Event event, std::int64_t code) const {
  if (event == Event::end_of_backward) return "ended its backward pass";
  const Step step = step_of(event, code);
  if (step.unit == kNorm) return "takes the norm of the gradients";
  const std::string& unit = units_[static_cast<std::size_t>(step.unit)];
  if (event == Event::reduce) return text::concat("reduces the gradients of the unit '", unit, "'");
  switch (step.act) {
    case Act::in_group:
      return text::concat("gathers the unit '", unit, "' in its group of ranks");
    case Act::whole:
      return text::concat("reads the whole unit '", unit, "'");
    case Act::in_pass:
      break;
  }
  return text::concat("gathers the unit '", unit, "'");
}

void ControlFlow::differ(int rank, const std::string& one, int other, const std::string& two) {
  // The same words, whoever finds it out.
  if (rank > other) return differ(other, two, rank, one);
  board_->post(epoch_,
               text::concat("SThe ranks went different ways: rank ", world_rank(rank), " ", one,
                            " while rank ", world_rank(other), " ", two,
                            ". Every rank must run the same modules in the same order. Where ranks "
                            "choose among units, switch FsdpOptions::all_units_every_pass on."));
}

void ControlFlow::fail(const std::string& message) {
  if (!board_) return;
  told_ = true;
  // The others are to say what was lost, and not what came of it.
  board_->post(epoch_, (board_->knows_loss() ? "L" : "F") + message);
}

void ControlFlow::raise() {
  told_ = true;
  const std::string notice = board_->notice();
  const std::string message = notice.substr(1);
  if (notice.front() == 'T') throw TimeoutError(message, "all_gather", group_.rank());
  // Where a rank was lost, that is the cause, and one that failed by it may say so before this rank
  // has heard of the loss.
  if (notice.front() == 'F' || notice.front() == 'L')
    board_->check_cause("all_gather", /*known_elsewhere=*/notice.front() == 'L');
  throw ShardingError(message);
}

void ControlFlow::check() {
  if (board_ && board_->has_notice(epoch_)) raise();
}

bool ControlFlow::begin_pass() {
  if (!board_ || !told_) return false;
  recover();
  return true;
}

void ControlFlow::recover() {
  const std::int64_t epoch = epoch_ + 1;
  settling_ = true;
  for (Queue& queue : queues_) const std::lock_guard wait_for_who_is_at_it(queue.launching);
  for (const Event event : kEvents) {
    word(group_.rank(),
         kRings * kept_ + kFinal + static_cast<int>(epoch % 2) * 3 + static_cast<int>(event))
        .store(count(event));
  }
  word(group_.rank(), kRings * kept_ + kArrived).store(epoch);
  board_->ring();
  try {
    wait_until(
        [&] {
          for (int rank = 0; rank < group_.size(); ++rank) {
            if (word(rank, kRings * kept_ + kArrived).load() < epoch) return false;
          }
          return true;
        },
        {"begins a pass after a failure", Event::reduce, -1, /*heeds_failure=*/false});
  } catch (...) {
    settling_ = false;
    throw;
  }
  settle(epoch);
  epoch_ = epoch;
  told_ = false;
  settling_ = false;
}

// Nobody announces anything now. Every rank starts what all had announced, and forgets the rest.
void ControlFlow::settle(std::int64_t epoch) {
  forwards_ = 0;
  word(group_.rank(), kRings * kept_ + kForwards).store(0);
  for (const Event event : kEvents) {
    const int index =
        kRings * kept_ + kFinal + static_cast<int>(epoch % 2) * 3 + static_cast<int>(event);
    Queue& queue = this->queue(event);
    const std::lock_guard lock(queue.mutex);
    const Range all = members(event, group_.rank());
    for (const Handle& ticket : queue.pending) {
      bool agreed = true;
      for (int rank = all.first; rank < all.last; ++rank) {
        agreed = agreed && word(rank, index).load() > ticket->number &&
                 entry(rank, event, ticket->number).load() == ticket->code;
      }
      agreed ? ticket->run() : ticket->drop();
    }
    queue.pending.clear();
    for (int rank = 0; rank < group_.size(); ++rank)
      queue.started = std::max(queue.started, word(rank, index).load());
    started(group_.rank(), event).store(queue.started);
  }
}

void ControlFlow::announce_end(How how) {
  Queue& ends = queue(Event::end_of_backward);
  const std::int64_t number = ends.started;
  // Who is asleep in an earlier pass must still find what it ended with.
  if (const std::int64_t oldest = number - kept_ + 2; oldest >= 0) {
    wait_until(
        [&] {
          for (int rank = 0; rank < group_.size(); ++rank) {
            if (started(rank, Event::end_of_backward).load() <= oldest) return false;
          }
          return true;
        },
        {"ended its backward pass", Event::end_of_backward, oldest});
  }
  const int self = group_.rank();
  const int place = static_cast<int>(number % kept_);
  word(self, kGathersAtEnd * kept_ + place).store(count(Event::gather));
  word(self, kReductionsAtEnd * kept_ + place).store(count(Event::reduce));
  word(self, kForwardsAtEnd * kept_ + place).store(forwards_);
  entry(self, Event::end_of_backward, number).store(static_cast<std::int64_t>(how));
  {
    const std::lock_guard lock(ends.mutex);
    started(self, Event::end_of_backward).store(++ends.started);
  }
  board_->ring();
}

void ControlFlow::begin_forward() {
  if (board_) word(group_.rank(), kRings * kept_ + kForwards).store(++forwards_);
}

bool ControlFlow::end_backward() {
  if (!board_) return false;
  const std::int64_t round = count(Event::end_of_backward);
  announce_end(How::ended);
  bool joined = false;
  for (int rank = 0; rank < group_.size(); ++rank) {
    joined = joined ||
             (started(rank, Event::end_of_backward).load() > round &&
              static_cast<How>(entry(rank, Event::end_of_backward, round).load()) != How::ended);
  }
  return joined;
}

// Finds what the others have announced in this round of backward passes and this rank has not, or
// that the round is over. False: neither yet.
bool ControlFlow::look_at_others(std::int64_t round, bool keeps, Next& next) {
  std::array<std::int64_t, 2> announced{};
  std::array<int, 2> by{};
  std::array<std::int64_t, 2> forwards{};
  bool open = false;
  next = {std::nullopt, keeps ? Others::keep : Others::none};
  const int place = static_cast<int>(round % kept_);
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (rank == group_.rank()) continue;
    // In this order: a rank whose round is not over cannot have announced more in the next.
    std::array<std::int64_t, 2> its{started(rank, Event::gather).load(),
                                    started(rank, Event::reduce).load()};
    std::int64_t its_forwards = word(rank, kRings * kept_ + kForwards).load();
    if (started(rank, Event::end_of_backward).load() <= round) {
      open = true;
    } else {
      its_forwards = word(rank, kForwardsAtEnd * kept_ + place).load();
      const auto how = static_cast<How>(entry(rank, Event::end_of_backward, round).load());
      its = {};
      if (how == How::ended) {
        next.others = Others::passed;
        its = {word(rank, kGathersAtEnd * kept_ + place).load(),
               word(rank, kReductionsAtEnd * kept_ + place).load()};
      } else if (how == How::joined_with_gradients && next.others == Others::none) {
        next.others = Others::keep;
      }
    }
    for (const Event event : {Event::gather, Event::reduce}) {
      const auto e = static_cast<std::size_t>(event);
      const Range all = members(event, group_.rank());
      if (rank < all.first || rank >= all.last || its[e] <= announced[e]) continue;
      announced[e] = its[e];
      by[e] = rank;
      forwards[e] = its_forwards;
    }
  }
  for (const Event event : {Event::gather, Event::reduce}) {
    const auto e = static_cast<std::size_t>(event);
    const std::int64_t own = count(event);
    if (own >= announced[e]) continue;
    if (event == Event::reduce && forwards[e] != forwards_) {
      const auto words = [](std::int64_t count) {
        return text::concat("comes to a backward pass after ", count, " forwards");
      };
      differ(group_.rank(), words(forwards_), by[e], words(forwards[e]));
      return false;
    }
    next.step = step_of(event, entry(by[e], event, own).load());
    return true;
  }
  return !open;
}

ControlFlow::Others ControlFlow::join(bool keeps, const Follower& follower) {
  if (!board_) return keeps ? Others::keep : Others::none;
  const std::int64_t round = count(Event::end_of_backward);
  announce_end(keeps ? How::joined_with_gradients : How::joined);
  Next next;
  while (true) {
    bool finishes = false;
    wait_until(
        [&] {
          finishes = follower.can_finish();
          return finishes || look_at_others(round, keeps, next);
        },
        {"has no part in this backward pass", Event::end_of_backward, -1});
    if (finishes) {
      follower.finish();
    } else if (next.step) {
      follower.serve(*next.step);
    } else {
      return next.others;
    }
  }
}

bool ControlFlow::has_started(const Handle& ticket) { return ticket->started; }

// Starts what is agreed on while this rank computes, and carries the board between machines.
void ControlFlow::watch() {
  bool carries = board_->carries();
  const auto carry = [&] {
    if (!carries) return false;
    try {
      return board_->carry();
    } catch (const std::exception& error) {
      // The store is gone with the rank that kept it; whoever waits learns who was lost.
      log::debug(text::concat("What ranks announce is not carried any more: ", describe(error)));
      carries = false;
      return false;
    }
  };
  auto pause = microseconds(100);
  while (!stop_) {
    const std::uint32_t rings = board_->rings(Board::Sleeper::watcher);
    pump_all();
    const bool waits = pending();
    if (waits) {
      board_->get_ready(Board::Sleeper::watcher);
      pump_all();
    }
    auto most = waits ? microseconds(20'000) : microseconds(3'600'000'000);
    pause = carry() ? microseconds(100) : std::min(pause * 2, microseconds(5000));
    if (carries) most = std::min(most, pause);
    if (!stop_) board_->sleep(Board::Sleeper::watcher, rings, most);
  }
  carry();  // others may still wait for what was announced last
}

}  // namespace accelerate::parallel
