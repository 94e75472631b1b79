#pragma once

#include <accelerate/comm/group.hpp>
#include <accelerate/core/loader_progress.hpp>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace accelerate {

/// How gradients are accumulated (the original's GradientAccumulationPlugin).
class GradientAccumulationOptions {
  /// Micro-batches in a window, that is for each optimizer step. At least 1. Default: 1.
  TORCH_ARG(std::int64_t, num_steps) = 1;
  /// The schedulers' lengths were counted in micro-batches, not in optimizer steps: a prepared
  /// scheduler advances by the number of micro-batches in the window that ended. In the original
  /// this is documented as the default and has no effect. Default: false.
  TORCH_ARG(bool, adjust_scheduler) = false;
  /// The last batch of a prepared loader ends a window, however short. Off, the count of
  /// micro-batches goes on in the next pass. Default: true.
  TORCH_ARG(bool, sync_with_dataloader) = true;
  /// Gradients are reduced over the ranks after every micro-batch: slower, and it saves the memory
  /// of unreduced gradients when parameters are sharded. Default: false.
  TORCH_ARG(bool, sync_each_batch) = false;
};

/// Where training stands in its accumulation window and in its loaders. One for each Accelerator,
/// shared with the optimizers, schedulers and loaders it prepared. Not thread-safe: the training
/// loop's thread uses it.
class GradientState final : public LoaderObserver {
 public:
  /// Throws ConfigError when num_steps is below 1. `group`: the ranks whose gradients are averaged.
  explicit GradientState(const GradientAccumulationOptions& options = {}, comm::Group group = {});

  const GradientAccumulationOptions& options() const noexcept { return options_; }
  std::int64_t num_steps() const noexcept { return options_.num_steps(); }
  /// From the next micro-batch on. Throws ConfigError below 1.
  void set_num_steps(std::int64_t num_steps);

  /// True while the present micro-batch is the last of its window, and whenever nobody accumulates:
  /// only then do optimizers and schedulers step.
  bool sync_gradients() const noexcept { return sync_gradients_; }
  void set_sync_gradients(bool sync) noexcept { sync_gradients_ = sync; }
  /// True when this micro-batch's backward reduces the gradients over the ranks.
  bool reduces_gradients() const noexcept { return sync_gradients_ || options_.sync_each_batch(); }

  /// What `accumulate()` does first. Returns `sync_gradients()`. At the end of the active loader
  /// (with sync_with_dataloader) the micro-batch ends a window and the count starts again; else
  /// every num_steps-th micro-batch ends one.
  bool begin_micro_batch();
  /// Notes that an optimizer stepped or its gradients were cleared: what is accumulated next
  /// belongs to another window.
  void end_window() noexcept { ended_ = true; }
  /// Micro-batches begun in the present window, this one included; 1 when nobody accumulates.
  std::int64_t micro_batches() const noexcept { return micro_batches_ > 0 ? micro_batches_ : 1; }
  /// The number of the micro-batch under way, over all windows; 0 when nobody accumulates.
  std::int64_t micro_batch() const noexcept { return micro_batch_; }
  /// The present window has micro-batches between the one numbered `after` and the one under way.
  bool has_earlier_micro_batches(std::int64_t after) const noexcept {
    return std::max(first_of_window_, after + 1) < micro_batch_;
  }
  /// The counter of the rule above, for a checkpoint.
  std::int64_t step() const noexcept { return step_; }
  void set_step(std::int64_t step) noexcept { step_ = step; }

  /// Notes a backward whose loss the caller divides by num_steps. Throws StateError when the window
  /// has a backward with a count.
  void add_backward();
  /// Notes a backward of a loss summed over `count` samples or tokens on this rank. The gradients
  /// of the window are to be multiplied by `normalisation` once before they are clipped or step.
  /// All counts of a window add up, so add losses over the same samples before the backward. Throws
  /// StateError when the window has a backward without a count or was normalised already,
  /// ConfigError for a count that is negative or not finite.
  void add_backward(double count);
  /// The backwards noted so far, over all windows.
  std::int64_t backwards() const noexcept { return backwards_; }
  /// The micro-batch under way had its backward.
  bool micro_batch_has_backward() const noexcept { return backwards_ > backwards_before_; }
  /// True when the window's gradients are sums that still want `normalisation`.
  bool normalises() const noexcept { return counts_ == Counts::given; }
  /// Ranks divided by the window's count on all ranks: what turns a mean over ranks of sums into
  /// the mean over all samples. 0-dim fp64 tensor on `device`; 0 when the count is 0. Collective
  /// over the group the first time in a window.
  at::Tensor normalisation(const at::Device& device);
  /// Which window this is: rises by one when a new one begins.
  std::int64_t window() const noexcept { return window_; }

  bool in_dataloader() const noexcept { return !passes_.empty(); }
  /// The present batch is the last one of the innermost loader; false outside.
  bool end_of_dataloader() const noexcept {
    return in_dataloader() && passes_.back()->end_of_dataloader;
  }
  /// As LoaderProgress::remainder of the innermost loader; -1 outside.
  std::int64_t remainder() const noexcept {
    return in_dataloader() ? passes_.back()->remainder : -1;
  }
  /// The innermost loader's progress; null outside.
  const LoaderProgress* progress() const noexcept {
    return in_dataloader() ? passes_.back() : nullptr;
  }

  void loader_begins(const LoaderProgress& progress) override;
  void loader_ends(const LoaderProgress& progress) noexcept override;

 private:
  enum class Counts { unknown, none, given };
  void begin_window_if_ended() noexcept;

  GradientAccumulationOptions options_;
  comm::Group group_;
  bool sync_gradients_ = true;
  bool ended_ = false;
  std::int64_t step_ = 0;
  std::int64_t micro_batches_ = 0;
  std::int64_t micro_batch_ = 0;
  std::int64_t first_of_window_ = 0;
  std::int64_t window_ = 0;
  std::int64_t backwards_ = 0;
  std::int64_t backwards_before_ = 0;  // the micro-batch under way
  Counts counts_ = Counts::unknown;
  double count_ = 0.0;
  at::Tensor normalisation_;
  std::vector<const LoaderProgress*> passes_;
};

}  // namespace accelerate
