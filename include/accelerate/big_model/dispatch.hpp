#pragma once

#include <accelerate/big_model/record_of.hpp>
#include <accelerate/big_model/weight_store.hpp>
#include <accelerate/core/tree.hpp>
#include <accelerate/device_map/device_map.hpp>

#include <torch/arg.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace c10 {
struct IValue;
}

namespace accelerate {

namespace tracking {
class MemoryTracker;
}

/// How weights come to the device that computes and leave it.
class OffloadOptions {
  /// Where offloaded weights are computed with. Default: the first accelerator of the device map,
  /// or of the machine where there is no map; without one the CPU.
  TORCH_ARG(std::optional<at::Device>, main_device);
  /// Whether buffers of offloaded modules are offloaded too. Otherwise they stay on the main
  /// device. Default: false.
  TORCH_ARG(bool, offload_buffers) = false;
  /// Classes whose modules come and go as one, with all that is in them. Default: each module
  /// brings the weights it has itself.
  TORCH_ARG(std::vector<std::string>, preload_module_classes);
  /// The most bytes of offloaded weights on the main device at one time; 0 for no limit. A weight
  /// above it is brought alone. Default: 0.
  TORCH_ARG(std::int64_t, resident_limit) = 0;
  /// How many modules' weights are brought ahead of their use, from the second forward on. Pays
  /// where a core is free for it: on a CPU whose cores all compute, 0 is faster. Default: 2.
  TORCH_ARG(int, prefetch) = 2;
  /// Where weights on disk are. Those that it lacks are written to `offload_dir`.
  TORCH_ARG(WeightStore, weights);
  /// The folder that weights are written to whose place is the disk. Default: none, an error when
  /// there are such weights.
  TORCH_ARG(std::filesystem::path, offload_dir);
  /// Whether a module that lies in one place, where it is computed, is given hooks all the same. It
  /// then refuses to be moved. Default: false.
  TORCH_ARG(bool, force_hooks) = false;
};

/// What was brought since the last reset.
struct OffloadStatistics {
  /// How often weights of a module came, and how often before they were wanted.
  std::int64_t brought = 0;
  std::int64_t prefetched = 0;
  /// Bytes brought, and those of them that were read from files.
  std::int64_t brought_bytes = 0;
  std::int64_t read_bytes = 0;
  /// The most bytes of offloaded weights on the main device at one time.
  std::int64_t peak_resident_bytes = 0;
};

namespace big_model {
/// Where offloaded weights are computed with under a map. Throws ConfigError when it, or a place of
/// the map, is neither the CPU nor an accelerator that is there.
at::Device main_device(const DeviceMap& map, const OffloadOptions& options);
}  // namespace big_model

/// The part of a dispatched module that does not depend on its class.
class Dispatched {
 public:
  Dispatched(ModuleRecord module, DeviceMap map, OffloadOptions options);
  /// Weights that were offloaded to the CPU are the module's again. Those on disk are on the meta
  /// device and throw a sentence when they are used, until the module is loaded or dispatched
  /// again.
  ~Dispatched();
  Dispatched(const Dispatched&) = delete;
  Dispatched& operator=(const Dispatched&) = delete;

  const DeviceMap& device_map() const noexcept;
  at::Device main_device() const noexcept;
  OffloadStatistics statistics() const;
  void reset_statistics();
  /// Has `tracker` record when which weights came and went, from the next forward on. It must live
  /// as long as the module is used, or until null is given instead.
  void track(tracking::MemoryTracker* tracker);
  /// Ends the offloading: every weight is an ordinary tensor of the module, on the CPU where it was
  /// offloaded. Throws OutOfMemoryError, and changes nothing, when they do not fit.
  void remove_offload();

  /// One forward. The order in which it uses weights is what the next one fetches ahead.
  class Forward {
   public:
    explicit Forward(Dispatched& module);
    ~Forward();
    Forward(const Forward&) = delete;
    Forward& operator=(const Forward&) = delete;

    /// An input of the module.
    void sees(const at::Tensor& input);
    void sees(const c10::IValue& input);
    /// Whether results are to be sent back: the module is spread over devices, and saw an input.
    bool moves() const;
    /// A result, or a TorchScript value with all that is in it, where the first input was.
    at::Tensor back(const at::Tensor& result) const;
    c10::IValue back(const c10::IValue& result) const;

