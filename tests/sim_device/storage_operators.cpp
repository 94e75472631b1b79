// Operators that make memory, or give tensors other memory.

#include "sim_device/memory.hpp"
#include "sim_device/operators.hpp"
#include "sim_device/orderings.hpp"
#include "sim_device/settings.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace sim {
namespace {

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using OnDevice = std::optional<at::Device>;

at::Tensor empty(c10::IntArrayRef sizes, Dtype dtype, Layout, OnDevice device,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only memory of the host can be pinned.");
  const c10::OptionalDeviceGuard guard(device);
  return at::Tensor(at::detail::empty_generic(sizes, &device_memory(), c10::DispatchKeySet(kKey),
                                              c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, Dtype dtype, Layout,
                         OnDevice device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::Tensor(at::detail::empty_strided_generic(
      sizes, strides, &device_memory(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype)));
}

void grow(const at::Tensor& self) {
  const std::size_t needed = at::detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  c10::StorageImpl& storage = *self.storage().unsafeGetStorageImpl();
  if (self.numel() == 0 || needed <= storage.nbytes()) return;
  TORCH_CHECK(storage.resizable() && storage.allocator() == &device_memory(),
              "Trying to resize storage that is not resizable");
  resize_storage(storage, needed);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
  if (self.sizes() == sizes && !format) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format) impl->empty_tensor_restride(*format);
  grow(self);
  return self;
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage storage, std::int64_t offset,
                           c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.data() == nullptr && !sizes.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides, offset);
  }
  grow(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<std::int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_at(self, std::move(storage), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (!self.is_same(source)) {
    set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(),
                   source.strides());
  }
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_storage_at(
      self,
      c10::Storage(c10::Storage::use_byte_size_t(), 0, device_memory().allocate(0),
                   &device_memory(), /*resizable=*/true),
      0, {0}, {});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (!is_left_out(Ordering::record_stream))
    device_memory().recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
}

}  // namespace

void resize_storage(c10::StorageImpl& storage, std::size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr now = device_memory().allocate(bytes);
  const std::size_t kept = std::min<std::size_t>(storage.nbytes(), bytes);
  if (kept > 0) device_memory().copy_data(now.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(now));
  storage.set_nbytes(bytes);
}

const std::set<std::string>& own_operators() {
  static const std::set<std::string> names{"aten::empty.memory_format",
                                           "aten::empty_strided",
                                           "aten::copy_",
                                           "aten::_copy_from",
                                           "aten::_copy_from_and_resize",
                                           "aten::resize_",
                                           "aten::set_.source_Storage",
                                           "aten::set_.source_Storage_storage_offset",
                                           "aten::set_.source_Tensor",
                                           "aten::set_",
                                           "aten::record_stream",
                                           "aten::_thnn_fused_lstm_cell",
                                           "aten::_thnn_fused_lstm_cell_backward_impl",
                                           "aten::_thnn_fused_gru_cell",
                                           "aten::_thnn_fused_gru_cell_backward"};
  return names;
}

}  // namespace sim
