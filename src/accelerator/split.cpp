#include <accelerate/accelerator/split.hpp>

#include <ATen/ops/cat.h>

#include <algorithm>

namespace accelerate::detail {

Part part_of(std::int64_t length, int rank, int size, bool apply_padding) {
  const std::int64_t whole = length / size;
  const std::int64_t extra = length % size;
  Part part;
  part.first = rank * whole + std::min<std::int64_t>(rank, extra);
  part.last = part.first + whole + (rank < extra ? 1 : 0);
  if (apply_padding && length > 0)
    part.padding = whole + (extra > 0 ? 1 : 0) - (part.last - part.first);
  return part;
}

at::Tensor rows_of(const at::Tensor& tensor, const Part& part) {
  at::Tensor rows = tensor.narrow(0, part.first, part.last - part.first);
  if (part.padding == 0) return rows;
  std::vector<std::int64_t> shape = tensor.sizes().vec();
  shape[0] = part.padding;
  return at::cat({rows, tensor.narrow(0, tensor.size(0) - 1, 1).expand(shape)});
}

}  // namespace accelerate::detail
