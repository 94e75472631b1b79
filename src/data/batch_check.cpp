#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/data/detail/batch_check.hpp>

#include <algorithm>

namespace accelerate::data::detail {
namespace {

std::string shown(const std::string& path) {
  return path.empty() ? "the batch itself" : "'" + path + "'";
}

std::string describe_tensor(c10::ScalarType dtype, c10::IntArrayRef sizes, bool varying_shapes) {
  if (dtype == c10::ScalarType::Undefined) return "undefined";
  std::string text = std::string(c10::toString(dtype)) + " [";
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ", ";
    text += i == 0 || varying_shapes ? "*" : std::to_string(sizes[i]);
  }
  return text + "]";
}

}  // namespace

void BatchCheck::remember(const std::string& path, const at::Tensor& tensor, bool varying_shapes) {
  Leaf leaf;
  leaf.path = path;
  if (tensor.defined()) {
    leaf.dtype = tensor.scalar_type();
    leaf.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  }
  remember(path);
  signature_ += " " + describe_tensor(leaf.dtype, leaf.sizes, varying_shapes);
  leaves_.push_back(std::move(leaf));
}

void BatchCheck::remember(const std::string& path) {
  if (!signature_.empty()) signature_ += ", ";
  signature_ += path.empty() ? "batch" : path;
  paths_.push_back(path);
}

void BatchCheck::report(const Leaf& leaf, const at::Tensor& found, bool varying_shapes,
                        const std::string& loader) const {
  const bool only_shape = found.defined() && found.scalar_type() == leaf.dtype &&
                          found.dim() == static_cast<std::int64_t>(leaf.sizes.size());
  throw DataError(text::concat(
      "A batch of the loader '", loader, "' differs from the ones before it in ", shown(leaf.path),
      ": found ",
      found.defined() ? describe_tensor(found.scalar_type(), found.sizes(), varying_shapes)
                      : "an undefined tensor",
      ", expected ", describe_tensor(leaf.dtype, leaf.sizes, varying_shapes), " (* is any size). ",
      only_shape ? "If shapes are meant to vary, say so with varying_shapes(true); collate::pad "
                   "makes them equal within a batch."
                 : "Have the dataset give every sample the same dtype and number of dimensions."));
}

void BatchCheck::report_structure(const std::vector<std::string>& found,
                                  const std::string& loader) const {
  const auto missing_from = [](const std::vector<std::string>& in,
                               const std::vector<std::string>& of) {
    std::vector<std::string> missing;
    for (const auto& path : of) {
      if (std::find(in.begin(), in.end(), path) == in.end()) missing.push_back(shown(path));
    }
    return missing;
  };
  const auto missing = missing_from(found, paths_);
  const auto extra = missing_from(paths_, found);
  std::string what;
  if (!missing.empty()) what += "missing: " + text::join(missing);
  if (!extra.empty())
    what += std::string(what.empty() ? "" : "; ") + "not there before: " + text::join(extra);
  if (what.empty()) what = "the same fields in another order";
  throw DataError(text::concat("A batch of the loader '", loader,
                               "' has other fields than the ones before it: ", what,
                               ". Every batch must have the same fields."));
}

}  // namespace accelerate::data::detail
