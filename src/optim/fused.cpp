#include "optim/parameter_lists.hpp"

#include <accelerate/optim/fused.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/serialize.h>

#include <utility>

namespace accelerate::optim {
namespace {

using torch::optim::OptimizerParamGroup;

void require(bool good, const char* optimizer, const char* what, double value) {
  if (!good)
    throw ConfigError(
        text::concat(optimizer, " was given ", what, " ", value, ", which is out of its range."));
}

FusedAdamWOptions checked(FusedAdamWOptions options) {
  const auto& [beta1, beta2] = options.betas();
  require(options.lr() >= 0.0, "FusedAdamW", "the learning rate", options.lr());
  require(options.eps() >= 0.0, "FusedAdamW", "eps", options.eps());
  require(beta1 >= 0.0 && beta1 < 1.0, "FusedAdamW", "beta1", beta1);
  require(beta2 >= 0.0 && beta2 < 1.0, "FusedAdamW", "beta2", beta2);
  require(options.weight_decay() >= 0.0, "FusedAdamW", "weight_decay", options.weight_decay());
  return options;
}

FusedSGDOptions checked(FusedSGDOptions options) {
  require(options.lr() >= 0.0, "FusedSGD", "the learning rate", options.lr());
  require(options.momentum() >= 0.0, "FusedSGD", "momentum", options.momentum());
  require(options.weight_decay() >= 0.0, "FusedSGD", "weight_decay", options.weight_decay());
  if (options.nesterov() && (options.momentum() <= 0.0 || options.dampening() != 0.0)) {
    throw ConfigError("FusedSGD was given nesterov, which needs a momentum and zero dampening.");
  }
  return options;
}

// The scaler's verdict on the device of each list.
std::optional<at::Tensor> verdict_on(const at::Tensor& found_inf, const at::Device& device) {
  if (!found_inf.defined()) return std::nullopt;
  return found_inf.to(device, /*non_blocking=*/true);
}

}  // namespace

void FusedAdamWOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(betas);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(amsgrad);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
}

void FusedAdamWOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(betas_t, betas);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, amsgrad);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
}

void FusedAdamWParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(exp_avg_sq);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(max_exp_avg_sq);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(fp32_parameter);
}

void FusedAdamWParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, exp_avg_sq);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, max_exp_avg_sq);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, fp32_parameter);
}

FusedAdamW::FusedAdamW(const std::vector<OptimizerParamGroup>& groups, FusedAdamWOptions defaults)
    : Optimizer(groups, std::make_unique<FusedAdamWOptions>(checked(std::move(defaults)))) {
  for (const auto& group : param_groups_)
    checked(static_cast<const FusedAdamWOptions&>(group.options()));
}

FusedAdamW::FusedAdamW(std::vector<at::Tensor> parameters, FusedAdamWOptions defaults)
    : FusedAdamW(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(parameters))},
                 std::move(defaults)) {}

at::Tensor FusedAdamW::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss = loss_of(closure);
  const at::Tensor found_inf = std::exchange(found_inf_, {});
  struct Lists {
    std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
  };
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const FusedAdamWOptions&>(group.options());
    ListsByKind<Lists> kinds;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      at::Tensor gradient = gradient_laid_out_as(parameter, parameter.grad(), "FusedAdamW");
      auto& slot = state_[parameter.unsafeGetTensorImpl()];
      if (slot == nullptr) {
        auto fresh = std::make_unique<FusedAdamWParamState>();
        fresh->step(
            at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(parameter.device())));
        fresh->exp_avg(at::zeros_like(parameter));
        fresh->exp_avg_sq(at::zeros_like(parameter));
        slot = std::move(fresh);
      }
      auto& state = static_cast<FusedAdamWParamState&>(*slot);
      if (options.amsgrad() && !state.max_exp_avg_sq().defined())
        state.max_exp_avg_sq(at::zeros_like(parameter));
      Lists& lists = kinds.of(parameter);
      lists.parameters.push_back(parameter);
      lists.gradients.push_back(std::move(gradient));
      lists.exp_avgs.push_back(state.exp_avg());
      lists.exp_avg_sqs.push_back(state.exp_avg_sq());
      if (options.amsgrad()) lists.max_exp_avg_sqs.push_back(state.max_exp_avg_sq());
      lists.steps.push_back(state.step());
    }
    kinds.for_each([&](const at::Device& device, Lists& lists) {
      const auto verdict = verdict_on(found_inf, device);
      if (device.is_cpu()) {
        // An addition through the dispatcher costs more than the rest of a small step.
        for (const at::Tensor& step : lists.steps) *step.mutable_data_ptr<float>() += 1.0F;
      } else {
        at::_foreach_add_(lists.steps, 1);
      }
      at::_fused_adamw_(lists.parameters, lists.gradients, lists.exp_avgs, lists.exp_avg_sqs,
                        lists.max_exp_avg_sqs, lists.steps, options.lr(),
                        std::get<0>(options.betas()), std::get<1>(options.betas()),
                        options.weight_decay(), options.eps(), options.amsgrad(),
                        options.maximize(),
                        /*grad_scale=*/std::nullopt, verdict);
      if (verdict)
        at::_foreach_sub_(lists.steps, std::vector<at::Tensor>(lists.steps.size(), *verdict));
    });
  }
  return loss;
}

