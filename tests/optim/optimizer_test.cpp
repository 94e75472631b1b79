// Gradient state, prepared optimizers and schedulers, and the state that all of them save.
#include <accelerate/base/error.hpp>
#include <accelerate/optim/adafactor.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/optim/optimizer.hpp>
#include <accelerate/optim/scheduler.hpp>
#include <accelerate/optim/schedules.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <sstream>

namespace accelerate {
namespace {

using optim::Adafactor;
using optim::AdafactorOptions;
using optim::FusedAdamW;
using optim::FusedAdamWOptions;
using optim::FusedSGD;
using optim::FusedSGDOptions;
using torch::optim::SGD;
using torch::optim::SGDOptions;

at::Tensor leaf(std::initializer_list<double> values) {
  return at::tensor(std::vector<double>(values)).requires_grad_(true);
}

std::shared_ptr<GradientState> gradients(const GradientAccumulationOptions& options = {}) {
  return std::make_shared<GradientState>(options);
}

double value(const at::Tensor& tensor) { return tensor.item<double>(); }

// The message of the E that `action` throws.
template <class E, class Action>
std::string message_of(Action&& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing, or another error, was thrown";
  return {};
}

/// Notes what an optimizer tells it.
struct WatchingStrategy : parallel::Strategy {
  using Strategy::Strategy;
  at::Tensor optimizer_leaf(const at::Tensor& parameter) const override {
    if (!Strategy::optimizer_leaf(parameter).defined()) return {};
    return replacement.defined() ? replacement : parameter;
  }
  void check_gradients() override {
    ++checks;
    if (refuse) throw StateError("not reduced");
  }
  void after_step() override { ++steps; }

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

// Steps, saves, loads into an optimizer over new parameters, and goes on: the same as never
// stopping.
template <class O, class Options>
void expect_resumes(const Options& options) {
  const auto make = [] {
    return std::vector{at::linspace(-1, 1, 6, at::kFloat).reshape({2, 3}).requires_grad_(true),
                       at::ones({4}).requires_grad_(true)};
  };
  const auto step = [](O& optimizer, const std::vector<at::Tensor>& weights, int number) {
    for (const at::Tensor& weight : weights)
      weight.mutable_grad() = at::cos(at::arange(weight.numel()).reshape(weight.sizes()) * number);
    optimizer.step();
  };
  const auto through = make(), before = make(), after = make();
  O uninterrupted(through, options), stopped(before, options), resumed(after, Options());
  for (int number = 1; number <= 4; ++number) step(uninterrupted, through, number);
  for (int number = 1; number <= 2; ++number) step(stopped, before, number);
  std::stringstream file;
  torch::save(stopped, file);
  {
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < after.size(); ++i) after[i].copy_(before[i]);
  }
  torch::load(resumed, file);
  for (int number = 3; number <= 4; ++number) step(resumed, after, number);
  for (std::size_t i = 0; i < after.size(); ++i)
    EXPECT_TRUE(after[i].equal(through[i])) << after[i] << through[i];
}

TEST(Optimizers, ResumeExactly) {
  expect_resumes<FusedAdamW>(FusedAdamWOptions(0.02).betas({0.8, 0.9}).amsgrad(true));
  expect_resumes<FusedSGD>(FusedSGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1));
  expect_resumes<Adafactor>(AdafactorOptions(0.05).eps1(1e-5).weight_decay(0.1));
  expect_resumes<Adafactor>(AdafactorOptions(0.05));
}

TEST(Optimizers, RefuseWhatTheyCannotStep) {
  const auto sparse = [](auto optimizer, const at::Tensor& weight) {
    weight.mutable_grad() = at::eye(2).to_sparse();
    EXPECT_THROW(optimizer.step(), UnsupportedError);
  };
  const at::Tensor weight = at::ones({2, 2}).requires_grad_(true);
  sparse(FusedAdamW({weight}), weight);
  sparse(FusedSGD({weight}), weight);
  sparse(Adafactor({weight}), weight);
  const at::Tensor gaps = at::ones({4, 4}).slice(1, 0, 2).detach().requires_grad_(true);
  gaps.mutable_grad() = at::ones({4, 2});
  EXPECT_THROW(FusedAdamW({gaps}).step(), UnsupportedError);
  const at::Tensor complex = at::ones({2}, at::kComplexFloat).requires_grad_(true);
  complex.mutable_grad() = at::ones({2}, at::kComplexFloat);
  EXPECT_THROW(FusedSGD({complex}).step(), UnsupportedError);

  EXPECT_THROW(FusedAdamW({weight}, FusedAdamWOptions(-1)), ConfigError);
  EXPECT_THROW(FusedAdamW({weight}, FusedAdamWOptions().betas({0.9, 1.0})), ConfigError);
  EXPECT_THROW(FusedSGD({weight}, FusedSGDOptions(0.1).nesterov(true)), ConfigError);
  EXPECT_THROW(Adafactor({weight}, AdafactorOptions().d(0.5)), ConfigError);
}

TEST(Optimizers, FollowTheParametersLayout) {
  // A gradient laid out otherwise than its parameter goes to the right elements.
  const at::Tensor weight = at::zeros({2, 3}).requires_grad_(true);
  const at::Tensor gradient = at::arange(6, at::kFloat).reshape({3, 2}).t();
  weight.mutable_grad() = gradient;
  FusedSGD optimizer({weight}, FusedSGDOptions(1.0));
  optimizer.step();
  EXPECT_TRUE(weight.equal(-gradient));
}

TEST(Optimizers, StepParametersThatJoinLater) {
  // A parameter's first gradient comes after another's momentum is there already.
  const at::Tensor early = leaf({0.0}), late = leaf({0.0});
  FusedSGD fused({early, late}, FusedSGDOptions(1.0).momentum(0.5).dampening(0.5));
  const at::Tensor early2 = leaf({0.0}), late2 = leaf({0.0});
  SGD plain({early2, late2}, SGDOptions(1.0).momentum(0.5).dampening(0.5));
  for (int step = 0; step < 3; ++step) {
    for (const auto& weight : {early, early2}) weight.mutable_grad() = at::ones({1}, at::kDouble);
    if (step > 0) {
      for (const auto& weight : {late, late2}) weight.mutable_grad() = at::ones({1}, at::kDouble);
    }
    fused.step();
    plain.step();
  }
  EXPECT_TRUE(early.equal(early2));
  EXPECT_TRUE(late.equal(late2));
}

template <class S>
PreparedScheduler<S> follow(std::shared_ptr<S> schedule,
                            const std::shared_ptr<OptimizerCore>& optimizer,
                            const SchedulerOptions& options = {}) {
  return {std::move(schedule),
          std::make_shared<SchedulerCore>(optimizer->gradients(), std::vector{optimizer}, options)};
}

TEST(PreparedScheduler, StopsAtTheEndOfACycle) {
  // The original goes one past the end, where the rate rises again.
  auto optimizer = prepare_optimizer(SGD({leaf({0.0})}, SGDOptions(0.1)), gradients());
  auto scheduler =
      follow(std::make_shared<optim::OneCycleLR>(
                 optimizer.optimizer(), optim::OneCycleLROptions(0.01, 5).cycle_momentum(false)),
             optimizer.core(), SchedulerOptions().num_processes(2));
  std::vector<double> rates;
  for (int i = 0; i < 4; ++i) {
    scheduler.step();
    rates.push_back(scheduler.get_last_lr()[0]);
  }
  EXPECT_NEAR(rates[0], 0.0061126, 1e-5);
  for (int i = 1; i < 4; ++i) EXPECT_NEAR(rates[i], 0.01 / 25 / 1e4, 1e-15);
  // Without accelerate in between it holds the last rate too.
  scheduler.scheduler().step();
  EXPECT_NEAR(scheduler.get_last_lr()[0], 0.01 / 25 / 1e4, 1e-15);
}

TEST(PreparedScheduler, CountsWhatItIsToldTo) {
  const auto last_step = [](const GradientAccumulationOptions& accumulation,
                            const SchedulerOptions& options, int micro_batches) {
    auto optimizer =
        prepare_optimizer(SGD({leaf({0.0})}, SGDOptions(0.1)), gradients(accumulation));
    auto schedule =
        std::make_shared<optim::LambdaLR>(optim::constant_schedule(optimizer.optimizer()));
    auto scheduler = follow(schedule, optimizer.core(), options);
    LoaderProgress progress;
    optimizer.core()->gradients()->loader_begins(progress);
    for (int i = 0; i < micro_batches; ++i) {
      progress.end_of_dataloader = i == micro_batches - 1;
      optimizer.core()->gradients()->begin_micro_batch();
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
    }
    return schedule->last_step();
  };
  const auto four = GradientAccumulationOptions().num_steps(4);
  const auto adjusted = GradientAccumulationOptions(four).adjust_scheduler(true);
  // Ten micro-batches in windows of 4, 4 and 2.
  EXPECT_EQ(last_step(four, SchedulerOptions(), 10), 3);
  EXPECT_EQ(last_step(four, SchedulerOptions().num_processes(2), 10), 6);
  EXPECT_EQ(last_step(adjusted, SchedulerOptions(), 10), 10);
  EXPECT_EQ(last_step(adjusted, SchedulerOptions().num_processes(2), 10), 20);
  EXPECT_EQ(last_step(adjusted, SchedulerOptions().num_processes(2).per_process_steps(false), 10),
            3);
  EXPECT_EQ(last_step(four, SchedulerOptions().num_processes(2).step_with_optimizer(false), 10),
            10);
  EXPECT_THROW(SchedulerCore(gradients(), {}, SchedulerOptions().num_processes(0)), ConfigError);
}

TEST(PreparedScheduler, FollowsLibTorchsSchedulers) {
  auto optimizer = prepare_optimizer(SGD({leaf({0.0})}, SGDOptions(1.0)), gradients());
  auto scheduler = follow(std::make_shared<torch::optim::StepLR>(optimizer.optimizer(), 2, 0.5),
                          optimizer.core(), SchedulerOptions().num_processes(2));
  SGD plain({leaf({0.0})}, SGDOptions(1.0));
  torch::optim::StepLR reference(plain, 2, 0.5);
  const auto rate_of = [](SGD& of) { return of.param_groups()[0].options().get_lr(); };
  for (int i = 0; i < 3; ++i) {
    scheduler.step();
    reference.step();
    reference.step();
    EXPECT_EQ(optimizer.learning_rates()[0], rate_of(plain));
  }
  // Its state goes on where it was, in another process with the optimizer's state loaded.
  const auto state = scheduler.state_dict();
  auto later = prepare_optimizer(SGD({leaf({0.0})}, SGDOptions(1.0)), gradients());
  auto resumed = follow(std::make_shared<torch::optim::StepLR>(later.optimizer(), 2, 0.5),
                        later.core(), SchedulerOptions().num_processes(2));
  EXPECT_THROW(resumed.load_state_dict(state), StateError);
  EXPECT_THROW(resumed.load_state_dict(Json::object()), CheckpointError);
  later.set_learning_rates(optimizer.learning_rates());
  resumed.load_state_dict(state);
  for (int i = 0; i < 3; ++i) {
    scheduler.step();
    resumed.step();
    EXPECT_EQ(later.learning_rates(), optimizer.learning_rates());
  }

  auto plateau = follow(std::make_shared<torch::optim::ReduceLROnPlateauScheduler>(
                            plain, torch::optim::ReduceLROnPlateauScheduler::min, 0.1F, 1),
                        optimizer.core(), SchedulerOptions().num_processes(8));
  const double before = rate_of(plain);
  plateau.step(1.0F);
  plateau.step(1.0F);
  EXPECT_EQ(rate_of(plain), before);
  plateau.step(1.0F);
  EXPECT_LT(rate_of(plain), before);
}

TEST(Schedules, ResumeExactly) {
  const auto expect_resumes_from = [](auto make) {
    SGD first({leaf({0.0})}, SGDOptions(0.3).momentum(0.9)),
        second({leaf({0.0})}, SGDOptions(0.7).momentum(0.1));
    auto schedule = make(first);
    for (int i = 0; i < 4; ++i) schedule.step();
    auto resumed = make(second);
    resumed.load_state_dict(Json::parse(schedule.state_dict().dump()));
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(resumed.get_last_lr(), schedule.get_last_lr());
      EXPECT_EQ(second.param_groups()[0].options().get_lr(),
                first.param_groups()[0].options().get_lr());
      schedule.step();
      resumed.step();
    }
    EXPECT_EQ(resumed.last_step(), 8);
    EXPECT_THROW(resumed.load_state_dict(Json{{"last_step", 1}}), CheckpointError);
    EXPECT_THROW(resumed.load_state_dict(Json{{"last_step", 1}, {"base_lrs", {1.0, 2.0}}}),
                 CheckpointError);
    EXPECT_EQ(resumed.last_step(), 8);
  };
  expect_resumes_from([](SGD& o) { return optim::cosine_schedule_with_warmup(o, 2, 10); });
  expect_resumes_from(
      [](SGD& o) { return optim::OneCycleLR(o, optim::OneCycleLROptions(0.5, 10)); });
}

