#pragma once

#include <sys/socket.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::net {

using Clock = std::chrono::steady_clock;

/// Owns a file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor();

  int number() const noexcept { return number_; }
  explicit operator bool() const noexcept { return number_ >= 0; }
  void reset() { *this = Descriptor(); }
  int release() noexcept { return std::exchange(number_, -1); }

 private:
  int number_ = -1;
};

/// Why two processes did not find together, in a sentence's part without a full stop.
class ConnectionError : public std::runtime_error {
 public:
  enum class Kind {
    unresolved,   ///< the name has no address
    taken,        ///< another program listens there
    unusable,     ///< this machine cannot listen there
    unreachable,  ///< nobody listens there, or no way leads there
    silent,       ///< nothing came in time
    stranger,     ///< whoever answers is no part of this run
    refused,      ///< the other side holds another secret
    lost          ///< the connection broke
  };
  ConnectionError(Kind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  Kind kind() const noexcept { return kind_; }

 private:
  Kind kind_;
};

/// An IP address without a port.
struct Address {
  sockaddr_storage storage{};
  socklen_t size = 0;

  bool loopback() const;
  /// Whether an interface of this machine has it.
  bool local() const;
  /// "127.0.0.1", "::1".
  std::string text() const;
};

/// The addresses of a name or of a number. Throws ConnectionError (unresolved).
std::vector<Address> resolve(const std::string& host);

/// A non-blocking socket for each of these addresses, or one for all interfaces when there are
/// none, all listening at one port; 0 takes a free one. Throws ConnectionError (taken, unusable).
std::vector<Descriptor> listen_at(const std::vector<Address>& addresses, int port);
int port_of(const Descriptor& socket);

/// The address by which this machine reaches that host; empty when no way leads there.
std::string address_toward(const std::string& host);

/// Connects, without blocking, to any of these addresses. Throws ConnectionError (unreachable).
Descriptor connect_to(const std::vector<Address>& addresses, int port, Clock::time_point deadline);

/// The messages are small and wait for each other; a peer whose machine is gone is noticed.
void set_up(const Descriptor& socket);

/// Waits until poll() finds one of `events`. False when the time is over.
bool ready(const Descriptor& socket, short events, Clock::time_point deadline);
/// All bytes, or ConnectionError (silent, lost).
void send_all(const Descriptor& socket, std::string_view bytes, Clock::time_point deadline);
std::string receive(const Descriptor& socket, std::size_t size, Clock::time_point deadline);

}  // namespace accelerate::net
