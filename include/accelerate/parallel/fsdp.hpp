#pragma once

#include <accelerate/comm/group.hpp>
#include <accelerate/parallel/strategy.hpp>

#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::parallel {

/// What is cut over the ranks.
enum class ShardingStrategy {
  full_shard,          ///< parameters, gradients and optimizer state (ZeRO 3)
  shard_grad_op,       ///< as full_shard, but parameters stay whole from forward to backward
  hybrid_shard,        ///< full_shard inside groups of ranks, replicated over the groups
  hybrid_shard_zero2,  ///< shard_grad_op inside groups of ranks, replicated over the groups
  shard_optimizer,  ///< gradients and optimizer state; parameters stay whole for good (ZeRO 1 and
                    ///< 2)
  no_shard          ///< nothing: every rank has all of it
};

/// Dtypes of a sharded module. Shards and optimizer state keep the module's own dtype.
struct MixedPrecisionPolicy {
  /// Parameters while they are whole, so also what is gathered. Default: their own.
  std::optional<at::ScalarType> param_dtype = {};
  /// Gradients while they are reduced. Default: that of the parameters while whole.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// What forward's floating-point outputs are cast to. Default: left as they are.
  std::optional<at::ScalarType> output_dtype = {};
  /// Floating-point buffers. Default: left as they are.
  std::optional<at::ScalarType> buffer_dtype = {};
};

/// When a unit's parameters are gathered for the backward pass.
enum class BackwardPrefetch {
  backward_pre,   ///< while the unit before it computes: two units in memory
  backward_post,  ///< once the unit before it has all its gradients: less overlap, lower peak
  none            ///< when it is used
};

/// Whether a unit's parameters are given up after forward, and over how many ranks they are spread
/// until backward.
struct ReshardAfterForward {
  /// True: over all ranks of the sharding group. False: they stay whole until backward.
  ReshardAfterForward(bool reshard) : enabled(reshard) {}  // NOLINT: as a bool is written
  /// Over groups of so many consecutive ranks (those of one machine, say), so that backward gathers
  /// within the group. It must divide the number of ranks of the sharding group. After FSDP2.
  ReshardAfterForward(int ranks) : enabled(true), group_size(ranks) {}  // NOLINT
  bool enabled = true;
  /// 0: all ranks.
  int group_size = 0;
};

/// How a module is cut into units, which are gathered and reduced as one.
class FsdpOptions {
 public:
  /// Default: full_shard.
  TORCH_ARG(ShardingStrategy, sharding_strategy) = ShardingStrategy::full_shard;
  /// Whether a unit's parameters are given up after forward and gathered again for backward: a
  /// bool, or the number of ranks that share them in between. False makes shard_grad_op of
  /// full_shard. Default: true.
  TORCH_ARG(ReshardAfterForward, reshard_after_forward) = true;
  /// Default: everything in the module's own dtype.
  TORCH_ARG(MixedPrecisionPolicy, mixed_precision);
  /// Modules by their dotted name that become one unit each. Default: chosen automatically.
  TORCH_ARG(std::vector<std::string>, unit_names);
  /// Module types that become one unit for each module, as `Module::name()` gives them, or their
  /// last part
  /// ("TransformerEncoderLayerImpl"). Default: chosen automatically.
  TORCH_ARG(std::vector<std::string>, unit_types);
  /// If above zero, every module with so many parameters that no unit inside it has becomes one.
  /// Default: 0.
  TORCH_ARG(std::int64_t, min_num_params) = 0;
  /// Modules by their dotted name that are left alone: not sharded, and their gradients not
  /// reduced.
  TORCH_ARG(std::vector<std::string>, ignored_modules);
  /// Shards, their gradients and the optimizer state stay in host memory. Default: false.
  TORCH_ARG(bool, cpu_offload) = false;
  /// Default: backward_pre.
  TORCH_ARG(BackwardPrefetch, backward_prefetch) = BackwardPrefetch::backward_pre;
  /// Whether units are gathered ahead of their use in forward too. Default: true.
  TORCH_ARG(bool, forward_prefetch) = true;
  /// How many units are gathered ahead. Default: 1.
  TORCH_ARG(int, prefetch_units) = 1;
  /// The most bytes of gathered parameters at one time; 0 for no limit. Must hold the largest unit.
  /// Default: 0.
  TORCH_ARG(std::int64_t, resident_limit) = 0;
  /// Whether parameters and buffers of rank 0 are sent to all before they are cut. Default: true.
  TORCH_ARG(bool, sync_module_states) = true;
  /// Whether the micro-batches that do not synchronise are reduced all the same, and added up in
  /// the shards: more communication, and no memory for whole gradients. Default: false.
  TORCH_ARG(bool, reduce_every_backward) = false;
  /// Ranks may use different units, as in a mixture of experts whose ranks choose, or where layers
  /// are dropped by chance: every forward gathers all units, in the module's order, and every
  /// backward reduces all. They stay in memory until the pass ends, so that full_shard needs as
  /// much memory for parameters as shard_grad_op, and more is gathered than a pass uses. A
  /// `resident_limit` must hold all units. Without it such ranks throw ShardingError. Default:
  /// false.
  TORCH_ARG(bool, all_units_every_pass) = false;
  /// Of no effect any more: ranks always compare which unit they gather or reduce.
  TORCH_ARG(bool, verify_control_flow) = false;
  /// Ranks of one sharding group in the hybrid strategies and shard_optimizer; it must divide the
  /// number of ranks. 0: the ranks of one machine, and all with shard_optimizer. Under an
  /// Accelerator it is the size of the mesh's axis dp_shard. Default: 0.
  TORCH_ARG(int, shard_group_size) = 0;
};

