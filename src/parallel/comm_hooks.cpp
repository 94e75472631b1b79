#include "parallel/comm_hooks.hpp"

#include <accelerate/base/error.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

#include <cmath>
#include <map>

namespace accelerate::parallel {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

/// Sends each bucket in a narrower dtype. The division by the number of ranks comes first, so that
/// the sum of p gradients cannot overflow fp16 where each alone does not.
class CompressHook final
    : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::ProcessGroup>> {
 public:
  CompressHook(c10::intrusive_ptr<c10d::ProcessGroup> group, at::ScalarType dtype)
      : CppCommHookInterface(std::move(group)), dtype_(dtype) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    const at::Tensor wide = bucket.getBuffer();
    std::vector<at::Tensor> narrow{wide.to(dtype_).div_(state_->getSize())};
    return state_->allreduce(narrow)->getFuture()->then(
        [wide](c10::ivalue::Future& done) -> c10::IValue {
          const at::NoGradGuard no_grad;
          wide.copy_(c10d::detail::parseCppCommHookResult(done.value()));
          return wide;
        },
        c10::TensorType::get());
  }

 private:
  at::ScalarType dtype_;
};

/// See PowerSgdOptions. Runs its two all-reduces one after the other and waits for each: a bucket
/// is done when the hook returns, so buckets do not overlap with each other or with backward.
class PowerSgdHook final : public c10d::CppCommHookInterface<comm::Group> {
 public:
  PowerSgdHook(const comm::Group& group, const DdpOptions& options)
      : CppCommHookInterface(group),
        options_(options.power_sgd()),
        batched_(options.comm_hook() == CommHook::batched_power_sgd),
        wire_(options.comm_wrapper() == CommHook::fp16   ? at::kHalf
              : options.comm_wrapper() == CommHook::bf16 ? at::kBFloat16
                                                         : at::ScalarType::Undefined),
        generator_(at::detail::createCPUGenerator(static_cast<std::uint64_t>(options_.seed()))) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    const at::NoGradGuard no_grad;
    const at::Tensor gradients = bucket.getBuffer();
    if (iteration_ < options_.start_iteration()) {
      average_(gradients);
    } else {
      compress_(bucket, gradients);
    }
    if (bucket.isLast()) ++iteration_;
    auto done =
        c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), devices_of(gradients));
    done->markCompleted(gradients);
    return done;
  }

 private:
  struct Memory {
    at::Tensor error;            ///< what compression lost last time
    std::vector<at::Tensor> qs;  ///< last factors, one a compressed matrix
  };

  static std::vector<at::Device> devices_of(const at::Tensor& tensor) {
    return tensor.is_cuda() ? std::vector<at::Device>{tensor.device()} : std::vector<at::Device>{};
  }

  void sum_(const at::Tensor& tensor) {
    if (tensor.numel() == 0) return;
    if (wire_ == at::ScalarType::Undefined) {
      state_.all_reduce(tensor).wait();
    } else {
      const at::Tensor narrow = tensor.div(state_.size()).to(wire_);
      state_.all_reduce(narrow).wait();
      tensor.copy_(narrow).mul_(state_.size());
    }
  }

  void average_(const at::Tensor& tensor) {
    sum_(tensor);
    tensor.div_(state_.size());
  }

  bool worth_compressing(int64_t rows, int64_t columns, int64_t rank) const {
    return static_cast<double>((rows + columns) * rank) * options_.min_compression_rate() <
           static_cast<double>(rows * columns);
  }

  void compress_(c10d::GradBucket& bucket, const at::Tensor& gradients) {
    Memory& memory = memory_[bucket.getIndex()];
    at::Tensor before;
    if (options_.use_error_feedback()) {
      if (memory.error.defined()) gradients.add_(memory.error);
      before = gradients.clone();
    }

    // The matrices to approximate are views of the bucket; what is too small travels whole.
    std::vector<at::Tensor> matrices;
    std::vector<at::Tensor> whole;
    at::Tensor square;
    if (batched_) {
      const auto side =
          static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(gradients.numel()))));
      square = at::zeros({side * side}, gradients.options());
      square.narrow(0, 0, gradients.numel()).copy_(gradients);
      matrices.push_back(square.view({side, side}));
    } else {
      for (const at::Tensor& gradient : bucket.getGradients()) {
        const at::Tensor matrix =
            gradient.dim() == 0 ? gradient.view({1, 1}) : gradient.view({gradient.size(0), -1});
        const int64_t rank =
            std::min({matrix.size(0), matrix.size(1), options_.matrix_approximation_rank()});
        (worth_compressing(matrix.size(0), matrix.size(1), rank) ? matrices : whole)
            .push_back(matrix);
      }
    }
    average_views_(whole);

    if (!options_.warm_start() || memory.qs.size() != matrices.size()) {
      memory.qs.clear();
      for (const at::Tensor& matrix : matrices) {
        const int64_t rank =
            std::min({matrix.size(0), matrix.size(1), options_.matrix_approximation_rank()});
        // Drawn on the CPU from a generator of its own: equal on all ranks, and the program's
        // random numbers stay what they were.
        memory.qs.push_back(
            at::randn({matrix.size(1), rank}, generator_, at::kDouble).to(matrix.options()));
      }
    }
    std::vector<at::Tensor> ps;
    for (const auto i : c10::irange(matrices.size())) {
      memory.qs[i] = orthogonal(memory.qs[i]);
      ps.push_back(at::mm(matrices[i], memory.qs[i]));
    }
    // No need to divide: they are made orthonormal next.
    ps = reduced(ps, [this](const at::Tensor& flat) { sum_(flat); });
    for (const auto i : c10::irange(matrices.size())) {
      ps[i] = orthogonal(ps[i]);
      memory.qs[i] = at::mm(matrices[i].t(), ps[i]);
    }
    memory.qs = reduced(memory.qs, [this](const at::Tensor& flat) { average_(flat); });
    for (const auto i : c10::irange(matrices.size()))
      matrices[i].copy_(at::mm(ps[i], memory.qs[i].t()));
    if (square.defined()) gradients.copy_(square.narrow(0, 0, gradients.numel()));

    if (options_.use_error_feedback()) memory.error = before.sub_(gradients);
    if (!options_.warm_start()) memory.qs.clear();
  }

  /// Orthonormal columns, in double: QR of half precision does not exist and fp32 loses them when a
  /// gradient nearly vanishes.
  static at::Tensor orthogonal(const at::Tensor& matrix) {
    return std::get<0>(at::linalg_qr(matrix.to(at::kDouble))).to(matrix.scalar_type());
  }

  template <class Reduce>
  static std::vector<at::Tensor> reduced(const std::vector<at::Tensor>& parts,
                                         const Reduce& reduce) {
    if (parts.empty()) return {};
    std::vector<at::Tensor> flat;
    for (const at::Tensor& part : parts) flat.push_back(part.reshape({-1}));
    const at::Tensor joined = at::cat(flat);
    reduce(joined);
    std::vector<at::Tensor> result;
    int64_t offset = 0;
    for (const at::Tensor& part : parts) {
      result.push_back(joined.narrow(0, offset, part.numel()).view(part.sizes()));
      offset += part.numel();
    }
    return result;
  }

  void average_views_(const std::vector<at::Tensor>& views) {
    const auto averaged = reduced(views, [this](const at::Tensor& flat) { average_(flat); });
    for (const auto i : c10::irange(views.size())) views[i].copy_(averaged[i]);
  }

  PowerSgdOptions options_;
  bool batched_;
  at::ScalarType wire_;
  at::Generator generator_;
  int64_t iteration_ = 0;
  std::map<std::size_t, Memory> memory_;
};

}  // namespace

