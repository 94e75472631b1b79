#pragma once

#include <accelerate/comm/group.hpp>
#include <accelerate/parallel/strategy.hpp>

#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace accelerate {

/// How gradients travel. `no` sums them as they are; fp16 and bf16 halve the bytes; power_sgd sends
/// low-rank factors of each gradient matrix, batched_power_sgd those of the whole bucket.
enum class CommHook { no, fp16, bf16, power_sgd, batched_power_sgd };

/// PowerSGD gradient compression (Vogels, Karimireddy, Jaggi 2019, arXiv:1905.13727), with error
/// feedback and warm start. Defaults are those of PyTorch's PowerSGDState.
struct PowerSgdOptions {
  /// Rank of the approximation of each gradient matrix.
  TORCH_ARG(int64_t, matrix_approximation_rank) = 1;
  /// Steps that use the plain all-reduce first. At least 2 with error feedback or warm start,
  /// because buckets are laid out anew after the first step.
  TORCH_ARG(int64_t, start_iteration) = 1000;
  /// A matrix is compressed only if that saves at least this factor.
  TORCH_ARG(double, min_compression_rate) = 2.0;
  /// Adds what compression lost to the next step's gradient.
  TORCH_ARG(bool, use_error_feedback) = true;
  /// Starts from the last step's factors.
  TORCH_ARG(bool, warm_start) = true;
  /// Seed of the first factors, equal on all ranks.
  TORCH_ARG(int64_t, seed) = 0;
};

/// Data parallelism by c10d::Reducer: the original's DistributedDataParallelKwargs. Defaults are
/// PyTorch's.
struct DdpOptions {
  /// Size of a gradient bucket in MiB. Each bucket is one all-reduce.
  TORCH_ARG(double, bucket_cap_mb) = 25.0;
  /// Size of the first bucket that becomes ready, in MiB; small, so that communication starts
  /// early.
  TORCH_ARG(double, first_bucket_mb) = 1.0;
  /// `.grad` becomes a view of the bucket, which saves one copy of the gradients.
  TORCH_ARG(bool, gradient_as_bucket_view) = false;
  /// Parameters may go without a gradient. Costs a walk over the graph in every step.
  TORCH_ARG(bool, find_unused_parameters) = false;
  /// The graph is the same in every step. Allows unused parameters and several uses at no cost from
  /// the second step on.
  TORCH_ARG(bool, static_graph) = false;
  /// Buffers (running statistics) are those of rank 0 before each training forward.
  TORCH_ARG(bool, broadcast_buffers) = true;
  TORCH_ARG(CommHook, comm_hook) = CommHook::no;
  /// The dtype PowerSGD's own all-reduces travel in: no, fp16 or bf16.
  TORCH_ARG(CommHook, comm_wrapper) = CommHook::no;
  TORCH_ARG(PowerSgdOptions, power_sgd);
  /// Names of parameters and buffers that are neither compared, broadcast nor reduced.
  TORCH_ARG(std::vector<std::string>, ignored_parameters);
};

namespace parallel {

/// Distributed data parallelism: every process holds the whole module, sees its own samples, and
/// the gradients are averaged while backward still runs (Li et al. 2020, arXiv:2006.15704).
class Ddp final : public Strategy {
 public:
  /// Collective. Compares names, shapes, dtypes and requires_grad of all parameters over the ranks
  /// (on a mismatch, DistributedError on every rank, naming the first that differs), then gives all
  /// ranks the parameters and buffers of rank 0. `group` has at least two processes.
  Ddp(ModuleRecord module, comm::Group group, DdpOptions options);
  ~Ddp() override;

  std::string_view name() const noexcept override { return "ddp"; }
  const DdpOptions& options() const noexcept;

  void before_forward(const ForwardContext& context) override;
  void after_forward(const ForwardContext& context,
                     const std::vector<at::Tensor>& outputs) override;
  bool wants_outputs() const noexcept override;
  void after_backward() override;
  void backward_failed() noexcept override;
  void sync_in_next_backward() override;
  void check_gradients(const std::vector<at::Tensor>& leaves) override;
  void follow_module() override;
  void after_step(const std::vector<at::Tensor>& leaves) override;
  void before_zero_grad(const std::vector<at::Tensor>& leaves) override;
  at::Tensor grad_norm(double p) const override;
  void scale_gradients_(const at::Tensor& factor) override;
  void clip_grad_value_(double limit) override;

  std::vector<std::vector<std::int64_t>> reduction_layout() override;
  void set_reduction_layout(const std::vector<std::vector<std::int64_t>>& layout) override;
  void check_reduction_layout(const std::vector<std::vector<std::int64_t>>& layout) const override;
  /// Collective. Throws DistributedError on every rank, naming the first parameter or buffer whose
  /// values are not bit-equal on all ranks.
  void verify_parameters() const override;

  /// While on, ranks may run out of batches at different times: see `shadow_until_all_joined`.
  void set_join(bool on);
  /// Collective with the forwards and backwards of the ranks that still have batches: takes part in
  /// their collectives with zero gradients until no rank has any, then gives all ranks the module
  /// of the rank that trained last.
  void shadow_until_all_joined();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace parallel
}  // namespace accelerate
