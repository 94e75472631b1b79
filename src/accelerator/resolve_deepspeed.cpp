#include "accelerator/resolve.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/base/topology.hpp>
#include <accelerate/parallel/deepspeed.hpp>

#include <nlohmann/json.hpp>

namespace accelerate {
namespace {

using parallel::DeepSpeedConfig;
using parallel::DeepSpeedContext;
using Device = parallel::DeepSpeedOffload::Device;

// What Python's launcher says when no file was given to it.
Json from_variables(const Environment& environment) {
  Json zero{{"stage", environment.get_int("ACCELERATE_DEEPSPEED_ZERO_STAGE").value_or(2)}};
  const std::string folder =
      environment.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH").value_or("");
  for (const auto& [variable, key] :
       {std::pair("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer"),
        std::pair("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "offload_param")}) {
    const auto device = environment.get(variable);
    if (!device || device->empty() || text::to_lower(*device) == "none") continue;
    zero[key] = Json{{"device", text::to_lower(*device)}};
    if (text::to_lower(*device) == "nvme" && !folder.empty()) zero[key]["nvme_path"] = folder;
  }
  return Json{{"zero_optimization", zero},
              {"train_micro_batch_size_per_gpu", "auto"},
              {"gradient_accumulation_steps", "auto"},
              {"gradient_clipping",
               environment.get("ACCELERATE_GRADIENT_CLIPPING") ? Json("auto") : Json(0.0)}};
}

}  // namespace

std::shared_ptr<const DeepSpeedConfig> read_deepspeed(
    const AcceleratorOptions& options, const Environment& environment,
    const std::optional<ParallelismConfig>& parallelism) {
  if (options.deepspeed()) return options.deepspeed();
  if (!environment.get_bool("ACCELERATE_USE_DEEPSPEED").value_or(false)) return nullptr;
  DeepSpeedContext context;
  context.world_size = detect_topology(environment).world_size;
  if (parallelism) context.world_size = mesh_axes(*parallelism, context.world_size).data_parallel;
  // The loaders come later; what the file says besides "auto" must agree with itself all the same.
  context.micro_batch_size = 1;
  context.gradient_accumulation_steps =
      environment.get_int("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
          .value_or(options.gradient_accumulation_steps().value_or(1));
  if (const auto norm = environment.get_double("ACCELERATE_GRADIENT_CLIPPING"))
    context.gradient_clipping = *norm;
  if (options.mixed_precision()) {
    context.mixed_precision = options.mixed_precision();
  } else if (const auto precision = environment.get("ACCELERATE_MIXED_PRECISION")) {
    context.mixed_precision = mixed_precision_from_string(text::to_lower(*precision));
  }
  const auto file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE");
  if (file && !file->empty() && text::to_lower(*file) != "none")
    return std::make_shared<const DeepSpeedConfig>(DeepSpeedConfig::read_file(*file, context));
  return std::make_shared<const DeepSpeedConfig>(
      DeepSpeedConfig::read(from_variables(environment), context));
}

void apply_deepspeed(const DeepSpeedConfig& config, ResolvedOptions& resolved) {
  const auto disagree = [](const std::string& ours, const std::string& theirs) {
    throw ConfigError(text::concat("The DeepSpeed configuration asks for ", theirs,
                                   ", and the Accelerator for ", ours,
                                   ". Say it in one of them, or write \"auto\" in the file."));
  };
  constexpr StrategyKind kStages[] = {StrategyKind::ddp, StrategyKind::zero1, StrategyKind::zero2,
                                      StrategyKind::zero3};
  const StrategyKind strategy = kStages[config.stage];
  if (resolved.strategy != StrategyKind::automatic && resolved.strategy != strategy) {
    disagree(text::concat("the strategy ", to_string(resolved.strategy)),
             text::concat("ZeRO stage ", config.stage));
  }
  resolved.strategy = strategy;

  if (resolved.mixed_precision != MixedPrecision::no &&
      resolved.mixed_precision != config.mixed_precision) {
    disagree(text::concat("mixed precision ", to_string(resolved.mixed_precision)),
             text::concat("mixed precision ", to_string(config.mixed_precision)));
  }
  resolved.mixed_precision = config.mixed_precision;

  const std::int64_t steps = resolved.gradient_accumulation.num_steps();
  if (steps != 1 && steps != config.gradient_accumulation_steps) {
    disagree(text::concat(steps, " micro-batches a step"),
             text::concat(config.gradient_accumulation_steps));
  }
  resolved.gradient_accumulation.num_steps(config.gradient_accumulation_steps);

  if (config.mixed_precision == MixedPrecision::fp16) {
    resolved.grad_scaler.init_scale(config.loss_scale.initial)
        .growth_interval(config.loss_scale.window)
        .hysteresis(config.loss_scale.hysteresis)
        .consecutive_hysteresis(config.loss_scale.consecutive_hysteresis)
        .min_scale(config.loss_scale.minimum);
  }
  if (config.reduce_bucket_size) {
    resolved.ddp.bucket_cap_mb(static_cast<double>(*config.reduce_bucket_size) * 4 / (1 << 20));
  }
  FsdpOptions& fsdp = resolved.fsdp;
  // Shards in host memory are what the optimizer then updates there.
  if (config.parameter_offload.device == Device::cpu ||
      config.optimizer_offload.device == Device::cpu)
    fsdp.cpu_offload(true);
  if (!config.prefetch) {
    fsdp.forward_prefetch(false).backward_prefetch(BackwardPrefetch::none);
  }
  if (config.max_live_parameters && config.stage == 3) {
    fsdp.resident_limit(*config.max_live_parameters *
                        (config.mixed_precision == MixedPrecision::no ? 4 : 2));
  }
  if (config.communication_dtype) {
    fsdp.mixed_precision().reduce_dtype = *config.communication_dtype == "fp32"   ? at::kFloat
                                          : *config.communication_dtype == "fp16" ? at::kHalf
                                                                                  : at::kBFloat16;
  }
}

}  // namespace accelerate
