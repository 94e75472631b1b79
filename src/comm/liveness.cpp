#include "comm/liveness.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace accelerate::comm {

using std::chrono::milliseconds;
using text::concat;

namespace {

constexpr const char* kPortKey = "liveness/port";
constexpr int kMostNamed = 8;

[[noreturn]] void fail(const std::string& what, int rank) {
  throw DistributedError(
      concat("Rank ", rank, " could not set up the watch over the other processes: ", what, " (",
             std::strerror(errno), ")."),
      "rendezvous", rank);
}

void set_up(int socket) {
  const int on = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
  ::fcntl(socket, F_SETFD, FD_CLOEXEC);
}

/// Waits for one socket. False when nothing came in time.
bool ready(int socket, short events, milliseconds timeout) {
  pollfd waiting{socket, events, 0};
  return ::poll(&waiting, 1, static_cast<int>(std::max<std::int64_t>(timeout.count(), 0))) > 0;
}

}  // namespace

/// All that is ever said, one size for all.
struct Liveness::Message {
  enum Kind : std::uint32_t { hello = 0xacce1e00, beat, goodbye, departed, lost };
  Kind kind = beat;
  /// hello, goodbye: the sender. departed, lost: who.
  std::int32_t rank = -1;
  /// beat: how many operations the sender has started; from rank 0: the fewest of any rank.
  std::uint64_t operations = 0;
  /// beat from rank 0: ranks that have started no more than that; -1 where there are fewer.
  std::array<std::int32_t, kMostNamed> behind{-1, -1, -1, -1, -1, -1, -1, -1};
  std::array<char, 64> reason{};
};

