#pragma once

#include <accelerate/big_model/record_of.hpp>
#include <accelerate/device_map/solver.hpp>

#include <c10/core/ScalarType.h>

namespace accelerate {

/// A module as names, shapes and types, for the functions of <accelerate/device_map/solver.hpp>.
ModelTree model_tree(const ModuleRecord& module);
template <big_model::ModuleLike M>
ModelTree model_tree(const M& module) {
  return model_tree(big_model::record_of(module));
}

/// The type that sizes are counted in, for a dtype of LibTorch.
ElementType element_type(at::ScalarType dtype);

/// What this machine has now: the free memory of every GPU, and of the host.
MaxMemory get_max_memory();

}  // namespace accelerate
