#pragma once

#include <accelerate/base/json.hpp>

#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace torch::optim {
class Optimizer;
}

/// Learning-rate schedules that LibTorch lacks, for any optimizer. Each is a function of the number
/// of steps taken, and gives the values of Python's torch.optim.lr_scheduler or of transformers'
/// `get_..._schedule...` functions. The optimizer must outlive its schedule.
namespace accelerate::optim {

/// Base of the schedules: counts steps and sets every parameter group's learning rate. A schedule
/// sets the rates of step 0 when it is made.
class Scheduler {
 public:
  virtual ~Scheduler() = default;
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;
  Scheduler(Scheduler&&) noexcept = default;
  Scheduler& operator=(Scheduler&&) noexcept = default;

  /// Goes to the next step and sets its rates.
  void step();
  /// Steps taken.
  std::int64_t last_step() const noexcept { return last_step_; }
  /// The rates now set, one for each parameter group.
  const std::vector<double>& get_last_lr() const noexcept { return last_rates_; }
  /// True when the schedule has a last step and is there.
  virtual bool at_end() const noexcept { return false; }
  torch::optim::Optimizer& optimizer() const noexcept { return *optimizer_; }

  /// What it takes to go on from here: the step and the rates the groups started from. Settings and
  /// functions are not in it; make the schedule as before, then load.
  virtual Json state_dict() const;
  /// Restores the step and sets its rates. Throws CheckpointError when `state` is not a schedule's,
  /// or one of another number of parameter groups.
  virtual void load_state_dict(const Json& state);

 protected:
  /// The groups' rates as they are become base_rates().
  explicit Scheduler(torch::optim::Optimizer& optimizer);
  /// Sets the rates of the present step. Constructors of subclasses end with it.
  void apply();
  const std::vector<double>& base_rates() const noexcept { return base_rates_; }
  void set_base_rates(std::vector<double> rates) { base_rates_ = std::move(rates); }

  /// The rate of parameter group `group` at step `step`.
  virtual double rate(std::size_t group, std::int64_t step) const = 0;
  /// Sets what else the schedule sets, before the rates.
  virtual void apply_others() {}

 private:
  torch::optim::Optimizer* optimizer_;
  std::vector<double> base_rates_;
  std::vector<double> last_rates_;
  std::int64_t last_step_ = 0;
};

/// The rates the groups started from, times a function of the step
/// (torch.optim.lr_scheduler.LambdaLR).
class LambdaLR : public Scheduler {
 public:
  using Factor = std::function<double(std::int64_t step)>;
  /// Throws ConfigError when a function is empty.
  LambdaLR(torch::optim::Optimizer& optimizer, Factor factor);
  /// One function for each parameter group. Throws ConfigError for another number of them.
  LambdaLR(torch::optim::Optimizer& optimizer, std::vector<Factor> factors);

 protected:
  double rate(std::size_t group, std::int64_t step) const override;

 private:
  std::vector<Factor> factors_;
};

/// The rates stay.
LambdaLR constant_schedule(torch::optim::Optimizer& optimizer);
/// Up from 0 in `warmup_steps`, then the rates stay.
LambdaLR constant_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                       std::int64_t warmup_steps);
/// Up from 0 in `warmup_steps`, then in a line down to 0 at `training_steps`.
LambdaLR linear_schedule_with_warmup(torch::optim::Optimizer& optimizer, std::int64_t warmup_steps,
                                     std::int64_t training_steps);
/// Up from 0 in `warmup_steps`, then along `cycles` waves of a cosine until `training_steps`; half
/// a wave goes down to 0.
LambdaLR cosine_schedule_with_warmup(torch::optim::Optimizer& optimizer, std::int64_t warmup_steps,
                                     std::int64_t training_steps, double cycles = 0.5);
/// Up from 0 in `warmup_steps`, then `cycles` times along half a cosine from the top down to 0.
LambdaLR cosine_with_hard_restarts_schedule_with_warmup(torch::optim::Optimizer& optimizer,
                                                        std::int64_t warmup_steps,
                                                        std::int64_t training_steps,
                                                        double cycles = 1.0);

/// Settings of OneCycleLR.
class OneCycleLROptions {
 public:
  enum class Anneal { cos, linear };
  /// One peak rate for all parameter groups.
  OneCycleLROptions(double max_lr, std::int64_t total_steps)
      : max_lr_({max_lr}), total_steps_(total_steps) {}
  /// One for each.
  OneCycleLROptions(std::vector<double> max_lr, std::int64_t total_steps)
      : max_lr_(std::move(max_lr)), total_steps_(total_steps) {}

  /// The highest rates.
  TORCH_ARG(std::vector<double>, max_lr);
  /// Steps in the cycle. The last rate is that of step total_steps - 1.
  TORCH_ARG(std::int64_t, total_steps);
  /// The part of the cycle in which the rate rises, from 0 to 1. Default: 0.3.
  TORCH_ARG(double, pct_start) = 0.3;
  /// The shape of rise and fall. Default: cos.
  TORCH_ARG(Anneal, anneal_strategy) = Anneal::cos;
  /// Momentum (beta1 of the Adam family) goes the other way. Default: true.
  TORCH_ARG(bool, cycle_momentum) = true;
  /// The momentum at the highest rate. Default: 0.85.
  TORCH_ARG(double, base_momentum) = 0.85;
  /// The momentum at the lowest rates. Default: 0.95.
  TORCH_ARG(double, max_momentum) = 0.95;
  /// The first rate is max_lr divided by this. Default: 25.
  TORCH_ARG(double, div_factor) = 25.0;
  /// The last rate is the first divided by this. Default: 10000.
  TORCH_ARG(double, final_div_factor) = 1e4;
  /// Down to the first rate as it came up, then down to the last one, instead of straight down.
  /// Default: false.
  TORCH_ARG(bool, three_phase) = false;
};

/// The 1cycle policy (Smith & Topin, "Super-Convergence", 2018) as in torch.optim.lr_scheduler: the
/// rate rises to max_lr, then falls far below where it began. After the last step the rates stay,
/// where Python's turn up again and then raise.
class OneCycleLR : public Scheduler {
 public:
  /// Throws ConfigError for settings out of range, and UnsupportedError when momentum is to be
  /// cycled and the optimizer has none (it is not SGD, RMSprop, of the Adam family or a fused one).
  OneCycleLR(torch::optim::Optimizer& optimizer, const OneCycleLROptions& options);

  bool at_end() const noexcept override { return last_step() >= options_.total_steps() - 1; }

 protected:
  double rate(std::size_t group, std::int64_t step) const override;
  void apply_others() override;

 private:
  struct Phase {
    double end_step;
    double start_rate, end_rate;  // as parts of max_lr
    double start_momentum, end_momentum;
  };
  double anneal(double start, double end, double part) const;
  /// The phase of a step, and how far into it the step is.
  std::pair<const Phase*, double> phase_of(std::int64_t step) const;

  OneCycleLROptions options_;
  std::vector<Phase> phases_;
};

}  // namespace accelerate::optim
