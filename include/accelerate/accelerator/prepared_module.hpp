#pragma once

#include <accelerate/core/module.hpp>
#include <accelerate/core/tree.hpp>
#include <accelerate/intercept/operator_policy.hpp>
#include <accelerate/parallel/strategy.hpp>
#include <accelerate/precision/autocast.hpp>
#include <accelerate/precision/mixed_precision.hpp>

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace accelerate {

class GradientState;

namespace detail {

/// What all handles of one prepared module share.
struct PreparedModuleCore {
  std::shared_ptr<parallel::Strategy> strategy;
  /// The one that restore() ended before the module was prepared again, or null. Optimizers may
  /// have its leaves.
  std::shared_ptr<parallel::Strategy> before;
  /// The module's address, which tells it from others only while this keeps its tensors.
  const void* identity = nullptr;
  /// It was prepared for training.
  bool trained = false;
  std::shared_ptr<GradientState> gradient_state;
  at::Device device = at::kCPU;
  MixedPrecision mixed_precision = MixedPrecision::no;
  AutocastOptions autocast;
  /// What floating-point outputs are cast to; if unset, half-precision ones to fp32 after autocast.
  std::optional<at::ScalarType> output_dtype;
  /// Gradients of forwards made now stay local: inside no_sync, or in a micro-batch that is not the
  /// last of its window.
  bool no_sync = false;
  /// A forward with gradients ran whose backward has not ended.
  bool used_since_backward = false;
};

/// One prepared forward: the strategy's part before it, mixed precision around it, the strategy's
/// part after it.
class ForwardPass {
 public:
  explicit ForwardPass(PreparedModuleCore& core);
  ForwardPass(const ForwardPass&) = delete;
  ForwardPass& operator=(const ForwardPass&) = delete;

  bool casts_outputs() const noexcept {
    return autocast_.has_value() || core_.output_dtype.has_value();
  }
  at::Tensor cast(const at::Tensor& output) const;
  bool wants_outputs() const noexcept;
  void leave_autocast() { autocast_.reset(); }
  void finish(const std::vector<at::Tensor>& outputs);

 private:
  PreparedModuleCore& core_;
  parallel::ForwardContext context_;
  std::optional<AutocastScope> autocast_;
  intercept::ForwardScope forward_;
};

[[noreturn]] void raise_outputs_unknown();

/// Runs `function` as the forward of a prepared module.
template <class Function>
auto run_forward(PreparedModuleCore& core, Function&& function) {
  ForwardPass pass(core);
  using Result = std::remove_cvref_t<std::invoke_result_t<Function>>;
  if constexpr (std::is_void_v<Result>) {
    std::forward<Function>(function)();
    if (pass.wants_outputs()) raise_outputs_unknown();
    pass.leave_autocast();
    pass.finish({});
  } else {
    Result result = std::forward<Function>(function)();
    const bool cast = pass.casts_outputs();
    pass.leave_autocast();
    if constexpr (TensorTree<Result>) {
      if (cast) {
        tree::for_each_tensor(result, [&](at::Tensor& tensor) {
          if (tensor.defined()) tensor = pass.cast(tensor);
        });
      }
      pass.finish(pass.wants_outputs() ? tree::tensors(result) : std::vector<at::Tensor>{});
    } else {
      // Leaving half-precision outputs, or guessing which parameters were used, would be a silent
      // fallback.
      if (cast || pass.wants_outputs()) raise_outputs_unknown();
      pass.finish({});
    }
    return result;
  }
}

}  // namespace detail

/// What prepared modules of every type have in common.
class PreparedModuleBase {
 public:
  explicit PreparedModuleBase(std::shared_ptr<detail::PreparedModuleCore> core)
      : core_(std::move(core)) {}

  void train(bool on = true) { strategy().module().train(on); }
  void eval() { train(false); }
  bool is_training() const { return strategy().module().is_training(); }
  /// Each parameter once, in registration order; what `module().parameters()` holds.
  std::vector<at::Tensor> parameters() const;
  const std::vector<NamedTensor>& named_parameters() const {
    return strategy().module().parameters();
  }
  const std::vector<NamedTensor>& named_buffers() const { return strategy().module().buffers(); }
  at::Device device() const noexcept { return core_->device; }

  /// Collective. Names and tensors of parameters and buffers, gathered if they are sharded.
  std::vector<NamedTensor> state_dict(const parallel::StateDictOptions& options = {}) const {
    return strategy().state_dict(options);
  }
  /// Collective. Takes such a state dict, the same on every rank.
  void load_state_dict(const std::vector<NamedTensor>& state,
                       const parallel::StateDictOptions& options = {}, bool strict = true) {
    strategy().load_state_dict(state, options, strict);
  }
  /// While what is returned lives, `parameters()` are whole ordinary tensors, in their own dtype.
  /// With `write_back`, changes made to them, alike on every rank, are kept. Collective.
  [[nodiscard]] std::shared_ptr<void> summon_full_params(bool write_back = false) {
    return strategy().summon_full_params(write_back);
  }
  /// Ends the sharding of the user's module: its parameters are whole and ordinary again. This
  /// handle must not be used afterwards. Collective.
  void restore() { strategy().restore(); }

  parallel::Strategy& strategy() const noexcept { return *core_->strategy; }
  const std::shared_ptr<detail::PreparedModuleCore>& core() const noexcept { return core_; }

 protected:
  std::shared_ptr<detail::PreparedModuleCore> core_;
};

/// A user's module, prepared: call it, or its `forward`, in place of the module's own. A handle:
/// copies share one module. `M` is the class with the forward, for example `NetImpl`.
template <class M>
class PreparedModule : public PreparedModuleBase {
  static_assert(!std::is_same_v<M, torch::jit::Module>,
                "To prepare a TorchScript module, include "
                "<accelerate/accelerator/prepared_script_module.hpp>.");

 public:
  PreparedModule(std::shared_ptr<M> module, std::shared_ptr<detail::PreparedModuleCore> core)
      : PreparedModuleBase(std::move(core)), module_(std::move(module)) {}

  /// The module's forward under this Accelerator's strategy and precision. fp16 and bf16 outputs
  /// come back as fp32.
  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return detail::run_forward(*core_, [&]() -> decltype(auto) {
      return module_->forward(std::forward<Arguments>(arguments)...);
    });
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }
  /// Another method as the forward: `model.call<&NetImpl::encode>(tokens)`.
  template <auto Method, class... Arguments>
  auto call(Arguments&&... arguments) {
    return detail::run_forward(*core_, [&]() -> decltype(auto) {
      return ((*module_).*Method)(std::forward<Arguments>(arguments)...);
    });
  }

  /// This handle, so that `model->forward(x)` is the prepared forward too. The module's own members
  /// are behind `module()`.
  PreparedModule* operator->() noexcept { return this; }
  /// The user's own module. Its forward is not the prepared one.
  M& module() const noexcept { return *module_; }
  /// The same, as a pointer that may own it; the original's `unwrap_model`.
  const std::shared_ptr<M>& unwrap() const noexcept { return module_; }

 private:
  std::shared_ptr<M> module_;
};

}  // namespace accelerate
