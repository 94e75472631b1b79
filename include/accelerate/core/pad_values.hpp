#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <map>
#include <string>
#include <vector>

namespace accelerate {

/// What fills tensors up to a common size: one value for all tensors of a tree, and others for the
/// fields that are named.
/// ```
/// accelerate::PadValues(0).field("labels", -100)
/// ```
class PadValues {
 public:
  PadValues(double value = 0) : value_(value) {}  // NOLINT: a number is all that most need
  /// `path`: as tree::for_each_leaf names the tensors ("labels", "target", "1", "data.mask"), or
  /// the part before a dot, which means everything below it. The longest that fits counts.
  PadValues& field(const std::string& path, double value) {
    fields_[path] = value;
    return *this;
  }

  double at(const std::string& path) const;
  /// Throws ConfigError when a field is named that has none of these paths.
  void require_known(const std::vector<std::string>& paths) const;
  /// Throws ConfigError when the tensors at `path`, of this dtype, cannot hold their value.
  void require_fits(at::ScalarType dtype, const std::string& path) const;

 private:
  double value_;
  std::map<std::string, double> fields_;
};

}  // namespace accelerate
