#pragma once

#include "net/socket.hpp"

#include <string>
#include <vector>

namespace accelerate::net {

/// Where the process listens that the others come to.
struct Place {
  /// None: all interfaces.
  std::vector<Address> addresses;
  /// Only processes of this machine can come.
  bool loopback = false;
};

/// The place for those who look for it under this name or number: loopback for a loopback address,
/// the interface that has the address, and all of them when none of this machine's has (a
/// translated address, a service's name). A name that means loopback on this machine alone, as a
/// machine's own name often does, is loopback when `one_machine` says that all processes are here.
/// Throws ConnectionError (unresolved).
Place place_of(const std::string& host, bool one_machine);

/// This machine's name.
std::string host_name();

}  // namespace accelerate::net
