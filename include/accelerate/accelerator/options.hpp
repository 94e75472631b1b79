#pragma once

#include <accelerate/accelerator/project.hpp>
#include <accelerate/comm/world.hpp>
#include <accelerate/core/random.hpp>
#include <accelerate/data/configuration.hpp>
#include <accelerate/optim/gradient_state.hpp>
#include <accelerate/parallel/ddp.hpp>
#include <accelerate/parallel/fsdp.hpp>
#include <accelerate/precision/autocast.hpp>
#include <accelerate/precision/grad_scaler.hpp>
#include <accelerate/precision/mixed_precision.hpp>
#include <accelerate/state/parallelism.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate {

namespace parallel {
struct DeepSpeedConfig;
}

/// How a prepared module is spread over the processes.
enum class StrategyKind {
  /// The one with the least communication whose parameters, gradients and Adam states fit the
  /// memory of each process: ddp, zero2, fsdp, in this order; `single` in one process.
  automatic,
  single,  ///< one process, nothing spread
  ddp,     ///< every process has everything
  fsdp,    ///< parameters, gradients and optimizer state are sharded, as FsdpOptions say
  zero1,   ///< optimizer state is sharded; gradients are, once they are reduced
  zero2,   ///< as zero1, and every micro-batch is reduced at once, so whole gradients never add up
  zero3    ///< parameters too: fsdp's full_shard
};

/// "auto", "single", "ddp", "fsdp", "zero1", "zero2", "zero3".
std::string_view to_string(StrategyKind strategy);
/// Throws ConfigError for any other name.
StrategyKind strategy_from_string(std::string_view name);

/// What an Accelerator is made from. Every field may be left alone: then the environment decides,
/// then the configuration file, then the default written here.
struct AcceleratorOptions {
  /// no, fp16, bf16. Environment: ACCELERATE_MIXED_PRECISION. Default: no.
  TORCH_ARG(std::optional<MixedPrecision>, mixed_precision) = std::nullopt;
  /// Micro-batches in one optimizer step. Environment: ACCELERATE_GRADIENT_ACCUMULATION_STEPS.
  /// Default: 1. Not together with gradient_accumulation.
  TORCH_ARG(std::optional<int64_t>, gradient_accumulation_steps) = std::nullopt;
  /// The same and more, as the original's GradientAccumulationPlugin.
  TORCH_ARG(std::optional<GradientAccumulationOptions>, gradient_accumulation) = std::nullopt;
  /// Environment: ACCELERATE_STRATEGY. Default: automatic.
  TORCH_ARG(std::optional<StrategyKind>, strategy) = std::nullopt;
  /// Use the CPU even where there is a GPU. Environment: ACCELERATE_USE_CPU. Default: off.
  TORCH_ARG(std::optional<bool>, cpu) = std::nullopt;
  /// gloo, mpi, nccl. Environment: ACCELERATE_BACKEND. Default: automatic (NCCL for CUDA; MPI when
  /// started by mpirun; else Gloo).
  TORCH_ARG(std::optional<comm::Backend>, backend) = std::nullopt;
  /// How long an operation waits for the other ranks. Environment: ACCELERATE_TIMEOUT, in seconds.
  TORCH_ARG(std::optional<std::chrono::milliseconds>, timeout) = std::nullopt;
  /// A rank that was silent for so long is taken for dead; zero switches the watch off.
  /// Environment: ACCELERATE_HEARTBEAT_TIMEOUT, in seconds. Default: 8 s.
  TORCH_ARG(std::optional<std::chrono::milliseconds>, heartbeat_timeout) = std::nullopt;
  /// How the processes are laid out along the axes of parallelism. Environment:
  /// ACCELERATE_USE_PARALLELISM_CONFIG and PARALLELISM_CONFIG_*. Default: all are data-parallel.
  TORCH_ARG(std::optional<ParallelismConfig>, parallelism_config) = std::nullopt;
  /// Check every collective on all ranks before it runs. Environment: ACCELERATE_DEBUG_MODE.
  TORCH_ARG(std::optional<bool>, debug) = std::nullopt;
  /// The device, instead of the choice by local rank ("cpu", "cuda:1"). Environment:
  /// ACCELERATE_TORCH_DEVICE.
  TORCH_ARG(std::optional<std::string>, device) = std::nullopt;
  /// Move modules and batches to the device.
  TORCH_ARG(bool, device_placement) = true;
  /// Which random number generators each pass over a loader first sets to rank 0's state.
  TORCH_ARG(std::vector<RngType>, rng_types);
  /// Schedulers step only when the optimizer did, once for each process (see
  /// per_process_scheduler_steps).
  TORCH_ARG(bool, step_scheduler_with_optimizer) = true;
  /// A scheduler takes one step for each process and optimizer step, as the original does for
  /// schedules written for one process. Off: one step an optimizer step.
  TORCH_ARG(bool, per_process_scheduler_steps) = true;
  TORCH_ARG(data::DataLoaderConfiguration, dataloader);
  TORCH_ARG(DdpOptions, ddp);
  /// How fsdp and zero1 to zero3 cut modules; giving it asks for fsdp unless `strategy` names one
  /// of the others, which set its sharding_strategy themselves. Environment: ACCELERATE_USE_FSDP
  /// and the original's FSDP_*.
  TORCH_ARG(std::optional<FsdpOptions>, fsdp) = std::nullopt;
  TORCH_ARG(GradScalerOptions, grad_scaler);
  TORCH_ARG(AutocastOptions, autocast);
  /// Where checkpoints go and how they are called.
  TORCH_ARG(ProjectConfiguration, project_config);

 public:
  /// Sets the folder in `project_config`.
  AcceleratorOptions& project_dir(std::filesystem::path folder) {
    project_config_.project_dir(std::move(folder));
    return *this;
  }
  /// What a DeepSpeed configuration asks for: stage, offload, precision, accumulation, clipping.
  /// Read it with `DeepSpeedConfig::read_file`, whose context fills in "auto". Environment:
  /// ACCELERATE_USE_DEEPSPEED with ACCELERATE_DEEPSPEED_CONFIG_FILE. Options of the same meaning
  /// that are given besides must agree with it.
  AcceleratorOptions& deepspeed(const parallel::DeepSpeedConfig& config);
  /// Null when there is none.
  const std::shared_ptr<const parallel::DeepSpeedConfig>& deepspeed() const noexcept {
    return deepspeed_;
  }

 private:
  std::shared_ptr<const parallel::DeepSpeedConfig> deepspeed_;

 public:
  /// A JSON file with any of: mixed_precision, gradient_accumulation_steps, strategy, cpu, backend,
  /// timeout and heartbeat_timeout (seconds), debug, device, fsdp (an object with FsdpOptions'
  /// names), parallelism_config (an object with ParallelismConfig's names). Environment:
  /// ACCELERATE_CONFIG_FILE.
  TORCH_ARG(std::optional<std::string>, config_file) = std::nullopt;
};

}  // namespace accelerate
