#pragma once

#include <accelerate/base/arg.hpp>
#include <accelerate/device_map/model_tree.hpp>

#include <cstdint>
#include <filesystem>
#include <iosfwd>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace accelerate {

/// Where weights are kept: an accelerator, host memory, or a disk.
struct Place {
  enum class Kind { accelerator, cpu, disk };
  Kind kind = Kind::cpu;
  /// Which accelerator; 0 for the others.
  int index = 0;

  static constexpr Place accelerator(int index) { return {Kind::accelerator, index}; }
  static constexpr Place cpu() { return {Kind::cpu, 0}; }
  static constexpr Place disk() { return {Kind::disk, 0}; }
  /// "cpu", "disk", "0", "cuda", "cuda:1". Throws ConfigError for anything else.
  static Place of(std::string_view text);
  /// "cpu", "disk", or the accelerator's number, as the original writes them.
  std::string text() const;

  friend bool operator==(const Place&, const Place&) = default;
};
std::ostream& operator<<(std::ostream& out, const Place& place);

/// A module's path (or a tensor's), and where it goes with all that is in it. The root is "".
using DeviceMap = std::vector<std::pair<std::string, Place>>;
/// A place, and how many bytes of weights it may hold.
using MaxMemory = std::vector<std::pair<Place, std::int64_t>>;

/// A hand-written map from JSON text, {"encoder": 0, "head": "cpu"}. Throws ConfigError when it is
/// not such an object, has a key twice, or names an unknown device.
DeviceMap parse_device_map(std::string_view json);
/// The same from a file.
DeviceMap read_device_map(const std::filesystem::path& file);
/// As JSON text, one entry on a line.
std::string to_json(const DeviceMap& map);

/// Limits from text: "0=10GiB,cpu=30GB", or from parts of it. A number without a unit, a place
/// named twice or an unknown place is a ConfigError.
MaxMemory parse_max_memory(std::string_view text);
/// Sorts limits into the order in which places are filled: accelerators, cpu, disk. Throws
/// ConfigError for a place named twice or a negative limit.
MaxMemory get_max_memory(MaxMemory limits);
/// Element types of single tensors by their path.
using SpecialDtypes = std::vector<std::pair<std::string, ElementType>>;

/// What weights are counted as.
class SizeOptions {
  /// Floating-point weights are counted in this type when it is smaller than their own. Default:
  /// their own.
  ACCELERATE_ARG(std::optional<ElementType>, dtype);
  /// Types of single tensors by their path; they go before `dtype`.
  ACCELERATE_ARG(SpecialDtypes, special_dtypes);
};

}  // namespace accelerate
