#pragma once

// What the tests of operator policies share.

#include <support/policies.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace accelerate::intercept {

namespace nn = torch::nn;
using at::Tensor;
using policies::InDtype;
using policies::LowRank;

inline Tensor leaf(at::IntArrayRef sizes, int seed, at::ScalarType dtype = at::kDouble) {
  torch::manual_seed(seed);
  return at::randn(sizes, at::kDouble).to(dtype).requires_grad_(true);
}

inline Tensor adapted(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& down,
                      const Tensor& up, double scale) {
  Tensor y = x.matmul(w.t());
  if (b.defined()) y = y + b;
  return y + scale * x.matmul(down.t()).matmul(up.t());
}

// Result and gradients, of `inputs`, of a sum that weighs every element differently.
inline std::vector<Tensor> run(const std::function<Tensor()>& forward,
                               const std::vector<Tensor>& inputs) {
  const Tensor y = forward();
  const Tensor weights = at::arange(1, y.numel() + 1, at::kDouble)
                             .div(y.numel())
                             .reshape(y.sizes())
                             .to(y.scalar_type());
  auto all = torch::autograd::grad({(y * weights).sum()}, inputs, {}, {}, false, true);
  all.insert(all.begin(), y.detach());
  return all;
}

inline void expect_same(const std::vector<Tensor>& one, const std::vector<Tensor>& other,
                        double tolerance = 0) {
  ASSERT_EQ(one.size(), other.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    ASSERT_EQ(one[i].defined(), other[i].defined()) << i;
    if (!one[i].defined()) continue;
    EXPECT_EQ(one[i].scalar_type(), other[i].scalar_type()) << i;
    const double difference =
        (one[i].to(at::kDouble) - other[i].to(at::kDouble)).abs().max().item<double>();
    EXPECT_LE(difference, tolerance) << "of value " << i;
  }
}

// A linear layer with everything that a test needs to say of it.
struct Layer {
  explicit Layer(at::ScalarType dtype = at::kDouble, bool bias = true)
      : linear(nn::LinearOptions(5, 4).bias(bias)) {
    linear->to(dtype);
    const at::NoGradGuard no_grad;
    linear->weight.copy_(leaf({4, 5}, 1));
    if (bias) linear->bias.copy_(leaf({4}, 2));
    for (Tensor* each : {&down, &up}) *each = each->detach().to(dtype).requires_grad_(true);
  }
  nn::Linear linear;
  Tensor down = leaf({2, 5}, 3), up = leaf({4, 2}, 4);
  Tensor weight() const { return linear->weight; }
  Tensor bias() const { return linear->bias; }
};

// Calls the operator in ways of its own, on the same weight.
class Calls final : public OperatorPolicy {
 public:
  using Body = std::function<Tensor(OperatorCall&)>;
  Calls(std::vector<std::string> names, Body body)
      : names_(std::move(names)), body_(std::move(body)) {}
  std::vector<std::string> operators() const override { return names_; }
  Tensor apply(OperatorCall& call) override {
    ++calls;
    return body_(call);
  }
  std::atomic<int> calls = 0;

 private:
  std::vector<std::string> names_;
  Body body_;
};

inline std::shared_ptr<Calls> calls(Calls::Body body) {
  return std::make_shared<Calls>(linear_operators(), std::move(body));
}

}  // namespace accelerate::intercept
