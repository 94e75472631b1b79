#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/parallel/saved_tensors.hpp>
#include <intercept/key.hpp>
#include <parallel/kept_tensor.hpp>

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/input_buffer.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace accelerate::parallel {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

thread_local SavedTensorPolicy* innermost = nullptr;

// Autograd asks its engine for the hooks of every tensor it saves: the only door there is. The
// engine that was there before does all the work, with its own threads and queues.
class HookingEngine final : public Engine {
 public:
  explicit HookingEngine(Engine& former) : former_(former) {}

  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (innermost != nullptr) {
      if (auto hooks = innermost->hooks()) return hooks;
    }
    return former_.get_default_saved_variable_hooks();
  }
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return former_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task,
      std::shared_ptr<torch::autograd::Node> root, torch::autograd::InputBuffer&& inputs) override {
    return former_.execute_with_graph_task(task, std::move(root), std::move(inputs));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return former_.make_anomaly_metadata();
  }
  void thread_on_exception(const std::shared_ptr<torch::autograd::GraphTask>& task,
                           const std::shared_ptr<torch::autograd::Node>& node,
                           std::exception& error) override {
    former_.thread_on_exception(task, node, error);
  }

 private:
  Engine& former_;
};

// Left in place at exit, as LibTorch's own engine is: threads may still ask for it.
HookingEngine* hooking_engine = nullptr;

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    hooking_engine = new HookingEngine(Engine::get_default_engine());
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *hooking_engine; });
  });
  if (&Engine::get_default_engine() != hooking_engine) {
    throw UnsupportedError(
        "Another library has replaced autograd's engine since this one added its hooks to it, so "
        "tensors saved for backward cannot be recomputed or offloaded. Load that library before "
        "the first use of checkpoint() or OffloadActivations.");
  }
  if (const auto& reason = at::SavedTensorDefaultHooks::get_disabled_error_message()) {
    throw UnsupportedError(text::concat(
        "Hooks on saved tensors are switched off on this thread, so they cannot be recomputed or "
        "offloaded here: ",
        *reason));
  }
}

}  // namespace

SavedTensorScope::SavedTensorScope(SavedTensorPolicy& policy) : outer_(innermost) {
  install();
  innermost = &policy;
}

SavedTensorScope::~SavedTensorScope() { innermost = outer_; }

WriteCheck::WriteCheck(const at::Tensor& tensor)
    : version_(tensor.unsafeGetTensorImpl()->version_counter()),
      expected_(static_cast<std::uint32_t>(tensor._version())) {}

void WriteCheck::check(const at::Tensor& like) const {
  const std::uint32_t now = version_.current_version();
  if (now == expected_) return;
  throw StateError(text::concat(
      "A tensor that backward needs, ", like.scalar_type(), " [",
      text::join(like.sizes(), ", ", 16), "], was changed in place since forward used it (version ",
      now, ", expected ", expected_,
      "). Call backward before the optimizer steps, and do not write to what a graph needs."));
}

KeptTensor::KeptTensor(const at::Tensor& tensor)
    : tensor_(tensor.is_leaf() ? tensor : tensor.detach()), written_(tensor) {}

const at::Tensor& KeptTensor::get() const {
  written_.check(tensor_);
  return tensor_;
}

bool is_of_model(const at::Tensor& tensor) {
  const auto is_trained_leaf = [](const at::TensorBase& each) {
    return each.is_leaf() && each.requires_grad();
  };
  return intercept::is_tagged(tensor) || is_trained_leaf(tensor) ||
         (tensor.is_view() && is_trained_leaf(tensor._base()));
}

}  // namespace accelerate::parallel
