#include "net/store_server.hpp"

#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <limits>

namespace accelerate::net {
namespace {

using std::chrono::milliseconds;
using text::concat;
using Kind = StoreMessage::Kind;

/// How often the gate is looked at when nobody knocks.
constexpr milliseconds kTick{1000};
/// No wait is longer; a client that wants more asks again.
constexpr std::int64_t kLongestWait = std::int64_t{30} * 24 * 3600 * 1000;

bool well_formed(const StoreMessage& request) {
  const std::size_t parts = request.parts.size();
  switch (request.kind) {
    case Kind::set:
      return parts % 2 == 0;
    case Kind::get:
    case Kind::wait:
    case Kind::check:
      return true;
    case Kind::add:
    case Kind::erase:
      return parts == 1;
    case Kind::append:
      return parts == 2;
    case Kind::compare_set:
      return parts == 3;
    case Kind::count:
      return parts == 0;
    default:
      return false;
  }
}

}  // namespace

StoreServer::StoreServer(std::vector<Descriptor> listening, const std::string& secret, int expected)
    : gate_(std::move(listening), secret, Purpose::store,
            std::max<std::size_t>(256, 2 * static_cast<std::size_t>(expected))),
      events_(::epoll_create1(EPOLL_CLOEXEC)),
      stop_(::eventfd(0, EFD_CLOEXEC)) {
  for (const int number : {gate_.descriptor(), stop_.number()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = number;
    if (::epoll_ctl(events_.number(), EPOLL_CTL_ADD, number, &event) != 0)
      throw ConnectionError(ConnectionError::Kind::unusable, "no descriptor can be watched");
  }
  thread_ = std::thread([this] {
    ::prctl(PR_SET_NAME, "accelerate-keys");
    try {
      run();
    } catch (const std::exception& error) {
      log::error(
          concat("The store where the processes of this run agree has ended: ", error.what()));
      clients_.clear();
    }
  });
}

StoreServer::~StoreServer() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(stop_.number(), &one, sizeof one);
  thread_.join();
}

void StoreServer::run() {
  std::array<epoll_event, 64> events{};
  auto next_tick = Clock::now() + kTick;
  while (true) {
    const auto left =
        std::chrono::ceil<milliseconds>(std::min(next_tick, next_deadline_) - Clock::now());
    const int found =
        ::epoll_wait(events_.number(), events.data(), events.size(),
                     static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, kTick.count())));
    bool knocked = Clock::now() >= next_tick;
    for (int i = 0; i < found; ++i) {
      const auto& event = events[static_cast<std::size_t>(i)];
      if (event.data.fd == stop_.number()) return;
      if (event.data.fd == gate_.descriptor()) knocked = true;
      const auto client = clients_.find(event.data.fd);
      if (client != clients_.end() && !serve(client->second, event.events)) remove(client);
    }
    if (Clock::now() >= next_deadline_) expire();
    finish_waits();
    if (!knocked) continue;
    welcome();
    next_tick = Clock::now() + kTick;
  }
}

/// Sends what others' requests have brought to those who waited, and goes on with what they said
/// meanwhile.
void StoreServer::finish_waits() {
  while (!answered_.empty()) {
    const auto client = clients_.find(answered_.back());
    answered_.pop_back();
    if (client == clients_.end()) continue;
    if (!flush(client->second) || !handle_requests(client->second)) remove(client);
  }
}

void StoreServer::remove(std::map<int, Client>::iterator client) {
  unpark(client->first, client->second);
  clients_.erase(client);
}

void StoreServer::welcome() {
  for (auto& visitor : gate_.admit()) {
    const int number = visitor.socket.number();
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.fd = number;
    if (::epoll_ctl(events_.number(), EPOLL_CTL_ADD, number, &event) != 0) continue;
    Client client;
    client.socket = std::move(visitor.socket);
    clients_.emplace(number, std::move(client));
  }
}

bool StoreServer::serve(Client& client, unsigned events) {
  if ((events & EPOLLOUT) != 0 && !flush(client)) return false;
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0 && !hear(client)) return false;
  return handle_requests(client);
}

/// Reads what has come, but no more than one message ahead: a client waits for its answer.
bool StoreServer::hear(Client& client) {
  std::array<char, 1 << 16> buffer;
  while (client.received.size() <= kMostMessageBytes + kLengthBytes) {
    const auto got = ::recv(client.socket.number(), buffer.data(), buffer.size(), 0);
    if (got > 0) {
      client.received.append(buffer.data(), static_cast<std::size_t>(got));
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return true;
    } else if (got == 0 || errno != EINTR) {
      return false;
    }
  }
  return false;
}

bool StoreServer::handle_requests(Client& client) {
  while (!client.waiting && client.unsent.empty() && client.received.size() >= kLengthBytes) {
    const std::size_t length = announced_length(client.received);
    if (length > kMostMessageBytes) return false;
    if (client.received.size() < kLengthBytes + length) return true;
    StoreMessage request;
    const bool good =
        decode(std::string_view(client.received).substr(kLengthBytes, length), request);
    if (!good || !well_formed(request)) return false;
    client.received.erase(0, kLengthBytes + length);
    answer(client, std::move(request));
    if (!flush(client)) return false;
  }
  return true;
}

