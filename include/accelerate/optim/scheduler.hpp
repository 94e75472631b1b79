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
}

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

  /// By how many steps `step()` advances the scheduler now: none within an accumulation window or
  /// when an optimizer's last step was skipped.
  std::int64_t steps_due() const;
  const SchedulerOptions& options() const noexcept { return options_; }

 private:
  std::shared_ptr<GradientState> gradients_;
  std::vector<std::shared_ptr<OptimizerCore>> optimizers_;
  SchedulerOptions options_;
};

/// The state of a LibTorch scheduler: {"step_count", "learning_rates"}. The learning rates are
/// those of its optimizer's parameter groups, from which most of them compute the next ones.
Json scheduler_state(const torch::optim::LRScheduler& scheduler);
/// Gives the scheduler its count and its optimizer the learning rates. Throws CheckpointError when
/// `state` is something else or has other parameter groups.
void load_scheduler_state(torch::optim::LRScheduler& scheduler, const Json& state);

/// What `prepare()` can follow an optimizer with: torch::optim's schedulers, those of
/// <accelerate/optim/schedules.hpp>, and anything else with a `step`.
template <class S>
concept SchedulerLike = requires(S& scheduler) {
  scheduler.step();
}
|| requires(S& scheduler) { scheduler.step(0.0F); };

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
      if (core_->steps_due() > 0) scheduler_->step(std::forward<Metric>(metric)...);
    } else {
      for (std::int64_t left = core_->steps_due(); left > 0; --left) {
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
    if constexpr (requires { scheduler_->state_dict(); }) {
      return scheduler_->state_dict();
    } else {
      static_assert(std::derived_from<S, torch::optim::LRScheduler>,
                    "LibTorch gives no access to the state of this scheduler; keep it yourself.");
      return scheduler_state(*scheduler_);
    }
  }
  void load_state_dict(const Json& state) {
    if constexpr (requires { scheduler_->load_state_dict(state); }) {
      scheduler_->load_state_dict(state);
    } else {
      static_assert(std::derived_from<S, torch::optim::LRScheduler>,
                    "LibTorch gives no access to the state of this scheduler; keep it yourself.");
      load_scheduler_state(*scheduler_, state);
    }
  }

  const std::shared_ptr<SchedulerCore>& core() const noexcept { return core_; }

 private:
  std::shared_ptr<S> scheduler_;
  std::shared_ptr<SchedulerCore> core_;
};

}  // namespace accelerate
