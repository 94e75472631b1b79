#pragma once

#include "comm/group_watch.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <vector>

namespace accelerate::comm {

/// What the inner backend can take.
enum class Memory {
  host,   ///< CPU tensors of common dtypes; others are staged through such (gloo, mpi)
  device  ///< CUDA tensors; its works order streams and are passed on as they are (nccl)
};

/// A backend around another one, through which all traffic of a group goes, c10d::Reducer's too: it
/// counts, names the operation and the rank in errors, fails everything under way when a rank is
/// lost, and stages what the inner backend cannot take (CUDA tensors, rare dtypes, means).
/// `aborted` are the backends that are aborted then. With `notes`, a gloo backend of its own for
/// the same ranks, they compare every call first (debug mode); null otherwise.
c10::intrusive_ptr<c10d::Backend> observe(c10::intrusive_ptr<c10d::Backend> inner,
                                          c10::intrusive_ptr<c10d::Backend> notes,
                                          std::shared_ptr<GroupWatch> watch, Memory memory,
                                          std::vector<c10::intrusive_ptr<c10d::Backend>> aborted);

}  // namespace accelerate::comm
