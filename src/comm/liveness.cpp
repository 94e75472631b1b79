#include "comm/liveness.hpp"

#include "comm/rendezvous.hpp"
#include "net/gate.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace accelerate::comm {

using std::chrono::milliseconds;
using text::concat;

namespace {

constexpr const char* kOperation = "rendezvous";
constexpr const char* kPortKey = "liveness/port";
constexpr int kMostNamed = 8;
/// A rank that was silent for so long is named in the log, unless it is about to be given up.
constexpr milliseconds kNoticeable{3000};
/// A rank that fails may have done its part in an operation that others have not ended: one that
/// all were told the same error by, say. What it sent arrives within this time.
constexpr milliseconds kOnTheWay{1000};

[[noreturn]] void set_up_failed(const std::string& what, int rank) {
  throw DistributedError(
      concat("Rank ", rank, " could not set up the watch over the other processes: ", what, "."),
      kOperation, rank);
}

}  // namespace

/// All that is ever said, one size for all.
struct Liveness::Message {
  enum Kind : std::uint32_t { beat = 0xacce1e00, goodbye, failing, departed, lost, failed_pass };
  Kind kind = beat;
  /// departed, lost, failed_pass: who. Otherwise the sender.
  std::int32_t rank = -1;
  /// beat: how many operations the sender has started; from rank 0: the fewest of any rank.
  /// failed_pass: how many of them.
  std::uint64_t operations = 0;
  /// beat from rank 0: ranks that have started no more than that; -1 where there are fewer.
  std::array<std::int32_t, kMostNamed> behind{-1, -1, -1, -1, -1, -1, -1, -1};
  /// failing, lost: why.
  std::array<char, 160> reason{};

  void explain(const std::string& why) {
    std::strncpy(reason.data(), why.c_str(), reason.size() - 1);
  }
};

Liveness::Liveness(const Rendezvous& met, int rank, int world_size, milliseconds silence,
                   milliseconds connect_timeout, LauncherWatch launcher)
    : rank_(rank),
      world_size_(world_size),
      silence_(silence),
      interval_(silence.count() == 0
                    ? milliseconds(1000)
                    : std::clamp(silence / 4, milliseconds(20), milliseconds(1000))),
      launcher_(launcher),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  failed_passes_.resize(static_cast<std::size_t>(world_size));
  if (!wake_) set_up_failed(concat("no eventfd (", std::strerror(errno), ")"), rank_);
  try {
    if (rank == 0) {
      accept_everyone(met, connect_timeout);
    } else {
      connect(met, connect_timeout);
    }
  } catch (const net::ConnectionError& error) {
    set_up_failed(error.what(), rank_);
  }
  for (auto& peer : peers_) peer.heard = Clock::now();
  thread_ = std::thread([this] {
    ::prctl(PR_SET_NAME, "accelerate-live");
    try {
      run();
    } catch (const std::exception& error) {
      log::error(concat("Rank ", rank_, " no longer watches over the other ranks: ", error.what()));
      const std::lock_guard lock(mutex_);
      deaf_ = true;
      changed_.notify_all();
    }
  });
}

Liveness::~Liveness() { leave(); }

void Liveness::accept_everyone(const Rendezvous& met, milliseconds timeout) {
  net::Gate gate(net::listen_at(met.place.addresses, 0), met.secret, net::Purpose::liveness,
                 std::max<std::size_t>(256, 2 * static_cast<std::size_t>(world_size_)));
  met.store->set(kPortKey, std::to_string(gate.port()));
  const auto has_come = [&](int rank) {
    return std::any_of(peers_.begin(), peers_.end(),
                       [&](const Peer& peer) { return peer.rank == rank; });
  };
  const auto deadline = Clock::now() + timeout;
  while (static_cast<int>(peers_.size()) < world_size_ - 1) {
    if (Clock::now() > deadline) {
      std::vector<int> missing;
      for (int rank = 1; rank < world_size_; ++rank) {
        if (!has_come(rank)) missing.push_back(rank);
      }
      throw TimeoutError(concat("Rank ", text::join(missing),
                                " met the others and did not connect to rank 0 within ",
                                text::format_seconds(timeout.count() / 1e3),
                                ". It ended, or a firewall is between them."),
                         kOperation, rank_);
    }
    pollfd waiting{gate.descriptor(), POLLIN, 0};
    ::poll(&waiting, 1, 500);
    for (auto& visitor : gate.admit()) {
      if (visitor.rank <= 0 || visitor.rank >= world_size_ || has_come(visitor.rank)) continue;
      Peer peer;
      peer.rank = visitor.rank;
      peer.socket = std::move(visitor.socket);
      peers_.push_back(std::move(peer));
    }
  }
}

