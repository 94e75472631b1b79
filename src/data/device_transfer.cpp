#include <accelerate/data/detail/device_transfer.hpp>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace accelerate::data::detail {

struct DeviceTransfer::Streams {
  explicit Streams(c10::Device device)
      : guard(device.type()), copies(guard.getStreamFromGlobalPool(device)) {}
  c10::impl::VirtualGuardImpl guard;
  c10::Stream copies;
};

class DeviceTransfer::Ticket {
 public:
  explicit Ticket(const c10::Stream& stream) : event_(stream.device_type()) {
    event_.record(stream);
  }
  void order_after(const c10::Stream& stream) const { event_.block(stream); }

 private:
  c10::Event event_;
};

DeviceTransfer::DeviceTransfer(c10::Device device, bool non_blocking, bool pin_memory, bool ahead)
    : device_(device),
      non_blocking_(non_blocking),
      pin_memory_(pin_memory),
      asynchronous_(ahead && device.type() != c10::kCPU && device.type() != c10::kMeta) {
  if (device_.type() != c10::kCPU && device_.type() != c10::kMeta && !device_.has_index()) {
    device_ = c10::impl::VirtualGuardImpl(device_.type()).getDevice();
  }
  if (asynchronous_) streams_ = std::make_unique<Streams>(device_);
}

DeviceTransfer::~DeviceTransfer() = default;

at::Tensor DeviceTransfer::stage(const at::Tensor& tensor) const {
  if (!pin_memory_ || tensor.device().type() != c10::kCPU || tensor.layout() != c10::kStrided ||
      tensor.is_pinned())
    return tensor;
  return tensor.pin_memory();
}

at::Tensor DeviceTransfer::move(const at::Tensor& tensor) const {
  return tensor.to(tensor.options().device(device_), asynchronous_ || non_blocking_);
}

std::shared_ptr<DeviceTransfer::Ticket> DeviceTransfer::run(
    const std::function<void()>& moves) const {
  struct Restore {
    const c10::impl::VirtualGuardImpl& guard;
    c10::Stream before;
    ~Restore() { guard.exchangeStream(before); }
  } restore{streams_->guard, streams_->guard.exchangeStream(streams_->copies)};
  moves();
  return std::make_shared<Ticket>(streams_->copies);
}

void DeviceTransfer::finish(const Ticket& ticket) const {
  ticket.order_after(streams_->guard.getStream(device_));
}

void DeviceTransfer::adopt(const at::Tensor& tensor) const {
  // Without this the caching allocator could hand the memory to the next copy while kernels of the
  // current stream still read it.
  if (tensor.device() == device_ && tensor.has_storage()) {
    streams_->guard.recordDataPtrOnStream(tensor.storage().data_ptr(),
                                          streams_->guard.getStream(device_));
  }
}

}  // namespace accelerate::data::detail
