#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>

namespace accelerate::parallel {

/// Whether somebody wrote to a tensor since, which autograd leaves to the hooks on saved tensors to
/// check. Does not keep the tensor's memory.
class WriteCheck {
 public:
  WriteCheck() = default;
  explicit WriteCheck(const at::Tensor& tensor);
  /// Throws StateError when the tensor was written to since; `like` has its dtype and sizes.
  void check(const at::Tensor& like) const;

 private:
  c10::VariableVersion version_;
  std::uint32_t expected_ = 0;
};

/// A tensor that hooks on saved tensors keep as it is.
class KeptTensor {
 public:
  KeptTensor() = default;
  explicit KeptTensor(const at::Tensor& tensor);
  bool defined() const noexcept { return tensor_.defined(); }
  /// Throws StateError when the tensor was written to since.
  const at::Tensor& get() const;

 private:
  at::Tensor tensor_;
  WriteCheck written_;
};

/// A parameter, or a view of one. The module holds its memory anyway, or a strategy brings it, so
/// nothing is gained by recomputing or offloading it.
bool is_of_model(const at::Tensor& tensor);

}  // namespace accelerate::parallel
