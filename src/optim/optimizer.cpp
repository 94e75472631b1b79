#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/memory_kind.hpp>
#include <accelerate/optim/optimizer.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace accelerate {
namespace {

template <class Visitor>
void for_each_parameter(torch::optim::Optimizer& optimizer, Visitor&& visitor) {
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) visitor(parameter);
  }
}

// LibTorch steps a parameter as often as it is listed, and `parameters()` of a TorchScript module
// lists a tied one under each of its names.
void list_each_once(torch::optim::Optimizer& optimizer) {
  auto& groups = optimizer.param_groups();
  std::unordered_map<const void*, std::size_t> group_of;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (const at::Tensor& parameter : groups[i].params()) {
      const auto [at, fresh] = group_of.try_emplace(parameter.unsafeGetTensorImpl(), i);
      if (fresh || at->second == i) continue;
      throw ConfigError(text::concat(
          "A parameter of shape [", text::join(parameter.sizes()), "] is in the parameter groups ",
          at->second, " and ", i,
          " of one optimizer, which would step it twice with options that may differ. List it in "
          "one group."));
    }
  }
  std::size_t repeated = 0;
  for (auto& group : groups) {
    auto& params = group.params();
    std::vector<at::Tensor> once;
    for (const at::Tensor& parameter : params) {
      if (group_of.erase(parameter.unsafeGetTensorImpl()) > 0) once.push_back(parameter);
    }
    repeated += params.size() - once.size();
    params = std::move(once);
  }
  if (repeated == 0) return;
  log::warning(text::concat(
      "The optimizer lists ", repeated, repeated == 1 ? " parameter" : " parameters",
      " more than once, as a module with tied weights gives them. Each is stepped once."));
}

// The state that an optimizer's constructor makes, for `leaf`; null when the state is the fruit of
// steps, or of a type that is not known.
std::unique_ptr<torch::optim::OptimizerParamState> fresh_state_for(
    const at::Tensor& leaf, const torch::optim::OptimizerParamState& state,
    const torch::optim::Optimizer& optimizer) {
  const auto* adagrad = dynamic_cast<const torch::optim::AdagradParamState*>(&state);
  const auto* options = dynamic_cast<const torch::optim::AdagradOptions*>(&optimizer.defaults());
  if (adagrad == nullptr || options == nullptr || adagrad->step() != 0 ||
      !adagrad->sum().eq(options->initial_accumulator_value()).all().item<bool>())
    return nullptr;
  auto fresh = std::make_unique<torch::optim::AdagradParamState>();
  fresh->step(0);
  fresh->sum(at::full_like(leaf.detach(), options->initial_accumulator_value()));
  return fresh;
}

}  // namespace

OptimizerCore::OptimizerCore(std::shared_ptr<torch::optim::Optimizer> optimizer,
                             std::shared_ptr<GradientState> gradients,
                             std::shared_ptr<GradScaler> scaler)
    : optimizer_(std::move(optimizer)),
      gradients_(std::move(gradients)),
      scaler_(std::move(scaler)),
      skips_on_device_(dynamic_cast<SkipsOnDevice*>(optimizer_.get())) {
  if (optimizer_ == nullptr)
    throw ConfigError("A null optimizer was given to prepare. Construct it first.");
  if (scaler_ != nullptr && !scaler_->enabled()) scaler_.reset();
  list_each_once(*optimizer_);
}