std::unique_ptr<c10d::CommHookInterface> make_comm_hook(
    const DdpOptions& options, const comm::Group& group,
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) {
  if (options.comm_wrapper() == CommHook::power_sgd ||
      options.comm_wrapper() == CommHook::batched_power_sgd) {
    throw ConfigError(
        "DdpOptions::comm_wrapper is a PowerSGD hook, and only no, fp16 and bf16 can wrap another "
        "hook. Set comm_hook "
        "to it instead.");
  }
  if (options.comm_wrapper() != CommHook::no && options.comm_hook() != CommHook::power_sgd &&
      options.comm_hook() != CommHook::batched_power_sgd) {
    throw ConfigError(
        "DdpOptions::comm_wrapper is set and comm_hook is not a PowerSGD hook, the only kind it "
        "wraps. To send gradients "
        "in fp16 or bf16, set comm_hook to that.");
  }
  switch (options.comm_hook()) {
    case CommHook::no:
      return nullptr;
    case CommHook::fp16:
      return std::make_unique<CompressHook>(process_group, at::kHalf);
    case CommHook::bf16:
      return std::make_unique<CompressHook>(process_group, at::kBFloat16);
    case CommHook::power_sgd:
    case CommHook::batched_power_sgd:
      break;
  }
  const PowerSgdOptions& power = options.power_sgd();
  if ((power.use_error_feedback() || power.warm_start()) && power.start_iteration() < 2) {
    throw ConfigError("PowerSgdOptions::start_iteration is " +
                      std::to_string(power.start_iteration()) +
                      ", and error feedback or warm start need at least 2, because gradient "
                      "buckets are laid out anew after the first "
                      "step. Raise it, or switch both off.");
  }
  if (power.matrix_approximation_rank() < 1) {
    throw ConfigError("PowerSgdOptions::matrix_approximation_rank is " +
                      std::to_string(power.matrix_approximation_rank()) +
                      ", and at least 1 is needed.");
  }
  return std::make_unique<PowerSgdHook>(group, options);
}

}  // namespace accelerate::parallel