TEST(Schedules, RefuseWhatCannotWork) {
  SGD optimizer({leaf({0.0})}, SGDOptions(0.3));
  EXPECT_THROW(optim::LambdaLR(optimizer, optim::LambdaLR::Factor()), ConfigError);
  EXPECT_THROW(optim::LambdaLR(optimizer, std::vector<optim::LambdaLR::Factor>(
                                              2, [](std::int64_t) { return 1.0; })),
               ConfigError);
  EXPECT_THROW(optim::linear_schedule_with_warmup(optimizer, -1, 10), ConfigError);
  EXPECT_THROW(optim::OneCycleLR(optimizer, optim::OneCycleLROptions(0.1, 0)), ConfigError);
  EXPECT_THROW(optim::OneCycleLR(optimizer, optim::OneCycleLROptions(0.1, 5).pct_start(1.5)),
               ConfigError);
  EXPECT_THROW(optim::OneCycleLR(optimizer, optim::OneCycleLROptions({0.1, 0.2}, 5)), ConfigError);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.3);
  Adafactor without_momentum({leaf({0.0})}, AdafactorOptions(0.3));
  EXPECT_THROW(optim::OneCycleLR(without_momentum, optim::OneCycleLROptions(0.1, 5)),
               UnsupportedError);
  EXPECT_EQ(without_momentum.param_groups()[0].options().get_lr(), 0.3);

  auto schedule = optim::constant_schedule(optimizer);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup({leaf({0.0})}));
  EXPECT_THROW(schedule.step(), StateError);
}

}  // namespace
}  // namespace accelerate
