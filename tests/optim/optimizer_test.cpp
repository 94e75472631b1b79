// Gradient state and prepared optimizers.
#include "support/message_of.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/optim/optimizer.hpp>
#include <accelerate/optim/scheduler.hpp>
#include <accelerate/optim/schedules.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/serialize.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cmath>
#include <optional>
#include <sstream>

namespace accelerate {
namespace {

using optim::FusedAdamW;
using optim::FusedAdamWOptions;
using optim::FusedSGD;
using optim::FusedSGDOptions;
using testing::message_of;
using torch::optim::SGD;
using torch::optim::SGDOptions;

at::Tensor leaf(std::initializer_list<double> values) {
  return at::tensor(std::vector<double>(values)).requires_grad_(true);
}

std::shared_ptr<GradientState> gradients(const GradientAccumulationOptions& options = {}) {
  return std::make_shared<GradientState>(options);
}

double value(const at::Tensor& tensor) { return tensor.item<double>(); }

/// Notes what an optimizer tells it.
struct WatchingStrategy : parallel::Strategy {
  using Strategy::Strategy;
  at::Tensor optimizer_leaf(const at::Tensor& parameter) const override {
    if (!Strategy::optimizer_leaf(parameter).defined()) return {};
    return replacement.defined() ? replacement : parameter;
  }
  void check_gradients(const std::vector<at::Tensor>&) override {
    ++checks;
    if (refuse) throw StateError("not reduced");
  }
  void after_step(const std::vector<at::Tensor>&) override { ++steps; }
  void before_zero_grad(const std::vector<at::Tensor>&) override { ++steps; }

