#include "optim/parameter_lists.hpp"

#include <accelerate/optim/adafactor.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace accelerate::optim {
namespace {

using torch::optim::OptimizerParamGroup;

AdafactorOptions checked(AdafactorOptions options) {
  const auto require = [](bool good, const char* what, double value, const char* expected) {
    if (!good)
      throw ConfigError(
          text::concat("Adafactor was given ", what, " ", value, "; it must be ", expected, "."));
  };
  require(options.lr() >= 0.0, "the learning rate", options.lr(), "0 or above");
  require(options.beta2_decay() <= 0.0, "beta2_decay", options.beta2_decay(), "0 or below");
  require(!options.eps1() || *options.eps1() >= 0.0, "eps1", options.eps1().value_or(0.0),
          "0 or above");
  require(options.eps2() >= 0.0, "eps2", options.eps2(), "0 or above");
  require(options.d() >= 1.0, "d", options.d(), "1 or above");
  require(options.weight_decay() >= 0.0, "weight_decay", options.weight_decay(), "0 or above");
  return options;
}

double epsilon_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    case at::kHalf:
      return std::numeric_limits<c10::Half>::epsilon();
    case at::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::epsilon();
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

double norm_of(const at::Tensor& tensor) { return at::linalg_vector_norm(tensor).item<double>(); }

// mean(gradient^2) over one dimension, without the memory of gradient^2.
at::Tensor mean_square(const at::Tensor& gradient, std::int64_t dim) {
  return at::linalg_vector_norm(gradient, 2, dim, /*keepdim=*/true)
      .square_()
      .div_(gradient.size(dim));
}

void step_one(const at::Tensor& parameter, AdafactorParamState& state,
              const AdafactorOptions& options) {
  const at::Tensor gradient = options.maximize() ? parameter.grad().neg() : parameter.grad();
  const double eps1 = options.eps1().value_or(epsilon_of(parameter.scalar_type()));
  state.step(state.step() + 1);
  const double step = static_cast<double>(state.step());
  const double forget = std::pow(step, options.beta2_decay());
  const double rho = std::min(options.lr(), 1.0 / std::sqrt(step));
  const double root_numel = std::sqrt(static_cast<double>(parameter.numel()));
  const double alpha = std::max(options.eps2(), norm_of(parameter) / root_numel) * rho;

  if (options.weight_decay() != 0.0) parameter.mul_(1.0 - options.lr() * options.weight_decay());

  at::Tensor update;
  if (gradient.dim() > 1) {
    state.row_var().lerp_(mean_square(gradient, -1), forget);
    state.col_var().lerp_(mean_square(gradient, -2), forget);
    update = state.row_var().matmul(state.col_var());
    update.div_(state.row_var().mean(-2, /*keepdim=*/true).clamp_min_(eps1));
  } else {
    state.variance().lerp_(gradient.mul(gradient), forget);
    update = state.variance().clone();
  }
  // Squared, since the root comes after.
  update.clamp_min_(eps1 * eps1).rsqrt_().mul_(gradient);
  const double clip = std::max(1.0, norm_of(update) / (root_numel * options.d()));
  parameter.add_(update, -alpha / clip);
}

}  // namespace

void AdafactorOptions::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(lr);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(beta2_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps1);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(eps2);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(d);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(weight_decay);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(maximize);
}

void AdafactorOptions::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, lr);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, beta2_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG_OPTIONAL(double, eps1);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, eps2);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, d);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(double, weight_decay);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(bool, maximize);
}

void AdafactorParamState::serialize(torch::serialize::OutputArchive& archive) const {
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(step);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(row_var);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(col_var);
  _TORCH_OPTIM_SERIALIZE_TORCH_ARG(variance);
}

void AdafactorParamState::serialize(torch::serialize::InputArchive& archive) {
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(std::int64_t, step);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, row_var);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, col_var);
  _TORCH_OPTIM_DESERIALIZE_TORCH_ARG(at::Tensor, variance);
}

Adafactor::Adafactor(const std::vector<OptimizerParamGroup>& groups, AdafactorOptions defaults)
    : Optimizer(groups, std::make_unique<AdafactorOptions>(checked(std::move(defaults)))) {
  for (const auto& group : param_groups_)
    checked(static_cast<const AdafactorOptions&>(group.options()));
}

Adafactor::Adafactor(std::vector<at::Tensor> parameters, AdafactorOptions defaults)
    : Adafactor(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(parameters))},
                std::move(defaults)) {}

at::Tensor Adafactor::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const AdafactorOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.grad();
      if (!gradient.defined() || gradient.numel() == 0) continue;
      check_dense(parameter, gradient, "Adafactor");
      auto& slot = state_[parameter.unsafeGetTensorImpl()];
      if (slot == nullptr) {
        auto fresh = std::make_unique<AdafactorParamState>();
        if (gradient.dim() > 1) {
          auto shape = gradient.sizes().vec();
          shape.back() = 1;
          fresh->row_var(at::zeros(shape, gradient.options()));
          shape = gradient.sizes().vec();
          shape[shape.size() - 2] = 1;
          fresh->col_var(at::zeros(shape, gradient.options()));
        } else {
          fresh->variance(at::zeros_like(gradient));
        }
        slot = std::move(fresh);
      }
      step_one(parameter, static_cast<AdafactorParamState&>(*slot), options);
    }
  }
  return loss;
}

void Adafactor::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<AdafactorParamState, AdafactorOptions>(archive, *this);
}

void Adafactor::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<AdafactorParamState, AdafactorOptions>(archive, *this);
}

}  // namespace accelerate::optim
