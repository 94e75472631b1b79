#pragma once

#include <accelerate/device_map/device_map.hpp>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace accelerate {

/// A path and its bytes.
using SizeTable = std::vector<std::pair<std::string, std::int64_t>>;

/// Bytes of every module and tensor, by path, the root under "". A tensor with several names is
/// counted once, under its first. In the order in which the paths are met: parameters, then
/// buffers, depth first.
SizeTable compute_module_sizes(const ModelTree& tree, const SizeOptions& options = {},
                               bool buffers_only = false);

/// Groups of names of one and the same parameter, each sorted.
std::vector<std::vector<std::string>> find_tied_parameters(const ModelTree& tree);

/// The model's bytes, and its largest layers: a layer is a module without children, or of a class
/// that is not to be split.
struct MaximumSizes {
  std::int64_t total = 0;
  std::int64_t largest_layer = 0;
  std::vector<std::string> largest_layers;
};
MaximumSizes calculate_maximum_sizes(const ModelTree& tree, const SizeOptions& options = {},
                                     const std::vector<std::string>& no_split_module_classes = {});

/// How a model is spread.
class DeviceMapOptions {
  /// Classes whose modules stay whole, for example those with a residual connection.
  ACCELERATE_ARG(std::vector<std::string>, no_split_module_classes);
  /// What weights are counted as. Default: their own types.
  ACCELERATE_ARG(SizeOptions, sizes);
  /// Whether modules that go to one place are put together under their parent. Default: true.
  ACCELERATE_ARG(bool, clean_result) = true;
  /// Whether buffers of offloaded modules are offloaded too; here it only decides whether a warning
  /// says that they fit no accelerator. Default: false.
  ACCELERATE_ARG(bool, offload_buffers) = false;
  /// When the next module in order fits no empty place: look for any module that does. Default:
  /// false.
  ACCELERATE_ARG(bool, fallback_allocation) = false;
};

/// Limits that spread a model evenly over the accelerators: each but the last may hold its share
/// and a quarter more than the larger of a typical layer and the first unsplittable module of each
/// class. `low_zero` keeps the first accelerator as empty as possible, for other uses.
MaxMemory get_balanced_memory(const ModelTree& tree, const MaxMemory& max_memory,
                              const DeviceMapOptions& options = {}, bool low_zero = false);

/// Gives each module a place, in the order of registration: accelerators first, then the CPU, then
/// the disk, never above `max_memory`. On the first accelerator and on the CPU there is always room
/// left for the largest layer that is not yet placed, for what has to be brought in later. Modules
/// that do not fit are split into their children, unless their class forbids it. Modules that share
/// a parameter go together where they fit.
///
/// The disk takes what is left; when its limit is given and too small, that is a ConfigError with
/// the figures. The algorithm is that of Hugging Face Accelerate 1.15; docs/differences.md says
/// where it was mended.
DeviceMap infer_auto_device_map(const ModelTree& tree, const MaxMemory& max_memory,
                                const DeviceMapOptions& options = {});

/// A map by name: "auto" and "balanced" spread evenly, "balanced_low_0" spares the first
/// accelerator, "sequential" fills one place after the other. Throws ConfigError for another name.
DeviceMap named_device_map(const std::string& name, const ModelTree& tree,
                           const MaxMemory& max_memory, const DeviceMapOptions& options = {});

/// Throws ConfigError when a key of the map is neither a module nor a tensor of the model, or a
/// tensor is left without a place; names them.
void check_device_map(const ModelTree& tree, const DeviceMap& map);

/// The place of a module or tensor: that of the longest key at or above its path. Nothing when
/// there is none.
std::optional<Place> place_of(const DeviceMap& map, const std::string& path);

}  // namespace accelerate
