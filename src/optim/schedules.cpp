#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/optim/schedules.hpp>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace accelerate::optim {
namespace {

std::vector<double> rates_of(torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

// The part of the rate while it rises, or nothing after that.
std::optional<double> warmup(std::int64_t step, std::int64_t warmup_steps) {
  if (step >= warmup_steps) return std::nullopt;
  return static_cast<double>(step) / static_cast<double>(std::max<std::int64_t>(1, warmup_steps));
}

double progress(std::int64_t step, std::int64_t warmup_steps, std::int64_t training_steps) {
  return static_cast<double>(step - warmup_steps) /
         static_cast<double>(std::max<std::int64_t>(1, training_steps - warmup_steps));
}

void check_lengths(std::int64_t warmup_steps, std::int64_t training_steps) {
  if (warmup_steps < 0 || training_steps < 0) {
    throw ConfigError(text::concat("A schedule was to warm up for ", warmup_steps, " steps of ",
                                   training_steps, "; neither can be negative."));
  }
}

template <class Options>
bool set_beta1(torch::optim::OptimizerOptions& options, double value) {
  auto* found = dynamic_cast<Options*>(&options);
  if (found != nullptr) found->betas({value, std::get<1>(found->betas())});
  return found != nullptr;
}

template <class Options>
bool set_plain_momentum(torch::optim::OptimizerOptions& options, double value) {
  auto* found = dynamic_cast<Options*>(&options);
  if (found != nullptr) found->momentum(value);
  return found != nullptr;
}

// LibTorch has no common way to a momentum as it has to a learning rate.
bool set_momentum(torch::optim::OptimizerOptions& options, double value) {
  return set_beta1<torch::optim::AdamWOptions>(options, value) ||
         set_beta1<torch::optim::AdamOptions>(options, value) ||
         set_beta1<FusedAdamWOptions>(options, value) ||
         set_plain_momentum<torch::optim::SGDOptions>(options, value) ||
         set_plain_momentum<FusedSGDOptions>(options, value) ||
         set_plain_momentum<torch::optim::RMSpropOptions>(options, value);
}

}  // namespace

Scheduler::Scheduler(torch::optim::Optimizer& optimizer)
    : optimizer_(&optimizer), base_rates_(rates_of(optimizer)), last_rates_(base_rates_) {}

void Scheduler::step() {
  ++last_step_;
  apply();
}

void Scheduler::apply() {
  auto& groups = optimizer_->param_groups();
  if (groups.size() != base_rates_.size()) {
    throw StateError(text::concat("A schedule was made for ", base_rates_.size(),
                                  " parameter groups, and its optimizer now has ", groups.size(),
                                  ". Make the schedule when all groups are there."));
  }
  apply_others();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    last_rates_[i] = rate(i, last_step_);
    groups[i].options().set_lr(last_rates_[i]);
  }
}

Json Scheduler::state_dict() const {
  return {{"last_step", last_step_}, {"base_lrs", base_rates_}, {"last_lrs", last_rates_}};
}

void Scheduler::load_state_dict(const Json& state) {
  std::int64_t step = 0;
  std::vector<double> rates;
  try {
    step = state.at("last_step").get<std::int64_t>();
    rates = state.at("base_lrs").get<std::vector<double>>();
  } catch (const Json::exception&) {
    std::throw_with_nested(CheckpointError("This is not the state of a schedule.", ""));
  }
  if (step < 0 || rates.size() != base_rates_.size()) {
    throw CheckpointError(
        text::concat("The state of a schedule is at step ", step, " with ", rates.size(),
                     " parameter groups, and the schedule has ", base_rates_.size(), " groups."),
        "");
  }
  last_step_ = step;
  base_rates_ = std::move(rates);
  apply();
}

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, Factor factor)
    : LambdaLR(optimizer, std::vector<Factor>(optimizer.param_groups().size(), std::move(factor))) {
}

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, std::vector<Factor> factors)
    : Scheduler(optimizer), factors_(std::move(factors)) {
  if (factors_.size() != base_rates().size()) {
    throw ConfigError(text::concat("LambdaLR was given ", factors_.size(), " functions for ",
                                   base_rates().size(), " parameter groups."));
  }
  for (const Factor& factor : factors_) {
    if (!factor) throw ConfigError("LambdaLR was given an empty function.");
  }
  apply();
}

double LambdaLR::rate(std::size_t group, std::int64_t step) const {
  return base_rates()[group] * factors_[group](step);
}

LambdaLR constant_schedule(torch::optim::Optimizer& optimizer) {
  return {optimizer, [](std::int64_t) { return 1.0; }};
}

LambdaLR constant_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                       std::int64_t warmup_steps) {
  check_lengths(warmup_steps, 0);
  return {optimizer, [=](std::int64_t step) { return warmup(step, warmup_steps).value_or(1.0); }};
}

