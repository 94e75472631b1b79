#pragma once

#include <accelerate/base/placement.hpp>

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace accelerate {

/// What a process has of a tensor.
struct LocalTensor {
  std::string name;
  Placement placement;
  /// Of the local tensor's shape, with any strides, where the process has all of it; else
  /// contiguous, of any shape, with the elements of the run one after another.
  at::Tensor tensor;

  /// Where each of the placement's boxes lies in `tensor`, counted from its first element.
  std::vector<PlacedBox> boxes() const;
  /// A view of `tensor` of the shape of one of these boxes.
  at::Tensor view(const PlacedBox& box) const;
};

/// Where each of a placement's boxes lies in memory of these sizes and strides, as for LocalTensor.
std::vector<PlacedBox> boxes_in_memory(const Placement& placement, at::IntArrayRef sizes,
                                       at::IntArrayRef strides);

/// A tensor that the process has as it is: its shape, and the order of its dimensions in memory.
LocalTensor whole_tensor(std::string name, const at::Tensor& tensor);

}  // namespace accelerate
