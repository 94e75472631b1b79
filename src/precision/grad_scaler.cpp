#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/precision/grad_scaler.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>

#include <nlohmann/json.hpp>

#include <cmath>
#include <utility>

namespace accelerate {
namespace {

void check(const GradScalerOptions& options) {
  const auto refuse = [](const char* what, double value, const char* expected) {
    throw ConfigError(text::concat("The gradient scaler was given ", what, " ", value,
                                   "; it must be ", expected, "."));
  };
  if (!(options.init_scale() > 0.0) || !std::isfinite(options.init_scale())) {
    refuse("init_scale", options.init_scale(), "a positive number");
  }
  if (!(options.growth_factor() > 1.0)) refuse("growth_factor", options.growth_factor(), "above 1");
  if (!(options.backoff_factor() > 0.0 && options.backoff_factor() < 1.0)) {
    refuse("backoff_factor", options.backoff_factor(), "between 0 and 1");
  }
  if (options.growth_interval() < 1) {
    refuse("growth_interval", static_cast<double>(options.growth_interval()), "at least 1");
  }
  if (options.hysteresis() < 1) {
    refuse("hysteresis", static_cast<double>(options.hysteresis()), "at least 1");
  }
  if (!(options.min_scale() >= 0.0 && std::isfinite(options.min_scale()))) {
    refuse("min_scale", options.min_scale(), "a number of at least 0");
  }
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options, comm::Group group)
    : options_(options),
      group_(std::move(group)),
      start_scale_(options.init_scale()),
      start_hysteresis_(options.hysteresis()) {
  if (enabled()) check(options_);
}

void GradScaler::start(const at::Device& device) {
  scale_ = at::full({}, start_scale_, at::TensorOptions().dtype(at::kFloat).device(device));
  growth_tracker_ =
      at::full({}, start_tracker_, at::TensorOptions().dtype(at::kInt).device(device));
  hysteresis_left_ =
      at::full({}, start_hysteresis_, at::TensorOptions().dtype(at::kInt).device(device));
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!enabled()) return loss;
  apply_pending_update();
  for (const auto& [key, state] : optimizers_) {
    if (state.stage == Stage::unscaled && state.has_gradients) {
      throw PrecisionError(
          "A loss is to be scaled while an optimizer has gradients that were unscaled (by "
          "clipping, for example) and not stepped with. Clip in the last micro-batch of a window "
          "only, then step the optimizer or clear its gradients with its zero_grad().");
    }
  }
  if (!scale_.defined()) start(loss.device());
  return loss.mul(scale_.to(loss.device(), /*non_blocking=*/true));
}

void GradScaler::unscale_(const void* optimizer, const std::vector<at::Tensor>& parameters) {
  if (!enabled()) return;
  if (!scale_.defined()) {
    throw PrecisionError(
        "Gradients were to be unscaled, and no loss was scaled before. Run the backward pass with "
        "Accelerator::backward(loss), not loss.backward().");
  }
  OptimizerState& state = optimizers_[optimizer];
  if (state.stage == Stage::unscaled) {
    throw PrecisionError(
        "The gradients of this optimizer were already unscaled since the last update. Unscale once "
        "for each step.");
  }
  if (state.stage == Stage::stepped) {
    throw PrecisionError(
        "The gradients of this optimizer were to be unscaled after its step. Unscale before it "
        "steps.");
  }

  const at::NoGradGuard no_grad;
  // One kernel for all gradients of one device and dtype.
  std::map<std::pair<at::Device, at::ScalarType>, std::vector<at::Tensor>,
           decltype([](const auto& a, const auto& b) {
             return std::tuple(a.first.type(), a.first.index(), a.second) <
                    std::tuple(b.first.type(), b.first.index(), b.second);
           })>
      groups;
  for (const at::Tensor& parameter : parameters) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    if (gradient.scalar_type() == at::kHalf && !options_.allow_fp16_gradients()) {
      throw PrecisionError(
          "A gradient is fp16. Keep parameters in fp32: mixed precision casts them where it helps, "
          "and fp16 gradients would underflow when unscaled.");
    }
    at::Tensor values = gradient;
    if (gradient.is_sparse()) {
      // Duplicate entries must be added before the check: their sum may overflow.
      if (gradient.scalar_type() == at::kHalf) gradient = gradient.coalesce();
      values = gradient._values();
    }
    groups[{values.device(), values.scalar_type()}].push_back(values);
  }

