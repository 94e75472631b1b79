#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace accelerate::data::detail {

/// Copies batches to a device. On an accelerator the copies run on a stream of their own, out of
/// page-locked memory, and whoever uses a batch is ordered after its copy.
class DeviceTransfer {
 public:
  DeviceTransfer(c10::Device device, bool non_blocking, bool pin_memory, bool ahead);
  ~DeviceTransfer();
  DeviceTransfer(const DeviceTransfer&) = delete;
  DeviceTransfer& operator=(const DeviceTransfer&) = delete;

  /// Copies ahead of use make sense: the device has streams.
  bool asynchronous() const noexcept { return asynchronous_; }
  /// The tensor in page-locked memory if that helps; called by the workers.
  at::Tensor stage(const at::Tensor& tensor) const;

  /// A copy of the tensor on the device.
  at::Tensor move(const at::Tensor& tensor) const;
  /// The end of the copies of one batch.
  class Ticket;
  /// Has the copies that `moves` makes run on the stream of the copies.
  std::shared_ptr<Ticket> run(const std::function<void()>& moves) const;
  /// Orders the current stream after the copies; then call `adopt` for each tensor of the batch.
  void finish(const Ticket& ticket) const;
  void adopt(const at::Tensor& tensor) const;

  c10::Device device() const noexcept { return device_; }

 private:
  struct Streams;
  c10::Device device_;
  bool non_blocking_;
  bool pin_memory_;
  bool asynchronous_;
  std::unique_ptr<Streams> streams_;
};

}  // namespace accelerate::data::detail
