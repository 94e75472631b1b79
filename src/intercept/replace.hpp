#pragma once

#include <intercept/policies.hpp>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

namespace accelerate::intercept {

/// `Tensor::set_data` without its rule that a tensor of the meta device stays one: every handle of
/// `tensor` then has the data of `with`, and is as much a parameter as before.
/// Its policies follow.
inline void replace_data(const at::Tensor& tensor, const at::Tensor& with) {
  tensor.unsafeGetTensorImpl()->shallow_copy_from(with.getIntrusivePtr());
  // Made for the old device and dtype; the next backward makes another.
  if (auto* autograd = torch::autograd::impl::get_autograd_meta(tensor))
    autograd->grad_accumulator_.reset();
  follow_with_policies(tensor);
}

}  // namespace accelerate::intercept
