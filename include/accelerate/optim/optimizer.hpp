#pragma once

#include <accelerate/optim/gradient_state.hpp>
#include <accelerate/parallel/strategy.hpp>
#include <accelerate/precision/grad_scaler.hpp>

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
class OptimizerParamGroup;
}  // namespace torch::optim

namespace accelerate {

class OwnStep;

/// An optimizer that can leave its step out on the device. Others make a gradient scaler wait for
/// the device before every step, to learn whether a gradient overflowed.
class SkipsOnDevice {
 public:
  virtual ~SkipsOnDevice() = default;
  /// For the next `step` only: changes nothing when `found_inf`, a 0-dim fp32 tensor, is above
  /// zero.
  virtual void set_found_inf(at::Tensor found_inf) = 0;
};

/// What a prepared optimizer does, whatever its type: steps and clears gradients at the end of an
/// accumulation window only, and under a gradient scaler steps or skips as all ranks agree.
class OptimizerCore {
 public:
  using Closure = std::function<at::Tensor()>;

  /// `scaler` may be null. An `optimizer` that this does not own is to outlive it.
  OptimizerCore(std::shared_ptr<torch::optim::Optimizer> optimizer,
                std::shared_ptr<GradientState> gradients,
                std::shared_ptr<GradScaler> scaler = nullptr);
  ~OptimizerCore();
  OptimizerCore(const OptimizerCore&) = delete;
  OptimizerCore& operator=(const OptimizerCore&) = delete;

  /// False when the optimizer is not owned and has been destroyed. For optimizers of LibTorch's and
  /// this library's classes; others are taken to live.
  bool is_alive() const noexcept { return !witness_ || !witness_->expired(); }
  /// Throws StateError unless the optimizer lives, as all that uses it does.
  void require_alive() const;
  /// This is for that very object, and not for one that was at its place before.
  bool is_of(const torch::optim::Optimizer& optimizer) const;

  /// Has this optimizer step for the module of `strategy`: puts the strategy's leaves in place of
  /// the module's parameters in every group, and tells the strategy of every step. Returns false,
  /// and does nothing, when the optimizer has none of the module's parameters. Throws StateError
  /// when a parameter would be replaced for which the optimizer has state already.
  bool link(std::shared_ptr<parallel::Strategy> strategy);
  /// Ends it.
  void unlink(const parallel::Strategy& strategy);
  /// Links parameters that were added to the groups since to the strategies that `link` was called
  /// with.
  void follow_groups();
  /// Has this optimizer step for the module of `strategy`, which was prepared anew after its
  /// `restore()`, in place of `ended`: state and gradients of the leaves of `ended` go over to
  /// those of `strategy`. Returns false, and does nothing, when it has none of the leaves of
  /// `ended`. Throws StateError when the leaves are of other shapes.
  bool relink(const parallel::Strategy& ended, std::shared_ptr<parallel::Strategy> strategy);
  const std::vector<std::shared_ptr<parallel::Strategy>>& strategies() const noexcept {
    return strategies_;
  }

  /// Steps, if gradients are in sync; otherwise returns an undefined tensor. Returns what the
  /// optimizer returned: the closure's loss, if there is one. Throws StateError when a linked
  /// strategy finds gradients that were not reduced, UnsupportedError for a closure under a
  /// gradient scaler.
  at::Tensor step(const Closure& closure = nullptr);
  /// Clears the gradients, if they are in sync: forgets them, or fills them with zeros in place.
  /// While gradients of earlier micro-batches wait for the window's last backward it keeps them,
  /// and says so once, unless a backward has failed since; inside a closure, which would be called
  /// again, it throws StateError.
  void zero_grad(bool set_to_none = true);
  /// Forgets the gradients, wherever in a window, and what was counted of it.
  void discard_gradients();
  /// After a backward that threw: the gradients are partial, and are not kept.
  void note_failed_backward() noexcept { partial_ = true; }
  /// After a backward within a window: notes how far the optimizer is.
  void note_own_step();
  /// Throws StateError when the optimizer's own step() was called since, instead of this one's.
  void check_own_step();
  /// Makes the gradients what training needs, once in a window: divided by the loss scale and,
  /// where backward had counts, by the window's count. `step` does it if nobody has; clipping does
  /// it first.
  void finish_gradients();
  /// The last `step` was skipped because a gradient had an inf or a NaN on some rank. May wait for
  /// the device.
  bool step_was_skipped() const;
  /// Has `step` first scale the gradients of the linked modules so that their norm is at most this,
  /// as DeepSpeed's gradient_clipping does. Nothing: they stay as they are.
  void set_max_norm(std::optional<double> max_norm) { max_norm_ = max_norm; }

  torch::optim::Optimizer& optimizer() const {
    require_alive();
    return *optimizer_;
  }
  const std::shared_ptr<GradientState>& gradients() const noexcept { return gradients_; }
  const std::shared_ptr<GradScaler>& scaler() const noexcept { return scaler_; }

  /// The parameters of all groups.
  std::vector<at::Tensor> parameters() const;
  /// True when any group has this very parameter.
  bool owns(const at::Tensor& parameter) const;
  /// True when any parameter has a gradient.
  bool has_gradients() const;
  /// The groups' learning rates, and setting them. Throws ConfigError unless there is one for each
  /// group.
  std::vector<double> learning_rates() const;
  void set_learning_rates(const std::vector<double>& rates);
  /// Steps taken or skipped since this was made.
  std::int64_t steps() const noexcept { return steps_; }