bool OptimizerCore::link(std::shared_ptr<parallel::Strategy> strategy) {
  std::vector<at::Tensor> leaves;
  auto& state = optimizer_->state();
  for_each_parameter(*optimizer_, [&](at::Tensor& parameter) {
    const at::Tensor leaf = strategy->optimizer_leaf(parameter);
    if (!leaf.defined()) return;
    leaves.push_back(leaf);
    if (const auto found = state.find(parameter.unsafeGetTensorImpl()); found != state.end()) {
      auto fresh = fresh_state_for(leaf, *found->second, *optimizer_);
      if (fresh == nullptr && !leaf.is_same(parameter)) {
        throw StateError(text::concat(
            "A parameter of shape [", text::join(parameter.sizes()),
            "] is being sharded, and its optimizer has state for it already, which is whole: it "
            "has stepped. Prepare the model and the optimizer before the first step."));
      }
      if (fresh != nullptr) {
        state.erase(found);
        state[leaf.unsafeGetTensorImpl()] = std::move(fresh);
      }
    }
    parameter = leaf;
  });
  if (leaves.empty()) return false;
  const auto known = std::find(strategies_.begin(), strategies_.end(), strategy);
  if (known == strategies_.end()) {
    strategies_.push_back(std::move(strategy));
    leaves_.push_back(std::move(leaves));
  } else {
    auto& of_it = leaves_[static_cast<std::size_t>(known - strategies_.begin())];
    of_it.insert(of_it.end(), leaves.begin(), leaves.end());
  }
  return true;
}

bool OptimizerCore::relink(const parallel::Strategy& ended,
                           std::shared_ptr<parallel::Strategy> strategy) {
  const auto known = std::find_if(strategies_.begin(), strategies_.end(),
                                  [&](const auto& each) { return each.get() == &ended; });
  if (known == strategies_.end()) return false;
  std::vector<at::Tensor> leaves;
  auto& state = optimizer_->state();
  for (const auto& [name, parameter] : strategy->module().parameters()) {
    const at::Tensor before = ended.optimizer_leaf(parameter);
    const at::Tensor now = strategy->optimizer_leaf(parameter);
    if (!before.defined() || !now.defined() || !owns(before)) continue;
    if (before.sizes() != now.sizes()) {
      throw StateError(text::concat(
          "The parameter '", name,
          "' is cut differently than before restore(), so its optimizer's state does not fit any "
          "more. Make a new optimizer after restore(), and prepare that."));
    }
    leaves.push_back(now);
    if (now.is_same(before)) continue;
    for_each_parameter(*optimizer_, [&](at::Tensor& each) {
      if (each.is_same(before)) each = now;
    });
    now.mutable_grad() = before.grad();
    const auto found = state.find(before.unsafeGetTensorImpl());
    if (found == state.end()) continue;
    auto moved = std::move(found->second);
    state.erase(found);
    state[now.unsafeGetTensorImpl()] = std::move(moved);
  }
  leaves_[static_cast<std::size_t>(known - strategies_.begin())] = std::move(leaves);
  *known = std::move(strategy);
  return true;
}

at::Tensor OptimizerCore::step(const Closure& closure) {
  if (!gradients_->sync_gradients()) return {};
  if (scaler_ != nullptr && closure) {
    throw UnsupportedError(
        "optimizer.step was given a closure under a gradient scaler (mixed precision fp16): each "
        "call of the closure would need its own scale. Use bf16, or an optimizer without a "
        "closure.");
  }
  skipped_.reset();
  at::Tensor result;
  const MemoryKindScope kind(MemoryKind::optimizer_state);
  if (closure) {
    result = optimizer_->step([&] {
      const MemoryKindScope its_own(MemoryKind::other);
      at::Tensor loss = closure();
      ready_gradients();
      return loss;
    });
  } else {
    ready_gradients();
    result = scaler_ != nullptr ? step_scaled() : optimizer_->step();
  }
  ++steps_;
  gradients_->end_window();
  for (std::size_t i = 0; i < strategies_.size(); ++i) strategies_[i]->after_step(leaves_[i]);
  return result;
}

void OptimizerCore::ready_gradients() {
  for (std::size_t i = 0; i < strategies_.size(); ++i) strategies_[i]->check_gradients(leaves_[i]);
  finish_gradients();
  if (!max_norm_) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  for (const auto& strategy : strategies_) norms.push_back(strategy->grad_norm(2));
  if (norms.empty()) return;
  const at::Tensor norm = at::linalg_vector_norm(at::stack(norms), 2);
  for (const auto& strategy : strategies_)
    strategy->scale_gradients_(parallel::clip_factor(norm, *max_norm_));
}

