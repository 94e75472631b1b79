#pragma once

#include <accelerate/accelerator/options.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/core/module.hpp>
#include <accelerate/parallel/strategy.hpp>

#include <cstdint>
#include <memory>
#include <string>

namespace accelerate {

/// What a module needs, and what there is for it.
struct StrategyFacts {
  std::int64_t parameter_bytes = 0;
  /// Of these, the ones that are trained.
  std::int64_t trained_bytes = 0;
  /// Free for each process, on the device it computes on.
  std::int64_t memory_bytes = 0;
  int processes = 1;
};

struct StrategyChoice {
  StrategyKind kind = StrategyKind::single;
  /// One line for the log.
  std::string why;
};

/// What `automatic` means for a module: the strategy with the least communication whose parameters,
/// gradients and Adam's two moments take no more than 60 % of the memory, so that as much as they
/// take at most is left for activations. Pure.
StrategyChoice choose_strategy(const StrategyFacts& facts);

/// Collective. The facts of a module, equal on all ranks: the least memory of any rank counts.
StrategyFacts strategy_facts(const ModuleRecord& module, at::Device device, int local_processes,
                             const comm::Group& world);

/// Spreads a module that is trained. Collective. Not for `automatic`.
std::shared_ptr<parallel::Strategy> make_strategy(StrategyKind kind, ModuleRecord module,
                                                  const comm::Group& world, const DdpOptions& ddp,
                                                  const FsdpOptions& fsdp);

}  // namespace accelerate
