#pragma once

#include "net/socket.hpp"

#include <cstdint>
#include <list>
#include <string>
#include <vector>

namespace accelerate::net {

/// What a connection is for. Part of what both sides sign, so that one kind cannot pass for
/// another.
enum class Purpose : std::uint8_t { store = 1, liveness = 2 };

/// 256 random bits as text.
std::string draw_secret();

/// The side that listens. Whoever connects is sent a random number and has to answer with a MAC of
/// it under the run's secret; then the other side proves the same. The secret itself never travels.
/// A secret may be empty: then the exchange only keeps out whoever connects by mistake.
///
/// Those who have not proved themselves yet have a deadline, a small fixed number of bytes to say
/// and a limited number of places; when all are taken the one who has waited longest has to go. So
/// strangers can neither keep the run's processes out nor make this one wait or grow.
class Gate {
 public:
  struct Visitor {
    Descriptor socket;
    /// The rank that it says it is, signed with the secret.
    int rank;
  };

  Gate(std::vector<Descriptor> listening, std::string secret, Purpose purpose,
       std::size_t most_pending);

  int port() const noexcept { return port_; }
  /// Readable, as poll() has it, when admit() has something to do. Call that once a second besides.
  int descriptor() const noexcept { return events_.number(); }
  /// Who has proved to be of this run since the last call. Does not block.
  std::vector<Visitor> admit();

 private:
  struct Pending {
    Descriptor socket;
    Address from;
    std::string challenge;
    std::string said;
    Clock::time_point deadline;
  };
  void accept_new(const Descriptor& listening);
  bool hear(Pending& pending, std::vector<Visitor>& admitted);
  void turn_away(const Pending& pending);
  void pause_listening();

  std::vector<Descriptor> listening_;
  const std::string secret_;
  const Purpose purpose_;
  const std::size_t most_pending_;
  int port_ = 0;
  Descriptor events_;
  std::list<Pending> pending_;  // the longest waiting first
  Clock::time_point paused_until_;
  bool paused_ = false;
  int turned_away_ = 0;
};

/// The side that connects: returns once both sides have proved that they hold the secret. Tries
/// until the deadline while nobody answers as a gate does. Throws ConnectionError (unreachable,
/// silent, stranger, refused).
Descriptor enter(const std::string& host, int port, const std::string& secret, Purpose purpose,
                 int rank, Clock::time_point deadline);

}  // namespace accelerate::net
