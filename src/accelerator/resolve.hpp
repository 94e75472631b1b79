#pragma once

#include <accelerate/accelerator/options.hpp>
#include <accelerate/base/environment.hpp>
#include <accelerate/base/json.hpp>
#include <accelerate/state/state.hpp>

namespace accelerate {

/// AcceleratorOptions with every question answered.
struct ResolvedOptions {
  StateOptions state;
  MixedPrecision mixed_precision = MixedPrecision::no;
  StrategyKind strategy = StrategyKind::automatic;
  GradientAccumulationOptions gradient_accumulation;
  FsdpOptions fsdp;
  DdpOptions ddp;
  GradScalerOptions grad_scaler;
  /// What is applied of it is in the fields above; kept for the optimizer. May be null.
  std::shared_ptr<const parallel::DeepSpeedConfig> deepspeed;
};

/// The one place where arguments, environment and configuration file meet: argument > environment >
/// file > default. Pure: reads nothing else. Throws ConfigError for anything unusable,
/// UnsupportedError for what LibTorch does not have (XLA, MPS, dynamo, ...), each naming where it
/// was said.
ResolvedOptions resolve(const AcceleratorOptions& options, const Environment& environment,
                        const Json& file);

/// The DeepSpeed configuration of `options`, or the one that the environment names, as Python's
/// launcher does. Null when neither has one. Throws ConfigError as DeepSpeedConfig::read does.
/// `parallelism` says how many of the processes are data-parallel.
std::shared_ptr<const parallel::DeepSpeedConfig> read_deepspeed(
    const AcceleratorOptions& options, const Environment& environment,
    const std::optional<ParallelismConfig>& parallelism);

/// Puts the configuration's settings where they belong. Throws ConfigError, naming both, when an
/// option says otherwise.
void apply_deepspeed(const parallel::DeepSpeedConfig& config, ResolvedOptions& resolved);

/// zero1 to zero3 are FsdpOptions with a name; does nothing for the other strategies.
void set_stage(StrategyKind strategy, FsdpOptions& fsdp);

/// FsdpOptions from the original's FSDP_* variables and the object "fsdp" of the configuration
/// file; nothing when neither asks for it.
std::optional<FsdpOptions> resolve_fsdp(const Environment& environment, const Json& file);

/// ParallelismConfig from the variables PARALLELISM_CONFIG_*, where
/// ACCELERATE_USE_PARALLELISM_CONFIG is on, and the object "parallelism_config" of the
/// configuration file; nothing when neither asks for it.
std::optional<ParallelismConfig> resolve_parallelism(const Environment& environment,
                                                     const Json& file);

/// The configuration file named by `options` or the environment, or an empty object. Throws
/// ConfigError when it cannot be read or is not a JSON object.
Json read_config_file(const AcceleratorOptions& options, const Environment& environment);

}  // namespace accelerate
