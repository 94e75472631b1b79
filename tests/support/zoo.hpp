#pragma once

#include <accelerate/core/module.hpp>

#include <functional>
#include <string>
#include <vector>

/// Modules that were not written for this library, as a user's would be: LibTorch's own,
/// TorchScript's, and compositions with every habit that sharding has to live with.
namespace zoo {

struct Specimen {
  accelerate::ModuleRecord record;
  std::function<at::Tensor(const at::Tensor&)> forward;
  /// A batch; the first dimension is the samples'.
  std::function<at::Tensor(std::int64_t samples)> input;
};

/// Every kind. Those that begin with "script" need the folder that make_modules.py filled, whose
/// path is in ACCELERATE_TEST_MODULES.
std::vector<std::string> names();
/// The same parameters each time for the same seed.
Specimen make(const std::string& name, std::uint64_t seed, at::ScalarType dtype = at::kDouble);
/// A scalar whose gradient reaches every output.
at::Tensor loss_of(const at::Tensor& output);

}  // namespace zoo