 private:
  void ready_gradients();
  at::Tensor step_scaled();
  void clear_gradients(bool set_to_none);

  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<std::weak_ptr<const void>> witness_;
  std::shared_ptr<GradientState> gradients_;
  std::shared_ptr<GradScaler> scaler_;
  SkipsOnDevice* skips_on_device_ = nullptr;
  std::vector<std::shared_ptr<parallel::Strategy>> strategies_;
  std::vector<std::vector<at::Tensor>> leaves_;           // of each, those that this optimizer owns
  std::vector<std::weak_ptr<parallel::Strategy>> known_;  // also those without a parameter in it
  std::vector<at::Tensor> followed_;                      // the groups' parameters at the last look
  std::unique_ptr<OwnStep> own_step_;
  std::optional<double> max_norm_;
  std::int64_t normalised_window_ = -1;
  std::int64_t used_up_ = 0;  // the micro-batch of the last step or clearing
  std::optional<std::int64_t> stepped_at_;  // the backwards before a step; empty once cleared
  bool in_closure_ = false;
  bool partial_ = false;  // a backward failed since the last step or clearing
  std::int64_t steps_ = 0;
  // Undefined: not skipped. Read only when asked, since reading waits for the device.
  at::Tensor skipped_;
};

/// What `prepare()` gives for an optimizer: a handle whose copies share one optimizer. Use it as
/// the user's own, which `optimizer()` is.
template <class O>
class PreparedOptimizer {
 public:
  PreparedOptimizer(std::shared_ptr<O> optimizer, std::shared_ptr<OptimizerCore> core)
      : optimizer_(std::move(optimizer)), core_(std::move(core)) {}

  /// Steps at the end of an accumulation window, and does nothing within it. `closure` clears
  /// gradients, runs forward and backward, and returns the loss, for optimizers that call it again
  /// (LBFGS).
  at::Tensor step(const std::function<at::Tensor()>& closure = nullptr) {
    return core_->step(closure);
  }
  /// Clears the gradients at the end of an accumulation window, and does nothing within it: not
  /// before its last micro-batch, nor in that before `backward`, so `zero_grad(); backward();
  /// step();` is right too.
  void zero_grad(bool set_to_none = true) { core_->zero_grad(set_to_none); }
  /// Forgets the gradients, those of the earlier micro-batches of a window too: for a batch or
  /// window that is to be left out.
  void discard_gradients() { core_->discard_gradients(); }
  /// The last step was skipped because fp16 gradients overflowed.
  bool step_was_skipped() const { return core_->step_was_skipped(); }

  /// The user's own optimizer. Throws StateError, as all else here does, when it was given to
  /// prepare() as an lvalue and has been destroyed.
  O& optimizer() const {
    core_->require_alive();
    return *optimizer_;
  }
  decltype(auto) param_groups() const { return optimizer().param_groups(); }
  std::vector<at::Tensor> parameters() const { return core_->parameters(); }
  /// One for each parameter group.
  std::vector<double> learning_rates() const { return core_->learning_rates(); }
  void set_learning_rates(const std::vector<double>& rates) { core_->set_learning_rates(rates); }

  const std::shared_ptr<OptimizerCore>& core() const noexcept { return core_; }

 private:
  std::shared_ptr<O> optimizer_;
  std::shared_ptr<OptimizerCore> core_;
};

/// Prepares an optimizer. The first takes an lvalue, which must outlive the result.
template <class O>
requires std::derived_from<O, torch::optim::Optimizer> PreparedOptimizer<O> prepare_optimizer(
    O& optimizer, std::shared_ptr<GradientState> gradients,
    std::shared_ptr<GradScaler> scaler = nullptr) {
  return prepare_optimizer(std::shared_ptr<O>(std::shared_ptr<void>(), &optimizer),
                           std::move(gradients), std::move(scaler));
}
template <class O>
requires std::derived_from<O, torch::optim::Optimizer> PreparedOptimizer<O> prepare_optimizer(
    std::shared_ptr<O> optimizer, std::shared_ptr<GradientState> gradients,
    std::shared_ptr<GradScaler> scaler = nullptr) {
  auto core = std::make_shared<OptimizerCore>(optimizer, std::move(gradients), std::move(scaler));
  return {std::move(optimizer), std::move(core)};
}
template <class O>
requires std::derived_from<O, torch::optim::Optimizer> PreparedOptimizer<O> prepare_optimizer(
    std::unique_ptr<O> optimizer, std::shared_ptr<GradientState> gradients,
    std::shared_ptr<GradScaler> scaler = nullptr) {
  return prepare_optimizer(std::shared_ptr<O>(std::move(optimizer)), std::move(gradients),
                           std::move(scaler));
}
template <class O>
requires(std::derived_from<O, torch::optim::Optimizer> && !std::is_lvalue_reference_v<O>)
    PreparedOptimizer<O> prepare_optimizer(O&& optimizer, std::shared_ptr<GradientState> gradients,
                                           std::shared_ptr<GradScaler> scaler = nullptr) {
  return prepare_optimizer(std::make_shared<O>(std::move(optimizer)), std::move(gradients),
                           std::move(scaler));
}

}  // namespace accelerate
