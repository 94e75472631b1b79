#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace accelerate::comm {

/// c10d's gloo backend. Its abort() closes the connections, so that operations which wait for a
/// lost rank end. Listens at `interface`, an address of this machine, unless GLOO_SOCKET_IFNAME
/// names an interface; where `interface` is empty gloo chooses. Its connections have no
/// authentication. Collective over the ranks that use the same store.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& interface);

}  // namespace accelerate::comm