   private:
    struct State;
    std::unique_ptr<State> state_;
  };

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A module whose weights lie where a device map says. `forward` and `()` are the module's own;
/// over several devices, a result that is a tensor, a tree of tensors or a TorchScript value comes
/// back to where the first input was, and one of another type stays where it is. The module itself
/// can be called too, only then nothing is fetched ahead, and tensors are not moved between
/// devices. Must outlive the module's use.
template <class M>
class DispatchedModel {
 public:
  DispatchedModel(M module, std::unique_ptr<Dispatched> core)
      : module_(std::move(module)), core_(std::move(core)) {}

  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    Dispatched::Forward scope(*core_);
    (see(scope, arguments), ...);
    using Result = decltype(call(std::forward<Arguments>(arguments)...));
    if constexpr (std::is_void_v<Result>) {
      call(std::forward<Arguments>(arguments)...);
    } else {
      return back(scope, call(std::forward<Arguments>(arguments)...));
    }
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// The user's own.
  M& module() noexcept { return module_; }
  Dispatched& offload() noexcept { return *core_; }
  const Dispatched& offload() const noexcept { return *core_; }
  const DeviceMap& device_map() const noexcept { return core_->device_map(); }
  /// As Dispatched::remove_offload.
  void remove_offload() { core_->remove_offload(); }

 private:
  template <class... Arguments>
  decltype(auto) call(Arguments&&... arguments) {
    if constexpr (requires { module_->forward(std::forward<Arguments>(arguments)...); }) {
      return module_->forward(std::forward<Arguments>(arguments)...);
    } else {
      return module_.forward(std::forward<Arguments>(arguments)...);
    }
  }
  template <class Argument>
  static void see(Dispatched::Forward& scope, const Argument& argument) {
    if constexpr (std::same_as<Argument, c10::IValue>) {
      scope.sees(argument);
    } else if constexpr (std::same_as<Argument, std::vector<c10::IValue>>) {
      for (const c10::IValue& value : argument) scope.sees(value);
    } else if constexpr (TensorTree<Argument>) {
      tree::for_each_tensor(argument, [&](const at::Tensor& tensor) { scope.sees(tensor); });
    } else if constexpr (std::convertible_to<const Argument&, at::Tensor>) {
      scope.sees(static_cast<at::Tensor>(argument));
    }
  }
  template <class Result>
  static Result back(const Dispatched::Forward& scope, Result result) {
    if constexpr (std::same_as<Result, c10::IValue>) {
      if (scope.moves()) result = scope.back(result);
    } else if constexpr (TensorTree<Result>) {
      if (scope.moves()) {
        tree::for_each_tensor(result, [&](at::Tensor& tensor) {
          if (tensor.defined()) tensor = scope.back(tensor);
        });
      }
    }
    return result;
  }

  M module_;
  std::unique_ptr<Dispatched> core_;
};

namespace big_model {

/// What a DispatchedModel keeps of the module it was given: a handle, or a pointer to it.
template <class M>
auto keep(M&& module) {
  using Module = std::remove_cvref_t<M>;
  if constexpr (std::derived_from<Module, torch::nn::Module>) {
    static_assert(std::is_lvalue_reference_v<M>,
                  "A module that is a temporary must be given in a pointer or a module holder.");
    return std::shared_ptr<Module>(std::shared_ptr<void>(), &module);
  } else {
    return Module(std::forward<M>(module));
  }
}

template <class M>
[[nodiscard]] auto dispatch(M&& module, DeviceMap map, OffloadOptions options) {
  auto kept = keep(std::forward<M>(module));
  auto core = std::make_unique<Dispatched>(record_of(kept), std::move(map), std::move(options));
  return DispatchedModel<decltype(kept)>(std::move(kept), std::move(core));
}

}  // namespace big_model

/// Puts each part of a module where the map says. What lies on an accelerator is computed there;
/// what lies on the CPU (beside accelerators) or on the disk is brought to the main device when an
/// operator touches it and leaves after its last use, and the weights of the next modules are
/// brought meanwhile. On accelerators inputs follow the weights that they meet.
///
/// A LibTorch module given itself must outlive the result; module holders, pointers and TorchScript
/// modules are kept. Keep the result for as long as the module is used: with it the offloading
/// ends. Weights must have values, or be in `weights`. Throws ConfigError when the map is not one
/// for this module or names a device that is not there, StateError when the module is dispatched
/// already.
template <big_model::ModuleLike M>
[[nodiscard]] auto dispatch_model(M&& module, DeviceMap map, OffloadOptions options = {}) {
  return big_model::dispatch(std::forward<M>(module), std::move(map), std::move(options));
}

/// Keeps all weights in host memory and brings them to `execution_device` module by module.
template <big_model::ModuleLike M>
[[nodiscard]] auto cpu_offload(M&& module, at::Device execution_device,
                               OffloadOptions options = {}) {
  return big_model::dispatch(std::forward<M>(module), {{"", Place::cpu()}},
                             options.main_device(execution_device).force_hooks(true));
}

/// Keeps all weights on disk and brings them to `execution_device` module by module. They are
/// written to `offload_dir`; weights without values (of the meta device) must be there already. A
/// weight that is on disk is not trained.
template <big_model::ModuleLike M>
[[nodiscard]] auto disk_offload(M&& module, const std::filesystem::path& offload_dir,
                                at::Device execution_device = at::kCPU,
                                OffloadOptions options = {}) {
  return big_model::dispatch(std::forward<M>(module), {{"", Place::disk()}},
                             options.main_device(execution_device).offload_dir(offload_dir));
}

/// Brings the weights of `module` to `execution_device` out of any store, module by module: what
/// the functions above are made of.
template <big_model::ModuleLike M>
[[nodiscard]] auto attach_align_device(M&& module, at::Device execution_device, WeightStore weights,
                                       OffloadOptions options = {}) {
  return big_model::dispatch(std::forward<M>(module), {{"", Place::disk()}},
                             options.main_device(execution_device).weights(std::move(weights)));
}

/// Moves a whole module that cpu_offload_with_hook offloaded, and the one before it in a chain.
class CpuOffloadHook {
 public:
  CpuOffloadHook(ModuleRecord module, at::Device execution_device,
                 std::optional<CpuOffloadHook> previous);