void Liveness::connect(const Rendezvous& met, milliseconds timeout) {
  const std::string port = met.store->get_to_str(kPortKey);
  Peer peer;
  peer.rank = 0;
  try {
    peer.socket = net::enter(met.host, static_cast<int>(text::to_int(port).value_or(0)), met.secret,
                             net::Purpose::liveness, rank_, Clock::now() + timeout);
  } catch (const net::ConnectionError& error) {
    set_up_failed(
        concat("it cannot connect to rank 0 at ", met.host, ":", port, " (", error.what(), ")"),
        rank_);
  }
  peers_.push_back(std::move(peer));
}

void Liveness::subscribe(const std::shared_ptr<LivenessListener>& listener) {
  const std::lock_guard lock(mutex_);
  std::erase_if(listeners_, [](const auto& weak) { return weak.expired(); });
  listeners_.push_back(listener);
}

std::vector<std::shared_ptr<LivenessListener>> Liveness::listeners() {
  std::vector<std::shared_ptr<LivenessListener>> alive;
  const std::lock_guard lock(mutex_);
  for (const auto& weak : listeners_) {
    if (auto listener = weak.lock()) alive.push_back(std::move(listener));
  }
  return alive;
}

std::optional<Loss> Liveness::loss() const {
  const std::lock_guard lock(mutex_);
  return loss_;
}

std::optional<Loss> Liveness::final_loss() const {
  const std::lock_guard lock(mutex_);
  return loss_is_final_ ? loss_ : std::nullopt;
}

std::optional<Loss> Liveness::wait_for_loss(milliseconds patience) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return loss_.has_value(); });
  return loss_;
}

milliseconds Liveness::patience() const noexcept {
  return silence_.count() == 0 ? milliseconds(2000) : silence_ + 2 * interval_;
}

std::vector<Liveness::Departure> Liveness::departures() const {
  const std::lock_guard lock(mutex_);
  return departures_;
}

bool Liveness::has_departed(int rank) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(departures_.begin(), departures_.end(),
                     [&](const Departure& gone) { return gone.rank == rank; });
}

std::vector<int> Liveness::behind() const {
  const std::lock_guard lock(mutex_);
  if (least_operations_ >= operations_) return {};
  return behind_;
}

void Liveness::wake() const {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.number(), &one, sizeof one);
}

void Liveness::say_failed_pass() {
  {
    const std::lock_guard lock(mutex_);
    ++failed_passes_[static_cast<std::size_t>(rank_)].count;
  }
  wake();
}

std::vector<Liveness::Departure> Liveness::failed_alone(const std::vector<int>& ranks) const {
  std::vector<Departure> ahead;
  const std::lock_guard lock(mutex_);
  const std::uint64_t own = failed_passes_[static_cast<std::size_t>(rank_)].count;
  for (const int rank : ranks) {
    const FailedPasses& its = failed_passes_[static_cast<std::size_t>(rank)];
    if (its.count > own) ahead.push_back({rank, its.last});
  }
  return ahead;
}

bool Liveness::all_failed(const std::vector<int>& ranks, milliseconds patience) const {
  std::unique_lock lock(mutex_);
  const std::uint64_t own = failed_passes_[static_cast<std::size_t>(rank_)].count;
  return changed_.wait_for(lock, patience, [&] {
    return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
      return failed_passes_[static_cast<std::size_t>(rank)].count >= own;
    });
  });
}

void Liveness::say_goodbye(milliseconds patience) {
  goodbye_ = true;
  wake();
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] {
    return loss_.has_value() || deaf_ || static_cast<int>(departures_.size()) >= world_size_ - 1;
  });
}

void Liveness::say_failure(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    failure_ = reason;
  }
  wake();
}

void Liveness::leave() noexcept {
  if (!thread_.joinable()) return;
  stop_ = true;
  wake();
  thread_.join();
  // A connection closed with unread beats in it is reset, and a reset may overtake what was said
  // last; so say that nothing more comes, and read until the other side has understood.
  for (const auto& peer : peers_) {
    if (peer.socket) ::shutdown(peer.socket.number(), SHUT_WR);
  }
  const auto deadline = Clock::now() + milliseconds(said_farewell_ ? 200 : 0);
  for (auto& peer : peers_) {
    std::array<char, 4096> rest;
    while (peer.socket && net::ready(peer.socket, POLLIN, deadline) &&
           ::recv(peer.socket.number(), rest.data(), rest.size(), 0) > 0) {
    }
    peer.socket.reset();
  }
}

