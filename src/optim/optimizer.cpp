#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/memory_kind.hpp>
#include <accelerate/intercept/operator_policy.hpp>
#include <accelerate/optim/optimizer.hpp>

#include "comm/user_call.hpp"
#include "optim/own_step.hpp"
#include "optim/witness.hpp"

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
      skips_on_device_(dynamic_cast<SkipsOnDevice*>(optimizer_.get())),
      own_step_(std::make_unique<OwnStep>()),
      used_up_(gradients_->micro_batch()) {
  if (optimizer_ == nullptr)
    throw ConfigError("A null optimizer was given to prepare. Construct it first.");
  if (scaler_ != nullptr && !scaler_->enabled()) scaler_.reset();
  list_each_once(*optimizer_);
  const bool is_owned = optimizer_.use_count() > 0;
  if (!is_owned) witness_ = witness_of(*optimizer_);
  followed_ = parameters();
}

OptimizerCore::~OptimizerCore() {
  // Another may come to lie at this address.
  if (scaler_ != nullptr) scaler_->forget(this);
}

void OptimizerCore::require_alive() const {
  if (is_alive()) return;
  throw StateError(
      "The optimizer was given to prepare() as an lvalue, which is referenced, and it has been "
      "destroyed before the prepared optimizer. Where a function makes an optimizer and returns "
      "what prepare() gives, hand it over: prepare(net, std::move(adam)), or a shared_ptr.");
}

bool OptimizerCore::is_of(const torch::optim::Optimizer& optimizer) const {
  if (optimizer_.get() != &optimizer || !is_alive()) return false;
  const bool is_owned = optimizer_.use_count() > 0;
  if (is_owned) return true;
  if (witness_) {
    const auto witness = known_witness_of(optimizer);
    return witness && !witness->owner_before(*witness_) && !witness_->owner_before(*witness);
  }
  return !followed_.empty() && owns(followed_.front());
}

bool OptimizerCore::link(std::shared_ptr<parallel::Strategy> strategy) {
  require_alive();
  const auto is_same = [&](const auto& known) { return known.lock() == strategy; };
  if (std::none_of(known_.begin(), known_.end(), is_same)) known_.emplace_back(strategy);
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
  followed_ = parameters();
  if (leaves.empty()) return false;
  const auto known = std::find(strategies_.begin(), strategies_.end(), strategy);
  if (known == strategies_.end()) {
    strategies_.push_back(std::move(strategy));
    leaves_.push_back(std::move(leaves));
  } else {
    leaves_[static_cast<std::size_t>(known - strategies_.begin())] = std::move(leaves);
  }
  return true;
}

void OptimizerCore::unlink(const parallel::Strategy& strategy) {
  const auto linked = std::find_if(strategies_.begin(), strategies_.end(),
                                   [&](const auto& each) { return each.get() == &strategy; });
  if (linked != strategies_.end()) {
    leaves_.erase(leaves_.begin() + (linked - strategies_.begin()));
    strategies_.erase(linked);
  }
  std::erase_if(known_, [&](const auto& each) {
    const auto known = each.lock();
    return known == nullptr || known.get() == &strategy;
  });
}

void OptimizerCore::follow_groups() {
  std::size_t next = 0;
  bool same = true;
  for_each_parameter(*optimizer_, [&](const at::Tensor& parameter) {
    same = same && next < followed_.size() && followed_[next].is_same(parameter);
    ++next;
  });
  if (same && next == followed_.size()) return;
  for (const auto& known : std::vector(known_)) {
    if (auto strategy = known.lock()) link(std::move(strategy));
  }
  followed_.clear();  // so that what is refused now is refused again
  list_each_once(*optimizer_);
  followed_ = parameters();
}

bool OptimizerCore::relink(const parallel::Strategy& ended,
                           std::shared_ptr<parallel::Strategy> strategy) {
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
  if (leaves.empty()) return false;
  unlink(ended);
  known_.emplace_back(strategy);
  strategies_.push_back(std::move(strategy));
  leaves_.push_back(std::move(leaves));
  followed_ = parameters();
  return true;
}