  // In double, so that the reciprocal is rounded once.
  const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  const at::Device home = scale_.device();
  at::Tensor found = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(home));
  for (auto& [key, gradients] : groups) {
    if (key.first == home) {
      at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
    } else {
      at::Tensor there = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(key.first));
      at::_amp_foreach_non_finite_check_and_unscale_(gradients, there,
                                                     inverse.to(key.first, /*non_blocking=*/true));
      found = at::maximum(found, there.to(home, /*non_blocking=*/true));
    }
  }
  // A rank may own no gradient at all (a sharded model) and takes part all the same.
  group_.all_reduce(found, comm::ReduceOp::max).wait();
  state.has_gradients = !groups.empty();
  state.found_inf = std::move(found);
  state.stage = Stage::unscaled;
}

void GradScaler::forget(const void* optimizer) {
  const auto found = optimizers_.find(optimizer);
  if (found != optimizers_.end() && found->second.stage == Stage::unscaled)
    optimizers_.erase(found);
}

bool GradScaler::unscaled(const void* optimizer) const {
  const auto found = optimizers_.find(optimizer);
  return found != optimizers_.end() && found->second.stage != Stage::ready;
}

at::Tensor GradScaler::found_inf(const void* optimizer) const {
  const auto found = optimizers_.find(optimizer);
  if (found == optimizers_.end() || !found->second.found_inf.defined()) {
    throw PrecisionError(
        "Nobody looked for overflowed gradients of this optimizer since the last update. Unscale "
        "them first.");
  }
  return found->second.found_inf;
}

void GradScaler::mark_stepped(const void* optimizer) {
  if (!enabled()) return;
  OptimizerState& state = optimizers_[optimizer];
  if (state.stage == Stage::stepped) {
    throw PrecisionError(
        "The optimizer stepped twice since the last update of the gradient scaler.");
  }
  if (state.stage == Stage::ready)
    throw PrecisionError("The optimizer is to step with gradients that were not unscaled.");
  if (!state.has_gradients && group_.size() == 1) {
    throw PrecisionError(
        "The optimizer is to step, and none of its parameters has a gradient. Run "
        "Accelerator::backward on a loss that depends on them first.");
  }
  state.stage = Stage::stepped;
}

bool GradScaler::step(const void* optimizer, const std::vector<at::Tensor>& parameters,
                      const std::function<void()>& step) {
  if (!enabled()) {
    step();
    return true;
  }
  if (!unscaled(optimizer)) unscale_(optimizer, parameters);
  mark_stepped(optimizer);
  if (found_inf(optimizer).item<float>() > 0.0F) return false;
  step();
  return true;
}

