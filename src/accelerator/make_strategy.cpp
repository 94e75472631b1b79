#include "accelerator/make_strategy.hpp"

#include "parallel/consistency.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/memory.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <map>
#include <string_view>

namespace accelerate {

StrategyChoice choose_strategy(const StrategyFacts& facts) {
  // Gradients and Adam's moments are of the parameters' own size and dtype.
  const double parameters = static_cast<double>(facts.parameter_bytes);
  const double states = 3.0 * static_cast<double>(facts.trained_bytes);
  const double share = 0.6 * static_cast<double>(facts.memory_bytes);
  const int n = facts.processes;
  const auto bytes = [](double count) {
    return text::format_bytes(static_cast<std::int64_t>(count));
  };
  StrategyChoice choice;
  double needed = parameters + states;
  if (n == 1) {
    choice.kind = StrategyKind::single;
  } else if (needed <= share) {
    choice.kind = StrategyKind::ddp;
  } else if (parameters + states / n <= share) {
    choice.kind = StrategyKind::zero2;
    needed = parameters + states / n;
  } else {
    choice.kind = StrategyKind::fsdp;
    needed = (parameters + states) / n;
  }
  choice.why = text::concat(
      "Strategy ", to_string(choice.kind),
      ": the module's parameters, gradients and Adam states are ", bytes(parameters + states),
      " whole, ", n == 1 ? "" : text::concat(bytes(needed), " here, "), "and ",
      bytes(static_cast<double>(facts.memory_bytes)), " are free for each of ", n,
      n == 1 ? " process" : " processes",
      needed > share
          ? ". That is tight: use more processes, FsdpOptions::cpu_offload, or a smaller model."
          : ".");
  return choice;
}

StrategyFacts strategy_facts(const ModuleRecord& module, at::Device device, int local_processes,
                             const comm::Group& world, int spread) {
  StrategyFacts facts;
  facts.processes = spread;
  for (const auto& [name, parameter] : module.parameters()) {
    const auto bytes = static_cast<std::int64_t>(parameter.nbytes());
    facts.parameter_bytes += bytes;
    if (parameter.requires_grad()) facts.trained_bytes += bytes;
  }
  facts.memory_bytes = available_memory(device) / (device.is_cpu() ? local_processes : 1);
  if (world.size() > 1) {
    // The module may be on the device already on one rank and not on another; the least counts.
    const at::Tensor least =
        at::tensor({facts.memory_bytes}, at::TensorOptions().dtype(at::kLong)).to(device);
    world.all_reduce(least, comm::ReduceOp::min).wait();
    facts.memory_bytes = least.item<std::int64_t>();
  }
  return facts;
}

void check_axes(const comm::Mesh::Axes& axes) {
  static const std::map<std::string, std::string> kMissing{{"cp", "context parallelism"},
                                                           {"sp", "sequence parallelism"},
                                                           {"tp", "tensor parallelism"},
                                                           {"pp", "pipeline parallelism"}};
  for (const auto& [name, size] : axes) {
    const auto missing = kMissing.find(name);
    if (size == 1 || missing == kMissing.end()) continue;
    throw UnsupportedError(text::concat(
        "The ParallelismConfig gives the axis ", name, " ", size,
        " processes, and this version has no ", missing->second,
        ": they would all do the same work. Use dp_replicate and dp_shard, or an axis with a name "
        "of your own whose communication the program does itself."));
  }
}

namespace {

bool is_sharded(StrategyKind kind) {
  return kind == StrategyKind::fsdp || kind == StrategyKind::zero1 || kind == StrategyKind::zero2 ||
         kind == StrategyKind::zero3;
}

int size_of(const comm::Mesh::Axes& axes, std::string_view name) {
  const auto found =
      std::find_if(axes.begin(), axes.end(), [&](const auto& axis) { return axis.first == name; });
  return found == axes.end() ? 1 : found->second;
}

// Each rank may have built the module with random numbers of its own.
void copy_from_first(const ModuleRecord& module, const comm::Mesh& mesh) {
  const comm::Group& group = copies(mesh);
  if (group.size() == 1) return;
  std::vector<NamedTensor> tensors = module.parameters();
  tensors.insert(tensors.end(), module.buffers().begin(), module.buffers().end());
  parallel::require_same_structure(tensors, mesh.whole());
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor contiguous = tensor.detach().contiguous();
    group.broadcast(contiguous).wait();
    if (!contiguous.is_alias_of(tensor)) tensor.detach().copy_(contiguous);
  }
}

}  // namespace

