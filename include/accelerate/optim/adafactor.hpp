#pragma once

#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace accelerate::optim {

/// Settings of Adafactor.
struct AdafactorOptions : public torch::optim::OptimizerCloneableOptions<AdafactorOptions> {
  AdafactorOptions(double lr = 1e-2) : lr_(lr) {}
  /// The largest relative step, and the factor of weight decay. Default: 0.01.
  TORCH_ARG(double, lr);
  /// The mean of squares forgets at the rate step^beta2_decay. Zero or below. Default: -0.8.
  TORCH_ARG(double, beta2_decay) = -0.8;
  /// Keeps the denominator from zero. Nothing: the epsilon of the parameter's dtype. Default:
  /// nothing.
  TORCH_ARG(std::optional<double>, eps1) = std::nullopt;
  /// The least root mean square of a parameter that steps are scaled with. Default: 0.001.
  TORCH_ARG(double, eps2) = 1e-3;
  /// Updates with a larger root mean square than this are clipped to it. At least 1. Default: 1.
  TORCH_ARG(double, d) = 1.0;
  /// Decoupled weight decay. Default: 0.
  TORCH_ARG(double, weight_decay) = 0.0;
  /// Goes up the gradient. Default: false.
  TORCH_ARG(bool, maximize) = false;

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  double get_lr() const override { return lr_; }
  void set_lr(double lr) override { lr_ = lr; }
};

/// What Adafactor remembers of a parameter: row_var and col_var of one with two dimensions or more,
/// variance of others.
struct AdafactorParamState
    : public torch::optim::OptimizerCloneableParamState<AdafactorParamState> {
  TORCH_ARG(std::int64_t, step) = 0;
  /// The parameter's shape with the last dimension 1.
  TORCH_ARG(at::Tensor, row_var);
  /// The parameter's shape with the last dimension but one 1.
  TORCH_ARG(at::Tensor, col_var);
  TORCH_ARG(at::Tensor, variance);

 public:
  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
};

/// Adafactor (Shazeer & Stern, 2018), whose state is about as large as a row and a column of each
/// parameter; as torch.optim.Adafactor, which differs from the paper in its use of lr and eps1.
class Adafactor : public torch::optim::Optimizer {
 public:
  /// Throws ConfigError for settings out of range.
  explicit Adafactor(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                     AdafactorOptions defaults = {});
  explicit Adafactor(std::vector<at::Tensor> parameters, AdafactorOptions defaults = {});

  /// Throws UnsupportedError for sparse gradients and for complex parameters.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
};

}  // namespace accelerate::optim
