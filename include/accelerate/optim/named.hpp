#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/optim/offloaded.hpp>
#include <accelerate/optim/schedules.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

/// Optimizers and schedules by the names and settings that DeepSpeed's configuration gives them.
namespace accelerate::optim {

/// "Adam" or "AdamW": FusedAdamW, or OffloadedAdamW when `offload` is given, with lr, betas, eps,
/// weight_decay, and the defaults of DeepSpeed (weight_decay: 0); "Adam" with "adam_w_mode" false,
/// or with "torch_adam" (where its weight decay is not decoupled): torch::optim::Adam. "SGD":
/// FusedSGD with lr, momentum, dampening, weight_decay, nesterov. Throws ConfigError for other
/// types, settings and values, UnsupportedError for one that cannot be offloaded and is to be.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& type, const Json& params,
    const std::vector<torch::optim::OptimizerParamGroup>& groups,
    const std::optional<OffloadOptions>& offload = std::nullopt);

/// DeepSpeed's schedules: "WarmupLR", "WarmupDecayLR", "WarmupCosineLR". As there, the first
/// step() leaves the first rate, so that the schedule begins with the second step of training.
/// Throws ConfigError for other types, settings and values.
std::unique_ptr<Scheduler> make_schedule(const std::string& type, const Json& params,
                                         torch::optim::Optimizer& optimizer);

}  // namespace accelerate::optim
