#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/data/collate.hpp>

#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

namespace accelerate::data::collate {
namespace {

using text::concat;

std::string shape(const at::Tensor& tensor) {
  return tensor.defined()
             ? concat(c10::toString(tensor.scalar_type()), " [", text::join(tensor.sizes()), "]")
             : "an undefined tensor";
}

std::string shown(const std::string& path) {
  return path.empty() ? "The examples" : concat("The examples' '", path, "'");
}

// One dtype and number of dimensions, else there is no common shape to pad to.
void check_alike(const std::vector<at::Tensor>& tensors, const std::string& path) {
  const at::Tensor& first = tensors.front();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined() || tensor.scalar_type() != first.scalar_type() ||
        tensor.dim() != first.dim()) {
      throw DataError(concat(shown(path),
                             " cannot be made into one tensor: that of example 0 of the batch is ",
                             shape(first), ", that of example ", i, " is ", shape(tensor),
                             ". They must have the same dtype and number of dimensions."));
    }
  }
}

}  // namespace

at::Tensor stack_tensors(const std::vector<at::Tensor>& tensors, const std::string& path) {
  check_alike(tensors, path);
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].sizes() != tensors.front().sizes()) {
      throw DataError(concat(shown(path), " differ in shape: that of example 0 of the batch is ",
                             shape(tensors.front()), ", that of example ", i, " is ",
                             shape(tensors[i]), ". Use collate::pad to fill the shorter ones up."));
    }
  }
  return at::stack(tensors);
}

at::Tensor pad_tensors(const std::vector<at::Tensor>& tensors, const PadValues& values,
                       const std::vector<std::int64_t>& dims, const std::string& path) {
  check_alike(tensors, path);
  const at::Tensor& first = tensors.front();
  const std::int64_t dim = first.dim();
  std::vector<bool> padded(dim, dims.empty());
  for (const std::int64_t wanted : dims) {
    const std::int64_t index = wanted < 0 ? wanted + dim : wanted;
    // A scalar or a vector beside a sequence has nothing to pad in dims that it does not have.
    if (index >= 0 && index < dim) padded[index] = true;
  }
  if (std::find(padded.begin(), padded.end(), true) != padded.end())
    values.require_fits(first.scalar_type(), path);
  std::vector<std::int64_t> sizes = first.sizes().vec();
  bool equal = true;
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    for (std::int64_t d = 0; d < dim; ++d) {
      const std::int64_t size = tensors[i].size(d);
      if (size == first.size(d)) continue;
      equal = false;
      if (!padded[d]) {
        throw DataError(concat(shown(path), " differ in dimension ", d,
                               ", which is not padded: that of example 0 of the batch is ",
                               shape(first), ", that of example ", i, " is ", shape(tensors[i]),
                               ". Padded dimensions: ", text::join(dims), "."));
      }
      sizes[d] = std::max(sizes[d], size);
    }
  }
  if (equal) return at::stack(tensors);
  sizes.insert(sizes.begin(), static_cast<std::int64_t>(tensors.size()));
  const at::Tensor batch = at::full(sizes, values.at(path), first.options());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor place = batch.select(0, static_cast<std::int64_t>(i));
    for (std::int64_t d = 0; d < dim; ++d) place = place.narrow(d, 0, tensors[i].size(d));
    place.copy_(tensors[i]);
  }
  return batch;
}

namespace detail {

at::Tensor tensor_of(const std::vector<double>& numbers) {
  return at::tensor(numbers, at::kDouble);
}
at::Tensor tensor_of(const std::vector<float>& numbers) { return at::tensor(numbers, at::kFloat); }
at::Tensor tensor_of(const std::vector<std::int64_t>& numbers) {
  return at::tensor(numbers, at::kLong);
}
at::Tensor tensor_of_bools(const std::vector<std::int64_t>& numbers) {
  return at::tensor(numbers, at::kLong).to(at::kBool);
}

void report_lengths(const std::string& path, std::size_t first, std::size_t other) {
  throw DataError(concat(shown(path), " differ in their number of entries: ", first, " and ", other,
                         ". Collate with a function of your own."));
}
void report_key(const std::string& path, const std::string& key) {
  throw DataError(concat(shown(path), " differ in their keys: not every one has '", key, "'."));
}

}  // namespace detail
}  // namespace accelerate::data::collate
