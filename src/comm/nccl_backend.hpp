#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace accelerate::comm {

/// Why the library was built without NCCL; empty when it has it.
std::string nccl_missing();
/// c10d's NCCL backend. Collective over the ranks that use the same store. Throws UnsupportedError
/// when the library was built without NCCL.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout);

}  // namespace accelerate::comm