at::Tensor OptimizerCore::step_scaled() {
  const void* key = optimizer_.get();
  scaler_->mark_stepped(key);
  const at::Tensor found_inf = scaler_->found_inf(key);
  at::Tensor result;
  if (skips_on_device_ != nullptr) {
    skips_on_device_->set_found_inf(found_inf);
    result = optimizer_->step();
    skipped_ = found_inf;
  } else if (found_inf.item<float>() > 0.0F) {
    skipped_ = found_inf;
  } else {
    result = optimizer_->step();
  }
  scaler_->update_later();
  return result;
}

void OptimizerCore::finish_gradients() {
  if (scaler_ != nullptr && !scaler_->unscaled(optimizer_.get()))
    scaler_->unscale_(optimizer_.get(), parameters());
  if (!gradients_->normalises() || normalised_window_ == gradients_->window()) return;
  normalised_window_ = gradients_->window();

  const at::NoGradGuard no_grad;
  using Kind = std::tuple<at::DeviceType, c10::DeviceIndex, at::ScalarType>;
  std::map<Kind, std::vector<at::Tensor>> groups;
  for_each_parameter(*optimizer_, [&](const at::Tensor& parameter) {
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) return;
    const at::Tensor values = gradient.is_sparse() ? gradient._values() : gradient;
    groups[{values.device().type(), values.device().index(), values.scalar_type()}].push_back(
        values);
  });
  for (auto& [kind, gradients] : groups) {
    // A double factor keeps fp64 gradients exact; foreach_mul_ would promote others, so it is cast.
    at::_foreach_mul_(gradients,
                      gradients_->normalisation(gradients.front().device()).to(std::get<2>(kind)));
  }
}

void OptimizerCore::zero_grad(bool set_to_none) {
  if (!gradients_->sync_gradients()) return;
  for (std::size_t i = 0; i < strategies_.size(); ++i) strategies_[i]->before_zero_grad(leaves_[i]);
  // torch's own zero_grad detaches the gradients in place, which views into a DDP bucket forbid.
  for (auto& group : optimizer_->param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (set_to_none) {
        gradient.reset();
        continue;
      }
      if (gradient.grad_fn() != nullptr) gradient = gradient.detach();
      const at::NoGradGuard no_grad;
      gradient.zero_();
    }
  }
  if (scaler_ != nullptr) scaler_->forget(optimizer_.get());
  gradients_->end_window();
}

bool OptimizerCore::step_was_skipped() const {
  return skipped_.defined() && skipped_.item<float>() > 0.0F;
}

std::vector<at::Tensor> OptimizerCore::parameters() const {
  std::vector<at::Tensor> found;
  for_each_parameter(*optimizer_, [&](const at::Tensor& parameter) { found.push_back(parameter); });
  return found;
}

bool OptimizerCore::owns(const at::Tensor& wanted) const {
  bool found = false;
  for_each_parameter(*optimizer_, [&](const at::Tensor& parameter) {
    found = found || parameter.is_same(wanted);
  });
  return found;
}

bool OptimizerCore::has_gradients() const {
  bool found = false;
  for_each_parameter(*optimizer_, [&](const at::Tensor& parameter) {
    found = found || parameter.grad().defined();
  });
  return found;
}

std::vector<double> OptimizerCore::learning_rates() const {
  std::vector<double> rates;
  for (const auto& group : optimizer_->param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void OptimizerCore::set_learning_rates(const std::vector<double>& rates) {
  auto& groups = optimizer_->param_groups();
  if (rates.size() != groups.size()) {
    throw ConfigError(text::concat(rates.size(),
                                   " learning rates were given for an optimizer with ",
                                   groups.size(), " parameter groups."));
  }
  for (std::size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(rates[i]);
}

}  // namespace accelerate