void follow_axes(const MeshAxes& axes, StrategyKind& strategy, FsdpOptions& fsdp) {
  if (!axes.divided) return;
  const int replicate = size_of(axes.axes, "dp_replicate"), shard = size_of(axes.axes, "dp_shard");
  if (strategy == StrategyKind::automatic && axes.data_parallel > 1)
    strategy = shard > 1 ? StrategyKind::fsdp : StrategyKind::ddp;
  const auto refuse = [&](const auto&... what) {
    throw ConfigError(text::concat("The ParallelismConfig has dp_replicate ", replicate,
                                   " and dp_shard ", shard, ", and ", what...));
  };
  if (!is_sharded(strategy)) {
    if (shard > 1) {
      refuse("the strategy is ", to_string(strategy),
             ", which cuts nothing. Use fsdp, or make dp_shard_size 1.");
    }
    return;
  }
  auto& sharding = fsdp.sharding_strategy();
  if (sharding == ShardingStrategy::no_shard ? shard > 1 : shard == 1 && replicate > 1) {
    refuse("the strategy is ", to_string(strategy),
           shard > 1 ? " with the sharding_strategy no_shard. Make dp_shard_size 1."
                     : ", which needs processes to cut a module over. Set dp_shard_size, or use "
                       "the strategy ddp.");
  }
  if (fsdp.shard_group_size() > 0 && fsdp.shard_group_size() != shard) {
    refuse("FsdpOptions::shard_group_size is ", fsdp.shard_group_size(),
           ". Say it in one of the two.");
  }
  fsdp.shard_group_size(shard);
  if (replicate == 1) return;
  if (sharding == ShardingStrategy::full_shard) sharding = ShardingStrategy::hybrid_shard;
  if (sharding == ShardingStrategy::shard_grad_op) sharding = ShardingStrategy::hybrid_shard_zero2;
}

int shard_size(StrategyKind strategy, const FsdpOptions& fsdp, const comm::Group& group) {
  return is_sharded(strategy) ? parallel::shard_size(fsdp, group) : 1;
}

const comm::Group& data_parallel(const comm::Mesh& mesh) {
  return mesh.flattened({"dp_replicate", "dp_shard"});
}

const comm::Group& averaging(const comm::Mesh& mesh) {
  return mesh.flattened({"dp_replicate", "dp_shard", "cp"});
}

const comm::Group& copies(const comm::Mesh& mesh) {
  std::vector<std::string> other;
  for (const auto& [name, size] : mesh.axes()) {
    if (name != "dp_replicate" && name != "dp_shard") other.push_back(name);
  }
  return mesh.flattened(other);
}

std::shared_ptr<parallel::Strategy> make_strategy(StrategyKind kind, ModuleRecord module,
                                                  const comm::Mesh& mesh, const DdpOptions& ddp,
                                                  const FsdpOptions& fsdp) {
  const comm::Group& group = averaging(mesh);
  const bool shards = is_sharded(kind);
  if (!shards || fsdp.sync_module_states()) copy_from_first(module, mesh);
  if (shards) {
    return std::make_shared<parallel::Fsdp>(std::move(module), fsdp, group,
                                            std::string(to_string(kind)));
  }
  if (kind == StrategyKind::ddp && group.size() > 1)
    return std::make_shared<parallel::Ddp>(std::move(module), group, ddp);
  return std::make_shared<parallel::Strategy>(std::move(module));
}

}  // namespace accelerate
