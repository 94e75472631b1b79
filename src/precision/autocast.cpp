#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/precision/autocast.hpp>

#include <ATen/autocast_mode.h>

namespace accelerate {

std::string_view to_string(MixedPrecision precision) {
  switch (precision) {
    case MixedPrecision::no:
      return "no";
    case MixedPrecision::fp16:
      return "fp16";
    case MixedPrecision::bf16:
      return "bf16";
    case MixedPrecision::fp8:
      return "fp8";
  }
  throw ConfigError(text::concat("There is no MixedPrecision ", static_cast<int>(precision), "."));
}

MixedPrecision mixed_precision_from_string(std::string_view name) {
  for (MixedPrecision precision :
       {MixedPrecision::no, MixedPrecision::fp16, MixedPrecision::bf16, MixedPrecision::fp8}) {
    if (name == to_string(precision)) return precision;
  }
  throw ConfigError(
      text::concat("There is no mixed precision \"", name, "\". Use no, fp16 or bf16."));
}

at::ScalarType compute_dtype(MixedPrecision precision) {
  switch (precision) {
    case MixedPrecision::fp16:
      return at::kHalf;
    case MixedPrecision::bf16:
    case MixedPrecision::fp8:
      return at::kBFloat16;
    case MixedPrecision::no:
      break;
  }
  throw PrecisionError("Mixed precision is off (no), so there is no dtype to compute in.");
}

void check_supported(MixedPrecision precision, const at::Device& device) {
  if (precision == MixedPrecision::no) return;
  if (precision == MixedPrecision::fp8) {
    throw UnsupportedError(
        "Mixed precision fp8 is not in this version. Use bf16, which trains with the same memory "
        "for weights and fewer surprises.");
  }
  if (device.is_cpu()) {
    if (precision == MixedPrecision::bf16) return;
    throw PrecisionError(
        "Mixed precision fp16 was asked for on the CPU. LibTorch has fast fp16 kernels for few "
        "CPUs, and fp16 needs its loss scaled; "
        "bf16 needs neither. Use bf16, or run on a GPU.");
  }
  if (!device.is_cuda()) {
    throw PrecisionError(
        text::concat("Mixed precision ", to_string(precision), " was asked for on ", device.str(),
                     ", and this library knows autocast for CPU and CUDA only. Use no."));
  }
}

void AutocastScope::enter(at::DeviceType device, at::ScalarType dtype,
                          const AutocastOptions& options) {
  if (device != at::kCPU && device != at::kCUDA) {
    throw PrecisionError(text::concat("Autocast was asked for on ",
                                      at::DeviceTypeName(device, /*lower_case=*/true),
                                      ", and this library knows it for cpu and cuda only."));
  }
  if (dtype != at::kHalf && dtype != at::kBFloat16) {
    throw PrecisionError(text::concat("Autocast was asked to compute in ", at::toString(dtype),
                                      ". It can in Half and BFloat16."));
  }
  device_ = device;
  was_enabled_ = at::autocast::is_autocast_enabled(device);
  former_dtype_ = at::autocast::get_autocast_dtype(device);
  was_cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  at::autocast::increment_nesting();
  at::autocast::set_autocast_enabled(device, options.enabled());
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::set_autocast_cache_enabled(options.cache_enabled());
  active_ = true;
}

void AutocastScope::leave() noexcept {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_enabled_);
  at::autocast::set_autocast_dtype(device_, former_dtype_);
  at::autocast::set_autocast_cache_enabled(was_cache_enabled_);
}

at::Tensor cast_to_fp32(const at::Tensor& tensor) {
  const bool low = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
  return low ? tensor.to(at::kFloat) : tensor;
}

}  // namespace accelerate
