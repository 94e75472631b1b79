#pragma once

#include <accelerate/core/module.hpp>
#include <intercept/engine.hpp>

#include <string>
#include <vector>

namespace accelerate::parallel {

/// Sharding moves each parameter into memory of the library's own, so whatever else lay in its
/// memory would go on with the values of that moment. A sentence that names what shares the memory
/// of a parameter of `plans`: another parameter, a buffer, or a tensor outside of the module that
/// has the memory of several. Empty when there is nothing.
std::string shared_memory(const ModuleRecord& module,
                          const std::vector<intercept::UnitPlan>& plans);

}  // namespace accelerate::parallel
