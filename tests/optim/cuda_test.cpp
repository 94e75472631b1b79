// fp16 and bf16 training, skipped steps and random state on a GPU.
#include <accelerate/core/memory.hpp>
#include <accelerate/core/random.hpp>
#include <accelerate/optim/adafactor.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/optim/offloaded.hpp>
#include <accelerate/optim/optimizer.hpp>
#include <accelerate/precision/autocast.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <nlohmann/json.hpp>

#include <cmath>

namespace accelerate {
namespace {

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "NOT RUN: this machine has no CUDA device.";
  }
};

at::Tensor weights(std::int64_t rows, std::int64_t columns) {
  return at::sin(at::arange(rows * columns, at::kFloat))
      .reshape({rows, columns})
      .mul_(0.3)
      .to(at::kCUDA)
      .requires_grad_(true);
}

TEST_F(Cuda, TrainsInMixedPrecision) {
  for (const auto precision : {MixedPrecision::fp16, MixedPrecision::bf16}) {
    check_supported(precision, at::Device(at::kCUDA, 0));
    const at::Tensor first = weights(16, 8), second = weights(1, 16);
    const auto state = std::make_shared<GradientState>();
    const auto scaler =
        precision == MixedPrecision::fp16 ? std::make_shared<GradScaler>() : nullptr;
    auto optimizer = prepare_optimizer(
        optim::FusedAdamW({first, second}, optim::FusedAdamWOptions(0.01)), state, scaler);
    const at::Tensor inputs = at::cos(at::arange(256, at::kFloat)).reshape({32, 8}).to(at::kCUDA);
    const at::Tensor targets = inputs.sum(1, true);
    double begin = 0, end = 0;
    for (int step = 0; step < 100; ++step) {
      at::Tensor outputs;
      {
        const AutocastScope scope(at::kCUDA, precision);
        outputs = at::linear(at::relu(at::linear(inputs, first)), second);
      }
      EXPECT_EQ(outputs.scalar_type(), compute_dtype(precision));
      const at::Tensor loss = at::mse_loss(cast_outputs_to_fp32(outputs), targets);
      (scaler ? scaler->scale(loss) : loss).backward();
      EXPECT_EQ(first.grad().scalar_type(), at::kFloat);
      optimizer.step();
      optimizer.zero_grad();
      (step == 0 ? begin : end) = loss.item<double>();
    }
    EXPECT_LT(end, begin / 2) << to_string(precision);
  }
}

TEST_F(Cuda, LeavesOverflowedStepsOut) {
  const auto state = std::make_shared<GradientState>();
  const auto scaler = std::make_shared<GradScaler>(GradScalerOptions().init_scale(8));
  const at::Tensor weight = weights(4, 4);
  auto optimizer = prepare_optimizer(optim::FusedAdamW({weight}), state, scaler);
  for (const double gradient : {1.0, static_cast<double>(INFINITY), 1.0}) {
    const at::Tensor before = weight.detach().clone();
    scaler->scale(weight.sum() * gradient).backward();
    optimizer.step();
    optimizer.zero_grad();
    EXPECT_EQ(optimizer.step_was_skipped(), !std::isfinite(gradient));
    EXPECT_EQ(weight.equal(before), !std::isfinite(gradient));
  }
  EXPECT_EQ(scaler->get_scale(), 4.0);
}

TEST_F(Cuda, OptimizersStepAsOnTheCpu) {
  const auto expect_alike = [](auto make) {
    const at::Tensor device = weights(4, 4), host = device.detach().cpu().requires_grad_(true);
    auto on_device = make(device);
    auto on_host = make(host);
    for (int step = 1; step <= 5; ++step) {
      host.mutable_grad() = at::cos(at::arange(16, at::kFloat) * step).reshape({4, 4});
      device.mutable_grad() = host.grad().to(at::kCUDA);
      on_device.step();
      on_host.step();
    }
    EXPECT_TRUE(device.cpu().allclose(host, 1e-5, 1e-6));
  };
  expect_alike([](const at::Tensor& weight) {
    return optim::FusedAdamW({weight}, optim::FusedAdamWOptions(0.1).amsgrad(true));
  });
  expect_alike([](const at::Tensor& weight) {
    return optim::FusedSGD({weight}, optim::FusedSGDOptions(0.1).momentum(0.9));
  });
  expect_alike([](const at::Tensor& weight) { return optim::Adafactor({weight}); });
}

TEST_F(Cuda, RandomStateGoesBack) {
  set_seed(5);
  const RngState state = RngState::capture();
  EXPECT_TRUE(state.states().contains("cuda:0"));
  const at::Tensor drawn = at::rand({4}, at::kCUDA);
  RngState::from_json(state.to_json()).restore();
  EXPECT_TRUE(at::rand({4}, at::kCUDA).equal(drawn));
}

TEST_F(Cuda, FindsABatchSizeThatFits) {
  const auto found = find_executable_batch_size(
      [](std::int64_t size) {
        return at::empty({size, std::int64_t{1} << 28}, at::kCUDA).size(0);
      },
      BatchSizeOptions().starting_batch_size(1 << 12).reduce(
          [](std::int64_t size) { return size / 2; }));
  EXPECT_GE(found, 1);
  EXPECT_LT(found, 1 << 12);
}

TEST_F(Cuda, StateOffTheDeviceTrainsAsStateOnIt) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto options = optim::OffloadOptions().block_bytes(1 << 16);
    for (const auto& offload : {options, optim::OffloadOptions(options)
                                             .place(optim::StatePlace::disk)
                                             .folder(::testing::TempDir())}) {
      const bool is_bf16 = dtype == at::kBFloat16;
      const auto copies = [&](at::ScalarType kind) {
        return std::vector<at::Tensor>{weights(300, 70).detach().to(kind).requires_grad_(true),
                                       weights(5, 3).detach().to(kind).requires_grad_(true)};
      };
      const auto ours = copies(dtype), theirs = copies(at::kFloat);
      if (is_bf16) {
        const at::NoGradGuard no_grad;
        for (std::size_t i = 0; i < ours.size(); ++i) theirs[i].copy_(ours[i]);
      }
      optim::OffloadedAdamW offloaded(ours, optim::FusedAdamWOptions(0.01),
                                      optim::OffloadOptions(offload).fp32_parameters(is_bf16));
      optim::FusedAdamW expected(theirs, optim::FusedAdamWOptions(0.01));
      for (int step = 0; step < 5; ++step) {
        for (std::size_t i = 0; i < ours.size(); ++i) {
          ours[i].mutable_grad() = at::sin(ours[i].detach() * (step + 1));
          theirs[i].mutable_grad() = ours[i].grad().to(at::kFloat);
        }
        offloaded.step();
        expected.step();
      }
      for (std::size_t i = 0; i < ours.size(); ++i) {
        EXPECT_TRUE(at::allclose(ours[i].to(at::kFloat), theirs[i], is_bf16 ? 1e-2 : 1e-5, 1e-6));
        const auto& state = static_cast<optim::FusedAdamWParamState&>(
            *offloaded.state().at(ours[i].unsafeGetTensorImpl()));
        EXPECT_TRUE(state.exp_avg().is_cpu());
      }
    }
  }
}

}  // namespace
}  // namespace accelerate
