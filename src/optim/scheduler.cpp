#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/optim/scheduler.hpp>

#include <torch/optim/schedulers/lr_scheduler.h>
#include <nlohmann/json.hpp>

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

// And what it keeps for itself alone can be named where a template is instantiated explicitly.
using SetRates = void (torch::optim::LRScheduler::*)(const std::vector<double>&);
SetRates set_rates();
template <SetRates kMember>
struct PrivateAccess {
  friend SetRates set_rates() { return kMember; }
};
template struct PrivateAccess<&torch::optim::LRScheduler::set_optimizer_lrs>;

}  // namespace

SchedulerCore::SchedulerCore(std::shared_ptr<GradientState> gradients,
                             std::vector<std::shared_ptr<OptimizerCore>> optimizers,
                             const SchedulerOptions& options)
    : gradients_(std::move(gradients)), optimizers_(std::move(optimizers)), options_(options) {
  if (options_.num_processes() < 1) {
    throw ConfigError(text::concat("A scheduler was to follow ", options_.num_processes(),
                                   " processes; the least is 1."));
  }
}

std::int64_t SchedulerCore::steps_due() const {
  if (!options_.step_with_optimizer()) return 1;
  if (!gradients_->sync_gradients()) return 0;
  for (const auto& optimizer : optimizers_) {
    if (optimizer->step_was_skipped()) return 0;
  }
  if (!options_.per_process_steps()) return 1;
  const std::int64_t batches =
      gradients_->options().adjust_scheduler() ? gradients_->micro_batches() : 1;
  return batches * (options_.split_batches() ? 1 : options_.num_processes());
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
  (scheduler.*set_rates())(rates);
  Access::step_count(scheduler) = count;
}

}  // namespace accelerate
