#include "accelerator/make_strategy.hpp"

#include <accelerate/base/text.hpp>
#include <accelerate/core/memory.hpp>

#include <ATen/ops/tensor.h>

#include <algorithm>

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
                             const comm::Group& world) {
  StrategyFacts facts;
  facts.processes = world.size();
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

std::shared_ptr<parallel::Strategy> make_strategy(StrategyKind kind, ModuleRecord module,
                                                  const comm::Group& world, const DdpOptions& ddp,
                                                  const FsdpOptions& fsdp) {
  switch (kind) {
    case StrategyKind::automatic:
    case StrategyKind::single:
      break;
    case StrategyKind::ddp:
      if (world.size() == 1) break;
      return std::make_shared<parallel::Ddp>(std::move(module), world, ddp);
    case StrategyKind::fsdp:
    case StrategyKind::zero1:
    case StrategyKind::zero2:
    case StrategyKind::zero3:
      return std::make_shared<parallel::Fsdp>(std::move(module), fsdp, world,
                                              std::string(to_string(kind)));
  }
  return std::make_shared<parallel::Strategy>(std::move(module));
}

}  // namespace accelerate