void Liveness::run() {
  auto next_beat = Clock::now();
  auto last = Clock::now();
  while (true) {
    std::vector<pollfd> waiting{{wake_.number(), POLLIN, 0}};
    for (const auto& peer : peers_)
      waiting.push_back({peer.socket.number(), POLLIN, 0});  // -1 is passed over
    const bool tells = loss() && !final_loss();
    const auto next = tells ? std::min(next_beat, lost_at_ + kOnTheWay) : next_beat;
    const auto left = std::chrono::ceil<milliseconds>(next - Clock::now());
    ::poll(waiting.data(), waiting.size(),
           static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, interval_.count())));
    std::uint64_t woken = 0;
    [[maybe_unused]] const auto drained = ::read(wake_.number(), &woken, sizeof woken);
    // Looked at before the farewell, which was asked for earlier: nobody goes without having said
    // it, however late this thread comes to it.
    const bool stopping = stop_;
    say_failed_passes();
    say_farewell();
    if (stopping) return;
    const auto now = Clock::now();
    // This process was itself stopped for a while: it cannot say who was silent meanwhile.
    if (now - last > 2 * interval_ + milliseconds(500)) {
      for (auto& peer : peers_) peer.heard = now;
    }
    last = now;
    for (std::size_t index = 0; index < peers_.size(); ++index) {
      if (waiting[index + 1].revents != 0) read(peers_[index]);
    }
    tell_of_loss(now);
    if (now >= next_beat) {
      next_beat = now + interval_;
      look_after_launcher();
      judge_silence(now);
      beat();
      for (const auto& listener : listeners()) listener->tick();
    }
  }
}

void Liveness::say_failed_passes() {
  Message message;
  message.kind = Message::failed_pass;
  message.rank = rank_;
  {
    const std::lock_guard lock(mutex_);
    message.operations = failed_passes_[static_cast<std::size_t>(rank_)].count;
    if (std::exchange(failed_passes_said_, message.operations) == message.operations) return;
  }
  say_all(message);
}

void Liveness::say_farewell() {
  std::string failure;
  {
    const std::lock_guard lock(mutex_);
    failure.swap(failure_);
  }
  if (said_farewell_ || (failure.empty() && !goodbye_)) return;
  said_farewell_ = true;
  Message message;
  message.kind = failure.empty() ? Message::goodbye : Message::failing;
  message.rank = rank_;
  message.explain(failure);
  say_all(message);
}

/// This rank cannot go on, and says so itself.
void Liveness::fail(const std::string& reason) {
  say_failure(reason);
  say_farewell();
  {
    const std::lock_guard lock(mutex_);
    if (loss_) return;
    loss_ = Loss{rank_, reason, true};
    loss_is_final_ = true;
  }
  changed_.notify_all();
  for (const auto& listener : listeners()) listener->peer_lost(Loss{rank_, reason, true});
}

void Liveness::look_after_launcher() {
  if (said_farewell_ || !launcher_.gone()) return;
  log::error("The torchrun that started this process has ended, and so does the run.");
  fail("the torchrun that started it has ended");
}

void Liveness::read(Peer& peer) {
  std::array<std::uint8_t, 4096> buffer;
  while (peer.socket) {
    const auto size = ::recv(peer.socket.number(), buffer.data(), buffer.size(), 0);
    if (size > 0) {
      const auto now = Clock::now();
      if (std::exchange(peer.noticed, false)) {
        log::warning(
            concat("Rank ", peer.rank, " is heard again, after ",
                   text::format_seconds(std::chrono::duration<double>(now - peer.heard).count()),
                   "."),
            log::Ranks::all);
      }
      peer.heard = now;
      peer.received.insert(peer.received.end(), buffer.begin(), buffer.begin() + size);
      while (peer.received.size() >= sizeof(Message)) {
        Message message;
        std::memcpy(&message, peer.received.data(), sizeof message);
        message.reason.back() = '\0';
        peer.received.erase(peer.received.begin(), peer.received.begin() + sizeof message);
        handle(peer, message);
      }
      continue;
    }
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (size < 0 && errno == EINTR) continue;
    const int rank = peer.rank;
    peer.socket.reset();
    if (!has_departed(rank)) {
      declare_lost(rank, "its process ended");
    } else if (rank_ != 0) {
      {
        const std::lock_guard lock(mutex_);
        deaf_ = true;
      }
      changed_.notify_all();
    }
  }
}

