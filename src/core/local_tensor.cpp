#include <accelerate/core/local_tensor.hpp>

#include <utility>

namespace accelerate {

std::vector<PlacedBox> LocalTensor::boxes() const {
  return boxes_in_memory(placement, tensor.sizes(), tensor.strides());
}

at::Tensor LocalTensor::view(const PlacedBox& box) const {
  return tensor.as_strided(box.box.sizes, box.strides, tensor.storage_offset() + box.offset);
}

std::vector<PlacedBox> boxes_in_memory(const Placement& placement, at::IntArrayRef sizes,
                                       at::IntArrayRef strides) {
  if (sizes == placement.local_shape() && c10::multiply_integers(sizes) == placement.count())
    return placement.boxes(strides.vec());
  return placement.boxes();
}

LocalTensor whole_tensor(std::string name, const at::Tensor& tensor) {
  const auto shape = tensor.sizes().vec();
  // Sparse ones have no strides.
  const bool strided = tensor.layout() == at::kStrided;
  return {std::move(name),
          Placement(shape, strided ? memory_order(shape, tensor.strides().vec())
                                   : std::vector<std::int64_t>()),
          tensor};
}

}  // namespace accelerate
