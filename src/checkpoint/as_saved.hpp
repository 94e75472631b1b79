#pragma once

#include <ATen/core/Tensor.h>

namespace accelerate::checkpoints {

// The same memory without autograd, and as checkpoints have it: LibTorch counts two 4-bit numbers
// as one element and converts none, so they are bytes.
at::Tensor as_saved(const at::Tensor& tensor);

}  // namespace accelerate::checkpoints
