#pragma once

// Two operator policies, as small as they can be, and what they have to compute: a linear layer in
// another dtype, and low-rank adapters. docs/interception.md points here.

#include <accelerate/intercept/operator_policy.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/matmul.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <utility>

namespace policies {

using accelerate::intercept::as_linear;
using accelerate::intercept::LinearCall;
using accelerate::intercept::OperatorCall;
using accelerate::intercept::OperatorPolicy;

/// input · weightᵀ + bias in `dtype`, given in the dtype that the layer itself would give.
inline at::Tensor linear_in(at::ScalarType dtype, const at::Tensor& input, const at::Tensor& weight,
                            const at::Tensor& bias) {
  const bool autocast = at::autocast::is_autocast_enabled(at::kCPU);
  const at::ScalarType result =
      autocast ? at::autocast::get_autocast_dtype(at::kCPU) : input.scalar_type();
  const c10::impl::ExcludeDispatchKeyGuard as_said(c10::autocast_dispatch_keyset);
  at::Tensor output = input.to(dtype).matmul(weight.to(dtype).t());
  if (bias.defined()) output = output + bias.to(dtype);
  return output.to(result);
}

/// Linear layers computed in another dtype.
class InDtype final : public OperatorPolicy {
 public:
  explicit InDtype(at::ScalarType dtype) : dtype_(dtype) {}
  std::vector<std::string> operators() const override {
    return accelerate::intercept::linear_operators();
  }
  at::Tensor apply(OperatorCall& call) override {
    ++calls;
    const auto linear = as_linear(call);
    if (!linear) return call.proceed();
    return linear_in(dtype_, linear->input, linear->weight, linear->bias);
  }
  std::atomic<int> calls = 0;

 private:
  at::ScalarType dtype_;
};

/// Low-rank adapters: the layer's result plus scale · input · (up · down)ᵀ. `down` is rank ×
/// inputs, `up` is outputs × rank. Of an embedding, the rows of up · down are added.
class LowRank final : public OperatorPolicy {
 public:
  LowRank(at::Tensor down, at::Tensor up, double scale)
      : down_(std::move(down)), up_(std::move(up)), scale_(scale) {}
  std::vector<std::string> operators() const override {
    auto all = accelerate::intercept::linear_operators();
    all.emplace_back("aten::embedding");
    return all;
  }
  at::Tensor apply(OperatorCall& call) override {
    ++calls;
    const at::Tensor result = call.proceed();
    const auto linear = as_linear(call);
    if (linear && linear->whole)
      return result + scale_ * linear->input.matmul(down_.t()).matmul(up_.t());
    // A part of the layer, or its transpose: with that part of up · down in the weight's place.
    const std::size_t at = call.positions().front();
    const at::Tensor part = call.same_view(up_.matmul(down_), at);
    if (linear) {
      return result +
             scale_ * linear->input.matmul(call.name() == "aten::linear" ? part.t() : part);
    }
    if (call.name() != "aten::embedding") return result;
    OperatorCall rows = call;
    rows.arguments()[at] = part;
    return result + scale_ * rows.proceed();
  }
  std::atomic<int> calls = 0;

 private:
  at::Tensor down_, up_;
  double scale_;
};

}  // namespace policies
