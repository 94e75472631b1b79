#pragma once

#include <accelerate/base/topology.hpp>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace accelerate::comm {

/// Where the processes of a run have met.
struct Rendezvous {
  /// Host of rank 0 as this process reaches it.
  std::string host;
  c10::intrusive_ptr<c10d::Store> store;
};

/// Brings all processes of `topology` (whose address is known by now) to one store, kept by rank 0,
/// and returns when every rank has come. Throws ConfigError when rank 0's port is taken,
/// TimeoutError that names the missing ranks, DistributedError otherwise.
Rendezvous meet(const Topology& topology, std::chrono::milliseconds timeout);

}  // namespace accelerate::comm
