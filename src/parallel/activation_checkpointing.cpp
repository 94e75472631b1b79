#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/random.hpp>
#include <accelerate/intercept/operator_policy.hpp>
#include <accelerate/parallel/activation_checkpointing.hpp>
#include <accelerate/precision/autocast.hpp>
#include <parallel/kept_tensor.hpp>

#include <ATen/autocast_mode.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include <array>
#include <exception>
#include <mutex>
#include <optional>
#include <typeinfo>

namespace accelerate::detail {
namespace {

using parallel::KeptTensor;
using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

/// Thrown through the user's function when all that was asked for is there. No std::exception, so
/// that code which handles errors does not take it for one.
struct AllIsThere {};

struct Autocast {
  at::DeviceType device;
  bool enabled;
  at::ScalarType dtype;

  static Autocast of(at::DeviceType device) {
    return {device, at::autocast::is_autocast_enabled(device),
            at::autocast::get_autocast_dtype(device)};
  }
};

// Tells results of different operators apart, which may have the same shape.
const std::type_info* source_of(const at::Tensor& tensor) {
  const auto& node = tensor.grad_fn();
  return node == nullptr ? nullptr : &typeid(*node);
}

std::string describe_tensor(at::ScalarType dtype, at::IntArrayRef sizes, at::Device device,
                            const std::type_info* source) {
  return text::concat(dtype, " [", text::join(sizes, ", ", 16), "] on ", device, " from ",
                      source == nullptr ? "no operator" : c10::demangle(source->name()));
}

}  // namespace

class CheckpointFrame::Impl final : public parallel::SavedTensorPolicy,
                                    public std::enable_shared_from_this<Impl> {
 public:
  Impl(const std::vector<at::Tensor>& inputs, Again again,
       const ActivationCheckpointOptions& options)
      : again_(std::move(again)),
        early_stop_(options.early_stop()),
        autocast_{Autocast::of(at::kCPU), Autocast::of(at::kCUDA)},
        autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
    if (options.preserve_rng_state()) rng_ = RngState::capture();
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
  }

  /// The first call is over.
  void complete() {
    const std::lock_guard lock(mutex_);
    complete_ = true;
  }

  std::unique_ptr<SavedVariableHooks> hooks() override;

 private:
  class FirstTime;
  struct Run;

  // A tensor that the first call saved.
  struct Slot {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;
    const std::type_info* source;  // the type of the node that made it, null for a leaf
    bool needed = true;            // backward may still ask for it
    KeptTensor value;              // between being computed again and being asked for
  };

  std::size_t add(const at::Tensor& tensor, bool needed) {
    const std::lock_guard lock(mutex_);
    slots_.push_back({tensor.sizes().vec(),
                      tensor.scalar_type(),
                      tensor.device(),
                      source_of(tensor),
                      needed,
                      {}});
    return slots_.size() - 1;
  }

  void forget(std::size_t index) {
    const std::lock_guard lock(mutex_);
    slots_[index].needed = false;
    slots_[index].value = {};
  }

  at::Tensor value(std::size_t index) {
    const std::lock_guard lock(mutex_);
    if (!slots_[index].value.defined()) compute_again();
    const KeptTensor value = std::exchange(slots_[index].value, {});
    return value.get();
  }

  void compute_again();
  void receive(Run& run, const at::Tensor& tensor);
  [[noreturn]] static void refuse(Run& run, const std::string& what);

  // Held while computing again: backward threads that want other tensors of this frame wait.
  // Recursive, because a function may end with the release of tensors of its own frame.
  std::recursive_mutex mutex_;
  Again again_;
  bool early_stop_;
  std::array<Autocast, 2> autocast_;
  bool autocast_cache_;
  std::optional<RngState> rng_;
  std::vector<SavedVariable> inputs_;
  std::vector<Slot> slots_;
  bool complete_ = false;
};

// Stands in the graph for a tensor that is not kept.
class CheckpointFrame::Impl::FirstTime final : public SavedVariableHooks {
 public:
  explicit FirstTime(std::shared_ptr<Impl> frame) : frame_(std::move(frame)) {}
  ~FirstTime() override {
    if (index_ && !kept_.defined()) frame_->forget(*index_);
  }
  void call_pack_hook(const at::Tensor& tensor) override {
    if (parallel::is_of_model(tensor)) kept_ = KeptTensor(tensor);
    index_ = frame_->add(tensor, /*needed=*/!kept_.defined());
  }
  at::Tensor call_unpack_hook() override {
    return kept_.defined() ? kept_.get() : frame_->value(*index_);
  }

 private:
  std::shared_ptr<Impl> frame_;
  std::optional<std::size_t> index_;
  KeptTensor kept_;
};

std::unique_ptr<SavedVariableHooks> CheckpointFrame::Impl::hooks() {
  return std::make_unique<FirstTime>(shared_from_this());
}

