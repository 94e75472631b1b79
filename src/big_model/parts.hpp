#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace accelerate::big_model {

/// Calls `act(begin, part)` for views that together are `tensor`, each of at most `most` elements
/// that follow one another in row-major order, from the one numbered `begin` on. Whatever the
/// shape, a part is no larger; tensors of equal sizes are cut alike.
template <class Act>
void for_parts(const at::Tensor& tensor, std::int64_t most, const Act& act,
               std::int64_t begin = 0) {
  if (tensor.numel() <= most) {
    if (tensor.numel() > 0) act(begin, tensor);
    return;
  }
  const std::int64_t rows = tensor.size(0), row = tensor.numel() / rows;
  if (row > most) {
    for (std::int64_t i = 0; i < rows; ++i)
      for_parts(tensor.select(0, i), most, act, begin + i * row);
    return;
  }
  for (std::int64_t i = 0; i < rows; i += most / row)
    act(begin + i * row, tensor.narrow(0, i, std::min(most / row, rows - i)));
}

/// The part of another tensor of the same sizes that was cut as `part` was.
inline at::Tensor same_part(at::Tensor tensor, std::int64_t begin, const at::Tensor& part) {
  while (tensor.dim() > part.dim()) {
    const std::int64_t row = tensor.numel() / tensor.size(0);
    tensor = tensor.select(0, begin / row);
    begin %= row;
  }
  if (tensor.numel() == part.numel()) return tensor;
  return tensor.narrow(0, begin / (tensor.numel() / tensor.size(0)), part.size(0));
}

}  // namespace accelerate::big_model
