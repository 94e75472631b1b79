#pragma once

#include <accelerate/checkpoint/py_value.hpp>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
#include <span>
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

/// Writes it as the archive that torch.save makes: gives `sink` its bytes in their order. Storages
/// on the host are given from where they lie, each in one call. Throws what `sink` throws.
void write_archive(const Pickled& pickled,
                   const std::function<void(std::span<const std::byte>)>& sink,
                   const std::string& path);

}  // namespace accelerate::checkpoints