void Liveness::handle(Peer& peer, const Message& message) {
  // Rank 0 speaks for all; the others for themselves.
  const bool of_another = message.kind == Message::departed || message.kind == Message::lost ||
                          (message.kind == Message::failed_pass && message.rank != peer.rank);
  if (of_another && (rank_ == 0 || message.rank < 0 || message.rank >= world_size_)) return;
  switch (message.kind) {
    case Message::beat:
      peer.operations = message.operations;
      if (rank_ != 0) {
        const std::lock_guard lock(mutex_);
        least_operations_ = message.operations;
        behind_.clear();
        for (const int rank : message.behind) {
          if (rank >= 0) behind_.push_back(rank);
        }
      }
      break;
    case Message::goodbye:
      declare_departed(peer.rank);
      break;
    case Message::failing:
      declare_lost(peer.rank, message.reason.data());
      break;
    case Message::departed:
      declare_departed(message.rank);
      break;
    case Message::lost:
      declare_lost(message.rank, message.reason.data());
      break;
    case Message::failed_pass:
      declare_failed_pass(message.rank, message.operations);
      break;
  }
}

void Liveness::judge_silence(Clock::time_point now) {
  const bool ends = silence_.count() > 0;
  for (auto& peer : peers_) {
    if (!peer.socket || has_departed(peer.rank)) continue;
    const auto quiet = now - peer.heard;
    if (ends && quiet > silence_) {
      declare_lost(peer.rank,
                   concat("it has been silent for ", text::format_seconds(silence_.count() / 1e3)));
    } else if (quiet > kNoticeable && (!ends || silence_ > kNoticeable + interval_) &&
               !std::exchange(peer.noticed, true) && rank_ <= 1) {
      // Of the ranks that miss rank 0, one says so.
      const std::string end = ends ? concat("The run ends when it has been silent for ",
                                            text::format_seconds(silence_.count() / 1e3),
                                            " (ACCELERATE_HEARTBEAT_TIMEOUT).")
                                   : std::string("The run waits for it.");
      log::warning(concat("Rank ", peer.rank, " has been silent for ",
                          text::format_seconds(kNoticeable.count() / 1e3),
                          ". Was its process stopped, is its machine out of memory or its network "
                          "down? ",
                          end),
                   log::Ranks::all);
    }
  }
}

void Liveness::beat() {
  Message message;
  message.rank = rank_;
  message.operations = operations_;
  if (rank_ == 0) {
    // The rank that is furthest behind, and those beside it.
    std::uint64_t least = operations_;
    for (const auto& peer : peers_) {
      if (!has_departed(peer.rank)) least = std::min(least, peer.operations);
    }
    message.operations = least;
    std::size_t named = 0;
    if (operations_ <= least) message.behind[named++] = 0;
    for (const auto& peer : peers_) {
      if (named < kMostNamed && peer.operations <= least && !has_departed(peer.rank))
        message.behind[named++] = peer.rank;
    }
    const std::lock_guard lock(mutex_);
    least_operations_ = least;
    behind_.assign(message.behind.begin(),
                   message.behind.begin() + static_cast<std::ptrdiff_t>(named));
  }
  say_all(message);
}

void Liveness::say(const Peer& peer, const Message& message) const {
  if (!peer.socket) return;
  // A full buffer means that the other side reads nothing; its silence will tell.
  [[maybe_unused]] const auto sent =
      ::send(peer.socket.number(), &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Liveness::say_all(const Message& message) const {
  for (const auto& peer : peers_) say(peer, message);
}

void Liveness::declare_lost(int rank, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (loss_) return;  // whoever went after the first went because of it
    loss_ = Loss{rank, reason};
    lost_at_ = Clock::now();
  }
  if (rank_ == 0) {
    Message message;
    message.kind = Message::lost;
    message.rank = rank;
    message.explain(reason);
    say_all(message);
  }
  changed_.notify_all();
  log::debug(concat("Rank ", rank, " was lost: ", reason, "."), log::Ranks::all);
}

void Liveness::tell_of_loss(Clock::time_point now) {
  Loss loss;
  {
    const std::lock_guard lock(mutex_);
    if (!loss_ || loss_is_final_ || now < lost_at_ + kOnTheWay) return;
    loss_is_final_ = true;
    loss = *loss_;
  }
  for (const auto& listener : listeners()) listener->peer_lost(loss);
}

void Liveness::declare_failed_pass(int rank, std::uint64_t count) {
  {
    const std::lock_guard lock(mutex_);
    failed_passes_[static_cast<std::size_t>(rank)] = {count, Clock::now()};
  }
  changed_.notify_all();
  if (rank_ == 0) {
    Message message;
    message.kind = Message::failed_pass;
    message.rank = rank;
    message.operations = count;
    say_all(message);
  }
}

void Liveness::declare_departed(int rank) {
  if (has_departed(rank)) return;
  {
    const std::lock_guard lock(mutex_);
    departures_.push_back({rank, Clock::now()});
  }
  changed_.notify_all();
  if (rank_ == 0) {
    Message message;
    message.kind = Message::departed;
    message.rank = rank;
    say_all(message);
  }
}

}  // namespace accelerate::comm