/// Over how many consecutive ranks of `group` a unit is cut. Collective over it. Throws
/// ShardingError when the number of ranks is not a multiple of that.
int shard_size(const FsdpOptions& options, const comm::Group& group);

/// What Fsdp did since the last reset.
struct FsdpStatistics {
  std::int64_t gathers = 0;
  /// Of these, started before they were needed.
  std::int64_t prefetched = 0;
  std::int64_t reductions = 0;
  /// Bytes of the whole units gathered and reduced, with and without what pads them.
  std::int64_t gathered_bytes = 0;
  std::int64_t gathered_parameter_bytes = 0;
  std::int64_t reduced_bytes = 0;
  std::int64_t reduced_parameter_bytes = 0;
  /// The most bytes of gathered parameters at one time.
  std::int64_t peak_resident_bytes = 0;
};

/// Shards an unmodified module over ranks: parameters live as parts on every rank, are gathered
/// when an operator touches them, and given up when nothing that comes soon uses them; gradients
/// are reduce-scattered onto the parts as backward produces them. The algorithm is that of ZeRO
/// (Rajbhandari et al., 2020) and PyTorch FSDP (Zhao et al., 2023), with the dispatcher in place of
/// module hooks.
class Fsdp final : public Strategy {
 public:
  /// Collective over `group`. Throws ShardingError, on every rank, when the ranks' modules differ,
  /// when there is nothing to shard, or when an option cannot be met; the module is then as it was.
  Fsdp(ModuleRecord module, FsdpOptions options, const comm::Group& group,
       std::string name = "fsdp");
  /// The module's parameters are unusable from then on, with a sentence that says so, unless
  /// `restore` was called. Does not communicate.
  ~Fsdp() override;

  /// "fsdp", or the name given to the constructor.
  std::string_view name() const noexcept override;
  const FsdpOptions& options() const noexcept;

  /// Throws StateError when parameters were registered or taken away since, which are not sharded.
  void follow_module() override;
  void before_forward(const ForwardContext& context) override;
  void after_forward(const ForwardContext& context,
                     const std::vector<at::Tensor>& outputs) override;
  void sync_in_next_backward() override;
  at::Tensor optimizer_leaf(const at::Tensor& parameter) const override;
  void before_backward() override;
  void after_backward() override;
  void backward_failed() noexcept override;
  void check_gradients(const std::vector<at::Tensor>& leaves) override;
  void after_step(const std::vector<at::Tensor>& leaves) override;
  void before_zero_grad(const std::vector<at::Tensor>& leaves) override;
  at::Tensor grad_norm(double p) const override;
  void scale_gradients_(const at::Tensor& factor) override;
  void clip_grad_value_(double limit) override;

  std::vector<LocalTensor> shards() const override;
  std::vector<NamedTensor> state_dict(const StateDictOptions& options = {}) const override;
  void load_state_dict(const std::vector<NamedTensor>& state, const StateDictOptions& options = {},
                       bool strict = true) override;
  std::shared_ptr<void> summon_full_params(bool write_back = false) override;
  /// Ends interception as well. Nothing is left to train then: every other member throws
  /// StateError.
  void restore() override;
  bool is_restored() const noexcept override;
  bool owns_leaves() const noexcept override { return true; }

  /// One line for each unit: its name, how many parameters, and how many bytes while whole.
  std::string describe_units() const;
  std::int64_t num_units() const noexcept;
  FsdpStatistics statistics() const;
  void reset_statistics();

 protected:
  int rank() const noexcept override;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::parallel

namespace accelerate {
using parallel::BackwardPrefetch;
using parallel::FsdpOptions;
using parallel::MixedPrecisionPolicy;
using parallel::ShardingStrategy;
using parallel::StateDictOptions;
using parallel::StateDictType;
}  // namespace accelerate