at::Tensor OptimizerCore::step(const Closure& closure) {
  const comm::UserCall call("step() of an optimizer");
  require_alive();
  check_own_step();
  if (!gradients_->sync_gradients()) return {};
  follow_groups();
  if (scaler_ != nullptr && closure) {
    throw UnsupportedError(
        "optimizer.step was given a closure under a gradient scaler (mixed precision fp16): each "
        "call of the closure would need its own scale. Use bf16, or an optimizer without a "
        "closure.");
  }
  skipped_.reset();
  at::Tensor result;
  const MemoryKindScope kind(MemoryKind::optimizer_state);
  const intercept::WithoutPolicies without_policies;
  if (closure) {
    in_closure_ = true;
    try {
      result = optimizer_->step([&] {
        const MemoryKindScope its_own(MemoryKind::other);
        const intercept::ForwardScope forward;
        at::Tensor loss = closure();
        ready_gradients();
        return loss;
      });
    } catch (...) {
      in_closure_ = false;
      throw;
    }
    in_closure_ = false;
  } else {
    ready_gradients();
    result = scaler_ != nullptr ? step_scaled() : optimizer_->step();
  }
  ++steps_;
  used_up_ = gradients_->micro_batch();
  stepped_at_ = gradients_->backwards();
  partial_ = false;
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
  const void* key = this;
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
  const comm::UserCall call("unscale_gradients()");
  if (scaler_ != nullptr && !scaler_->unscaled(this)) scaler_->unscale_(this, parameters());
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
  require_alive();
  check_own_step();
  if (!gradients_->sync_gradients()) {
    // zero_grad(); backward(); step(): what the last window's step used is still there when the
    // next window begins.
    const bool first_since = gradients_->micro_batch() == used_up_ + 1;
    if (stepped_at_ == gradients_->backwards() && first_since) clear_gradients(set_to_none);
    return;
  }
  // After the window's last backward, nobody clears but to drop what is there.
  if (partial_ || gradients_->micro_batch_has_backward() ||
      !gradients_->has_earlier_micro_batches(used_up_))
    return clear_gradients(set_to_none);
  if (in_closure_) {
    throw StateError(
        "zero_grad() was called inside the closure of step() while gradients of earlier "
        "micro-batches of the accumulation window wait for that step. A closure runs the whole "
        "step: use it without accumulation.");
  }
  log::warning_once(
      "zero_grad() was called in the last micro-batch of an accumulation window, before "
      "backward(). The gradients of the window's earlier micro-batches are kept for that step. To "
      "leave them "
      "out, call discard_gradients() on the prepared optimizer.");
}

void OptimizerCore::discard_gradients() {
  require_alive();
  check_own_step();
  clear_gradients(/*set_to_none=*/true);
}

void OptimizerCore::note_own_step() { own_step_->note(optimizer()); }

void OptimizerCore::check_own_step() {
  if (!own_step_->happened(optimizer())) return;
  throw StateError(
      "The optimizer's own step() was called inside an accumulation window, on gradients of some "
      "micro-batches that are not averaged over the processes. prepare() returned the optimizer "
      "to step and to clear: call step() and zero_grad() of that, as in `auto [model, optimizer] "
      "= accelerator.prepare(net, adam)`, where adam.step() is not to be called any more.");
}

void OptimizerCore::clear_gradients(bool set_to_none) {
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
  if (scaler_ != nullptr) scaler_->forget(this);
  used_up_ = gradients_->micro_batch();
  stepped_at_.reset();
  partial_ = false;
  gradients_->end_window();
}

bool OptimizerCore::step_was_skipped() const {
  return skipped_.defined() && skipped_.item<float>() > 0.0F;
}

std::vector<at::Tensor> OptimizerCore::parameters() const {
  std::vector<at::Tensor> found;
  for_each_parameter(optimizer(), [&](const at::Tensor& parameter) { found.push_back(parameter); });
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
  for (const auto& group : optimizer().param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

void OptimizerCore::set_learning_rates(const std::vector<double>& rates) {
  auto& groups = optimizer().param_groups();
  if (rates.size() != groups.size()) {
    throw ConfigError(text::concat(rates.size(),
                                   " learning rates were given for an optimizer with ",
                                   groups.size(), " parameter groups."));
  }
  for (std::size_t i = 0; i < groups.size(); ++i) groups[i].options().set_lr(rates[i]);
}

}  // namespace accelerate