  /// To the execution device, after the module before it has been sent back.
  void bring() const;
  /// Back to host memory.
  void offload() const;
  /// The module stays where it is from now on.
  void remove() const;
  /// An input of the module, or a TorchScript value with all that is in it, on the execution
  /// device.
  at::Tensor sent(const at::Tensor& input) const;
  c10::IValue sent(const c10::IValue& input) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// A module that comes to its device as a whole when it is called, and stays until its hook, or the
/// next module in a chain, sends it back. Inputs that are tensors, trees of tensors or TorchScript
/// values come along.
template <class M>
class HookedModel {
 public:
  HookedModel(M module, CpuOffloadHook hook) : module_(std::move(module)), hook_(std::move(hook)) {}
  template <class... Arguments>
  decltype(auto) forward(Arguments&&... arguments) {
    hook_.bring();
    if constexpr (requires { module_->forward(std::forward<Arguments>(arguments)...); }) {
      return module_->forward(sent(std::forward<Arguments>(arguments))...);
    } else {
      return module_.forward(sent(std::forward<Arguments>(arguments))...);
    }
  }
  template <class... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }
  M& module() noexcept { return module_; }

 private:
  template <class Argument>
  decltype(auto) sent(Argument&& argument) const {
    using Value = std::remove_cvref_t<Argument>;
    if constexpr (std::same_as<Value, c10::IValue>) {
      return hook_.sent(argument);
    } else if constexpr (std::same_as<Value, std::vector<c10::IValue>>) {
      Value there;
      for (const typename Value::value_type& value : argument) there.push_back(hook_.sent(value));
      return there;
    } else if constexpr (TensorTree<Value>) {
      return tree::map(Value(std::forward<Argument>(argument)),
                       [&](const at::Tensor& tensor) { return hook_.sent(tensor); });
    } else {
      return std::forward<Argument>(argument);
    }
  }

  M module_;
  CpuOffloadHook hook_;
};

/// Keeps a module in host memory until it is called, and then on `execution_device` until
/// `hook.offload()`, or until the model that was given its hook as `previous` is called: for
/// pipelines of models that run one after the other, some of them in a loop. Returns the model to
/// call, and its hook. Throws ConfigError when the device is not there.
template <big_model::ModuleLike M>
[[nodiscard]] auto cpu_offload_with_hook(M&& module, at::Device execution_device,
                                         std::optional<CpuOffloadHook> previous = {}) {
  auto kept = big_model::keep(std::forward<M>(module));
  CpuOffloadHook hook(big_model::record_of(kept), execution_device, std::move(previous));
  return std::pair(HookedModel<decltype(kept)>(std::move(kept), hook), hook);
}

}  // namespace accelerate