LambdaLR linear_schedule_with_warmup(torch::optim::Optimizer& optimizer, std::int64_t warmup_steps,
                                     std::int64_t training_steps) {
  check_lengths(warmup_steps, training_steps);
  return {optimizer, [=](std::int64_t step) {
            if (const auto rising = warmup(step, warmup_steps)) return *rising;
            return std::max(0.0, static_cast<double>(training_steps - step) /
                                     static_cast<double>(
                                         std::max<std::int64_t>(1, training_steps - warmup_steps)));
          }};
}

LambdaLR cosine_schedule_with_warmup(torch::optim::Optimizer& optimizer, std::int64_t warmup_steps,
                                     std::int64_t training_steps, double cycles) {
  check_lengths(warmup_steps, training_steps);
  return {optimizer, [=](std::int64_t step) {
            if (const auto rising = warmup(step, warmup_steps)) return *rising;
            const double part = progress(step, warmup_steps, training_steps);
            return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * cycles * 2.0 * part)));
          }};
}

LambdaLR cosine_with_hard_restarts_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                                        std::int64_t warmup_steps,
                                                        std::int64_t training_steps,
                                                        double cycles) {
  check_lengths(warmup_steps, training_steps);
  return {optimizer, [=](std::int64_t step) {
            if (const auto rising = warmup(step, warmup_steps)) return *rising;
            const double part = progress(step, warmup_steps, training_steps);
            if (part >= 1.0) return 0.0;
            return std::max(
                0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * std::fmod(cycles * part, 1.0))));
          }};
}

OneCycleLR::OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options)
    : Scheduler(optimizer), options_(options) {
  const double total = static_cast<double>(options_.total_steps());
  const double rising = options_.pct_start();
  const std::size_t groups = base_rates().size();
  if (options_.total_steps() < 1) {
    throw ConfigError(text::concat("OneCycleLR was given ", options_.total_steps(),
                                   " total steps; the least is 1."));
  }
  if (!(rising >= 0.0 && rising <= 1.0)) {
    throw ConfigError(
        text::concat("OneCycleLR was given pct_start ", rising, "; it must lie between 0 and 1."));
  }
  if (!(options_.div_factor() > 0.0 && options_.final_div_factor() > 0.0)) {
    throw ConfigError("OneCycleLR was given a div_factor or final_div_factor that is not above 0.");
  }
  if (options_.max_lr().size() == 1)
    options_.max_lr(std::vector<double>(groups, options_.max_lr().front()));
  if (options_.max_lr().size() != groups) {
    throw ConfigError(text::concat("OneCycleLR was given ", options_.max_lr().size(),
                                   " peak rates for ", groups, " parameter groups."));
  }

  const double first = 1.0 / options_.div_factor();
  const double last = first / options_.final_div_factor();
  const double low = options_.base_momentum();
  const double high = options_.max_momentum();
  phases_.push_back({rising * total - 1.0, first, 1.0, high, low});
  if (options_.three_phase()) {
    phases_.push_back({2.0 * rising * total - 2.0, 1.0, first, low, high});
    phases_.push_back({total - 1.0, first, last, high, high});
  } else {
    phases_.push_back({total - 1.0, 1.0, last, low, high});
  }
  apply();
}

double OneCycleLR::anneal(double start, double end, double part) const {
  if (options_.anneal_strategy() == OneCycleLROptions::Anneal::linear)
    return (end - start) * part + start;
  return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * part) + 1.0);
}

std::pair<const OneCycleLR::Phase*, double> OneCycleLR::phase_of(std::int64_t step) const {
  const double at = static_cast<double>(std::min(step, options_.total_steps() - 1));
  double start = 0.0;
  for (const Phase& phase : phases_) {
    if (at <= phase.end_step || &phase == &phases_.back()) {
      // A phase of no length (one step in all) is at its end.
      return {&phase, phase.end_step > start ? (at - start) / (phase.end_step - start) : 1.0};
    }
    start = phase.end_step;
  }
  return {&phases_.back(), 1.0};
}

double OneCycleLR::rate(std::size_t group, std::int64_t step) const {
  const auto [phase, part] = phase_of(step);
  const double top = options_.max_lr()[group];
  return anneal(top * phase->start_rate, top * phase->end_rate, part);
}

void OneCycleLR::apply_others() {
  if (!options_.cycle_momentum()) return;
  const auto [phase, part] = phase_of(last_step());
  const double momentum = anneal(phase->start_momentum, phase->end_momentum, part);
  for (auto& group : optimizer().param_groups()) {
    if (!set_momentum(group.options(), momentum)) {
      throw UnsupportedError(
          "OneCycleLR was to cycle the momentum of an optimizer whose momentum it does not know: "
          "it knows SGD, RMSprop, Adam, AdamW, FusedSGD and FusedAdamW. Set "
          "cycle_momentum(false).");
    }
  }
}

}  // namespace accelerate::optim
