#pragma once

#include <accelerate/core/local_tensor.hpp>
#include <accelerate/core/module.hpp>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <string>
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

/// Which tensors a state dict has.
enum class StateDictType {
  full,     ///< every parameter and buffer whole
  sharded,  ///< this rank's part of each parameter (see Strategy::shards for where it lies), and
            ///< every buffer whole
  local  ///< as it is stored on this rank: one flat tensor a unit, and every buffer whole. Of use
         ///< only to the same module under the same strategy on as many ranks
};

struct StateDictOptions {
  /// Default: full.
  TORCH_ARG(StateDictType, type) = StateDictType::full;
  /// Copies to host memory, unit by unit, so that the device never holds the whole. Default: false.
  TORCH_ARG(bool, offload_to_cpu) = false;
  /// Only rank 0 gets the tensors of a full state dict; the others get none. Default: false.
  TORCH_ARG(bool, rank0_only) = false;
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

  /// Takes notice of parameters and buffers that the program has registered, replaced or frozen
  /// since; before a forward with gradients, and before a checkpoint. Throws StateError where the
  /// strategy cannot follow. May be collective: ranks change their modules alike.
  virtual void follow_module();

  /// Around every prepared forward. `outputs` are the tensors of what forward returned.
  virtual void before_forward(const ForwardContext& context);
  virtual void after_forward(const ForwardContext&, const std::vector<at::Tensor>& /*outputs*/) {}
  /// True when after_forward wants the outputs (collecting them costs a walk over the tree).
  virtual bool wants_outputs() const noexcept { return false; }
  /// Around the backward pass that `Accelerator::backward` runs; `backward_failed` in place of
  /// `after_backward` when an exception ended it. Calls nest, and may come from several threads.
  virtual void before_backward() {}
  virtual void after_backward() {}
  virtual void backward_failed() noexcept {}
  /// Has the next backward reduce the gradients although its forward ran without sync.
  virtual void sync_in_next_backward() {}

  /// The leaf the optimizer owns in place of a module's parameter: the parameter itself unless it
  /// is sharded. Undefined when `parameter` is not the module's.
  virtual at::Tensor optimizer_leaf(const at::Tensor& parameter) const;
  /// Around an optimizer's work. `leaves` are those of this module's that it owns (see
  /// `optimizer_leaf`): the others belong to other optimizers, or to none, and are left alone.
  /// Called before it steps. Throws StateError when the gradients are not what training needs, for
  /// example those of a forward that went around the prepared module and so were never reduced.
  virtual void check_gradients(const std::vector<at::Tensor>& leaves);
  /// Called after it stepped.
  virtual void after_step(const std::vector<at::Tensor>& /*leaves*/) {}
  /// Called before it clears its gradients, which may be between a forward and its backward.
  virtual void before_zero_grad(const std::vector<at::Tensor>& /*leaves*/) {}

  /// The p-norm of all gradients, over all ranks. p may be infinity.
  virtual at::Tensor grad_norm(double p) const;
  /// Multiplies all gradients by a 0-dim tensor.
  virtual void scale_gradients_(const at::Tensor& factor);
  virtual void clip_grad_value_(double limit);

  /// This rank's parts of all parameters, in the module's order: each whole unless it is sharded.
  /// The tensor is what the optimizer owns; of a part it has rows of the parameter where the cut
  /// falls between rows, else one dimension.
  virtual std::vector<LocalTensor> shards() const;
  /// Collective. Names and tensors of parameters and buffers, in the parameters' own dtype. They
  /// share memory with the module where they need no gathering and no copy was asked for. A full
  /// one has a tied tensor under each of its names.
  virtual std::vector<NamedTensor> state_dict(const StateDictOptions& options = {}) const;
  /// Collective. Takes the values of such a state dict, which every rank gives. With `strict`,
  /// throws CheckpointError naming what is missing and what is not known; always for wrong shapes.
  /// Changes nothing when it throws.
  virtual void load_state_dict(const std::vector<NamedTensor>& state,
                               const StateDictOptions& options = {}, bool strict = true);
  /// In which groups gradients are added over the ranks, by the parameters' places in the module: a
  /// resumed run that is to get the same bits adds them likewise. Empty when that does not change
  /// while training. Collective.
  virtual std::vector<std::vector<std::int64_t>> reduction_layout() { return {}; }
  /// Takes such a layout, of the same module on as many ranks, alike on every rank; an empty one
  /// changes nothing. Throws CheckpointError when it is one of another module.
  virtual void set_reduction_layout(const std::vector<std::vector<std::int64_t>>& /*layout*/) {}
  /// Throws CheckpointError when `layout` cannot be that of this module. Changes nothing.
  virtual void check_reduction_layout(
      const std::vector<std::vector<std::int64_t>>& /*layout*/) const {}
  /// While what is returned lives, the module's parameters are whole ordinary tensors. With
  /// `write_back`, changes made to them, alike on every rank, are kept. Collective.
  virtual std::shared_ptr<void> summon_full_params(bool write_back);
  /// Ends it: the module is again as the user made it, with its parameters whole. Collective.
  virtual void restore() {}
  /// `restore` was called, so that the module can be prepared anew.
  virtual bool is_restored() const noexcept { return false; }
  /// True when a rank's gradients are not in the user's parameters, so only a prepared optimizer
  /// can step.
  virtual bool owns_leaves() const noexcept { return false; }

  /// Collective. Throws DistributedError on every rank when a parameter or buffer that should be
  /// equal on all ranks is not, naming the first.
  virtual void verify_parameters() const {}

 protected:
  /// In the group that the module is spread over.
  virtual int rank() const noexcept { return 0; }
  /// Throws StateError when the prepared module was never called, so that gradients come from
  /// forwards of the bare one.
  void require_forward() const;

  ModuleRecord module_;

 private:
  bool forwarded_ = false;
};

/// What gradients of this norm are multiplied by so that it is at most `max_norm`; as
/// torch.nn.utils.clip_grad_norm_.
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);

}  // namespace accelerate::parallel
