#include "optim/own_step.hpp"

#include <accelerate/optim/adafactor.hpp>
#include <accelerate/optim/fused.hpp>

#include <ATen/Dispatch.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>

namespace accelerate {

void OwnStep::note(torch::optim::Optimizer& optimizer) {
  parameter_.reset();
  // The last one: of most modules a bias, which every sample has a gradient for.
  auto& groups = optimizer.param_groups();
  for (auto group = groups.rbegin(); group != groups.rend() && !parameter_.defined(); ++group) {
    const auto& parameters = group->params();
    const auto found = std::find_if(parameters.rbegin(), parameters.rend(),
                                    [](const at::Tensor& each) { return each.grad().defined(); });
    if (found == parameters.rend()) continue;
    parameter_ = *found;
    rate_ = decay_ = 0;
    if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&group->options())) {
      rate_ = sgd->lr();
      decay_ = sgd->weight_decay();
    } else if (const auto* fused = dynamic_cast<const optim::FusedSGDOptions*>(&group->options())) {
      rate_ = fused->maximize() ? -fused->lr() : fused->lr();
      decay_ = fused->maximize() ? -fused->weight_decay() : fused->weight_decay();
    }
  }
  if (!parameter_.defined()) return;
  progress_ = progress(optimizer, parameter_);
  if (progress_) return;
  values_ = sample(parameter_);
  gradient_ = sample(parameter_.grad());
}

bool OwnStep::happened(torch::optim::Optimizer& optimizer) {
  if (!parameter_.defined()) return false;
  const at::Tensor parameter = std::move(parameter_);
  parameter_.reset();
  const auto now = progress(optimizer, parameter);
  if (progress_) return now && *now != *progress_;
  if (now) return now->steps <= 1;  // state that was loaded has more
  // Without momentum SGD has no state: did the values go where it takes them?
  if (rate_ == 0 || gradient_.count == 0) return false;
  const Sample after = sample(parameter);
  if (after == values_ || after.count != gradient_.count) return false;
  for (int i = 0; i < after.count; ++i) {
    const double before = values_.values[static_cast<std::size_t>(i)];
    const double step = rate_ * (gradient_.values[static_cast<std::size_t>(i)] + decay_ * before);
    const double found = before - after.values[static_cast<std::size_t>(i)];
    if (std::abs(found - step) > 1e-2 * std::abs(step) + 1e-6 * std::abs(before)) return false;
  }
  return true;
}

OwnStep::Sample OwnStep::sample(const at::Tensor& tensor) {
  Sample result;
  if (!tensor.defined() || tensor.layout() != c10::Layout::Strided || !tensor.is_cpu() ||
      !tensor.is_contiguous() || tensor.numel() == 0 || !tensor.is_floating_point()) {
    return result;
  }
  result.count = static_cast<int>(std::min<std::int64_t>(4, tensor.numel()));
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, tensor.scalar_type(), "sample", [&] {
    const auto* data = tensor.const_data_ptr<scalar_t>();
    for (int i = 0; i < result.count; ++i) {
      result.values[static_cast<std::size_t>(i)] =
          static_cast<double>(data[i * (tensor.numel() - 1) / std::max(result.count - 1, 1)]);
    }
  });
  return result;
}

std::optional<OwnStep::Progress> OwnStep::progress(torch::optim::Optimizer& optimizer,
                                                   const at::Tensor& parameter) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return std::nullopt;
  const torch::optim::OptimizerParamState* state = found->second.get();
  Progress result;
  const auto steps_of = [&]<class State>(const State*) {
    const auto* own = dynamic_cast<const State*>(state);
    if (own != nullptr) result.steps = own->step();
    return own != nullptr;
  };
  const auto buffer_of = [&]<class State>(const State*) {
    const auto* own = dynamic_cast<const State*>(state);
    if (own == nullptr || !own->momentum_buffer().defined()) return own != nullptr;
    result.version = own->momentum_buffer()._version();
    result.buffer = sample(own->momentum_buffer());
    return true;
  };
  using namespace torch::optim;
  if (steps_of(static_cast<const AdamWParamState*>(nullptr)) ||
      steps_of(static_cast<const AdamParamState*>(nullptr)) ||
      buffer_of(static_cast<const SGDParamState*>(nullptr)) ||
      steps_of(static_cast<const RMSpropParamState*>(nullptr)) ||
      steps_of(static_cast<const AdagradParamState*>(nullptr)) ||
      steps_of(static_cast<const optim::AdafactorParamState*>(nullptr)) ||
      buffer_of(static_cast<const optim::FusedSGDParamState*>(nullptr))) {
    return result;
  }
  if (const auto* lbfgs = dynamic_cast<const LBFGSParamState*>(state)) {
    result.steps = lbfgs->func_evals();
  } else if (const auto* fused = dynamic_cast<const optim::FusedAdamWParamState*>(state)) {
    if (fused->step().is_cpu()) result.steps = fused->step().item<std::int64_t>();
  }
  return result;
}

}  // namespace accelerate