void GradScaler::update() {
  if (!enabled()) return;
  update_pending_ = false;
  at::Tensor found;
  for (const auto& [key, state] : optimizers_) {
    if (!state.found_inf.defined()) continue;
    found = found.defined() ? found.add(state.found_inf) : state.found_inf;
  }
  if (!found.defined()) {
    throw PrecisionError(
        "The gradient scaler was to adapt its scale, and nobody looked for overflowed gradients "
        "since the last update. Step an optimizer first.");
  }
  const at::NoGradGuard no_grad;
  const bool has_hysteresis = options_.hysteresis() > 1;
  at::Tensor overflowed;
  if (has_hysteresis) {
    overflowed = found.gt(0).to(hysteresis_left_.device());
    const at::Tensor lets_pass = overflowed.logical_and(hysteresis_left_.gt(1));
    hysteresis_left_.sub_(lets_pass.to(at::kInt));
    // To the update it is a step that neither overflowed nor counts as good.
    found = found.masked_fill(lets_pass.to(found.device()), 0.0);
    growth_tracker_.masked_fill_(lets_pass, -1);
  }
  at::_amp_update_scale_(scale_, growth_tracker_, found, options_.growth_factor(),
                         options_.backoff_factor(), options_.growth_interval());
  if (has_hysteresis) {
    // A good step leaves the tracker at zero when the scale grew.
    at::Tensor restored = overflowed.logical_not();
    if (!options_.consecutive_hysteresis()) restored = restored.logical_and(growth_tracker_.eq(0));
    hysteresis_left_.masked_fill_(restored, options_.hysteresis());
  }
  if (options_.min_scale() > 0.0) scale_.clamp_min_(options_.min_scale());
  optimizers_.clear();
}

void GradScaler::update(double new_scale) {
  if (!enabled()) return;
  if (!(new_scale > 0.0) || !std::isfinite(new_scale)) {
    throw ConfigError(text::concat("The gradient scaler was given the scale ", new_scale,
                                   "; it must be a positive number."));
  }
  update_pending_ = false;
  start_scale_ = new_scale;
  if (scale_.defined()) scale_.fill_(new_scale);
  optimizers_.clear();
}

void GradScaler::update_later() { update_pending_ = enabled(); }

void GradScaler::apply_pending_update() {
  if (update_pending_) update();
}

double GradScaler::get_scale() {
  if (!enabled()) return 1.0;
  apply_pending_update();
  return scale_.defined() ? scale_.item<double>() : start_scale_;
}

std::int64_t GradScaler::growth_tracker() {
  if (!enabled()) return 0;
  apply_pending_update();
  return growth_tracker_.defined() ? growth_tracker_.item<std::int64_t>() : start_tracker_;
}

Json GradScaler::state_dict() {
  if (!enabled()) return Json::object();
  Json state = {{"scale", get_scale()},
                {"growth_factor", options_.growth_factor()},
                {"backoff_factor", options_.backoff_factor()},
                {"growth_interval", options_.growth_interval()},
                {"_growth_tracker", growth_tracker()}};
  if (options_.hysteresis() > 1) {
    state["_hysteresis_left"] =
        hysteresis_left_.defined() ? hysteresis_left_.item<std::int64_t>() : start_hysteresis_;
  }
  return state;
}

GradScaler::Loaded GradScaler::read_state(const Json& state) const {
  Loaded loaded{options_};
  try {
    loaded.options.init_scale(state.at("scale").get<double>())
        .growth_factor(state.at("growth_factor").get<double>())
        .backoff_factor(state.at("backoff_factor").get<double>())
        .growth_interval(state.at("growth_interval").get<std::int64_t>());
    loaded.tracker = state.at("_growth_tracker").get<std::int64_t>();
    loaded.hysteresis = state.value("_hysteresis_left", options_.hysteresis());
    check(loaded.options);
  } catch (const std::exception&) {
    std::throw_with_nested(
        CheckpointError("This is not the state of a gradient scaler. If it is empty, it was saved "
                        "with the scaler off, that is without fp16.",
                        ""));
  }
  return loaded;
}

void GradScaler::check_state_dict(const Json& state) const {
  if (enabled()) static_cast<void>(read_state(state));
}

void GradScaler::load_state_dict(const Json& state) {
  if (!enabled()) return;
  const Loaded loaded = read_state(state);
  options_ = loaded.options;
  start_scale_ = loaded.options.init_scale();
  start_tracker_ = loaded.tracker;
  start_hysteresis_ = loaded.hysteresis;
  update_pending_ = false;
  optimizers_.clear();
  if (scale_.defined()) start(scale_.device());
}

}  // namespace accelerate
