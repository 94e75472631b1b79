#include "comm/staging.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace accelerate::comm {
namespace {

/// The dtypes that gloo computes with.
bool is_common(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

}  // namespace

at::Tensor Staging::convert(const at::Tensor& tensor, bool read, bool write) {
  if (!active_ || !tensor.defined() || tensor.is_sparse()) return tensor;
  const at::NoGradGuard no_grad;
  at::Tensor staged = tensor.detach();
  if (staged.is_cuda())
    staged = read ? staged.cpu() : at::empty_like(staged, staged.options().device(at::kCPU));
  if (!staged.is_contiguous()) {
    throw ConfigError(text::concat(
        "A tensor of shape [", text::join(tensor.sizes()), "] and strides [",
        text::join(tensor.strides()),
        "] was to be communicated, which takes contiguous memory. Give it tensor.contiguous()."));
  }
  const at::Tensor host = staged;
  const auto dtype = staged.scalar_type();
  if (!is_common(dtype)) {
    const bool flag = dtype == at::kBool;
    if (use_ == Use::move || flag) {
      // The same memory, seen as bytes.
      staged = staged.reshape(-1).view(at::kByte);
    } else if (dtype == at::kShort) {
      staged = staged.to(at::kInt);
    } else if (at::isComplexType(dtype)) {
      staged = at::view_as_real(staged);  // sums of parts; anything else is refused by reduction()
    } else {
      throw UnsupportedError(
          text::concat("Tensors of ", c10::toString(dtype),
                       " cannot be reduced over ranks. Convert them to a wider dtype first."));
    }
  }
  if (write && staged.data_ptr() != tensor.data_ptr() && tensor.numel() > 0) {
    // From where the result lies, in the caller's dtype or one that converts to it.
    copies_back_.emplace_back(tensor, dtype == at::kShort && use_ == Use::reduce ? staged : host);
  }
  return staged;
}

at::Tensor Staging::in(const at::Tensor& tensor) { return convert(tensor, true, false); }
at::Tensor Staging::out(const at::Tensor& tensor) { return convert(tensor, false, true); }
at::Tensor Staging::inout(const at::Tensor& tensor) { return convert(tensor, true, true); }

namespace {
template <class Convert>
std::vector<at::Tensor> each(const std::vector<at::Tensor>& tensors, Convert&& convert) {
  std::vector<at::Tensor> converted;
  converted.reserve(tensors.size());
  for (const auto& tensor : tensors) converted.push_back(convert(tensor));
  return converted;
}
}  // namespace

std::vector<at::Tensor> Staging::in(const std::vector<at::Tensor>& tensors) {
  return each(tensors, [&](const at::Tensor& tensor) { return in(tensor); });
}
std::vector<at::Tensor> Staging::out(const std::vector<at::Tensor>& tensors) {
  return each(tensors, [&](const at::Tensor& tensor) { return out(tensor); });
}
std::vector<at::Tensor> Staging::inout(const std::vector<at::Tensor>& tensors) {
  return each(tensors, [&](const at::Tensor& tensor) { return inout(tensor); });
}

c10d::ReduceOp Staging::reduction(const c10d::ReduceOp& op, const std::vector<at::Tensor>& outputs,
                                  int size) {
  if (!active_) return op;
  const auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
  const auto dtype = outputs.empty() ? at::kFloat : outputs.front().scalar_type();
  if (at::isComplexType(dtype) && kind != c10d::ReduceOp::SUM && kind != c10d::ReduceOp::AVG) {
    throw UnsupportedError(
        "Complex tensors can be summed or averaged over ranks, not multiplied or compared.");
  }
  if (dtype == at::kBool) {
    // On bytes that are 0 or 1: "any" is the maximum, "all" the minimum.
    if (kind == c10d::ReduceOp::SUM) return c10d::ReduceOp::MAX;
    if (kind == c10d::ReduceOp::PRODUCT) return c10d::ReduceOp::MIN;
  }
  if (kind != c10d::ReduceOp::AVG) return op;
  averaged_ = outputs;
  size_ = size;
  return c10d::ReduceOp::SUM;
}

std::function<void()> Staging::finish() {
  if (copies_back_.empty() && averaged_.empty()) return {};
  return [copies = std::move(copies_back_), averaged = std::move(averaged_), size = size_] {
    const at::NoGradGuard no_grad;
    for (const auto& [mine, staged] : copies) mine.detach().copy_(staged.view_as(mine));
    for (const auto& tensor : averaged) tensor.detach().div_(size);
    // The caller goes on on a stream of its own, which knows nothing of this thread's.
    for (const auto& [mine, staged] : copies) {
      if (!mine.is_cuda()) continue;
      const c10::impl::VirtualGuardImpl guard(mine.device().type());
      guard.synchronizeStream(guard.getStream(mine.device()));
    }
  };
}

}  // namespace accelerate::comm
