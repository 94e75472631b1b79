#pragma once

#include <accelerate/device_map/solver.hpp>

namespace accelerate::device_map {

/// Bytes of modules and tensors, by their index in the tree.
struct Sizes {
  std::vector<std::int64_t> modules, tensors;
  /// The tensors that were counted, in order; later names of a tensor are not among them.
  std::vector<int> counted;
};
Sizes measure(const ModelTree& tree, const SizeOptions& options, bool parameters = true,
              bool buffers = true);

/// Groups of tensors that are one and the same, by index, sorted by name.
std::vector<std::vector<int>> tied_groups(const ModelTree& tree);

/// A module that is never divided: it has no children, or its class is among those to keep whole.
bool is_layer(const ModelTree& tree, int module, const std::vector<std::string>& no_split);

}  // namespace accelerate::device_map
