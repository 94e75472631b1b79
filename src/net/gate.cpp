#include "net/gate.hpp"

#include "net/sha256.hpp"

#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include <sys/epoll.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>

namespace accelerate::net {
namespace {

using std::chrono::milliseconds;
using text::concat;
using Kind = ConnectionError::Kind;

constexpr std::string_view kGreeting = "accel/1\n";
constexpr std::size_t kNonce = 32;
constexpr std::size_t kProof = sizeof(Digest);
// The gate:      greeting, its nonce.
// The visitor:   greeting, its nonce, its rank, its proof.
// The gate:      yes or no, its proof.
constexpr std::size_t kChallengeSize = kGreeting.size() + kNonce;
constexpr std::size_t kAnswerSize = kGreeting.size() + kNonce + sizeof(std::uint32_t) + kProof;
constexpr std::size_t kVerdictSize = 1 + kProof;

constexpr std::chrono::seconds kPatience{10};
constexpr int kMostWarnings = 8;
/// So long nobody is accepted when the process has no file descriptors left.
constexpr milliseconds kPause{200};

std::string random_bytes(std::size_t size) {
  std::string bytes(size, '\0');
  for (std::size_t filled = 0; filled < size;) {
    const auto got = ::getrandom(bytes.data() + filled, size - filled, 0);
    if (got > 0) filled += static_cast<std::size_t>(got);
    if (got < 0 && errno != EINTR)
      throw ConnectionError(Kind::unusable, "the system gives no random numbers");
  }
  return bytes;
}

std::string rank_bytes(std::uint32_t rank) {
  std::string bytes(sizeof rank, '\0');
  for (std::size_t i = 0; i < sizeof rank; ++i) bytes[i] = static_cast<char>(rank >> (8 * i));
  return bytes;
}
std::uint32_t rank_from(std::string_view bytes) {
  std::uint32_t rank = 0;
  for (std::size_t i = 0; i < sizeof rank; ++i)
    rank |= std::uint32_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return rank;
}

/// `side` keeps the two directions apart: a proof sent back is none.
std::string proof(const std::string& secret, Purpose purpose, std::string_view side,
                  std::string_view gate_nonce, std::string_view visitor_nonce,
                  std::string_view rank) {
  const Digest digest =
      hmac_sha256(secret, concat("accelerate ", side, ' ', static_cast<char>(purpose), gate_nonce,
                                 visitor_nonce, rank));
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

void watch(int events, const Descriptor& socket) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.fd = socket.number();
  if (::epoll_ctl(events, EPOLL_CTL_ADD, socket.number(), &event) != 0)
    throw ConnectionError(Kind::unusable,
                          concat("no connection can be watched (", std::strerror(errno), ")"));
}

void forget(int events, const Descriptor& socket) {
  ::epoll_ctl(events, EPOLL_CTL_DEL, socket.number(), nullptr);
}

/// One attempt.
Descriptor knock(const std::vector<Address>& addresses, int port, const std::string& secret,
                 Purpose purpose, int rank, Clock::time_point deadline) {
  Descriptor socket = connect_to(addresses, port, deadline);
  const std::string challenge = receive(socket, kChallengeSize, deadline);
  if (!challenge.starts_with(kGreeting))
    throw ConnectionError(Kind::stranger, "whoever holds the port does not answer as a store does");
  const std::string gate_nonce = challenge.substr(kGreeting.size());
  const std::string nonce = random_bytes(kNonce);
  const std::string who = rank_bytes(static_cast<std::uint32_t>(rank));
  send_all(socket,
           concat(kGreeting, nonce, who, proof(secret, purpose, "visitor", gate_nonce, nonce, who)),
           deadline);
  const std::string verdict = receive(socket, kVerdictSize, deadline);
  if (verdict[0] == 0)
    throw ConnectionError(Kind::refused,
                          "whoever holds the port belongs to another run: it has another secret");
  if (!equal_in_constant_time(std::string_view(verdict).substr(1),
                              proof(secret, purpose, "gate", gate_nonce, nonce, who))) {
    throw ConnectionError(Kind::stranger, "whoever holds the port does not know this run's secret");
  }
  return socket;
}

}  // namespace

std::string draw_secret() {
  std::string text;
  for (const char byte : random_bytes(32)) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

Gate::Gate(std::vector<Descriptor> listening, std::string secret, Purpose purpose,
           std::size_t most_pending)
    : listening_(std::move(listening)),
      secret_(std::move(secret)),
      purpose_(purpose),
      most_pending_(most_pending),
      port_(port_of(listening_.front())),
      events_(::epoll_create1(EPOLL_CLOEXEC)) {
  for (const Descriptor& socket : listening_) watch(events_.number(), socket);
}

std::vector<Gate::Visitor> Gate::admit() {
  std::vector<Visitor> admitted;
  if (paused_ && Clock::now() >= paused_until_) {
    paused_ = false;
    for (const Descriptor& socket : listening_) watch(events_.number(), socket);
  }
  std::array<epoll_event, 64> events{};
  const int found = ::epoll_wait(events_.number(), events.data(), events.size(), 0);
  for (int i = 0; i < found; ++i) {
    const int number = events[static_cast<std::size_t>(i)].data.fd;
    const auto listener =
        std::find_if(listening_.begin(), listening_.end(),
                     [&](const auto& socket) { return socket.number() == number; });
    if (listener != listening_.end()) {
      accept_new(*listener);
      continue;
    }
    const auto pending = std::find_if(pending_.begin(), pending_.end(), [&](const Pending& one) {
      return one.socket.number() == number;
    });
    if (pending != pending_.end() && hear(*pending, admitted)) pending_.erase(pending);
  }
  while (!pending_.empty() && Clock::now() > pending_.front().deadline) {
    turn_away(pending_.front());
    pending_.pop_front();
  }
  return admitted;
}

void Gate::accept_new(const Descriptor& listening) {
  Address from;
  from.size = sizeof from.storage;
  Descriptor socket(::accept4(listening.number(), reinterpret_cast<sockaddr*>(&from.storage),
                              &from.size, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket) {
    const bool exhausted =
        errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (exhausted && !pending_.empty()) {
      pending_.pop_front();
    } else if (exhausted) {
      pause_listening();
    }
    return;
  }
  if (pending_.size() >= most_pending_) pending_.pop_front();
  set_up(socket);
  Pending pending{std::move(socket), from, random_bytes(kNonce), {}, Clock::now() + kPatience};
  const std::string greeting = concat(kGreeting, pending.challenge);
  // The buffer of a new connection has room for it.
  if (::send(pending.socket.number(), greeting.data(), greeting.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(greeting.size())) {
    return;
  }
  watch(events_.number(), pending.socket);
  pending_.push_back(std::move(pending));
}

/// True when it is over with this one.
bool Gate::hear(Pending& pending, std::vector<Visitor>& admitted) {
  std::array<char, kAnswerSize> buffer{};
  const auto got =
      ::recv(pending.socket.number(), buffer.data(), kAnswerSize - pending.said.size(), 0);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return false;
  if (got <= 0) return true;  // such as somebody who looks which ports are open
  pending.said.append(buffer.data(), static_cast<std::size_t>(got));
  const std::string_view said = pending.said;
  if (said.substr(0, kGreeting.size()) != kGreeting.substr(0, said.size())) {
    turn_away(pending);
    return true;
  }
  if (said.size() < kAnswerSize) return false;
  const std::string_view nonce = said.substr(kGreeting.size(), kNonce);
  const std::string_view who = said.substr(kGreeting.size() + kNonce, sizeof(std::uint32_t));
  const bool knows =
      equal_in_constant_time(said.substr(kAnswerSize - kProof),
                             proof(secret_, purpose_, "visitor", pending.challenge, nonce, who));
  std::string verdict(kVerdictSize, '\0');
  if (knows) verdict = '\1' + proof(secret_, purpose_, "gate", pending.challenge, nonce, who);
  const bool sent = ::send(pending.socket.number(), verdict.data(), verdict.size(), MSG_NOSIGNAL) ==
                    static_cast<ssize_t>(verdict.size());
  if (!knows) turn_away(pending);
  if (knows && sent) {
    forget(events_.number(), pending.socket);
    admitted.push_back({std::move(pending.socket), static_cast<int>(rank_from(who))});
  }
  return true;
}

void Gate::turn_away(const Pending& pending) {
  if (++turned_away_ > kMostWarnings) return;
  log::warning_once(
      concat("A connection from ", pending.from.text(), " to port ", port_,
             ", where the processes of this run meet, did not prove that it belongs to the run, "
             "and was closed. The run goes on; further ones from there are closed without a word."),
      log::Ranks::all);
}

void Gate::pause_listening() {
  for (const Descriptor& socket : listening_) forget(events_.number(), socket);
  paused_ = true;
  paused_until_ = Clock::now() + kPause;
}

Descriptor enter(const std::string& host, int port, const std::string& secret, Purpose purpose,
                 int rank, Clock::time_point deadline) {
  std::vector<Address> addresses;
  auto pause = milliseconds(2);
  std::optional<ConnectionError> heard;  // says more than that a later attempt was refused
  while (true) {
    try {
      if (addresses.empty()) addresses = resolve(host);
      return knock(addresses, port, secret, purpose, rank,
                   std::min(deadline, Clock::now() + kPatience));
    } catch (const ConnectionError& error) {
      if (error.kind() == Kind::refused) throw;
      if (error.kind() == Kind::silent)
        heard.emplace(Kind::silent,
                      "the port is open, and whoever holds it does not answer as a store does");
      if (error.kind() == Kind::stranger) heard = error;
      if (Clock::now() + pause >= deadline) {
        if (heard) throw *heard;
        throw;
      }
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, milliseconds(100));
  }
}

}  // namespace accelerate::net
