#include "net/socket.hpp"

#include <accelerate/base/text.hpp>

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

namespace accelerate::net {
namespace {

using text::concat;
using Kind = ConnectionError::Kind;

const sockaddr_in& four(const Address& address) {
  return reinterpret_cast<const sockaddr_in&>(address.storage);
}
const sockaddr_in6& six(const Address& address) {
  return reinterpret_cast<const sockaddr_in6&>(address.storage);
}

/// Nobody listens at a port that the kernel itself may choose for the connection: then the two ends
/// can become one.
bool connected_to_itself(const Descriptor& socket) {
  Address own, peer;
  own.size = peer.size = sizeof own.storage;
  const auto at = [](Address& address) { return reinterpret_cast<sockaddr*>(&address.storage); };
  return ::getsockname(socket.number(), at(own), &own.size) == 0 &&
         ::getpeername(socket.number(), at(peer), &peer.size) == 0 && own.size == peer.size &&
         std::memcmp(&own.storage, &peer.storage, own.size) == 0;
}

Address with_port(Address address, int port) {
  // Both families keep it at the same place.
  reinterpret_cast<sockaddr_in&>(address.storage).sin_port =
      htons(static_cast<std::uint16_t>(port));
  return address;
}

const sockaddr* raw(const Address& address) {
  return reinterpret_cast<const sockaddr*>(&address.storage);
}

Descriptor make_socket(int family, int type) {
  return Descriptor(::socket(family, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

/// Of all interfaces, with both IP versions where the machine has them.
Address everywhere() {
  Address address;
  if (make_socket(AF_INET6, SOCK_STREAM)) {
    auto& any = reinterpret_cast<sockaddr_in6&>(address.storage);
    any.sin6_family = AF_INET6;
    any.sin6_addr = in6addr_any;
    address.size = sizeof any;
  } else {
    auto& any = reinterpret_cast<sockaddr_in&>(address.storage);
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_ANY);
    address.size = sizeof any;
  }
  return address;
}

/// Sets errno when it returns none.
Descriptor try_listen(const Address& address, int port, bool both_versions) {
  Descriptor socket = make_socket(address.storage.ss_family, SOCK_STREAM);
  if (!socket) return socket;
  const int on = 1;
  const int six_only = both_versions ? 0 : 1;
  // A port at which connections only linger is free.
  ::setsockopt(socket.number(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.storage.ss_family == AF_INET6)
    ::setsockopt(socket.number(), IPPROTO_IPV6, IPV6_V6ONLY, &six_only, sizeof six_only);
  const Address place = with_port(address, port);
  if (::bind(socket.number(), raw(place), place.size) == 0 &&
      ::listen(socket.number(), SOMAXCONN) == 0) {
    return socket;
  }
  const int error = errno;
  socket.reset();
  errno = error;
  return socket;
}

}  // namespace

Descriptor::~Descriptor() {
  if (number_ >= 0) ::close(number_);
}

bool Address::loopback() const {
  if (storage.ss_family == AF_INET) return ntohl(four(*this).sin_addr.s_addr) >> 24 == 127;
  const in6_addr& address = six(*this).sin6_addr;
  return IN6_IS_ADDR_LOOPBACK(&address) ||
         (IN6_IS_ADDR_V4MAPPED(&address) && address.s6_addr[12] == 127);
}

bool Address::local() const {
  if (loopback()) return true;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return false;
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || entry->ifa_addr->sa_family != storage.ss_family) continue;
    if (storage.ss_family == AF_INET) {
      const auto* mine = reinterpret_cast<const sockaddr_in*>(entry->ifa_addr);
      if (mine->sin_addr.s_addr == four(*this).sin_addr.s_addr) return true;
    } else {
      const auto* mine = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
      if (std::memcmp(&mine->sin6_addr, &six(*this).sin6_addr, sizeof(in6_addr)) == 0) return true;
    }
  }
  return false;
}

std::string Address::text() const {
  std::array<char, NI_MAXHOST> name{};
  if (::getnameinfo(raw(*this), size, name.data(), name.size(), nullptr, 0, NI_NUMERICHOST) != 0)
    return "an unknown address";
  return name.data();
}

std::vector<Address> resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (error != 0) {
    throw ConnectionError(Kind::unresolved, concat("the name ", host, " has no address (",
                                                   ::gai_strerror(error), ")"));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  std::vector<Address> addresses;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    if (entry->ai_family != AF_INET && entry->ai_family != AF_INET6) continue;
    Address address;
    std::memcpy(&address.storage, entry->ai_addr, entry->ai_addrlen);
    address.size = entry->ai_addrlen;
    addresses.push_back(address);
  }
  return addresses;
}

std::vector<Descriptor> listen_at(const std::vector<Address>& addresses, int port) {
  const bool all = addresses.empty();
  const std::vector<Address> places = all ? std::vector{everywhere()} : addresses;
  std::vector<Descriptor> sockets;
  int last_error = EADDRNOTAVAIL;
  for (const Address& place : places) {
    Descriptor socket = try_listen(place, port, all);
    if (!socket) {
      last_error = errno;
      if (last_error == EADDRINUSE) {
        throw ConnectionError(Kind::taken, concat("another program listens at port ", port));
      }
      continue;  // such as IPv6's loopback where there is no IPv6
    }
    if (port == 0) port = port_of(socket);
    sockets.push_back(std::move(socket));
  }
  if (sockets.empty()) {
    throw ConnectionError(Kind::unusable, concat("this machine cannot listen there (",
                                                 std::strerror(last_error), ")"));
  }
  return sockets;
}

int port_of(const Descriptor& socket) {
  Address address;
  address.size = sizeof address.storage;
  ::getsockname(socket.number(), reinterpret_cast<sockaddr*>(&address.storage), &address.size);
  return ntohs(four(address).sin_port);
}

std::string address_toward(const std::string& host) {
  try {
    for (const Address& address : resolve(host)) {
      // Connecting a datagram socket sends nothing; it only chooses the way.
      const Descriptor socket = make_socket(address.storage.ss_family, SOCK_DGRAM);
      const Address target = with_port(address, 9);
      if (!socket || ::connect(socket.number(), raw(target), target.size) != 0) continue;
      Address own;
      own.size = sizeof own.storage;
      if (::getsockname(socket.number(), reinterpret_cast<sockaddr*>(&own.storage), &own.size) == 0)
        return own.text();
    }
  } catch (const ConnectionError&) {
    // A name without an address has no way to it either.
  }
  return {};
}

Descriptor connect_to(const std::vector<Address>& addresses, int port, Clock::time_point deadline) {
  int last_error = EHOSTUNREACH;
  auto untried = static_cast<int>(addresses.size());
  for (const Address& address : addresses) {
    // One to which no way leads must not use up the others' time.
    const auto now = Clock::now();
    const auto own_deadline = now + (deadline - now) / untried--;
    Descriptor socket = make_socket(address.storage.ss_family, SOCK_STREAM);
    if (!socket) {
      last_error = errno;
      continue;
    }
    set_up(socket);
    const Address target = with_port(address, port);
    int error = ::connect(socket.number(), raw(target), target.size) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      error = ETIMEDOUT;
      socklen_t size = sizeof error;
      if (ready(socket, POLLOUT, own_deadline))
        ::getsockopt(socket.number(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
    if (error == 0 && connected_to_itself(socket)) error = ECONNREFUSED;
    if (error == 0) return socket;
    last_error = error;
  }
  throw ConnectionError(Kind::unreachable, std::strerror(last_error));
}

void set_up(const Descriptor& socket) {
  const auto set = [&](int level, int option, int value) {
    ::setsockopt(socket.number(), level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 15);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 4);
}

bool ready(const Descriptor& socket, short events, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd waiting{socket.number(), events, 0};
    const int found =
        ::poll(&waiting, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1 << 30)));
    if (found > 0) return true;
    if (found == 0 && left <= 0) return false;
    if (found < 0 && errno != EINTR) return false;
  }
}

