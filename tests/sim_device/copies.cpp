// Copies: within a device, between devices, and between a device and the host. Which of them need
// temporaries, and which the host waits for, is decided as CUDA's copy kernel does
// (aten/src/ATen/native/cuda/Copy.cu).

#include "sim_device/checker.hpp"
#include "sim_device/memory.hpp"
#include "sim_device/passage.hpp"
#include "sim_device/streams.hpp"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

namespace sim {
namespace {

at::Tensor& copy(at::Tensor& self, const at::Tensor& given, bool non_blocking);

const std::string* copy_name() {
  static const std::string* const name = kept_name("aten::copy_");
  return name;
}

void copy_within(at::Tensor& self, const at::Tensor& source) {
  const c10::DeviceGuard guard(self.device());
  Passage passage(*copy_name());
  Stream& stream = stream_of(current_stream(self.device().index()));
  const std::lock_guard busy(stream.busy);
  start(stream, copy_name(), {use_of(source, false), use_of(self, true)});
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  passage.to_host(self).copy_(passage.to_host(source));
}

// By way of contiguous tensors of one dtype. Where the host does not wait, the device converts.
void copy_in_steps(at::Tensor& self, const at::Tensor& source, bool non_blocking, bool plain) {
  const bool to = is_ours(self), from = is_ours(source);
  const bool convert_at_the_source = from == (non_blocking || to == from);
  at::Tensor filled = self, sent;
  if (convert_at_the_source) {
    if (!self.is_contiguous() || self.is_conj())
      filled = at::empty_like(self, at::MemoryFormat::Contiguous);
    sent = source.to(self.scalar_type()).resolve_conj().resolve_neg().contiguous();
  } else {
    if (!self.is_contiguous() || !plain) {
      filled = at::empty_like(self, self.options().dtype(source.scalar_type()),
                              at::MemoryFormat::Contiguous);
    }
    sent = source.resolve_conj().resolve_neg().contiguous();
  }
  copy(filled, sent, non_blocking);
  if (!filled.is_same(self)) self.copy_(filled, non_blocking);
}

// On the source's stream, after the destination's and before what comes on that.
void copy_between_devices(at::Tensor& self, const at::Tensor& source) {
  const c10::DeviceGuard guard(source.device());
  Stream& stream = stream_of(current_stream(source.device().index()));
  Stream& other = stream_of(current_stream(self.device().index()));
  const std::lock_guard busy(stream.busy);
  const Use read = use_of(source, false), written = use_of(self, true);
  const Lock lock(mutex());
  host_joins(other);
  stream.clock.join(other.clock);
  start(stream, copy_name(), {read, written});
  other.clock.join(stream.clock);
  std::memcpy(host_alias(written.begin), host_alias(read.begin), read.bytes);
}

void copy_to_device(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  static const std::string* const name = kept_name("aten::copy_ (host to device)");
  const c10::DeviceGuard guard(self.device());
  Stream& stream = stream_of(current_stream(self.device().index()));
  const std::lock_guard busy(stream.busy);
  const Use read = use_of(source, false), written = use_of(self, true);
  const bool pinned = is_pinned(read.begin);
  const Lock lock(mutex());
  std::vector<Use> uses{written};
  if (pinned) uses.push_back(read);
  const std::uint64_t number = start(stream, name, uses);
  if (pinned) settle_transfers(read.begin, read.bytes, /*written=*/false);
  std::memcpy(host_alias(written.begin), read.begin, read.bytes);
  if (non_blocking && pinned) {
    add_transfer({.to_host = false,
                  .host = const_cast<void*>(read.begin),
                  .size = read.bytes,
                  .bytes = {},
                  .hash = hash_of(read.begin, read.bytes),
                  .stream = stream.index,
                  .number = number,
                  .op = name});
  }
  if (!non_blocking) synchronize(stream);
}

void copy_to_host(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  static const std::string* const name = kept_name("aten::copy_ (device to host)");
  const c10::DeviceGuard guard(source.device());
  Stream& stream = stream_of(current_stream(source.device().index()));
  const std::lock_guard busy(stream.busy);
  const Use read = use_of(source, false), written = use_of(self, true);
  auto* host = const_cast<void*>(written.begin);
  const bool pinned = is_pinned(host);
  const Lock lock(mutex());
  std::vector<Use> uses{read};
  if (pinned) uses.push_back(written);
  const std::uint64_t number = start(stream, name, uses);
  if (pinned) settle_transfers(host, read.bytes, /*written=*/true);
  const char* arriving = host_alias(read.begin);
  if (non_blocking && pinned) {
    add_transfer({.to_host = true,
                  .host = host,
                  .size = read.bytes,
                  .bytes = {arriving, arriving + read.bytes},
                  .stream = stream.index,
                  .number = number,
                  .op = name});
    std::memset(host, 0xff, read.bytes);  // until the host has waited
    return;
  }
  std::memcpy(host, arriving, read.bytes);
  synchronize(stream);
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  const at::Tensor source = given.sizes() == self.sizes() ? given : given.expand_as(self);
  if (self.numel() == 0 || self.is_same(source)) return self;
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  const bool to = is_ours(self), from = is_ours(source);
  if (to && from && self.device() == source.device()) {
    copy_within(self, source);
    return self;
  }
  const bool plain = self.scalar_type() == source.scalar_type() &&
                     self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  const bool same_layout =
      (self.is_contiguous() && source.is_contiguous()) ||
      (self.strides() == source.strides() && self.is_non_overlapping_and_dense());
  if (!plain || !same_layout) {
    copy_in_steps(self, source, non_blocking, plain);
  } else if (to && from) {
    copy_between_devices(self, source);
  } else if (to) {
    copy_to_device(self, source, non_blocking);
  } else {
    copy_to_host(self, source, non_blocking);
  }
  return self;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& self, bool non_blocking) {
  at::Tensor to = self;
  return copy(to, source, non_blocking);
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& self) {
  at::Tensor to = self;
  if (to.sizes() != source.sizes()) to.resize_(source.sizes());
  return copy(to, source, false);
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", &copy);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
}

}  // namespace
}  // namespace sim
