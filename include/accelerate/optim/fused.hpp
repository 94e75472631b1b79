#pragma once

#include <accelerate/optim/optimizer.hpp>

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

/// Optimizers that LibTorch has kernels for, or Python has, and torch::optim has not. They are
/// torch::optim::Optimizers: use, save and load them as those.
namespace accelerate::optim {

/// Settings of FusedAdamW.
struct FusedAdamWOptions : public torch::optim::OptimizerCloneableOptions<FusedAdamWOptions> {
  FusedAdamWOptions(double lr = 1e-3) : lr_(lr) {}
  /// Learning rate. Default: 0.001.
  TORCH_ARG(double, lr);
  typedef std::tuple<double, double> betas_t;
  /// Decay of the running means of the gradient and of its square. Default: 0.9, 0.999.
  TORCH_ARG(betas_t, betas) = std::make_tuple(0.9, 0.999);
  /// Added to the denominator. Default: 1e-8.
  TORCH_ARG(double, eps) = 1e-8;
  /// Decoupled weight decay. Default: 0.01.
  TORCH_ARG(double, weight_decay) = 1e-2;
  /// Divides by the largest mean of squares so far. Default: false.
  TORCH_ARG(bool, amsgrad) = false;
  /// Goes up the gradient. Default: false.
  TORCH_ARG(bool, maximize) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
};

/// What FusedAdamW remembers of a parameter.
struct FusedAdamWParamState
    : public torch::optim::OptimizerCloneableParamState<FusedAdamWParamState> {
  /// Steps taken: 0-dim fp32 tensor on the parameter's device, since a step may be left out there.
  TORCH_ARG(at::Tensor, step);
  TORCH_ARG(at::Tensor, exp_avg);
  TORCH_ARG(at::Tensor, exp_avg_sq);
  TORCH_ARG(at::Tensor, max_exp_avg_sq);
  /// The parameter itself in fp32, where OffloadedAdamW keeps it.
  TORCH_ARG(at::Tensor, fp32_parameter);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// AdamW (Loshchilov & Hutter, 2019) in one kernel for all parameters of a device and dtype:
/// torch.optim.AdamW with fused=True. Parameters are fp64, fp32, bf16 or fp16, on the CPU or a GPU.
class FusedAdamW : public torch::optim::Optimizer, public SkipsOnDevice {
 public:
  /// Throws ConfigError for settings out of range.
  explicit FusedAdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                      FusedAdamWOptions defaults = {});
  explicit FusedAdamW(std::vector<at::Tensor> parameters, FusedAdamWOptions defaults = {});

  /// Throws UnsupportedError for sparse gradients and for complex parameters.
  at::Tensor step(LossClosure closure = nullptr) override;
  void set_found_inf(at::Tensor found_inf) override { found_inf_ = std::move(found_inf); }
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 protected:
  at::Tensor found_inf_;
};

/// Settings of FusedSGD.
struct FusedSGDOptions : public torch::optim::OptimizerCloneableOptions<FusedSGDOptions> {
  FusedSGDOptions(double lr = 1e-3) : lr_(lr) {}
  /// Learning rate. Default: 0.001.
  TORCH_ARG(double, lr);
  /// Default: 0.
  TORCH_ARG(double, momentum) = 0;
  /// Damps what a new gradient adds to the momentum. Default: 0.
  TORCH_ARG(double, dampening) = 0;
  /// Weight decay as an L2 penalty. Default: 0.
  TORCH_ARG(double, weight_decay) = 0;
  /// Nesterov's momentum; needs momentum and no dampening. Default: false.
  TORCH_ARG(bool, nesterov) = false;
  /// Goes up the gradient. Default: false.
  TORCH_ARG(bool, maximize) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
};

/// What FusedSGD remembers of a parameter.
struct FusedSGDParamState : public torch::optim::OptimizerCloneableParamState<FusedSGDParamState> {
  TORCH_ARG(at::Tensor, momentum_buffer);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// SGD in one kernel for all parameters of a device and dtype: torch.optim.SGD with fused=True.
class FusedSGD : public torch::optim::Optimizer, public SkipsOnDevice {
 public:
  /// Throws ConfigError for settings out of range.
  explicit FusedSGD(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                    FusedSGDOptions defaults = {});
  explicit FusedSGD(std::vector<at::Tensor> parameters, FusedSGDOptions defaults = {});

  /// Throws UnsupportedError for sparse gradients and for complex parameters.
  at::Tensor step(LossClosure closure = nullptr) override;
  void set_found_inf(at::Tensor found_inf) override { found_inf_ = std::move(found_inf); }
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  at::Tensor found_inf_;
};

}  // namespace accelerate::optim