Liveness::Liveness(c10d::Store& store, const std::string& host, int rank, int world_size,
                   milliseconds silence, milliseconds connect_timeout)
    : rank_(rank),
      world_size_(world_size),
      silence_(silence),
      interval_(silence.count() == 0
                    ? milliseconds(1000)
                    : std::clamp(silence / 4, milliseconds(20), milliseconds(1000))) {
  try {
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_ < 0) fail("no eventfd", rank_);
    if (rank == 0) {
      listen(store);
      accept_everyone(connect_timeout);
    } else {
      connect(store, host, connect_timeout);
    }
  } catch (...) {
    for (auto& peer : peers_) drop(peer);
    for (const int descriptor : {listening_, wake_}) {
      if (descriptor >= 0) ::close(descriptor);
    }
    throw;
  }
  for (auto& peer : peers_) peer.heard = Clock::now();
  thread_ = std::thread([this] {
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

Liveness::~Liveness() {
  leave();
  if (wake_ >= 0) ::close(wake_);
}

void Liveness::listen(c10d::Store& store) {
  listening_ = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const bool six = listening_ >= 0;
  if (!six) listening_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listening_ < 0) fail("no socket", rank_);
  sockaddr_storage address{};
  socklen_t size = 0;
  if (six) {
    const int off = 0;  // IPv4 comes in by the same socket
    ::setsockopt(listening_, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    reinterpret_cast<sockaddr_in6&>(address).sin6_family = AF_INET6;
    reinterpret_cast<sockaddr_in6&>(address).sin6_addr = in6addr_any;
    size = sizeof(sockaddr_in6);
  } else {
    reinterpret_cast<sockaddr_in&>(address).sin_family = AF_INET;
    reinterpret_cast<sockaddr_in&>(address).sin_addr.s_addr = htonl(INADDR_ANY);
    size = sizeof(sockaddr_in);
  }
  if (::bind(listening_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      ::listen(listening_, world_size_) != 0) {
    fail("it cannot listen on any port", rank_);
  }
  socklen_t got = sizeof address;
  ::getsockname(listening_, reinterpret_cast<sockaddr*>(&address), &got);
  const auto port = ntohs(six ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                              : reinterpret_cast<sockaddr_in&>(address).sin_port);
  store.set(kPortKey, std::to_string(port));
}

void Liveness::accept_everyone(milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  while (static_cast<int>(peers_.size()) < world_size_ - 1) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    if (left.count() <= 0 || !ready(listening_, POLLIN, left)) {
      std::vector<int> missing;
      for (int rank = 1; rank < world_size_; ++rank) {
        if (std::none_of(peers_.begin(), peers_.end(),
                         [&](const Peer& peer) { return peer.rank == rank; })) {
          missing.push_back(rank);
        }
      }
      throw TimeoutError(concat("Rank ", text::join(missing),
                                " met the others and did not connect to rank 0 within ",
                                text::format_seconds(timeout.count() / 1e3),
                                ". It ended, or a firewall is between them."),
                         "rendezvous", rank_);
    }
    const int socket = ::accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) continue;
    Peer peer;
    peer.socket = socket;
    Message hello;
    // Whoever knocks by mistake says nothing of ours, and is sent away.
    const bool spoke =
        ready(socket, POLLIN, milliseconds(2000)) &&
        ::recv(socket, &hello, sizeof hello, MSG_WAITALL) == static_cast<ssize_t>(sizeof hello);
    if (!spoke || hello.kind != Message::hello || hello.rank <= 0 || hello.rank >= world_size_) {
      ::close(socket);
      continue;
    }
    set_up(socket);
    peer.rank = hello.rank;
    peers_.push_back(std::move(peer));
  }
  ::close(listening_);
  listening_ = -1;
}

void Liveness::connect(c10d::Store& store, const std::string& host, milliseconds timeout) {
  const std::string port = store.get_to_str(kPortKey);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found); error != 0) {
    throw DistributedError(concat("Rank ", rank_, " cannot resolve ", host,
                                  ", where rank 0 is: ", ::gai_strerror(error), "."),
                           "rendezvous", rank_);
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
  for (const addrinfo* address = found; address != nullptr; address = address->ai_next) {
    const int socket = ::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (socket < 0) continue;
    set_up(socket);
    int error = ::connect(socket, address->ai_addr, address->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      socklen_t size = sizeof error;
      error = ETIMEDOUT;
      if (ready(socket, POLLOUT, timeout))
        ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
    }
    Peer peer;
    peer.rank = 0;
    peer.socket = socket;
    Message hello;
    hello.kind = Message::hello;
    hello.rank = rank_;
    if (error == 0 &&
        ::send(socket, &hello, sizeof hello, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof hello)) {
      peers_.push_back(std::move(peer));
      return;
    }
    ::close(socket);
    errno = error;
  }
  fail(concat("it cannot connect to rank 0 at ", host, ":", port), rank_);
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
  [[maybe_unused]] const auto written = ::write(wake_, &one, sizeof one);
}

void Liveness::say_goodbye(milliseconds patience) {
  goodbye_ = true;
  wake();
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] {
    return loss_.has_value() || deaf_ || static_cast<int>(departures_.size()) >= world_size_ - 1;
  });
}

void Liveness::leave() noexcept {
  if (!thread_.joinable()) return;
  stop_ = true;
  wake();
  thread_.join();
  // A connection closed with unread beats in it is reset, and a reset may overtake what was said
  // last; so say that nothing more comes, and read until the other side has understood.
  for (const auto& peer : peers_) {
    if (peer.socket >= 0) ::shutdown(peer.socket, SHUT_WR);
  }
  const auto deadline = Clock::now() + milliseconds(goodbye_ ? 200 : 0);
  for (auto& peer : peers_) {
    std::array<char, 4096> rest;
    while (peer.socket >= 0) {
      const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
      if (left.count() <= 0 || !ready(peer.socket, POLLIN, left) ||
          ::recv(peer.socket, rest.data(), rest.size(), 0) <= 0)
        break;
    }
    drop(peer);
  }
}

