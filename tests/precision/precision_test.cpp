// Autocast scopes and the gradient scaler, alone and against Python's torch.amp.
#include "support/python.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/precision/autocast.hpp>
#include <accelerate/precision/grad_scaler.hpp>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <map>

namespace accelerate {
namespace {

const Json& reference() {
  static const Json json = testing::run_python("precision/reference.py");
  return json;
}

at::Tensor leaf(std::vector<float> values) { return at::tensor(values).requires_grad_(true); }

TEST(MixedPrecision, HasNames) {
  for (const char* name : {"no", "fp16", "bf16", "fp8"})
    EXPECT_EQ(to_string(mixed_precision_from_string(name)), name);
  EXPECT_THROW(mixed_precision_from_string("float16"), ConfigError);
  EXPECT_EQ(compute_dtype(MixedPrecision::fp16), at::kHalf);
  EXPECT_EQ(compute_dtype(MixedPrecision::bf16), at::kBFloat16);
  EXPECT_THROW(compute_dtype(MixedPrecision::no), PrecisionError);
}

TEST(MixedPrecision, IsRefusedWhereItWouldBeSomethingElse) {
  EXPECT_NO_THROW(check_supported(MixedPrecision::no, at::kMeta));
  EXPECT_NO_THROW(check_supported(MixedPrecision::bf16, at::kCPU));
  EXPECT_NO_THROW(check_supported(MixedPrecision::fp16, at::kCUDA));
  EXPECT_THROW(check_supported(MixedPrecision::fp16, at::kCPU), PrecisionError);
  EXPECT_THROW(check_supported(MixedPrecision::bf16, at::kMeta), PrecisionError);
  EXPECT_THROW(check_supported(MixedPrecision::fp8, at::kCPU), UnsupportedError);
}

TEST(Autocast, ComputesInTheDtypeWhileItLives) {
  const at::Tensor a = at::ones({2, 2}), b = at::ones({2, 2});
  const auto dtype = [&] { return at::mm(a, b).scalar_type(); };
  {
    const AutocastScope outer(at::kCPU, MixedPrecision::bf16);
    EXPECT_EQ(dtype(), at::kBFloat16);
    {
      const AutocastScope off(at::kCPU, MixedPrecision::bf16, AutocastOptions().enabled(false));
      EXPECT_EQ(dtype(), at::kFloat);
      const AutocastScope half(at::kCPU, at::kHalf);
      EXPECT_EQ(dtype(), at::kHalf);
    }
    EXPECT_EQ(dtype(), at::kBFloat16);
    try {
      const AutocastScope inner(at::kCPU, at::kHalf);
      throw std::runtime_error("from within");
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(dtype(), at::kBFloat16);
    const AutocastScope nothing(at::kCPU, MixedPrecision::no);
    EXPECT_EQ(dtype(), at::kBFloat16);
  }
  EXPECT_EQ(dtype(), at::kFloat);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(Autocast, KeepsCastsOnlyIfAskedAndOnlyWithin) {
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(true);
  // With the cache on, two uses of a parameter share one cast: one node in the graph.
  const auto shares_cast = [&](const AutocastOptions& options) {
    const AutocastScope scope(at::kCPU, MixedPrecision::bf16, options);
    const at::Tensor first = at::mm(weight, at::ones({2, 2})),
                     second = at::mm(weight, at::ones({2, 2}));
    return first.grad_fn()->next_edge(0).function == second.grad_fn()->next_edge(0).function;
  };
  EXPECT_TRUE(shares_cast({}));
  EXPECT_FALSE(shares_cast(AutocastOptions().cache_enabled(false)));
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  // A parameter that changed between two scopes is cast anew.
  const auto product = [&] {
    const AutocastScope scope(at::kCPU, MixedPrecision::bf16);
    return at::mm(weight, at::ones({2, 1})).sum().item<float>();
  };
  EXPECT_EQ(product(), 4.0F);
  {
    const at::NoGradGuard no_grad;
    weight.fill_(2.0);
  }
  EXPECT_EQ(product(), 8.0F);
}

TEST(Autocast, RefusesWhatItDoesNotKnow) {
  EXPECT_THROW(AutocastScope(at::kCPU, at::kDouble), PrecisionError);
  EXPECT_THROW(AutocastScope(at::kMeta, MixedPrecision::bf16), PrecisionError);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

TEST(Autocast, GivesOutputsInFp32) {
  std::map<std::string, std::vector<at::Tensor>> outputs{
      {"logits", {at::ones({2}, at::kBFloat16), at::ones({2}, at::kHalf)}},
      {"rest", {at::ones({2}, at::kLong), at::ones({2}, at::kDouble), at::Tensor()}}};
  const auto cast = cast_outputs_to_fp32(std::pair(outputs, 3));
  EXPECT_EQ(cast.second, 3);
  for (const at::Tensor& tensor : cast.first.at("logits"))
    EXPECT_EQ(tensor.scalar_type(), at::kFloat);
  EXPECT_EQ(cast.first.at("rest")[0].scalar_type(), at::kLong);
  EXPECT_EQ(cast.first.at("rest")[1].scalar_type(), at::kDouble);
  EXPECT_FALSE(cast.first.at("rest")[2].defined());
}

TEST(Autocast, TrainsAsPythonsDoes) {
  if (!testing::has_python())
    GTEST_SKIP() << "This LibTorch came without Python, so there is nothing to compare with.";
  torch::nn::Sequential layer(torch::nn::Linear(8, 8),
                              torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
                              torch::nn::Linear(8, 2));
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : layer->parameters()) {
      parameter.copy_(
          at::sin(at::arange(parameter.numel(), at::kDouble)).reshape(parameter.sizes()));
    }
  }
  const at::Tensor inputs = at::cos(at::arange(32, at::kDouble)).reshape({4, 8}).to(at::kFloat);
  at::Tensor outputs;
  {
    const AutocastScope scope(at::kCPU, MixedPrecision::bf16);
    outputs = layer->forward(inputs);
  }
  EXPECT_EQ(outputs.scalar_type(), at::kBFloat16);
  cast_outputs_to_fp32(outputs).pow(2).sum().backward();
  const auto expect = [](const at::Tensor& found, const Json& expected) {
    const auto values = expected.get<std::vector<double>>();
    EXPECT_TRUE(found.detach().to(at::kDouble).flatten().equal(at::tensor(values, at::kDouble)));
  };
  expect(outputs, reference().at("autocast").at("outputs"));
  const auto parameters = layer->parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    expect(parameters[i].grad(), reference().at("autocast").at("gradients").at(i));
  }
}

TEST(GradScaler, FollowsPythonsBitForBit) {
  if (!testing::has_python())
    GTEST_SKIP() << "This LibTorch came without Python, so there is nothing to compare with.";
  const double nan = std::nan("");
  struct Case {
    GradScalerOptions options;
    std::vector<double> gradients;
  };
  const std::map<std::string, Case> cases{
      {"defaults", {{}, {1.0, 0.3, INFINITY, 0.7, nan, 2.0}}},
      {"interval_2",
       {GradScalerOptions().growth_interval(2),
        {1.0, 0.3, 0.5, INFINITY, 0.7, 0.1, 0.2, nan, 2.0}}},
      {"slow",
       {GradScalerOptions().init_scale(10).growth_factor(1.5).backoff_factor(0.25).growth_interval(
            3),
        {0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, INFINITY, 0.3, 0.3, 0.3, 0.3}}}};
  for (const auto& [name, test] : cases) {
    const Json& expected = reference().at("scaler").at(name);
    GradScaler scaler(test.options);
    const at::Tensor weight = leaf({1.0F});
    for (std::size_t i = 0; i < test.gradients.size(); ++i) {
      scaler.scale((weight * test.gradients[i]).sum()).backward();
      const bool stepped = scaler.step(&scaler, {weight}, [&] {
        const at::NoGradGuard no_grad;
        weight.add_(weight.grad(), -0.1);
      });
      EXPECT_EQ(stepped, std::isfinite(test.gradients[i]));
      scaler.update();
      const Json& row = expected.at("rows").at(i);
      EXPECT_EQ(scaler.get_scale(), row.at(0).get<double>()) << name << " " << i;
      EXPECT_EQ(scaler.growth_tracker(), row.at(1).get<std::int64_t>()) << name << " " << i;
      EXPECT_EQ(weight.item<double>(), row.at(2).get<double>()) << name << " " << i;
      if (!row.at(3).is_null()) {
        EXPECT_EQ(weight.grad().item<double>(), row.at(3).get<double>()) << name << " " << i;
      }
      weight.mutable_grad().reset();
    }
    EXPECT_EQ(scaler.state_dict(), expected.at("state")) << name;
  }
}

// The scale after each of a series of steps, '!' for one whose gradient overflowed.
std::vector<double> scales(GradScaler& scaler, const std::string& steps) {
  std::vector<double> found;
  const at::Tensor weight = at::ones({1}).requires_grad_(true);
  for (const char step : steps) {
    scaler.scale(at::ones({}));
    weight.mutable_grad() = at::full({1}, step == '!' ? INFINITY : 1.0);
    scaler.unscale_(&scaler, {weight});
    scaler.update();
    found.push_back(scaler.get_scale());
  }
  return found;
}

TEST(GradScaler, LetsOverflowsPassAsDeepSpeedDoes) {
  // DeepSpeed's DynamicLossScaler with delayed_shift 2: the second overflow halves, and so does
  // each after it until the scale has grown.
  const auto options = GradScalerOptions().init_scale(64).growth_interval(3).hysteresis(2);
  GradScaler scaler(options);
  EXPECT_EQ(scales(scaler, "!!!...!!"), (std::vector<double>{64, 32, 16, 16, 16, 32, 32, 16}));
  GradScaler patient(GradScalerOptions(options).consecutive_hysteresis(true));
  EXPECT_EQ(scales(patient, "!.!.!!!"), (std::vector<double>{64, 64, 64, 64, 64, 32, 16}));
  // An overflow that was let pass is no good step.
  GradScaler counting(options);
  EXPECT_EQ(scales(counting, "..!.."), (std::vector<double>{64, 64, 64, 64, 64}));
  EXPECT_EQ(scales(counting, "."), (std::vector<double>{128}));

  GradScaler least(GradScalerOptions().init_scale(8).min_scale(3));
  EXPECT_EQ(scales(least, "!!!"), (std::vector<double>{4, 3, 3}));

  // What is left of it is state.
  GradScaler saved(options), loaded(options);
  scales(saved, "!");
  const Json state = saved.state_dict();
  EXPECT_EQ(state.at("_hysteresis_left"), 1);
  loaded.load_state_dict(state);
  EXPECT_EQ(scales(loaded, "!"), (std::vector<double>{32}));
  EXPECT_THROW(GradScaler(GradScalerOptions().hysteresis(0)), ConfigError);
  EXPECT_THROW(GradScaler(GradScalerOptions().min_scale(-1)), ConfigError);
}

TEST(GradScaler, RefusesTheWrongOrder) {
  GradScaler scaler;
  const at::Tensor weight = leaf({1.0F});
  weight.mutable_grad() = at::ones({1});
  EXPECT_THROW(scaler.unscale_(&scaler, {weight}), PrecisionError);  // nothing was scaled
  EXPECT_THROW(scaler.update(), PrecisionError);
  EXPECT_THROW((void)scaler.found_inf(&scaler), PrecisionError);
  scaler.scale(at::ones({}));
  EXPECT_THROW(scaler.mark_stepped(&scaler), PrecisionError);
  EXPECT_FALSE(scaler.unscaled(&scaler));
  scaler.unscale_(&scaler, {weight});
  EXPECT_EQ(weight.grad().item<float>(), 1.0F / 65536.0F);
  EXPECT_TRUE(scaler.unscaled(&scaler));
  EXPECT_THROW(scaler.unscale_(&scaler, {weight}), PrecisionError);
  EXPECT_EQ(weight.grad().item<float>(), 1.0F / 65536.0F);
  scaler.mark_stepped(&scaler);
  EXPECT_THROW(scaler.mark_stepped(&scaler), PrecisionError);
  EXPECT_THROW(scaler.unscale_(&scaler, {weight}), PrecisionError);
  scaler.update();
  EXPECT_NO_THROW(scaler.unscale_(&scaler, {weight}));
  int without_gradient = 0;
  scaler.unscale_(&without_gradient, {leaf({1.0F})});
  EXPECT_THROW(scaler.mark_stepped(&without_gradient), PrecisionError);
}

TEST(GradScaler, RefusesToAddScaledGradientsToUnscaledOnes) {
  GradScaler scaler;
  const at::Tensor weight = leaf({1.0F});
  int clipped = 0, without_gradient = 0;
  scaler.scale(weight.sum()).backward();
  scaler.unscale_(&clipped, {weight});
  scaler.unscale_(&without_gradient, {leaf({1.0F})});
  EXPECT_THROW(scaler.scale(weight.sum()), PrecisionError);
  // Cleared without a step: the next gradients are unscaled anew.
  weight.mutable_grad().reset();
  scaler.forget(&clipped);
  scaler.scale(weight.sum()).backward();
  EXPECT_FALSE(scaler.unscaled(&clipped));
  EXPECT_TRUE(scaler.step(&clipped, {weight}, [] {}));
  EXPECT_EQ(weight.grad().item<float>(), 1.0F);
  // After a step, what it found counts for the update.
  scaler.forget(&clipped);
  EXPECT_NO_THROW(scaler.update());
}

TEST(GradScaler, RefusesFp16GradientsUnlessAllowed) {
  const at::Tensor weight = at::ones({2}, at::kHalf).requires_grad_(true);
  weight.mutable_grad() = at::full({2}, 4.0, at::kHalf);
  GradScaler strict(GradScalerOptions().init_scale(2)),
      sharded(GradScalerOptions().init_scale(2).allow_fp16_gradients(true));
  for (GradScaler* scaler : {&strict, &sharded}) scaler->scale(at::ones({}));
  EXPECT_THROW(strict.unscale_(&strict, {weight}), PrecisionError);
  EXPECT_EQ(weight.grad()[0].item<float>(), 4.0F);
  sharded.unscale_(&sharded, {weight});
  EXPECT_EQ(weight.grad()[0].item<float>(), 2.0F);
}

TEST(GradScaler, UnscalesEveryDtypeAndSparseGradients) {
  GradScaler scaler(GradScalerOptions().init_scale(4));
  scaler.scale(at::ones({}));
  const at::Tensor single = leaf({1.0F}), twice = at::ones({1}, at::kDouble).requires_grad_(true),
                   brain = at::ones({1}, at::kBFloat16).requires_grad_(true),
                   sparse = at::ones({2, 2}).requires_grad_(true);
  single.mutable_grad() = at::full({1}, 8.0);
  twice.mutable_grad() = at::full({1}, 8.0, at::kDouble);
  brain.mutable_grad() = at::full({1}, 8.0, at::kBFloat16);
  sparse.mutable_grad() = (at::eye(2) * 8).to_sparse();
  scaler.unscale_(&scaler, {single, twice, brain, sparse, leaf({1.0F})});
  EXPECT_EQ(scaler.found_inf(&scaler).item<float>(), 0.0F);
  for (const at::Tensor& weight : {single, twice, brain})
    EXPECT_EQ(weight.grad().item<float>(), 2.0F);
  EXPECT_TRUE(sparse.grad().to_dense().equal(at::eye(2) * 2));
}

TEST(GradScaler, BacksOffWhenAnyOptimizerOverflowed) {
  GradScaler scaler(GradScalerOptions().init_scale(16));
  scaler.scale(at::ones({}));
  const at::Tensor good = leaf({1.0F}), bad = leaf({1.0F});
  good.mutable_grad() = at::ones({1});
  bad.mutable_grad() = at::full({1}, -INFINITY);
  int first = 0, second = 0, ran = 0;
  EXPECT_TRUE(scaler.step(&first, {good}, [&] { ++ran; }));
  EXPECT_FALSE(scaler.step(&second, {bad}, [&] { ++ran; }));
  EXPECT_EQ(ran, 1);
  scaler.update_later();
  EXPECT_EQ(scaler.get_scale(), 8.0);
  EXPECT_EQ(scaler.get_scale(), 8.0);
}

TEST(GradScaler, IsTransparentWhenOff) {
  GradScaler scaler(GradScalerOptions().enabled(false));
  const at::Tensor loss = at::ones({});
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  int ran = 0;
  const at::Tensor weight = leaf({1.0F});
  weight.mutable_grad() = at::full({1}, INFINITY);
  EXPECT_TRUE(scaler.step(&scaler, {weight}, [&] { ++ran; }));
  EXPECT_EQ(ran, 1);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 1.0);
  EXPECT_TRUE(scaler.state_dict().empty());
}

TEST(GradScaler, SavesAndLoads) {
  GradScaler scaler(GradScalerOptions().init_scale(32).growth_interval(5));
  const at::Tensor weight = leaf({1.0F});
  weight.mutable_grad() = at::ones({1});
  scaler.scale(at::ones({}));
  scaler.step(&scaler, {weight}, [] {});
  scaler.update();
  const Json state = Json::parse(scaler.state_dict().dump());
  GradScaler fresh, used;
  used.scale(at::ones({}));
  for (GradScaler* other : {&fresh, &used}) {
    other->load_state_dict(state);
    EXPECT_EQ(other->get_scale(), 32.0);
    EXPECT_EQ(other->growth_tracker(), 1);
    EXPECT_EQ(other->scale(at::ones({})).item<float>(), 32.0F);
    EXPECT_EQ(other->state_dict(), state);
    EXPECT_THROW(other->load_state_dict(Json::object()), CheckpointError);
    EXPECT_EQ(other->get_scale(), 32.0);
  }
  scaler.update(128.0);
  EXPECT_EQ(scaler.get_scale(), 128.0);
  EXPECT_THROW(scaler.update(-1.0), ConfigError);
  EXPECT_THROW(scaler.update(INFINITY), ConfigError);
}

TEST(GradScaler, RefusesOptionsOutOfRange) {
  EXPECT_THROW(GradScaler(GradScalerOptions().growth_factor(1.0)), ConfigError);
  EXPECT_THROW(GradScaler(GradScalerOptions().backoff_factor(1.0)), ConfigError);
  EXPECT_THROW(GradScaler(GradScalerOptions().init_scale(0.0)), ConfigError);
  EXPECT_THROW(GradScaler(GradScalerOptions().growth_interval(0)), ConfigError);
}

}  // namespace
}  // namespace accelerate
