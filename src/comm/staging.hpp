#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <utility>
#include <vector>

namespace accelerate::comm {

/// Turns tensors into ones that a backend on host memory can take, and the results back. Tensors it
/// can take already are passed on as they are.
class Staging {
 public:
  enum class Use { move, reduce };
  /// Reductions depend on the dtype; moving data is bytes.
  Staging(bool active, Use use) : active_(active), use_(use) {}

  at::Tensor in(const at::Tensor& tensor);
  at::Tensor out(const at::Tensor& tensor);
  at::Tensor inout(const at::Tensor& tensor);
  std::vector<at::Tensor> in(const std::vector<at::Tensor>& tensors);
  std::vector<at::Tensor> out(const std::vector<at::Tensor>& tensors);
  std::vector<at::Tensor> inout(const std::vector<at::Tensor>& tensors);
  /// What a mean becomes: a sum that finish() divides. Other operations stay.
  c10d::ReduceOp reduction(const c10d::ReduceOp& op, const std::vector<at::Tensor>& outputs,
                           int size);

  /// What is left to do when the operation has succeeded; empty when nothing is.
  std::function<void()> finish();

 private:
  at::Tensor convert(const at::Tensor& tensor, bool read, bool write);

  bool active_;
  Use use_;
  // (the caller's, the backend's)
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_back_;
  std::vector<at::Tensor> averaged_;
  int size_ = 1;
};

}  // namespace accelerate::comm
