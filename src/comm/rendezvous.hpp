#pragma once

#include "net/place.hpp"

#include <accelerate/base/topology.hpp>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace accelerate::comm {

/// Where the processes of a run have met.
struct Rendezvous {
  c10::intrusive_ptr<c10d::Store> store;
  /// Host of rank 0 as this process reaches it.
  std::string host;
  /// Rank 0: where it listens for the others.
  net::Place place;
  /// What they prove to each other. Empty when only processes of this machine can come and nobody
  /// gave one.
  std::string secret;
  /// The address of this machine at which the others reach this process; empty when it is not
  /// known.
  std::string interface;
};

/// Brings all processes of `topology` (whose address is known by now) to one store, kept by rank 0
/// or by torchrun, and returns when every rank has come. Throws ConfigError when rank 0's port is
/// taken, when the processes hold different secrets, or none where other machines can come,
/// TimeoutError that names the missing ranks, DistributedError otherwise.
Rendezvous meet(const Topology& topology, std::chrono::milliseconds timeout);

}  // namespace accelerate::comm
