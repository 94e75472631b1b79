#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/optim/gradient_state.hpp>

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <cmath>

namespace accelerate {

GradientState::GradientState(const GradientAccumulationOptions& options, comm::Group group)
    : options_(options), group_(std::move(group)) {
  set_num_steps(options.num_steps());
}

void GradientState::set_num_steps(std::int64_t num_steps) {
  if (num_steps < 1) {
    throw ConfigError(text::concat("Gradients were to be accumulated over ", num_steps,
                                   " micro-batches; the least is 1."));
  }
  options_.num_steps(num_steps);
}

void GradientState::begin_window_if_ended() noexcept {
  if (!ended_) return;
  ended_ = false;
  micro_batches_ = 0;
  counts_ = Counts::unknown;
  count_ = 0.0;
  normalisation_.reset();
  ++window_;
}

bool GradientState::begin_micro_batch() {
  begin_window_if_ended();
  ++micro_batches_;
  if (sync_gradients_) first_of_window_ = micro_batch_ + 1;
  ++micro_batch_;
  backwards_before_ = backwards_;
  if (options_.sync_with_dataloader() && end_of_dataloader()) {
    step_ = 0;
    sync_gradients_ = true;
  } else {
    ++step_;
    sync_gradients_ = step_ % num_steps() == 0;
  }
  return sync_gradients_;
}

void GradientState::add_backward() {
  begin_window_if_ended();
  if (counts_ == Counts::given) {
    throw StateError(
        "backward(loss) was called in an accumulation window that has a backward(loss_sum, count). "
        "Give every backward of a window a count, or none.");
  }
  counts_ = Counts::none;
  ++backwards_;
}

void GradientState::add_backward(double count) {
  if (!(count >= 0.0) || !std::isfinite(count)) {
    throw ConfigError(text::concat("backward(loss_sum, count) was given the count ", count,
                                   "; it must be a number of samples or tokens, zero or more."));
  }
  begin_window_if_ended();
  if (counts_ == Counts::none) {
    throw StateError(
        "backward(loss_sum, count) was called in an accumulation window that has a backward(loss). "
        "Give every backward of a window a count, or none.");
  }
  if (normalisation_.defined()) {
    throw StateError(
        "backward(loss_sum, count) was called after the gradients of this window were clipped or "
        "otherwise finished. Step or clear them first.");
  }
  counts_ = Counts::given;
  count_ += count;
  ++backwards_;
}

at::Tensor GradientState::normalisation(const at::Device& device) {
  if (!normalises())
    throw StateError("The gradients of this window are not sums: no backward had a count.");
  if (!normalisation_.defined()) {
    // On the device, so that nothing waits for it.
    at::Tensor total = at::full({}, count_, at::TensorOptions().dtype(at::kDouble).device(device));
    group_.all_reduce(total).wait();
    normalisation_ = at::full_like(total, static_cast<double>(group_.size()))
                         .div_(total)
                         .masked_fill_(total.eq(0.0), 0.0);
  }
  return normalisation_.to(device);
}

void GradientState::loader_begins(const LoaderProgress& progress) { passes_.push_back(&progress); }

void GradientState::loader_ends(const LoaderProgress& progress) noexcept {
  std::erase(passes_, &progress);
}

}  // namespace accelerate