void FusedAdamW::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<FusedAdamWParamState, FusedAdamWOptions>(archive, *this);
}

void FusedAdamW::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<FusedAdamWParamState, FusedAdamWOptions>(archive, *this);
}

void FusedSGDOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(dampening);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(nesterov);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
}

void FusedSGDOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, momentum);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, dampening);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, nesterov);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
}

void FusedSGDParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(momentum_buffer);
}

void FusedSGDParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, momentum_buffer);
}

FusedSGD::FusedSGD(const std::vector<OptimizerParamGroup>& groups, FusedSGDOptions defaults)
    : Optimizer(groups, std::make_unique<FusedSGDOptions>(checked(std::move(defaults)))) {
  for (const auto& group : param_groups_)
    checked(static_cast<const FusedSGDOptions&>(group.options()));
}

FusedSGD::FusedSGD(std::vector<at::Tensor> parameters, FusedSGDOptions defaults)
    : FusedSGD(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(parameters))},
               std::move(defaults)) {}

at::Tensor FusedSGD::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss = loss_of(closure);
  const at::Tensor found_inf = std::exchange(found_inf_, {});
  struct Lists {
    std::vector<at::Tensor> parameters, gradients, momenta;
  };
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const FusedSGDOptions&>(group.options());
    const bool has_momentum = options.momentum() != 0.0;
    // The first gradient becomes the momentum undamped, so first steps are a kernel call of their
    // own.
    ListsByKind<Lists> first, later;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      at::Tensor gradient = gradient_laid_out_as(parameter, parameter.grad(), "FusedSGD");
      const bool is_first =
          has_momentum && state_.find(parameter.unsafeGetTensorImpl()) == state_.end();
      Lists& lists = (is_first ? first : later).of(parameter);
      if (has_momentum && !is_first) {
        lists.momenta.push_back(
            static_cast<FusedSGDParamState&>(*state_.at(parameter.unsafeGetTensorImpl()))
                .momentum_buffer());
      }
      lists.parameters.push_back(parameter);
      lists.gradients.push_back(std::move(gradient));
    }
    const auto run = [&](const at::Device& device, Lists& lists, bool is_first) {
      at::_fused_sgd_(lists.parameters, lists.gradients, lists.momenta, options.weight_decay(),
                      options.momentum(), options.lr(), options.dampening(), options.nesterov(),
                      options.maximize(), is_first,
                      /*grad_scale=*/std::nullopt,
                      is_first ? std::nullopt : verdict_on(found_inf, device));
    };
    later.for_each([&](const at::Device& device, Lists& lists) { run(device, lists, false); });
    first.for_each([&](const at::Device& device, Lists& lists) {
      // A first step that is left out must leave no momentum; this once, wait for the verdict.
      if (found_inf.defined() && found_inf.item<float>() > 0.0F) return;
      for (const at::Tensor& parameter : lists.parameters) {
        auto fresh = std::make_unique<FusedSGDParamState>();
        fresh->momentum_buffer(at::empty_like(parameter));
        lists.momenta.push_back(fresh->momentum_buffer());
        state_[parameter.unsafeGetTensorImpl()] = std::move(fresh);
      }
      run(device, lists, true);
    });
  }
  return loss;
}

void FusedSGD::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<FusedSGDParamState, FusedSGDOptions>(archive, *this);
}

void FusedSGD::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<FusedSGDParamState, FusedSGDOptions>(archive, *this);
}

}  // namespace accelerate::optim
