// The optimizers LibTorch lacks, schedules and prepared schedulers, and the state that they save.
#include <accelerate/base/error.hpp>
#include <accelerate/optim/adafactor.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/optim/scheduler.hpp>
#include <accelerate/optim/schedules.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <nlohmann/json.hpp>

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
  // Its state goes on where it was, in another process with a new optimizer.
  const auto state = scheduler.state_dict();
  auto later = prepare_optimizer(SGD({leaf({0.0})}, SGDOptions(1.0)), gradients());
  auto resumed = follow(std::make_shared<torch::optim::StepLR>(later.optimizer(), 2, 0.5),
                        later.core(), SchedulerOptions().num_processes(2));
  EXPECT_THROW(resumed.load_state_dict(Json::object()), CheckpointError);
  Json of_two_groups = state;
  of_two_groups["learning_rates"] = {0.1, 0.2};
  EXPECT_THROW(resumed.load_state_dict(of_two_groups), CheckpointError);
  EXPECT_EQ(later.learning_rates()[0], 1.0);
  resumed.load_state_dict(state);
  EXPECT_EQ(later.learning_rates(), optimizer.learning_rates());
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

TEST(PreparedScheduler, ResumesAtTheSamePaceOnAnotherNumberOfProcesses) {
  auto optimizer = prepare_optimizer(SGD({leaf({0.0})}, SGDOptions(1.0)), gradients());
  const auto core_of = [&](int processes, std::int64_t accumulation = 1) {
    return SchedulerCore(gradients(GradientAccumulationOptions().num_steps(accumulation)),
                         {optimizer.core()}, SchedulerOptions().num_processes(processes));
  };
  const auto steps = [](SchedulerCore& core, int times) {
    std::vector<std::int64_t> all;
    for (int i = 0; i < times; ++i) all.push_back(core.take_steps());
    return all;
  };
  using Steps = std::vector<std::int64_t>;
  SchedulerCore two = core_of(2);
  EXPECT_EQ(steps(two, 2), (Steps{2, 2}));
  const Json pace = Json::parse(two.pace(/*batch=*/16).dump());
  const auto resumed = [&](int processes, std::int64_t batch, std::int64_t accumulation = 1) {
    auto core = std::make_unique<SchedulerCore>(core_of(processes, accumulation));
    core->continue_pace(pace, batch);
    return core;
  };
  EXPECT_EQ(steps(*resumed(2, 16), 2), (Steps{2, 2}));
  EXPECT_EQ(steps(*resumed(1, 16), 2), (Steps{2, 2})) << "the batch of all processes is the same";
  EXPECT_EQ(steps(*resumed(4, 16), 2), (Steps{2, 2}));
  EXPECT_EQ(steps(*resumed(1, 8, /*accumulation=*/2), 2), (Steps{2, 2}));
  EXPECT_EQ(steps(*resumed(4, 32), 2), (Steps{4, 4})) << "the batch of one process is the same";
  EXPECT_EQ(steps(*resumed(1, 8), 2), (Steps{1, 1}));
  EXPECT_EQ(steps(*resumed(3, 12), 4), (Steps{1, 2, 1, 2}));
  EXPECT_EQ(steps(*resumed(1, 4), 4), (Steps{0, 1, 0, 1}));
  EXPECT_EQ(steps(*resumed(1, 0), 2), (Steps{2, 2})) << "nobody knows the samples";
  // A fraction of a step is carried over the next resume.
  const auto third = resumed(3, 12);
  EXPECT_EQ(steps(*third, 1), (Steps{1}));
  SchedulerCore again = core_of(3);
  again.continue_pace(third->pace(12), 12);
  EXPECT_EQ(steps(again, 3), (Steps{2, 1, 2}));
  SchedulerCore back = core_of(2);
  back.continue_pace(third->pace(12), 16);
  EXPECT_EQ(steps(back, 2), (Steps{2, 2}));

  SchedulerCore by_optimizer_steps(gradients(), {optimizer.core()},
                                   SchedulerOptions().num_processes(2).per_process_steps(false));
  EXPECT_TRUE(by_optimizer_steps.pace(16).is_null());
  by_optimizer_steps.continue_pace(pace, 16);
  EXPECT_EQ(steps(by_optimizer_steps, 2), (Steps{1, 1}));
  for (const Json& wrong :
       {Json{{"steps", 1}}, Json{{"steps", 1}, {"of", 0}, {"carry", 0}, {"samples", 1}},
        Json{{"steps", -1}, {"of", 1}, {"carry", 0}, {"samples", 1}},
        Json{{"steps", 1}, {"of", 1}, {"carry", 1}, {"samples", 1}}, Json(3), Json("fast")}) {
    EXPECT_THROW(two.continue_pace(wrong, 16), CheckpointError) << wrong;
  }
  EXPECT_EQ(steps(two, 1), (Steps{2}));
}

TEST(PreparedScheduler, OneThatFollowsAMetricHasAState) {
  using Plateau = torch::optim::ReduceLROnPlateauScheduler;
  SGD first({leaf({0.0})}, SGDOptions(1.0)), second({leaf({0.0})}, SGDOptions(1.0));
  Plateau plateau(first, Plateau::min, 0.5F, 2), resumed(second, Plateau::min, 0.5F, 2);
  const auto rate_of = [](SGD& of) { return of.param_groups()[0].options().get_lr(); };
  for (const float metric : {1.0F, 2.0F}) plateau.step(metric);
  load_state_of(resumed, Json::parse(state_of(plateau).dump()));
  for (const float metric : {3.0F, 4.0F, 0.5F, 0.6F, 0.7F, 0.8F, 0.9F}) {
    plateau.step(metric);
    resumed.step(metric);
    EXPECT_EQ(rate_of(second), rate_of(first)) << metric;
  }
  EXPECT_LT(rate_of(first), 0.5);
  EXPECT_THROW(load_state_of(resumed, Json{{"best", 1.0}}), CheckpointError);
}

// prepare() takes only schedulers whose state can be saved.
struct OnlySteps {
  void step() {}
};
struct WithState : OnlySteps {
  Json state_dict() const { return {}; }
  void load_state_dict(const Json&) {}
};
static_assert(SchedulerLike<OnlySteps> && !SchedulerWithState<OnlySteps>);
static_assert(SchedulerWithState<WithState> && SchedulerWithState<torch::optim::StepLR> &&
              SchedulerWithState<torch::optim::ReduceLROnPlateauScheduler> &&
              SchedulerWithState<optim::LambdaLR> && SchedulerWithState<optim::OneCycleLR>);

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
