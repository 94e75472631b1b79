#pragma once

#include "net/socket.hpp"
#include "net/store_message.hpp"

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

namespace accelerate::net {

/// Talks to a StoreServer. Safe to use from several threads: each request has a connection to
/// itself, so that one that waits for a key holds up nobody.
class StoreClient {
 public:
  /// Returns when it has connected. Throws ConnectionError.
  StoreClient(std::string host, int port, std::string secret, int rank, Clock::time_point deadline);

  /// The answer: done or timed_out. `patience` is for a connection and for the answer; get and wait
  /// may take their own time, `number`, besides. Throws ConnectionError, std::invalid_argument for
  /// a request that the store does not carry out.
  StoreMessage ask(StoreMessage request, std::chrono::milliseconds patience);

 private:
  Descriptor take(Clock::time_point deadline);
  void give_back(Descriptor connection);

  const std::string host_;
  const int port_;
  const std::string secret_;
  const int rank_;
  std::mutex mutex_;
  std::vector<Descriptor> idle_;
};

}  // namespace accelerate::net