void StoreServer::answer(Client& client, StoreMessage request) {
  auto& parts = request.parts;
  StoreMessage result;
  switch (request.kind) {
    case Kind::set:
      for (std::size_t i = 0; i + 1 < parts.size(); i += 2) put(parts[i], std::move(parts[i + 1]));
      break;
    case Kind::get:
    case Kind::wait:
      if (park(client, request,
               Clock::now() +
                   milliseconds(std::clamp<std::int64_t>(request.number, 0, kLongestWait))))
        return;
      result = look_up(request);
      break;
    case Kind::check:
      result.number = std::all_of(parts.begin(), parts.end(),
                                  [&](const auto& key) { return values_.contains(key); });
      break;
    case Kind::add: {
      const auto found = values_.find(parts[0]);
      const auto before = found == values_.end() ? 0 : text::to_int(found->second);
      if (!before || __builtin_add_overflow(*before, request.number, &result.number)) {
        result = {Kind::impossible, 0, {"the value is no number, or the sum too large for one"}};
        break;
      }
      put(parts[0], std::to_string(result.number));
      break;
    }
    case Kind::append: {
      std::string value = values_[parts[0]];
      put(parts[0], value.append(parts[1]));
      break;
    }
    case Kind::compare_set: {
      const auto found = values_.find(parts[0]);
      const bool absent = found == values_.end();
      // Nothing is what an absent key is expected to hold.
      if (absent ? parts[1].empty() : found->second == parts[1]) {
        put(parts[0], parts[2]);
        result.parts = {parts[2]};
      } else {
        result.parts = {absent ? parts[1] : found->second};
      }
      break;
    }
    case Kind::erase:
      result.number = static_cast<std::int64_t>(values_.erase(parts[0]));
      break;
    case Kind::count:
      result.number = static_cast<std::int64_t>(values_.size());
      break;
    default:
      break;
  }
  reply(client, result);
}

/// Of a get or wait whose keys are all there.
StoreMessage StoreServer::look_up(const StoreMessage& request) const {
  StoreMessage result;
  if (request.kind != Kind::get) return result;
  std::size_t bytes = 0;
  for (const std::string& key : request.parts) {
    const std::string& value = values_.at(key);
    bytes += value.size() + 4;
    if (bytes > kMostMessageBytes / 2)
      return {Kind::impossible, 0, {"the values together are too large for one message"}};
    result.parts.push_back(value);
  }
  return result;
}

/// True when the client has to wait for some of the keys.
bool StoreServer::park(Client& client, const StoreMessage& request, Clock::time_point deadline) {
  client.missing = 0;
  for (const std::string& key : request.parts) {
    if (values_.contains(key)) continue;
    awaited_[key].push_back(client.socket.number());
    ++client.missing;
  }
  if (client.missing == 0) return false;
  client.deadline = deadline;
  next_deadline_ = std::min(next_deadline_, deadline);
  client.waiting = request;
  return true;
}

void StoreServer::put(const std::string& key, std::string value) {
  values_[key] = std::move(value);
  const auto found = awaited_.find(key);
  if (found == awaited_.end()) return;
  const std::vector<int> numbers = std::move(found->second);
  awaited_.erase(found);
  for (const int number : numbers) {
    const auto entry = clients_.find(number);
    if (entry == clients_.end() || !entry->second.waiting) continue;
    Client& client = entry->second;
    if (--client.missing > 0) continue;
    const StoreMessage request = std::move(*client.waiting);
    client.waiting.reset();
    // A key that came may be gone again.
    if (park(client, request, client.deadline)) continue;
    reply(client, look_up(request));
    answered_.push_back(number);
  }
}

void StoreServer::reply(Client& client, const StoreMessage& message) {
  client.unsent += encode(message);
}

/// Sends what the connection takes, and asks to be told when it takes more.
bool StoreServer::flush(Client& client) {
  std::size_t sent = 0;
  while (sent < client.unsent.size()) {
    const auto size = ::send(client.socket.number(), client.unsent.data() + sent,
                             client.unsent.size() - sent, MSG_NOSIGNAL);
    if (size >= 0) {
      sent += static_cast<std::size_t>(size);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno != EINTR) {
      return false;
    }
  }
  client.unsent.erase(0, sent);
  if (client.stuck == !client.unsent.empty()) return true;
  client.stuck = !client.unsent.empty();
  epoll_event event{};
  event.events = client.stuck ? EPOLLOUT : EPOLLIN | EPOLLRDHUP;
  event.data.fd = client.socket.number();
  return ::epoll_ctl(events_.number(), EPOLL_CTL_MOD, client.socket.number(), &event) == 0;
}

void StoreServer::expire() {
  const auto now = Clock::now();
  next_deadline_ = Clock::time_point::max();
  for (auto& [number, client] : clients_) {
    if (!client.waiting) continue;
    if (now < client.deadline) {
      next_deadline_ = std::min(next_deadline_, client.deadline);
      continue;
    }
    unpark(number, client);
    StoreMessage result{Kind::timed_out, 0, {}};
    for (const std::string& key : client.waiting->parts) {
      if (!values_.contains(key) && result.parts.size() < 8) result.parts.push_back(key);
    }
    client.waiting.reset();
    reply(client, result);
    answered_.push_back(number);
  }
}

void StoreServer::unpark(int number, const Client& client) {
  if (!client.waiting) return;
  for (const std::string& key : client.waiting->parts) {
    const auto found = awaited_.find(key);
    if (found == awaited_.end()) continue;
    std::erase(found->second, number);
    if (found->second.empty()) awaited_.erase(found);
  }
}

}  // namespace accelerate::net
