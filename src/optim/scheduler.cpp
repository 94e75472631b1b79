#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/optim/scheduler.hpp>

#include <torch/optim/schedulers/lr_scheduler.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <numeric>

namespace accelerate {
namespace {

// LibTorch keeps a scheduler's count and rates for its subclasses; naming them through one is the
// way in that the language has.
struct Access : torch::optim::LRScheduler {
  static unsigned& step_count(torch::optim::LRScheduler& scheduler) {
    return scheduler.*(&Access::step_count_);
  }
  static unsigned step_count(const torch::optim::LRScheduler& scheduler) {
    return scheduler.*(&Access::step_count_);
  }
  static std::vector<double> rates(const torch::optim::LRScheduler& scheduler) {
    return (scheduler.*(&Access::get_current_lrs))();
  }
};

// What they keep for themselves alone can be named where a template is instantiated explicitly.
template <auto kMember, class Tag>
struct Opened {
  friend constexpr typename Tag::Member member(Tag) { return kMember; }
};
struct SetRates {
  using Member = void (torch::optim::LRScheduler::*)(const std::vector<double>&);
  friend constexpr Member member(SetRates);
};
template struct Opened<&torch::optim::LRScheduler::set_optimizer_lrs, SetRates>;

using Plateau = torch::optim::ReduceLROnPlateauScheduler;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wnon-template-friend"  // one function for each instance is meant
#endif
template <class T, int kIndex>
struct PlateauMember {
  using Member = T Plateau::*;
  friend constexpr Member member(PlateauMember);
};
using Best = PlateauMember<float, 0>;
using LastEpoch = PlateauMember<int, 1>;
using BadEpochs = PlateauMember<int, 2>;
using Cooldown = PlateauMember<int, 3>;
template struct Opened<&Plateau::best, Best>;
template struct Opened<&Plateau::last_epoch, LastEpoch>;
template struct Opened<&Plateau::num_bad_epochs, BadEpochs>;
template struct Opened<&Plateau::cooldown_counter, Cooldown>;
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

}  // namespace

SchedulerCore::SchedulerCore(std::shared_ptr<GradientState> gradients,
                             std::vector<std::shared_ptr<OptimizerCore>> optimizers,
                             const SchedulerOptions& options)
    : gradients_(std::move(gradients)), optimizers_(std::move(optimizers)), options_(options) {
  if (options_.num_processes() < 1) {
    throw ConfigError(text::concat("A scheduler was to follow ", options_.num_processes(),
                                   " processes; the least is 1."));
  }
  const bool per_process =
      options_.step_with_optimizer() && options_.per_process_steps() && !options_.split_batches();
  if (per_process) steps_ = options_.num_processes();
}

bool SchedulerCore::is_due() const {
  if (!options_.step_with_optimizer()) return true;
  return gradients_->sync_gradients() &&
         std::none_of(optimizers_.begin(), optimizers_.end(),
                      [](const auto& optimizer) { return optimizer->step_was_skipped(); });
}

std::int64_t SchedulerCore::take_steps() {
  if (!is_due()) return 0;
  const bool counts_batches = options_.step_with_optimizer() && options_.per_process_steps() &&
                              gradients_->options().adjust_scheduler();
  carry_ += (counts_batches ? gradients_->micro_batches() : 1) * steps_;
  const std::int64_t due = carry_ / of_;
  carry_ %= of_;
  return due;
}

std::int64_t SchedulerCore::samples(std::int64_t batch) const {
  return gradients_->options().adjust_scheduler() ? batch : batch * gradients_->num_steps();
}

Json SchedulerCore::pace(std::int64_t batch) const {
  if (!options_.step_with_optimizer() || !options_.per_process_steps()) return nullptr;
  return {{"steps", steps_}, {"of", of_}, {"carry", carry_}, {"samples", samples(batch)}};
}

void SchedulerCore::continue_pace(const Json& pace, std::int64_t batch) {
  // Counted in optimizer steps, or by the program: the same on any number of processes.
  if (pace.is_null() || !options_.step_with_optimizer() || !options_.per_process_steps()) return;
  std::int64_t steps = 0, of = 0, carry = 0, before = 0;
  try {
    steps = pace.at("steps").get<std::int64_t>();
    of = pace.at("of").get<std::int64_t>();
    carry = pace.at("carry").get<std::int64_t>();
    before = pace.at("samples").get<std::int64_t>();
  } catch (const Json::exception&) {
    std::throw_with_nested(CheckpointError("This is not the pace of a schedule.", ""));
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  if (steps < 0 || steps > kMost || of < 1 || of > kMost || carry < 0 || carry >= of ||
      before < 0 || before > kMost) {
    throw CheckpointError("This is not the pace of a schedule.", "");
  }
  const std::int64_t now = samples(batch);
  if (now > 0 && now <= kMost && before > 0) {
    const std::int64_t common = std::gcd(now, before);
    steps *= now / common;
    of *= before / common;
    carry *= before / common;
  }
  const std::int64_t common = std::gcd(std::gcd(steps, of), carry);
  steps_ = steps / common;
  of_ = of / common;
  carry_ = carry / common;
}

Json scheduler_state(const torch::optim::LRScheduler& scheduler) {
  return {{"step_count", Access::step_count(scheduler)},
          {"learning_rates", Access::rates(scheduler)}};
}

void load_scheduler_state(torch::optim::LRScheduler& scheduler, const Json& state) {
  unsigned count = 0;
  std::vector<double> rates;
  try {
    count = state.at("step_count").get<unsigned>();
    rates = state.at("learning_rates").get<std::vector<double>>();
  } catch (const Json::exception&) {
    std::throw_with_nested(CheckpointError("This is not the state of a LibTorch scheduler.", ""));
  }
  const std::size_t groups = Access::rates(scheduler).size();
  if (rates.size() != groups) {
    throw CheckpointError(
        text::concat("The state of a LibTorch scheduler has ", rates.size(),
                     " learning rates, and its optimizer has ", groups, " parameter groups."),
        "");
  }
  (scheduler.*member(SetRates()))(rates);
  Access::step_count(scheduler) = count;
}

Json scheduler_state(const Plateau& scheduler) {
  return {{"best", scheduler.*member(Best())},
          {"last_epoch", scheduler.*member(LastEpoch())},
          {"num_bad_epochs", scheduler.*member(BadEpochs())},
          {"cooldown_counter", scheduler.*member(Cooldown())}};
}

void load_scheduler_state(Plateau& scheduler, const Json& state) {
  float best = 0;
  int last_epoch = 0, bad_epochs = 0, cooldown = 0;
  try {
    // JSON has no infinity, where the best metric starts.
    const Json& saved = state.at("best");
    best = saved.is_null() ? scheduler.*member(Best()) : saved.get<float>();
    last_epoch = state.at("last_epoch").get<int>();
    bad_epochs = state.at("num_bad_epochs").get<int>();
    cooldown = state.at("cooldown_counter").get<int>();
  } catch (const Json::exception&) {
    std::throw_with_nested(CheckpointError("This is not the state of a LibTorch scheduler.", ""));
  }
  scheduler.*member(Best()) = best;
  scheduler.*member(LastEpoch()) = last_epoch;
  scheduler.*member(BadEpochs()) = bad_epochs;
  scheduler.*member(Cooldown()) = cooldown;
}

}  // namespace accelerate
