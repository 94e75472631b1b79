#include "sim_device/passage.hpp"

#include "sim_device/memory.hpp"
#include "sim_device/settings.hpp"

#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace sim {
namespace {

void* address_of(c10::StorageImpl& storage) { return storage._mutable_data_ptr_no_checks().get(); }

// Like `like`, on another storage. A view keeps all dispatch keys of what it is a view of; a new
// tensor gets those of autograd as it is made.
at::Tensor over(const c10::Storage& storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  at::Tensor tensor =
      keys.has_any(c10::autograd_dispatch_keyset)
          ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage),
                                                     keys, like.dtype())
          : at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return tensor;
}

}  // namespace

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

Use use_of(const at::Tensor& tensor, bool write) {
  if (tensor.numel() == 0) return {nullptr, 0, write};
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto item = static_cast<std::int64_t>(tensor.itemsize());
  const auto* begin =
      static_cast<const char*>(tensor.storage().data()) + tensor.storage_offset() * item;
  return {begin, static_cast<std::size_t>((last + 1) * item), write};
}

at::Tensor Passage::to_host(const at::Tensor& tensor, bool only_a_view) {
  if (!is_ours(tensor)) {
    if (tensor.defined() && tensor.is_cpu() && tensor.dim() > 0) host_tensor_ = tensor;
    return tensor;
  }
  TORCH_CHECK(tensor.layout() == at::kStrided, "The simulated device has no tensors of layout ",
              tensor.layout(), ", which ", op_, " was given.");
  if (!device_) device_ = tensor.device();
  TORCH_CHECK(*device_ == tensor.device(), "Expected all tensors of ", op_,
              " to be on the same device, but found at least two devices, ", *device_, " and ",
              tensor.device(), "!");
  for (const auto& [original, alias] : tensors_) {
    if (original.is_same(tensor)) return alias;
  }
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  c10::Storage& host = hosts_[storage];
  if (!host) {
    const void* data = only_a_view ? address_of(*storage) : storage->data();
    host = c10::Storage(
        c10::Storage::use_byte_size_t(), storage->nbytes(),
        c10::DataPtr(data == nullptr ? nullptr : host_alias(data), c10::Device(c10::kCPU)),
        c10::GetCPUAllocator(), /*resizable=*/true);
    homes_[host.unsafeGetStorageImpl()] = {tensor.storage(), tensor.key_set()};
  }
  const at::Tensor alias = over(host, c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
  tensors_.emplace_back(tensor, alias);
  return alias;
}

c10::DataPtr Passage::allocate_copy(const c10::Storage& storage) {
  const c10::DeviceGuard guard(*device_);
  c10::DataPtr data = device_memory().allocate(storage.nbytes());
  if (data.get() != nullptr) {
    std::memcpy(host_alias(data.get()), storage.data(), storage.nbytes());
    made_.push_back({data.get(), storage.nbytes(), true});
  }
  return data;
}

at::Tensor Passage::to_device(const at::Tensor& result) {
  if (!result.defined() || !result.is_cpu() || !device_) return result;
  for (const auto& [original, alias] : tensors_) {
    if (alias.is_same(result)) return original;
  }
  TORCH_CHECK(result.layout() == at::kStrided, "The simulated device has no tensors of layout ",
              result.layout(), ", which ", op_, " makes.");
  c10::StorageImpl* storage = result.storage().unsafeGetStorageImpl();
  auto at = homes_.find(storage);
  if (at == homes_.end()) {
    c10::Storage made(c10::Storage::use_byte_size_t(), storage->nbytes(),
                      allocate_copy(result.storage()), &device_memory(), /*resizable=*/true);
    at = homes_.emplace(storage, Home{std::move(made), c10::DispatchKeySet(kKey)}).first;
    kept_.push_back(result);
  }
  return over(at->second.storage, at->second.keys, result);
}

void Passage::bring_changes_back() {
  for (const auto& [original, alias] : tensors_) {
    const c10::Storage& storage = alias.storage();
    const auto at = homes_.find(storage.unsafeGetStorageImpl());
    TORCH_CHECK(at != homes_.end(), op_, " gave a tensor of the simulated device another storage.");
    c10::StorageImpl& home = *at->second.storage.unsafeGetStorageImpl();
    const void* expected = address_of(home) == nullptr ? nullptr : host_alias(address_of(home));
    if (storage.data() != expected) {  // the kernel resized it
      const std::size_t bytes = storage.nbytes();
      home.set_data_ptr_noswap(allocate_copy(storage));
      home.set_nbytes(bytes);
      void* now = bytes == 0 ? nullptr : host_alias(home.data());
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
          c10::DataPtr(now, c10::Device(c10::kCPU)));
    }
    if (alias.sizes() != original.sizes() || alias.strides() != original.strides() ||
        alias.storage_offset() != original.storage_offset()) {
      original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(),
                                                            alias.storage_offset());
    }
  }
}

}  // namespace sim
