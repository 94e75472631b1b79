#pragma once

#include <accelerate/comm/mesh.hpp>

#include <torch/arg.h>

#include <optional>

namespace accelerate {

/// How the processes are laid out along the axes of parallelism; after Python Accelerate's class of
/// this name. The sizes multiply to the number of processes. A size of 0 or -1 is computed from the
/// others; at most one may be. Sizes that are not set are 1, but where neither dp_replicate_size
/// nor dp_shard_size is set and none is to be computed, the data-parallel axes get the processes
/// that the other axes leave, and the strategy divides these between the two.
///
/// From the outermost to the innermost, whose neighbours have neighbouring ranks, the order is pp,
/// dp_replicate, dp_shard, cp, sp, further axes, tp.
class ParallelismConfig {
 public:
  using Size = std::optional<int>;
  /// Processes that hold replicas, which average gradients. Environment:
  /// PARALLELISM_CONFIG_DP_REPLICATE_SIZE, and so on for each.
  TORCH_ARG(Size, dp_replicate_size) = std::nullopt;
  /// Processes that a sharded module is cut over.
  TORCH_ARG(Size, dp_shard_size) = std::nullopt;
  /// Context parallelism.
  TORCH_ARG(Size, cp_size) = std::nullopt;
  /// Context parallelism by all-to-all over heads. Not together with cp_size.
  TORCH_ARG(Size, sp_size) = std::nullopt;
  /// Tensor parallelism.
  TORCH_ARG(Size, tp_size) = std::nullopt;
  /// Pipeline parallelism.
  TORCH_ARG(Size, pp_size) = std::nullopt;
  /// Axes with names of the program's own, such as {"ep", 2}. Processes along them hold the same
  /// data and the same parameters; the program communicates along them through the mesh.
  /// Environment: PARALLELISM_CONFIG_FURTHER_AXES ("ep=2,name=4").
  TORCH_ARG(comm::Mesh::Axes, further_axes);

 public:
  bool operator==(const ParallelismConfig& other) const;
};

/// The sizes that `config` means.
struct MeshAxes {
  /// All axes, those of size 1 too, from the outermost to the innermost. Where `divided` is false
  /// dp_replicate has all data-parallel processes.
  comm::Mesh::Axes axes;
  int data_parallel = 1;
  /// The configuration says how the data-parallel processes are divided between dp_replicate and
  /// dp_shard; else the strategy does.
  bool divided = false;
};

/// Throws ConfigError when the sizes do not multiply to `processes`, and for names and sizes that
/// mean nothing.
MeshAxes mesh_axes(const ParallelismConfig& config, int processes);

}  // namespace accelerate
