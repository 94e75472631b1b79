#pragma once

#include <accelerate/checkpoint/py_value.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace accelerate::checkpoints {

/// A value as a pickle of protocol 2, and the storages that it refers to by their place in the
/// list.
struct Pickled {
  std::string pickle;
  /// Contiguous bytes, of the device that the tensors are on.
  std::vector<at::Tensor> storages;
};

/// Throws UnsupportedError when a tensor in it is sparse, quantized, undefined or without data.
Pickled pickle(const PyValue& value);

}  // namespace accelerate::checkpoints