void Liveness::run() {
  auto next_beat = Clock::now();
  auto last = Clock::now();
  bool said_goodbye = false;
  while (!stop_) {
    std::vector<pollfd> waiting{{wake_, POLLIN, 0}};
    for (const auto& peer : peers_)
      waiting.push_back({peer.socket, POLLIN, 0});  // -1 is passed over
    const auto left = std::chrono::duration_cast<milliseconds>(next_beat - Clock::now());
    ::poll(waiting.data(), waiting.size(),
           static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, interval_.count())));
    std::uint64_t woken = 0;
    [[maybe_unused]] const auto drained = ::read(wake_, &woken, sizeof woken);
    if (goodbye_ && !said_goodbye) {
      Message goodbye;
      goodbye.kind = Message::goodbye;
      goodbye.rank = rank_;
      say_all(goodbye);
      said_goodbye = true;
    }
    const auto now = Clock::now();
    // This process was itself stopped for a while: it cannot say who was silent meanwhile.
    if (now - last > 2 * interval_ + milliseconds(500)) {
      for (auto& peer : peers_) peer.heard = now;
    }
    last = now;
    for (std::size_t index = 0; index < peers_.size(); ++index) {
      if (waiting[index + 1].revents != 0) read(peers_[index]);
    }
    if (now >= next_beat) {
      next_beat = now + interval_;
      judge_silence(now);
      beat();
      for (const auto& listener : listeners()) listener->tick();
    }
  }
}

void Liveness::read(Peer& peer) {
  std::array<std::uint8_t, 4096> buffer;
  while (peer.socket >= 0) {
    const auto size = ::recv(peer.socket, buffer.data(), buffer.size(), 0);
    if (size > 0) {
      peer.heard = Clock::now();
      peer.received.insert(peer.received.end(), buffer.begin(), buffer.begin() + size);
      while (peer.received.size() >= sizeof(Message)) {
        Message message;
        std::memcpy(&message, peer.received.data(), sizeof message);
        peer.received.erase(peer.received.begin(), peer.received.begin() + sizeof message);
        handle(peer, message);
      }
      continue;
    }
    if (size < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (size < 0 && errno == EINTR) continue;
    const int rank = peer.rank;
    drop(peer);
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
      declare_departed(message.rank);
      break;
    case Message::departed:
      declare_departed(message.rank);
      break;
    case Message::lost:
      declare_lost(message.rank, message.reason.data());
      break;
    case Message::hello:
      break;
  }
}

void Liveness::judge_silence(Clock::time_point now) {
  if (silence_.count() == 0) return;
  for (auto& peer : peers_) {
    if (peer.socket < 0 || now - peer.heard <= silence_ || has_departed(peer.rank)) continue;
    declare_lost(peer.rank,
                 concat("it has been silent for ", text::format_seconds(silence_.count() / 1e3)));
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
  if (peer.socket < 0) return;
  // A full buffer means that the other side reads nothing; its silence will tell.
  [[maybe_unused]] const auto sent =
      ::send(peer.socket, &message, sizeof message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Liveness::say_all(const Message& message) const {
  for (const auto& peer : peers_) say(peer, message);
}

void Liveness::declare_lost(int rank, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (loss_) return;  // whoever went after the first went because of it
    loss_ = Loss{rank, reason};
  }
  if (rank_ == 0) {
    Message message;
    message.kind = Message::lost;
    message.rank = rank;
    std::strncpy(message.reason.data(), reason.c_str(), message.reason.size() - 1);
    say_all(message);
  }
  changed_.notify_all();
  log::debug(concat("Rank ", rank, " was lost: ", reason, "."), log::Ranks::all);
  for (const auto& listener : listeners()) listener->peer_lost(Loss{rank, reason});
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

void Liveness::drop(Peer& peer) {
  if (peer.socket >= 0) ::close(peer.socket);
  peer.socket = -1;
}

}  // namespace accelerate::comm