// One time of computing again.
struct CheckpointFrame::Impl::Run final : parallel::SavedTensorPolicy {
  // Hands each tensor to the frame, and keeps it besides, for functions that take gradients inside.
  class Hooks final : public SavedVariableHooks {
   public:
    explicit Hooks(Run& run) : run_(run) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      kept_ = KeptTensor(tensor);
      run_.frame.receive(run_, tensor);
    }
    at::Tensor call_unpack_hook() override { return kept_.get(); }

   private:
    Run& run_;  // of use while packing only
    KeptTensor kept_;
  };

  explicit Run(Impl& owner) : frame(owner) {
    for (std::size_t i = 0; i < owner.slots_.size(); ++i) {
      if (owner.slots_[i].needed) last_needed = i;
    }
  }
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(*this); }

  Impl& frame;
  std::size_t last_needed = 0;
  std::size_t count = 0;
  bool all_there = false;
  std::exception_ptr refusal;
};

void CheckpointFrame::Impl::refuse(Run& run, const std::string& what) {
  run.refusal = std::make_exception_ptr(StateError(text::concat(
      "A function under checkpoint() did something else when it was called again for backward: ",
      what,
      ". It must do the same each time it is called with the same inputs and random state. Take "
      "what changes (a counter, a cache, a flag) out of it or give it as an input, and leave "
      "preserve_rng_state on if it draws random numbers.")));
  std::rethrow_exception(run.refusal);
}

void CheckpointFrame::Impl::receive(Run& run, const at::Tensor& tensor) {
  const std::size_t index = run.count++;
  if (index >= slots_.size()) {
    // While the first call still runs (it takes gradients inside), it has not saved everything yet.
    if (complete_)
      refuse(run,
             text::concat("it saved more than the ", slots_.size(), " tensors of the first time"));
    return;
  }
  Slot& slot = slots_[index];
  if (slot.needed) {
    const std::type_info* source = source_of(tensor);
    const bool same_source =
        source == slot.source ||
        (source != nullptr && slot.source != nullptr && *source == *slot.source);
    if (tensor.sizes() != at::IntArrayRef(slot.sizes) || tensor.scalar_type() != slot.dtype ||
        tensor.device() != slot.device || !same_source) {
      refuse(run,
             text::concat(
                 "tensor ", index + 1, " of the ", slots_.size(), " it saves was ",
                 describe_tensor(slot.dtype, slot.sizes, slot.device, slot.source), " and is now ",
                 describe_tensor(tensor.scalar_type(), tensor.sizes(), tensor.device(), source)));
    }
    slot.value = KeptTensor(tensor.detach());
  }
  if (early_stop_ && index == run.last_needed) {
    run.all_there = true;
    throw AllIsThere();
  }
}

void CheckpointFrame::Impl::compute_again() {
  std::vector<at::Tensor> inputs;
  for (const SavedVariable& input : inputs_) inputs.push_back(input.unpack());
  const auto as_before = [&](const Autocast& each) {
    return AutocastScope(each.device, each.dtype,
                         AutocastOptions().enabled(each.enabled).cache_enabled(autocast_cache_));
  };
  const AutocastScope cpu = as_before(autocast_[0]);
  const AutocastScope cuda = as_before(autocast_[1]);
  const at::AutoGradMode with_gradients(true);
  const intercept::ForwardScope forward;
  const PlainTorchScript plain;
  std::optional<RngState> now;
  if (rng_) {
    now = RngState::capture();
    rng_->restore();
  }
  Run run(*this);
  std::exception_ptr error;
  try {
    const parallel::SavedTensorScope scope(run);
    again_(inputs);
    if (!run.all_there && complete_ && run.count != slots_.size()) {
      refuse(run, text::concat("it saved ", run.count, " tensors, and ", slots_.size(),
                               " the first time"));
    }
  } catch (...) {
    // TorchScript's interpreter, for one, makes an exception of its own out of any.
    if (!run.all_there) error = run.refusal ? run.refusal : std::current_exception();
  }
  if (now) now->restore();
  if (error) {
    for (Slot& slot : slots_) slot.value = {};
    std::rethrow_exception(error);
  }
}

PlainTorchScript::PlainTorchScript() : was_optimized_(torch::jit::getGraphExecutorOptimize()) {
  torch::jit::setGraphExecutorOptimize(false);
}

PlainTorchScript::~PlainTorchScript() { torch::jit::setGraphExecutorOptimize(was_optimized_); }

CheckpointFrame::CheckpointFrame(const std::vector<at::Tensor>& inputs, Again again,
                                 const ActivationCheckpointOptions& options)
    : impl_(std::make_shared<Impl>(inputs, std::move(again), options)), scope_(*impl_) {}

CheckpointFrame::~CheckpointFrame() { impl_->complete(); }

}  // namespace accelerate::detail
