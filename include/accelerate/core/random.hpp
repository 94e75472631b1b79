#pragma once

#include <accelerate/base/json.hpp>

#include <ATen/core/Generator.h>
#include <torch/arg.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate {

/// How `set_seed` seeds.
class SeedOptions {
  /// Adds `rank` to the seed, so that every process draws other numbers. Default: false.
  TORCH_ARG(bool, device_specific) = false;
  /// Has LibTorch use deterministic algorithms, and refuse operators that have none. Default:
  /// false.
  TORCH_ARG(bool, deterministic) = false;
  /// The rank of this process; used when device_specific. Default: 0.
  TORCH_ARG(int, rank) = 0;
};

/// Seeds LibTorch's default generators of the CPU and of every device.
void set_seed(std::uint64_t seed, const SeedOptions& options = {});

/// The state of LibTorch's default generators: of the CPU ("cpu") and of every CUDA device
/// ("cuda:0", ...). It holds copies; drawing afterwards does not change it.
class RngState {
 public:
  /// The state as it is now.
  static RngState capture();
  /// Sets the generators back. Throws StateError when it holds a device that this process does not
  /// have, and DataError when a state is not that of such a generator; then nothing has been
  /// changed.
  void restore() const;
  /// Throws what `restore` would throw, and changes nothing.
  void check() const;

  /// Device to the bytes of its generator's state, as `Generator::get_state` gives them.
  const std::map<std::string, std::string>& states() const noexcept { return states_; }

  /// {"cpu": "<bytes in hexadecimal>", ...}.
  Json to_json() const;
  /// Throws DataError when `json` is not what `to_json` gives.
  static RngState from_json(const Json& json);

  bool operator==(const RngState&) const = default;

 private:
  std::map<std::string, std::string> states_;
};

/// Which random numbers are kept alike on all ranks.
enum class RngType {
  torch,     ///< the default generator of the CPU
  cuda,      ///< the default generator of this process' CUDA device
  generator  ///< a generator of the user's, usually a sampler's
};

/// "torch", "cuda" or "generator".
std::string_view to_string(RngType type);
/// Throws ConfigError for any other name.
RngType rng_type_from_string(std::string_view name);

/// The generator a type names. Throws ConfigError when that is `generator` and none was given, or
/// `cuda` where there is no CUDA device.
at::Generator generator_of(RngType type, const std::optional<at::Generator>& generator);
/// The state of a generator as bytes, and back. Throws DataError when the bytes are not the state
/// of such a generator.
std::string generator_state(at::Generator generator);
void set_generator_state(at::Generator generator, const std::string& bytes);

/// Gives the generators named by `types` the state they have on rank 0. Collective over `group`,
/// which is a comm::Group or anything else with its `size` and `broadcast_bytes`.
template <class Group>
void synchronize_rng_states(const std::vector<RngType>& types, const Group& group,
                            const std::optional<at::Generator>& generator = std::nullopt) {
  for (RngType type : types) {
    const at::Generator chosen = generator_of(type, generator);
    if (group.size() == 1) continue;
    set_generator_state(chosen, group.broadcast_bytes(generator_state(chosen), 0));
  }
}

}  // namespace accelerate
