#pragma once

#include <accelerate/core/tree.hpp>
#include <accelerate/precision/mixed_precision.hpp>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <torch/arg.h>

#include <string_view>

namespace accelerate {

/// Settings of autocast (the original's AutocastKwargs).
class AutocastOptions {
  /// Off: inside the scope operators run in the dtype of their inputs, even within an outer scope.
  /// Default: true.
  TORCH_ARG(bool, enabled) = true;
  /// Whether casts of parameters are kept for reuse until the outermost scope ends. Default: true.
  TORCH_ARG(bool, cache_enabled) = true;
};

/// "no", "fp16", "bf16" or "fp8".
std::string_view to_string(MixedPrecision precision);
/// Throws ConfigError for any other name.
MixedPrecision mixed_precision_from_string(std::string_view name);
/// The dtype autocast computes in: kHalf, kBFloat16, and kBFloat16 for fp8, whose operators outside
/// the fp8 linears run in bf16. Throws PrecisionError for `no`.
at::ScalarType compute_dtype(MixedPrecision precision);

/// Throws when training in `precision` on `device` would not be what was asked for:
/// - PrecisionError for fp16 on the CPU. Autocast would accept it, but LibTorch has fast fp16
/// kernels
///   for few CPUs only, and fp16's narrow range needs loss scaling; bf16 needs neither.
/// - PrecisionError for devices other than CPU and CUDA.
/// - UnsupportedError for fp8, which this version cannot do.
/// On CUDA fp16 and bf16 always pass: GPUs without bf16 units compute in it correctly, only slower.
void check_supported(MixedPrecision precision, const at::Device& device);

/// While it lives, this thread runs LibTorch's operators under autocast on one device type, as
/// `torch.autocast` does in Python. Scopes nest; the outermost one empties the cache of casted
/// parameters when it ends. End a scope on the thread that began it.
///
/// With MixedPrecision::no it does nothing and costs nothing.
class [[nodiscard]] AutocastScope {
 public:
  AutocastScope(at::DeviceType device, MixedPrecision precision,
                const AutocastOptions& options = {}) {
    if (precision != MixedPrecision::no) enter(device, compute_dtype(precision), options);
  }
  /// Throws PrecisionError when LibTorch has no autocast for this device or dtype.
  AutocastScope(at::DeviceType device, at::ScalarType dtype, const AutocastOptions& options = {}) {
    enter(device, dtype, options);
  }
  ~AutocastScope() {
    if (active_) leave();
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  void enter(at::DeviceType device, at::ScalarType dtype, const AutocastOptions& options);
  void leave() noexcept;

  bool active_ = false;
  bool was_enabled_ = false;
  bool was_cache_enabled_ = false;
  at::DeviceType device_ = at::DeviceType::CPU;
  at::ScalarType former_dtype_ = at::ScalarType::Undefined;
};

/// `tensor` in fp32 if it is fp16 or bf16, else itself.
at::Tensor cast_to_fp32(const at::Tensor& tensor);

/// The same tree with its fp16 and bf16 tensors cast to fp32; everything else is left alone. What a
/// prepared forward returns goes through this, so that losses are computed in fp32.
template <class T>
requires TensorTree<T> T cast_outputs_to_fp32(T outputs) {
  return tree::map(std::move(outputs),
                   [](const at::Tensor& tensor) { return cast_to_fp32(tensor); });
}

}  // namespace accelerate
