#pragma once

#include <accelerate/accelerator/options.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/comm/mesh.hpp>
#include <accelerate/core/module.hpp>
#include <accelerate/parallel/strategy.hpp>
#include <accelerate/state/parallelism.hpp>

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
/// `spread`: over how many ranks it can be cut.
StrategyFacts strategy_facts(const ModuleRecord& module, at::Device device, int local_processes,
                             const comm::Group& world, int spread);

/// Refuses axes of parallelism that no strategy can use yet, with UnsupportedError.
void check_axes(const comm::Mesh::Axes& axes);

/// Where the ParallelismConfig says how data-parallel processes are divided, brings the strategy
/// and its options in line with it. Throws ConfigError when they contradict each other. Pure.
void follow_axes(const MeshAxes& axes, StrategyKind& strategy, FsdpOptions& fsdp);

/// Over how many processes this strategy cuts a module. Collective over
/// `group`, the data-parallel ones. 1 for `automatic`.
int shard_size(StrategyKind strategy, const FsdpOptions& fsdp, const comm::Group& group);

/// Spreads a module that is trained over the data-parallel processes of the mesh, and gives those
/// along its other axes the same parameters. Collective. Not for `automatic`.
std::shared_ptr<parallel::Strategy> make_strategy(StrategyKind kind, ModuleRecord module,
                                                  const comm::Mesh& mesh, const DdpOptions& ddp,
                                                  const FsdpOptions& fsdp);

/// The processes that share the batches of a dataset.
const comm::Group& data_parallel(const comm::Mesh& mesh);
/// The processes that gradients are averaged over.
const comm::Group& averaging(const comm::Mesh& mesh);
/// The processes that read the same data as this one.
const comm::Group& copies(const comm::Mesh& mesh);

}  // namespace accelerate
