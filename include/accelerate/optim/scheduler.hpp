#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/optim/optimizer.hpp>

#include <torch/arg.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace accelerate {

/// How a prepared scheduler follows its optimizer.
class SchedulerOptions {
  /// Off: `step` is the scheduler's own, whatever the optimizer does. Default: true.
  TORCH_ARG(bool, step_with_optimizer) = true;
  /// The loaders split batches over the processes, so that a step sees as many samples as it would
  /// in one process, and the scheduler advances by one. Default: false.
  TORCH_ARG(bool, split_batches) = false;
  /// As in the original, the schedule's length is counted in batches of one process' size, and it
  /// advances by as many as there are processes for each optimizer step. Off: it is counted in
  /// optimizer steps and advances by one for each, whatever the processes and the accumulation.
  /// Default: true.
  TORCH_ARG(bool, per_process_steps) = true;
  /// Processes whose batches make up a step. Default: 1.
  TORCH_ARG(std::int64_t, num_processes) = 1;
};

/// What a prepared scheduler does, whatever its type.
class SchedulerCore {
 public:
  /// `optimizers`: those the scheduler sets the learning rates of, or all there are if nobody can
  /// tell.
  SchedulerCore(std::shared_ptr<GradientState> gradients,
                std::vector<std::shared_ptr<OptimizerCore>> optimizers,
                const SchedulerOptions& options = {});

  /// Whether `step()` advances the scheduler now: not within an accumulation window, nor when an
  /// optimizer's last step was skipped.
  bool is_due() const;
  /// By how many steps it advances; a resumed schedule may advance by a fraction of a step, which
  /// is carried on.
  std::int64_t take_steps();
  const SchedulerOptions& options() const noexcept { return options_; }
  const std::vector<std::shared_ptr<OptimizerCore>>& optimizers() const noexcept {
    return optimizers_;
  }
  /// Keeps what the scheduler is owned by, if anything, alive as long as this.
  void keep(std::shared_ptr<const void> scheduler) { scheduler_ = std::move(scheduler); }

  /// How fast the schedule goes, for a checkpoint: its steps for each optimizer step, and how many
  /// samples that is. `batch`: samples of one step of the loader on all processes together; 0 when
  /// nobody knows.
  Json pace(std::int64_t batch) const;
  /// Has the schedule go on as fast as in the run that saved `pace`, per sample, or per optimizer
  /// step where the samples are not known, on however many processes. Throws CheckpointError when
  /// it is no pace.
  void continue_pace(const Json& pace, std::int64_t batch);

 private:
  std::int64_t samples(std::int64_t batch) const;

  std::shared_ptr<GradientState> gradients_;
  std::vector<std::shared_ptr<OptimizerCore>> optimizers_;
  SchedulerOptions options_;
  std::shared_ptr<const void> scheduler_;
  // steps_ / of_ steps of the schedule for each batch; carry_ / of_ of a step is left over.
  std::int64_t steps_ = 1, of_ = 1, carry_ = 0;
};

/// The state of a LibTorch scheduler: {"step_count", "learning_rates"}. The learning rates are
/// those of its optimizer's parameter groups, from which most of them compute the next ones.
Json scheduler_state(const torch::optim::LRScheduler& scheduler);
/// Gives the scheduler its count and its optimizer the learning rates. Throws CheckpointError when
/// `state` is something else or has other parameter groups.
void load_scheduler_state(torch::optim::LRScheduler& scheduler, const Json& state);
/// The same of the one that follows a metric: {"best", "last_epoch", "num_bad_epochs",
/// "cooldown_counter"}, as in Python.
Json scheduler_state(const torch::optim::ReduceLROnPlateauScheduler& scheduler);
void load_scheduler_state(torch::optim::ReduceLROnPlateauScheduler& scheduler, const Json& state);

/// What `prepare()` can follow an optimizer with: torch::optim's schedulers, those of
/// <accelerate/optim/schedules.hpp>, and anything else with a `step`.
template <class S>
concept SchedulerLike = requires(S& scheduler) {
  scheduler.step();
}
|| requires(S& scheduler) { scheduler.step(0.0F); };

/// A scheduler whose state can be saved and loaded: LibTorch's, and those with `state_dict()` and
/// `load_state_dict()`.
template <class S>
concept SchedulerWithState = requires(S& scheduler, const Json& state) {
  { scheduler.state_dict() } -> std::convertible_to<Json>;
  scheduler.load_state_dict(state);
}
|| requires(S& scheduler, const Json& state) {
  scheduler_state(scheduler);
  load_scheduler_state(scheduler, state);
};
template <SchedulerWithState S>
auto state_of(const S& scheduler) {
  if constexpr (requires { scheduler.state_dict(); }) {
    return scheduler.state_dict();
  } else {
    return scheduler_state(scheduler);
  }
}
template <SchedulerWithState S>
void load_state_of(S& scheduler, const Json& state) {
  if constexpr (requires { scheduler.load_state_dict(state); }) {
    scheduler.load_state_dict(state);
  } else {
    load_scheduler_state(scheduler, state);
  }
}

/// What `prepare()` gives for a scheduler: a handle whose copies share one scheduler.
template <class S>
class PreparedScheduler {
 public:
  PreparedScheduler(std::shared_ptr<S> scheduler, std::shared_ptr<SchedulerCore> core)
      : scheduler_(std::move(scheduler)), core_(std::move(core)) {}

  /// Advances the schedule once for each process (see SchedulerOptions) if the optimizers have just
  /// stepped, and does nothing within an accumulation window or after a skipped step. A schedule
  /// with an end (`at_end()`, as OneCycleLR has) stays there. A scheduler that is given a metric,
  /// as ReduceLROnPlateauScheduler, takes one step for one metric.
  template <class... Metric>
  void step(Metric&&... metric) {
    if constexpr (sizeof...(Metric) > 0) {
      if (core_->is_due()) scheduler_->step(std::forward<Metric>(metric)...);
    } else {
      for (std::int64_t left = core_->take_steps(); left > 0; --left) {
        if constexpr (requires { scheduler_->at_end(); }) {
          if (core_->options().step_with_optimizer() && scheduler_->at_end()) return;
        }
        scheduler_->step();
      }
    }
  }

  /// The user's own scheduler.
  S& scheduler() const noexcept { return *scheduler_; }
  std::vector<double> get_last_lr() const requires requires(const S& s) { s.get_last_lr(); }
  { return scheduler_->get_last_lr(); }

  /// Everything needed to go on from here; for torch::optim's schedulers see `scheduler_state`.
  auto state_dict() const {
    static_assert(SchedulerWithState<S>,
                  "This scheduler has no state_dict() and load_state_dict().");
    return state_of(static_cast<const S&>(*scheduler_));
  }
  void load_state_dict(const Json& state) {
    static_assert(SchedulerWithState<S>,
                  "This scheduler has no state_dict() and load_state_dict().");
    load_state_of(*scheduler_, state);
  }

  const std::shared_ptr<SchedulerCore>& core() const noexcept { return core_; }

 private:
  std::shared_ptr<S> scheduler_;
  std::shared_ptr<SchedulerCore> core_;
};

}  // namespace accelerate
