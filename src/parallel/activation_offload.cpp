#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/parallel/activation_offload.hpp>
#include <parallel/kept_tensor.hpp>

#include <ATen/ops/empty_strided.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>

namespace accelerate {

using parallel::KeptTensor;

class OffloadActivations::Impl final : public parallel::SavedTensorPolicy,
                                       public std::enable_shared_from_this<Impl> {
 public:
  explicit Impl(const ActivationOffloadOptions& options) : options_(options) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override;

  ActivationOffloadStatistics statistics() const {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }

 private:
  class Hooks;

  bool moves(const at::Tensor& tensor) const {
    if (parallel::is_of_model(tensor) || tensor.layout() != c10::Layout::Strided) return false;
    const auto bytes = static_cast<std::int64_t>(tensor.nbytes());
    // An expanded tensor would be larger on the host than its memory here.
    return bytes > 0 && bytes >= options_.min_bytes() &&
           tensor.nbytes() <= tensor.storage().nbytes() &&
           (!tensor.is_cpu() || options_.host_tensors());
  }

  // The stream on which copies to the host leave a device: one for each device.
  c10::Stream leaving(at::Device device) {
    const std::lock_guard lock(mutex_);
    const auto found = streams_.find(device.index());
    if (found != streams_.end()) return found->second;
    const c10::impl::VirtualGuardImpl guard(device.type());
    return streams_.emplace(device.index(), guard.getStreamFromGlobalPool(device)).first->second;
  }

  void count(std::int64_t change, bool moved) {
    const std::lock_guard lock(mutex_);
    statistics_.resident_bytes += change;
    statistics_.peak_bytes = std::max(statistics_.peak_bytes, statistics_.resident_bytes);
    if (moved) {
      ++statistics_.tensors;
      statistics_.bytes += change;
    }
  }

  const ActivationOffloadOptions options_;
  mutable std::mutex mutex_;
  ActivationOffloadStatistics statistics_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

class OffloadActivations::Impl::Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Hooks(std::shared_ptr<Impl> owner) : owner_(std::move(owner)) {}
  ~Hooks() override {
    if (host_.defined()) owner_->count(-bytes(), /*moved=*/false);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    if (!owner_->moves(tensor)) {
      kept_ = KeptTensor(tensor);
      const std::lock_guard lock(owner_->mutex_);
      ++owner_->statistics_.kept;
      return;
    }
    device_ = tensor.device();
    const at::Tensor source =
        tensor.is_non_overlapping_and_dense() ? tensor.detach() : tensor.detach().contiguous();
    const bool pin = !device_.is_cpu() && owner_->options_.pin_memory();
    host_ = at::empty_strided(source.sizes(), source.strides(),
                              source.options().device(at::kCPU).pinned_memory(pin));
    if (device_.is_cpu()) {
      host_.copy_(source);
    } else {
      const c10::impl::VirtualGuardImpl guard(device_.type());
      const c10::Stream computing = guard.getStream(device_);
      const c10::Stream leaving = owner_->leaving(device_);
      c10::Event computed(device_.type());
      computed.record(computing);
      const c10::StreamGuard on(leaving);
      computed.block(leaving);
      host_.copy_(source, /*non_blocking=*/true);
      source.record_stream(leaving);  // its memory must not be used anew before it has left
      left_.emplace(device_.type());
      left_->record(leaving);
      written_ = parallel::WriteCheck(tensor);
      // The operator that saves running statistics writes them, too, and no version says so.
      if (tensor.dim() == 1 && tensor.is_leaf()) left_->block(computing);
    }
    owner_->count(bytes(), /*moved=*/true);
  }

  at::Tensor call_unpack_hook() override {
    if (kept_.defined()) return kept_.get();
    {
      const std::lock_guard lock(owner_->mutex_);
      ++owner_->statistics_.brought_back;
    }
    if (device_.is_cpu()) return host_.clone();
    written_.check(host_);  // while it was being copied, for all that is known
    const c10::impl::VirtualGuardImpl guard(device_.type());
    left_->block(guard.getStream(device_));
    at::Tensor back = at::empty_strided(host_.sizes(), host_.strides(),
                                        host_.options().device(device_).pinned_memory(false));
    return back.copy_(host_, /*non_blocking=*/true);
  }

 private:
  std::int64_t bytes() const { return static_cast<std::int64_t>(host_.nbytes()); }

  std::shared_ptr<Impl> owner_;
  KeptTensor kept_;
  at::Tensor host_;
  at::Device device_ = at::kCPU;
  std::optional<c10::Event> left_;
  parallel::WriteCheck written_;
};

std::unique_ptr<torch::autograd::SavedVariableHooks> OffloadActivations::Impl::hooks() {
  return std::make_unique<Hooks>(shared_from_this());
}

namespace {

const ActivationOffloadOptions& checked(const ActivationOffloadOptions& options) {
  if (options.min_bytes() < 0) {
    throw ConfigError(text::concat("ActivationOffloadOptions::min_bytes is ", options.min_bytes(),
                                   ". Give a number of bytes, 0 to move every activation."));
  }
  return options;
}

}  // namespace

OffloadActivations::OffloadActivations(const ActivationOffloadOptions& options)
    : impl_(std::make_shared<Impl>(checked(options))), scope_(*impl_) {}

OffloadActivations::~OffloadActivations() = default;

ActivationOffloadStatistics OffloadActivations::statistics() const { return impl_->statistics(); }

}  // namespace accelerate
