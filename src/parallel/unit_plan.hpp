#pragma once

#include <accelerate/intercept/engine.hpp>
#include <accelerate/parallel/fsdp.hpp>

#include <vector>

namespace accelerate::parallel {

/// Cuts a module into units: those the options name, or else the children of ModuleList, Sequential
/// and ModuleDict and modules of a repeated type, small ones taken together. What is left, and what
/// belongs to several, is the root unit, which comes first. Each unit has parameters of one dtype,
/// on one device, all trained or all frozen.
std::vector<intercept::UnitPlan> plan_units(const ModuleRecord& module, const FsdpOptions& options);

}  // namespace accelerate::parallel