  at::Tensor replacement;
  bool refuse = false;
  int checks = 0;
  int steps = 0;
};

TEST(GradientState, RefusesNoSteps) {
  EXPECT_THROW(GradientState(GradientAccumulationOptions().num_steps(0)), ConfigError);
  GradientState state;
  EXPECT_THROW(state.set_num_steps(-1), ConfigError);
  EXPECT_EQ(state.num_steps(), 1);
}

TEST(GradientState, FollowsTheInnermostLoader) {
  GradientState state(GradientAccumulationOptions().num_steps(100));
  EXPECT_FALSE(state.in_dataloader());
  EXPECT_EQ(state.remainder(), -1);
  LoaderProgress training, evaluation;
  training.remainder = 3;
  training.end_of_dataloader = true;
  state.loader_begins(training);
  EXPECT_TRUE(state.end_of_dataloader());
  state.loader_begins(evaluation);
  EXPECT_FALSE(state.end_of_dataloader());
  EXPECT_FALSE(state.begin_micro_batch());
  state.loader_ends(evaluation);
  EXPECT_EQ(state.remainder(), 3);
  EXPECT_EQ(state.progress(), &training);
  EXPECT_TRUE(state.begin_micro_batch());
  // A loop that was left ends in any order.
  state.loader_begins(evaluation);
  state.loader_ends(training);
  EXPECT_EQ(state.progress(), &evaluation);
}

TEST(GradientState, ReducesEachBatchIfAsked) {
  GradientState state(GradientAccumulationOptions().num_steps(2).sync_each_batch(true));
  EXPECT_FALSE(state.begin_micro_batch());
  EXPECT_TRUE(state.reduces_gradients());
}

TEST(PreparedOptimizer, DoesNothingWithinAWindow) {
  // y = 2 x, squared error, SGD 0.02, four micro-batches: the original's own test.
  const auto state = gradients(GradientAccumulationOptions().num_steps(4));
  const at::Tensor weight = leaf({0.0});
  auto optimizer = prepare_optimizer(SGD({weight}, SGDOptions(0.02)), state);
  std::vector<double> weights;
  for (double x : {1.0, 2.0, 3.0, 4.0}) {
    state->begin_micro_batch();
    state->add_backward();
    ((weight * x - 2 * x).pow(2).sum() / 4).backward();
    optimizer.step();
    optimizer.zero_grad();
    weights.push_back(value(weight));
    EXPECT_EQ(weight.grad().defined(), x < 4.0);
  }
  EXPECT_EQ(std::vector<double>(weights.begin(), weights.end() - 1),
            (std::vector<double>{0.0, 0.0, 0.0}));
  EXPECT_DOUBLE_EQ(weights.back(), 0.02 / 4 * 2 * 2 * (1 + 4 + 9 + 16));
  EXPECT_EQ(optimizer.core()->steps(), 1);
}

TEST(PreparedOptimizer, ClearsGradientsThatAreViews) {
  // As a DDP bucket holds them: torch's own zero_grad cannot.
  const at::Tensor bucket = at::ones({4}, at::kDouble);
  const at::Tensor weight = leaf({1.0, 2.0});
  SGD plain({weight}, SGDOptions(0.1));
  auto optimizer = prepare_optimizer(plain, gradients());
  weight.mutable_grad() = bucket.slice(0, 0, 2);
  EXPECT_ANY_THROW(plain.zero_grad(/*set_to_none=*/false));
  optimizer.zero_grad(/*set_to_none=*/false);
  EXPECT_TRUE(bucket.equal(at::tensor({0.0, 0.0, 1.0, 1.0}, at::kDouble)));
  EXPECT_TRUE(weight.grad().is_alias_of(bucket));
  optimizer.zero_grad();
  EXPECT_FALSE(weight.grad().defined());
}

TEST(PreparedOptimizer, ReferencesAnLvalueAndOwnsTheRest) {
  const at::Tensor weight = leaf({1.0});
  SGD own({weight}, SGDOptions(0.5));
  auto referenced = prepare_optimizer(own, gradients());
  EXPECT_EQ(&referenced.optimizer(), &own);
  static_assert(std::is_same_v<decltype(referenced), PreparedOptimizer<SGD>>);
  const auto shared = std::make_shared<SGD>(std::vector{weight}, SGDOptions(0.5));
  auto kept = prepare_optimizer(shared, gradients());
  EXPECT_EQ(shared.use_count(), 3);
  auto moved =
      prepare_optimizer(std::make_unique<SGD>(std::vector{weight}, SGDOptions(0.5)), gradients());
  auto rvalue = prepare_optimizer(SGD({weight}, SGDOptions(0.5)), gradients());
  for (auto* optimizer : {&referenced, &kept, &moved, &rvalue}) {
    weight.mutable_grad() = at::ones({1}, at::kDouble);
    const double before = value(weight);
    optimizer->step();
    EXPECT_DOUBLE_EQ(value(weight), before - 0.5);
    EXPECT_EQ(optimizer->param_groups().size(), 1U);
    EXPECT_EQ(optimizer->parameters().size(), 1U);
  }
  EXPECT_THROW(prepare_optimizer(std::shared_ptr<SGD>(), gradients()), ConfigError);
}

TEST(PreparedOptimizer, SetsLearningRates) {
  auto optimizer = prepare_optimizer(SGD({leaf({1.0})}, SGDOptions(0.5)), gradients());
  optimizer.set_learning_rates({0.25});
  EXPECT_EQ(optimizer.learning_rates(), std::vector<double>{0.25});
  EXPECT_THROW(optimizer.set_learning_rates({0.1, 0.2}), ConfigError);
}

TEST(PreparedOptimizer, TellsTheStrategiesOfItsParameters) {
  torch::nn::Linear layer(2, 1), other(2, 1);
  const auto strategy = std::make_shared<WatchingStrategy>(ModuleRecord(layer.ptr()));
  auto optimizer = prepare_optimizer(SGD(layer->parameters(), SGDOptions(0.1)), gradients());
  auto stranger = prepare_optimizer(SGD(other->parameters(), SGDOptions(0.1)), gradients());
  EXPECT_TRUE(optimizer.core()->link(strategy));
  EXPECT_TRUE(optimizer.core()->link(strategy));
  EXPECT_FALSE(stranger.core()->link(strategy));
  EXPECT_EQ(optimizer.core()->strategies().size(), 1U);
  EXPECT_TRUE(optimizer.core()->owns(layer->weight));
  EXPECT_FALSE(optimizer.core()->owns(other->weight));

  layer->forward(at::ones({1, 2})).sum().backward();
  EXPECT_TRUE(optimizer.core()->has_gradients());
  EXPECT_FALSE(stranger.core()->has_gradients());
  optimizer.step();
  optimizer.zero_grad();
  EXPECT_EQ(strategy->checks, 1);
  EXPECT_EQ(strategy->steps, 2);

  // What the strategy refuses changes nothing.
  layer->forward(at::ones({1, 2})).sum().backward();
  const at::Tensor before = layer->weight.detach().clone();
  strategy->refuse = true;
  EXPECT_THROW(optimizer.step(), StateError);
  EXPECT_TRUE(layer->weight.equal(before));
}

TEST(PreparedOptimizer, OwnsTheLeavesOfAShardedModule) {
  torch::nn::Linear layer(torch::nn::LinearOptions(2, 1).bias(false));
  const auto strategy = std::make_shared<WatchingStrategy>(ModuleRecord(layer.ptr()));
  strategy->replacement = at::zeros({1}).requires_grad_(true);
  SGD own(layer->parameters(), SGDOptions(0.1).momentum(0.9));
  EXPECT_TRUE(prepare_optimizer(own, gradients()).core()->link(strategy));
  EXPECT_TRUE(own.param_groups()[0].params()[0].is_same(strategy->replacement));

  SGD stepped(layer->parameters(), SGDOptions(0.1).momentum(0.9));
  layer->forward(at::ones({1, 2})).sum().backward();
  stepped.step();
  EXPECT_THROW(prepare_optimizer(stepped, gradients()).core()->link(strategy), StateError);
}

TEST(PreparedOptimizer, NormalisesByCounts) {
  // Two micro-batches of 1 and 3 samples: the mean over the four, not the mean of two means.
  const auto state = gradients(GradientAccumulationOptions().num_steps(2));
  const at::Tensor weight = leaf({0.0});
  const at::Tensor single = at::zeros({1}, at::kFloat).requires_grad_(true);
  auto optimizer = prepare_optimizer(SGD({weight, single}, SGDOptions(1.0)), state);
  for (int window = 0; window < 2; ++window) {
    const double before = value(weight);
    for (const auto& samples : {std::vector<double>{1.0}, std::vector<double>{2.0, 3.0, 6.0}}) {
      state->begin_micro_batch();
      state->add_backward(static_cast<double>(samples.size()));
      ((weight + single) * at::tensor(samples)).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT_DOUBLE_EQ(value(weight), before - (1.0 + 2.0 + 3.0 + 6.0) / 4.0);
    EXPECT_FLOAT_EQ(single.item<float>(), static_cast<float>(value(weight)));
  }
}

TEST(PreparedOptimizer, NormalisesOnceForClippingAndStep) {
  const auto state = gradients();
  const at::Tensor weight = leaf({0.0});
  auto optimizer = prepare_optimizer(SGD({weight}, SGDOptions(1.0)), state);
  state->add_backward(4);
  (weight * 8).sum().backward();
  optimizer.core()->finish_gradients();
  EXPECT_DOUBLE_EQ(value(weight.grad()), 2.0);
  // Adding sums to means would be wrong.
  EXPECT_THROW(state->add_backward(4), StateError);
  optimizer.step();
  EXPECT_DOUBLE_EQ(value(weight), -2.0);

  // No sample at all: no step, and no NaN.
  optimizer.zero_grad();
  state->add_backward(0);
  (weight * 0).sum().backward();
  optimizer.step();
  EXPECT_DOUBLE_EQ(value(weight), -2.0);
}

TEST(PreparedOptimizer, RefusesToMixCountsAndMeans) {
  GradientState state;
  state.add_backward();
  EXPECT_NE(message_of<StateError>([&] { state.add_backward(3); }).find("count"),
            std::string::npos);
  state.end_window();
  state.add_backward(3);
  EXPECT_THROW(state.add_backward(), StateError);
  EXPECT_THROW(state.add_backward(-1), ConfigError);
  EXPECT_THROW(state.add_backward(std::nan("")), ConfigError);
}

TEST(PreparedOptimizer, RunsClosures) {
  const auto solve = [](bool prepared, bool counts) {
    const at::Tensor weight = leaf({3.0, -1.0});
    torch::optim::LBFGS own({weight}, torch::optim::LBFGSOptions(0.5).max_iter(5));
    const auto state = gradients();
    auto optimizer = prepare_optimizer(own, state);
    const auto loss = [&] { return (weight * weight * at::tensor({1.0, 4.0}, at::kDouble)).sum(); };
    const auto plain = [&] {
      own.zero_grad();
      const at::Tensor result = loss();
      result.backward();
      return result;
    };
    const auto counted = [&] {
      optimizer.zero_grad();
      const at::Tensor result = loss();
      if (counts) state->add_backward(2);
      (counts ? result * 2 : result).backward();
      return result;
    };
    for (int i = 0; i < 3; ++i) prepared ? optimizer.step(counted) : own.step(plain);
    return weight.detach().clone();
  };
  const at::Tensor expected = solve(false, false);
  EXPECT_TRUE(solve(true, false).equal(expected));
  EXPECT_TRUE(solve(true, true).allclose(expected, 1e-12, 1e-12));
}

TEST(PreparedOptimizer, RefusesClosuresUnderAScaler) {
  auto optimizer = prepare_optimizer(SGD({leaf({1.0})}, SGDOptions(0.1)), gradients(),
                                     std::make_shared<GradScaler>());
  EXPECT_THROW(optimizer.step([] { return at::zeros({}); }), UnsupportedError);
}

TEST(PreparedOptimizer, SkipsOverflowedStepsAndTellsTheScheduler) {
  const auto state = gradients();
  const auto scaler =
      std::make_shared<GradScaler>(GradScalerOptions().init_scale(8).growth_interval(2));
  const at::Tensor weight = leaf({1.0});
  auto optimizer = prepare_optimizer(SGD({weight}, SGDOptions(0.5)), state, scaler);
  auto schedule = std::make_shared<optim::LambdaLR>(optimizer.optimizer(), [](std::int64_t step) {
    return 1.0 / (1.0 + static_cast<double>(step));
  });
  PreparedScheduler scheduler(
      schedule, std::make_shared<SchedulerCore>(state, std::vector{optimizer.core()}));
  const auto step = [&](double gradient) {
    scaler->scale((weight * gradient).sum()).backward();
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
  };
  step(1.0);
  EXPECT_DOUBLE_EQ(value(weight), 0.5);
  EXPECT_FALSE(optimizer.step_was_skipped());
  step(INFINITY);
  EXPECT_DOUBLE_EQ(value(weight), 0.5);
  EXPECT_TRUE(optimizer.step_was_skipped());
  EXPECT_EQ(schedule->last_step(), 1);
  EXPECT_EQ(scaler->get_scale(), 4.0);
  step(2.0);
  EXPECT_DOUBLE_EQ(value(weight), 0.5 - 2.0 * 0.25);
  EXPECT_EQ(scaler->get_scale(), 4.0);
  step(std::nan(""));
  EXPECT_EQ(scaler->get_scale(), 2.0);
  EXPECT_EQ(schedule->last_step(), 2);
}

TEST(PreparedOptimizer, MayBeClearedAfterClippingWithoutAStep) {
  const auto scaler = std::make_shared<GradScaler>();
  const at::Tensor weight = leaf({1.0}), idle = leaf({1.0});
  auto optimizer = prepare_optimizer(SGD({weight}, SGDOptions(1.0)), gradients(), scaler);
  auto other = prepare_optimizer(SGD({idle}, SGDOptions(1.0)), gradients(), scaler);
  for (int i = 0; i < 2; ++i) {
    optimizer.zero_grad();
    scaler->scale(weight.sum()).backward();
    optimizer.core()->finish_gradients();
    // Clipping finishes the gradients of every optimizer; one without any is none the worse.
    other.core()->finish_gradients();
    EXPECT_DOUBLE_EQ(value(weight.grad()), 1.0);
  }
  optimizer.step();
  EXPECT_DOUBLE_EQ(value(weight), 0.0);
  EXPECT_THROW(other.step(), PrecisionError);
}

TEST(PreparedOptimizer, SharesAScaleWithOthersOfTheSameBackward) {
  // The scale must not change between the unscaling of the first and of the second optimizer.
  const auto state = gradients();
  const auto scaler =
      std::make_shared<GradScaler>(GradScalerOptions().init_scale(4).growth_interval(1));
  const at::Tensor a = leaf({1.0}), b = leaf({1.0});
  auto first = prepare_optimizer(SGD({a}, SGDOptions(1.0)), state, scaler);
  auto second = prepare_optimizer(SGD({b}, SGDOptions(1.0)), state, scaler);
  scaler->scale((a * 3 + b * 5).sum()).backward();
  first.core()->finish_gradients();
  first.core()->finish_gradients();
  second.core()->finish_gradients();
  EXPECT_DOUBLE_EQ(value(b.grad()), 5.0);
  first.step();
  second.step();
  EXPECT_DOUBLE_EQ(value(a), -2.0);
  EXPECT_DOUBLE_EQ(value(b), -4.0);
  EXPECT_EQ(scaler->get_scale(), 8.0);
  EXPECT_EQ(scaler->growth_tracker(), 0);
}

TEST(PreparedOptimizer, AnotherAtTheSameAddressIsUnscaledToo) {
  const auto state = gradients();
  const auto scaler = std::make_shared<GradScaler>(GradScalerOptions().init_scale(8));
  std::optional<SGD> own;
  for (int fold = 0; fold < 3; ++fold) {
    const at::Tensor weight = leaf({1.0});
    own.emplace(std::vector{weight}, SGDOptions(0.5));
    auto optimizer = prepare_optimizer(*own, state, scaler);
    scaler->scale(weight.sum()).backward();
    optimizer.core()->finish_gradients();
    EXPECT_DOUBLE_EQ(value(weight.grad()), 1.0) << fold;
    // Left without a step.
  }
}

TEST(PreparedOptimizer, KnowsWhetherAReferencedOneLives) {
  const auto check = [](auto make) {
    auto own = make();
    auto optimizer = prepare_optimizer(*own, gradients());
    auto owned = prepare_optimizer(make(), gradients());
    EXPECT_TRUE(optimizer.core()->is_alive());
    EXPECT_TRUE(optimizer.core()->is_of(*own));
    EXPECT_FALSE(optimizer.core()->is_of(owned.optimizer()));
    EXPECT_EQ(prepare_optimizer(*own, gradients()).core()->is_of(*own), true);
    own.reset();
    EXPECT_FALSE(optimizer.core()->is_alive());
    EXPECT_THROW(optimizer.param_groups(), StateError);
    EXPECT_THROW(optimizer.optimizer(), StateError);
    EXPECT_THROW(optimizer.set_learning_rates({0.1}), StateError);
    EXPECT_TRUE(owned.core()->is_alive());
  };
  check([] { return std::make_unique<SGD>(std::vector{leaf({1.0})}, SGDOptions(0.5)); });
  check([] {
    return std::make_unique<FusedAdamW>(std::vector{leaf({1.0})}, FusedAdamWOptions(0.5));
  });
  check([] { return std::make_unique<torch::optim::LBFGS>(std::vector{leaf({1.0})}, 0.5); });
}

TEST(PreparedOptimizer, AWitnessLeavesNoTraceInWhatIsSaved) {
  const at::Tensor weight = leaf({1.0});
  torch::optim::Adam own({weight}, torch::optim::AdamOptions(0.25));
  auto optimizer = prepare_optimizer(own, gradients());
  weight.mutable_grad() = at::ones({1}, at::kDouble);
  optimizer.step();
  std::stringstream file;
  torch::save(own, file);
  torch::optim::Adam other({leaf({1.0})}, torch::optim::AdamOptions(0.5));
  torch::load(other, file);
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.25);
  EXPECT_EQ(static_cast<torch::optim::AdamOptions&>(own.defaults()).lr(), 0.25);
  own.add_param_group(torch::optim::OptimizerParamGroup({leaf({2.0})}));
  EXPECT_EQ(own.param_groups()[1].options().get_lr(), 0.25);
  EXPECT_EQ(typeid(own.param_groups()[1].options()), typeid(torch::optim::AdamOptions));
}

TEST(PreparedOptimizer, AClosureIsRefusedWithinAWindow) {
  const auto state = gradients(GradientAccumulationOptions().num_steps(2));
  const at::Tensor weight = leaf({3.0});
  torch::optim::LBFGS own({weight}, torch::optim::LBFGSOptions(0.5).max_iter(5));
  auto optimizer = prepare_optimizer(own, state);
  const auto closure = [&] {
    optimizer.zero_grad();
    const at::Tensor loss = (weight * weight).sum();
    loss.backward();
    return loss;
  };
  state->begin_micro_batch();
  EXPECT_FALSE(optimizer.step(closure).defined());
  state->begin_micro_batch();
  EXPECT_NE(message_of<StateError>([&] { optimizer.step(closure); }).find("without accumulation"),
            std::string::npos);
}

template <class O, class Options>
void expect_skips_on_device(Options options) {
  const auto run = [&](const std::vector<double>& gradients_of_steps) {
    const auto state = gradients();
    const auto scaler = std::make_shared<GradScaler>();
    const at::Tensor weight = at::full({3}, 2.0).requires_grad_(true);
    auto optimizer = prepare_optimizer(O({weight}, options), state, scaler);
    for (double gradient : gradients_of_steps) {
      const at::Tensor before = weight.detach().clone();
      scaler->scale(weight.sum()).backward();
      weight.mutable_grad().mul_(gradient);
      optimizer.step();
      EXPECT_EQ(optimizer.step_was_skipped(), !std::isfinite(gradient));
      EXPECT_EQ(weight.equal(before), !std::isfinite(gradient));
      optimizer.zero_grad();
    }
    return weight.detach().clone();
  };
  // A skipped step leaves no trace, neither in the parameters nor in the state.
  EXPECT_TRUE(run({INFINITY, 1.0, 0.5, NAN, 2.0}).equal(run({1.0, 0.5, 2.0})));
}

TEST(PreparedOptimizer, FusedOptimizersSkipOnTheDevice) {
  expect_skips_on_device<FusedAdamW>(FusedAdamWOptions(0.1));
  expect_skips_on_device<FusedSGD>(FusedSGDOptions(0.1).momentum(0.9).dampening(0.5));
  expect_skips_on_device<FusedSGD>(FusedSGDOptions(0.1));
}

}  // namespace
}  // namespace accelerate
