#pragma once

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/optim/optimizer.h>

#include <string_view>
#include <utility>
#include <vector>

/// What the optimizers of this room share.
namespace accelerate::optim {

/// What the closure of a step returns, run with gradients recorded; undefined without one.
inline at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  const at::AutoGradMode with_gradients(true);
  return closure();
}

/// Throws UnsupportedError for a parameter or gradient that no optimizer here can step.
inline void check_dense(const at::Tensor& parameter, const at::Tensor& gradient,
                        std::string_view optimizer) {
  if (gradient.is_sparse()) {
    throw UnsupportedError(
        text::concat(optimizer,
                     " was given a sparse gradient. Make the embedding's gradients dense "
                     "(sparse(false)), or use torch::optim::SGD."));
  }
  if (parameter.is_complex()) {
    throw UnsupportedError(text::concat(optimizer,
                                        " was given a complex parameter. Use torch::optim::AdamW, "
                                        "or keep real and imaginary parts as parameters."));
  }
}

/// The gradient in the memory layout of its parameter: fused kernels walk both as flat arrays.
inline at::Tensor gradient_laid_out_as(const at::Tensor& parameter, const at::Tensor& gradient,
                                       std::string_view optimizer) {
  check_dense(parameter, gradient, optimizer);
  if (!parameter.is_non_overlapping_and_dense()) {
    throw UnsupportedError(text::concat(optimizer, " was given a parameter of shape [",
                                        text::join(parameter.sizes()),
                                        "] that is a view with gaps. Make it contiguous."));
  }
  if (parameter.strides() == gradient.strides()) return gradient;
  return at::empty_like(parameter).copy_(gradient);
}

/// One Lists for each device and dtype, in order of appearance; usually there is one.
template <class Lists>
class ListsByKind {
 public:
  Lists& of(const at::Tensor& tensor) {
    for (auto& entry : entries_) {
      if (entry.device == tensor.device() && entry.dtype == tensor.scalar_type())
        return entry.lists;
    }
    return entries_.emplace_back(Entry{tensor.device(), tensor.scalar_type(), {}}).lists;
  }
  template <class Visitor>
  void for_each(Visitor&& visitor) {
    for (auto& entry : entries_) visitor(entry.device, entry.lists);
  }

 private:
  struct Entry {
    at::Device device;
    at::ScalarType dtype;
    Lists lists;
  };
  std::vector<Entry> entries_;
};

}  // namespace accelerate::optim
