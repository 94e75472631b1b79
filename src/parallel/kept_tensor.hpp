#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace accelerate::parallel {

/// A tensor that hooks on saved tensors keep as it is. Autograd leaves the check that nobody wrote
/// to it meanwhile to the hooks.
class KeptTensor {
 public:
  KeptTensor() = default;
  explicit KeptTensor(const at::Tensor& tensor);
  bool defined() const noexcept { return tensor_.defined(); }
  /// Throws StateError when the tensor was written to since.
  const at::Tensor& get() const;

 private:
  at::Tensor tensor_;
  std::int64_t version_ = 0;
};

/// A parameter, or a view of one. The module holds its memory anyway, or a strategy brings it, so
/// nothing is gained by recomputing or offloading it.
bool is_of_model(const at::Tensor& tensor);

}  // namespace accelerate::parallel
