#pragma once

#include <accelerate/core/tree.hpp>
#include <accelerate/parallel/saved_tensors.hpp>

#include <ATen/core/grad_mode.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace accelerate {

/// How `checkpoint` computes again.
class ActivationCheckpointOptions {
  /// Whether the random numbers of forward are drawn again, so that dropout drops the same. Costs a
  /// copy of the generators' states (5 KB for the CPU's) for each call. Default: true.
  TORCH_ARG(bool, preserve_rng_state) = true;
  /// Whether computing again ends as soon as all that backward needs is there. It ends with an
  /// exception through the function, of a type that is not derived from std::exception. Default:
  /// true.
  TORCH_ARG(bool, early_stop) = true;
};

namespace detail {

/// While it lives, this thread's TorchScript runs as it is written. Its optimizer takes effect from
/// the second or third call on, and saves other tensors for backward than the calls before.
class PlainTorchScript {
 public:
  PlainTorchScript();
  ~PlainTorchScript();
  PlainTorchScript(const PlainTorchScript&) = delete;
  PlainTorchScript& operator=(const PlainTorchScript&) = delete;

 private:
  bool was_optimized_;
};

/// One call of `checkpoint`: counts what is saved inside it, and computes it again when backward
/// asks for it.
class CheckpointFrame {
 public:
  using Again = std::function<void(const std::vector<at::Tensor>& inputs)>;
  /// `inputs` are saved the way tensors are saved where the call stands.
  CheckpointFrame(const std::vector<at::Tensor>& inputs, Again again,
                  const ActivationCheckpointOptions& options);
  ~CheckpointFrame();
  CheckpointFrame(const CheckpointFrame&) = delete;
  CheckpointFrame& operator=(const CheckpointFrame&) = delete;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
  parallel::SavedTensorScope scope_;
  PlainTorchScript plain_;
};

template <class T, class Visitor>
void for_each_tensor_of(T& input, Visitor&& visitor) {
  if constexpr (TensorTree<T>) tree::for_each_tensor(input, visitor);
}

}  // namespace detail

/// `function(inputs...)`, without keeping the activations inside it for backward: when backward
/// comes to them, `function` is called again, with the inputs, random state and autocast of the
/// first call. Only the inputs are kept. Costs one more forward of `function` in each backward.
///
/// Any return type; inputs may be anything that can be copied, and the tensors in trees (see
/// core/tree.hpp) are saved as autograd saves them. Nests. Gradients are those that the same call
/// without `checkpoint` gives, those of gradients included, for a `function` that does the same
/// both times. What it refers to (a module, say) must live until backward. A parameter that is
/// sharded is gathered again. TorchScript runs without its optimizer inside.
///
/// `function` is copied; pass std::ref to refer to one. Member functions work:
/// `checkpoint(&BlockImpl::forward, block.ptr(), x)`.
///
/// Backward throws StateError when the second call saved other tensors (in number, shape, dtype or
/// device) than the first, or when an input, or a parameter that backward reads, was written to in
/// between. Side effects of `function` happen twice: BatchNorm moves its running statistics twice a
/// step.
///
/// The algorithm is that of torch.utils.checkpoint with use_reentrant=False.
template <class Function, class... Inputs>
requires std::invocable < std::decay_t<Function>
&, Inputs... > decltype(auto) checkpoint(const ActivationCheckpointOptions& options,
                                         Function&& function, Inputs&&... inputs) {
  auto call = std::make_shared<std::decay_t<Function>>(std::forward<Function>(function));
  if (!at::GradMode::is_enabled()) return std::invoke(*call, std::forward<Inputs>(inputs)...);
  std::tuple<std::decay_t<Inputs>...> kept(inputs...);
  std::vector<at::Tensor> tensors;
  const auto for_each = [](auto& all, const auto& visitor) {
    std::apply([&](auto&... each) { (detail::for_each_tensor_of(each, visitor), ...); }, all);
  };
  // The tensors go to the frame, which saves them as autograd would; the rest stays here.
  for_each(kept, [&](at::Tensor& tensor) { tensors.push_back(std::exchange(tensor, {})); });
  const detail::CheckpointFrame frame(
      tensors,
      [call, kept, for_each](const std::vector<at::Tensor>& saved) {
        auto arguments = kept;
        std::size_t next = 0;
        for_each(arguments, [&](at::Tensor& tensor) { tensor = saved[next++]; });
        std::apply([&](auto&... each) { std::invoke(*call, static_cast<Inputs&&>(each)...); },
                   arguments);
      },
      options);
  tensors.clear();
  return std::invoke(*call, std::forward<Inputs>(inputs)...);
}

template <class Function, class... Inputs>
requires std::invocable < std::decay_t<Function>
&, Inputs... > decltype(auto) checkpoint(Function&& function, Inputs&&... inputs) {
  return checkpoint(ActivationCheckpointOptions(), std::forward<Function>(function),
                    std::forward<Inputs>(inputs)...);
}

/// Which modules `apply_activation_checkpointing` chooses. With neither types nor names: every
/// child of a Sequential that has parameters. What lies inside a chosen module is not chosen again.
class ActivationCheckpointPolicy {
  /// Module types, as `Module::name()` gives them, or their last part ("BlockImpl").
  TORCH_ARG(std::vector<std::string>, types);
  /// Modules by their dotted name ("blocks.3").
  TORCH_ARG(std::vector<std::string>, names);
  /// Of those chosen, only the first of every so many; 1 for all. Default: 1.
  TORCH_ARG(std::int64_t, every_n) = 1;
  /// How each is computed again.
  TORCH_ARG(ActivationCheckpointOptions, options);
};

/// Has chosen modules inside an unmodified module run under `checkpoint` from now on, and returns
/// their names. Nothing else changes: names, parameters, `children()` and state dicts stay as they
/// are, and the module may be prepared before or after. A module that runs so already is left as it
/// is.
///
/// Only what is called through a boundary that the library can step into can be called again:
/// children of a torch::nn::Sequential, at any depth. A Sequential calls its children through
/// AnyModule; a ModuleList or ModuleDict is only a list, whose children the user's own forward
/// calls directly. Throws UnsupportedError, naming the module, when one of those is chosen, or one
/// that is a plain member of its parent; call `checkpoint` in the forward for these. Throws
/// ConfigError when a type or name is met nowhere, when `every_n` is not above 0, or when there is
/// nothing to choose. When it throws, nothing has been changed.
///
/// `Sequential::at<T>` and `ptr<T>` do not know the chosen children as T any more; `ptr(i)` does.
std::vector<std::string> apply_activation_checkpointing(
    torch::nn::Module& module, const ActivationCheckpointPolicy& policy = {});

}  // namespace accelerate
