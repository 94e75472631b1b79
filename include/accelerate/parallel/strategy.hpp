#pragma once

#include <accelerate/core/module.hpp>

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>
#include <vector>

namespace accelerate::parallel {

/// What a prepared forward tells its strategy.
struct ForwardContext {
  /// Gradients are recorded.
  bool grad_enabled = true;
  /// The gradients of this forward's backward are to be reduced over the ranks (false inside
  /// no_sync and in all but the last micro-batch of an accumulation window).
  bool sync = true;
};

/// How a prepared module is spread over processes. One object for each prepared module; it lives as
/// long as the module is prepared. A module in one process has the plain `Strategy`.
class Strategy {
 public:
  explicit Strategy(ModuleRecord module) : module_(std::move(module)) {}
  virtual ~Strategy() = default;
  Strategy(const Strategy&) = delete;
  Strategy& operator=(const Strategy&) = delete;

  /// "single", "ddp", "fsdp", ...
  virtual std::string_view name() const noexcept { return "single"; }
  const ModuleRecord& module() const noexcept { return module_; }

  /// Around every prepared forward. `outputs` are the tensors of what forward returned.
  virtual void before_forward(const ForwardContext&) {}
  virtual void after_forward(const ForwardContext&, const std::vector<at::Tensor>& outputs) {}
  /// True when after_forward wants the outputs (collecting them costs a walk over the tree).
  virtual bool wants_outputs() const noexcept { return false; }
  /// Called by `Accelerator::backward` when the backward pass has returned.
  virtual void after_backward() {}
  /// Has the next backward reduce the gradients although its forward ran without sync.
  virtual void sync_in_next_backward() {}

  /// The leaf the optimizer owns in place of a module's parameter: the parameter itself unless it
  /// is sharded. Undefined when `parameter` is not the module's.
  virtual at::Tensor optimizer_leaf(const at::Tensor& parameter) const;
  /// Called before an optimizer over this module's parameters steps. Throws StateError when the
  /// gradients are not what training needs, for example those of a forward that went around the
  /// prepared module and so were never reduced.
  virtual void check_gradients() {}
  /// Called after an optimizer stepped or its gradients were cleared.
  virtual void after_step() {}

  /// The p-norm of all gradients, over all ranks. p may be infinity.
  virtual at::Tensor grad_norm(double p) const;
  /// Multiplies all gradients by a 0-dim tensor.
  virtual void scale_gradients_(const at::Tensor& factor);
  virtual void clip_grad_value_(double limit);

  /// Collective. Throws DistributedError on every rank when a parameter or buffer that should be
  /// equal on all ranks is not, naming the first.
  virtual void verify_parameters() const {}

 protected:
  ModuleRecord module_;
};

}  // namespace accelerate::parallel