void send_all(const Descriptor& socket, std::string_view bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    const auto sent = ::send(socket.number(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent >= 0) {
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!ready(socket, POLLOUT, deadline))
        throw ConnectionError(Kind::silent, "the other side takes no data");
    } else if (errno != EINTR) {
      throw ConnectionError(Kind::lost,
                            concat("the connection was closed (", std::strerror(errno), ")"));
    }
  }
}

std::string receive(const Descriptor& socket, std::size_t size, Clock::time_point deadline) {
  // What was announced is believed only as it comes.
  constexpr std::size_t kStep = 1 << 20;
  std::string bytes;
  std::size_t filled = 0;
  while (filled < size) {
    if (bytes.size() == filled) bytes.resize(std::min(size, filled + kStep));
    const auto got = ::recv(socket.number(), bytes.data() + filled, bytes.size() - filled, 0);
    if (got > 0) {
      filled += static_cast<std::size_t>(got);
    } else if (got == 0) {
      throw ConnectionError(Kind::lost, "the connection was closed");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!ready(socket, POLLIN, deadline))
        throw ConnectionError(Kind::silent, "no answer came in time");
    } else if (errno != EINTR) {
      throw ConnectionError(Kind::lost,
                            concat("the connection was closed (", std::strerror(errno), ")"));
    }
  }
  return bytes;
}

}  // namespace accelerate::net
