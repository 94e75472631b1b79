#pragma once

#include "sim_device/checker.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sim {

bool is_ours(const at::Tensor& tensor);
/// The bytes from a tensor's first element to its last.
Use use_of(const at::Tensor& tensor, bool write);

/// One operator's way through a kernel of the CPU: tensors of a device are exchanged for tensors of
/// the host over the same bytes, and what the kernel made is brought back.
class Passage {
 public:
  explicit Passage(const std::string& op) : op_(op) {}

  /// A tensor that the kernel can use. Where only its shape matters, its memory need not be there.
  at::Tensor to_host(const at::Tensor& tensor, bool only_a_view = false);
  at::Tensor to_device(const at::Tensor& result);
  /// Sizes and memory that the kernel changed in place.
  void bring_changes_back();

  const std::optional<c10::Device>& device() const { return device_; }
  void set_device(c10::Device device) { device_ = device; }
  /// A tensor of the host, not a scalar, that was given beside those of the device.
  const at::Tensor& host_tensor() const { return host_tensor_; }
  /// New memory, which the operator has written.
  const std::vector<Use>& made() const { return made_; }

 private:
  struct Home {
    c10::Storage storage;
    c10::DispatchKeySet keys;
  };
  c10::DataPtr allocate_copy(const c10::Storage& storage);

  const std::string& op_;
  std::optional<c10::Device> device_;
  at::Tensor host_tensor_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;  // of the device, of the host
  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_;
  std::unordered_map<c10::StorageImpl*, Home> homes_;
  std::vector<at::Tensor> kept_;  // so that no storage is freed and its address used again
  std::vector<Use> made_;
};

}  // namespace sim
