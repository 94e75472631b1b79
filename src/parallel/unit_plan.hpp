#pragma once

#include <accelerate/parallel/fsdp.hpp>
#include <intercept/engine.hpp>

#include <unordered_set>
#include <vector>

namespace accelerate::parallel {

/// Cuts a module into units: those the options name, or else the children of ModuleList, Sequential
/// and ModuleDict and modules of a repeated type, small ones taken together. What is left, and what
/// belongs to several, is the root unit, which comes first. Each unit has parameters of one dtype,
/// on one device, all trained or all frozen. Under mixed precision, norms with running statistics
/// have units of their own, which keep their dtype.
std::vector<intercept::UnitPlan> plan_units(const ModuleRecord& module, const FsdpOptions& options);

/// The running statistics of norms, by their TensorImpl: they keep their dtype, and so must the
/// parameters beside them, because kernels take both in one.
std::unordered_set<const void*> norm_statistics(const ModuleRecord& module);

}  // namespace accelerate::parallel
