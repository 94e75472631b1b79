#pragma once

#include "comm/group_watch.hpp"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <string>
#include <vector>

namespace accelerate::comm {

/// Debug mode: before each operation the ranks of a group tell each other what they are about to
/// call. Costs an exchange of some hundred bytes each time.
class CallCheck {
 public:
  /// `notes`: a gloo backend of its own for the same ranks.
  CallCheck(c10::intrusive_ptr<c10d::Backend> notes, std::shared_ptr<GroupWatch> watch);

  /// Returns when every rank has come. Throws the same DistributedError on all of them when they do
  /// not all call this operation with tensors of these shapes and dtypes in the same way.
  /// `detail`: what else must be equal: "sum", "from rank 0".
  void compare(const char* operation, const std::vector<at::Tensor>& tensors,
               const std::string& detail = {}) const;

 private:
  c10::intrusive_ptr<c10d::Backend> notes_;
  std::shared_ptr<GroupWatch> watch_;
};

}  // namespace accelerate::comm
