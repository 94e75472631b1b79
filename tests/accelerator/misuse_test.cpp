// What programs do wrong, and what they rarely do, through the facade on one rank and on several.

#include "support/distributed.hpp"
#include "support/message_of.hpp"

#include "accelerator/resolve.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/parallel/fsdp.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <sstream>

namespace accelerate {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::world;

const std::vector<StrategyKind>& kinds() {
  static const std::vector<StrategyKind> all{StrategyKind::automatic, StrategyKind::fsdp,
                                             StrategyKind::zero1, StrategyKind::zero2};
  return all;
}

torch::nn::Sequential make_net() {
  torch::manual_seed(5);
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 2));
  net->to(torch::kDouble);
  return net;
}

torch::Tensor batch() { return torch::ones({3, 4}, torch::kDouble); }

TEST(Misuse, TheModuleItselfIsCalled) {
  for (const StrategyKind kind : kinds()) {
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    auto net = make_net();
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    accelerator.backward(net->forward(batch()).sum());
    EXPECT_NE(message_of([&, &optimizer = optimizer] { optimizer.step(); }), "no error")
        << to_string(kind);
    optimizer.zero_grad();
  }
}

TEST(Misuse, TheModuleIsCastAfterPrepare) {
  for (const StrategyKind kind : kinds()) {
    if (kind == StrategyKind::automatic && world().size() == 1) continue;  // nothing is shared
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    auto net = make_net();
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    net->to(torch::kFloat);
    EXPECT_THAT(message_of([&, &model = model] { model(batch().to(torch::kFloat)); }),
                HasSubstr("moved or cast"))
        << to_string(kind);
  }
}

// LibTorch's own error type, which nothing of ours can change: the advice is ours, and works.
TEST(Misuse, AShardedModuleIsSavedByTorch) {
  Accelerator accelerator(AcceleratorOptions().strategy(StrategyKind::fsdp));
  auto net = make_net();
  auto model = accelerator.prepare(net);
  const auto save = [&] {
    std::stringstream file;
    torch::save(net, file);
    return file.str().size();
  };
  try {
    save();
    FAIL() << "addresses were given out";
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("summon_full_params()"));
    EXPECT_THAT(error.what(), HasSubstr("state_dict()"));
  }
  const auto whole = model.summon_full_params();
  EXPECT_GT(save(), 500U);
}

TEST(Misuse, TheOptimizerIsOfOtherParameters) {
  for (const StrategyKind kind : kinds()) {
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    auto net = make_net();
    auto copy = make_net();
    torch::optim::SGD sgd(copy->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    const auto loss = model(batch()).sum();
    EXPECT_THAT(message_of([&] { accelerator.backward(loss); }),
                HasSubstr("was made of other parameters"))
        << to_string(kind);
  }
}

TEST(Misuse, LimitsThatAreNone) {
  Accelerator accelerator;
  auto net = make_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  accelerator.backward(model(batch()).sum());
  for (const double limit : {-1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THAT(
        message_of<ConfigError>([&, &model = model] { accelerator.clip_grad_norm_(model, limit); }),
        HasSubstr("a number from 0 up was expected"));
    EXPECT_THAT(message_of<ConfigError>(
                    [&, &model = model] { accelerator.clip_grad_value_(model, limit); }),
                HasSubstr("a number from 0 up was expected"));
  }
}

TEST(Misuse, DurationsThatAreNone) {
  for (const char* variable : {"ACCELERATE_TIMEOUT", "ACCELERATE_HEARTBEAT_TIMEOUT"}) {
    for (const char* value : {"nan", "inf", "-1", "1e300", "soon"}) {
      EXPECT_THAT(message_of<ConfigError>([&] {
                    resolve(AcceleratorOptions(), Environment({{variable, value}}), Json::object());
                  }),
                  HasSubstr("a number of seconds"))
          << variable << "=" << value;
    }
  }
}

TEST(Rarely, WhoRunsWhat) {
  const Accelerator accelerator;
  int ran = 0;
  accelerator.on_process(world().size() - 1, [&] { ran += 1; });
  accelerator.on_local_process(0, [&] { ran += 10; });
  accelerator.on_local_main_process([&] { ran += 100; });
  accelerator.on_last_process([&] { ran += 1000; });
  const bool last = world().rank() == world().size() - 1;
  EXPECT_EQ(ran, (last ? 1001 : 0) + (world().rank() == 0 ? 110 : 0));
  std::vector<Json> order;
  accelerator.local_main_process_first([&] { order.push_back(accelerator.process_index()); });
  EXPECT_EQ(order.size(), 1U);
}

TEST(Rarely, AccumulationChangesOnTheWay) {
  Accelerator accelerator(AcceleratorOptions().gradient_accumulation_steps(3));
  auto net = make_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  accelerator.set_gradient_accumulation_steps(1);
  EXPECT_EQ(accelerator.gradient_accumulation_steps(), 1);
  const auto before = net->parameters()[0].detach().clone();
  {
    const auto window = accelerator.accumulate(model);
    accelerator.backward(model(batch()).sum());
    accelerator.unscale_gradients();
    optimizer.step();
  }
  EXPECT_FALSE(net->parameters()[0].equal(before));
}

TEST(Rarely, ASchedulerByItself) {
  Accelerator accelerator(AcceleratorOptions().step_scheduler_with_optimizer(false));
  auto net = make_net();
  torch::optim::SGD sgd(net->parameters(), 1.0);
  torch::optim::StepLR schedule(sgd, 1, 0.5);
  auto [model, optimizer, scheduler] = accelerator.prepare(net, sgd, schedule);
  // No optimizer has stepped, and one call is one step on any number of processes. LibTorch's first
  // one changes nothing.
  scheduler.step();
  scheduler.step();
  EXPECT_EQ(static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options()).lr(), 0.5);
}

TEST(Rarely, ASchedulerThatStepsForSeveralProcessesSaysSo) {
  for (const bool per_process : {true, false}) {
    Accelerator accelerator(AcceleratorOptions().per_process_scheduler_steps(per_process));
    auto net = make_net();
    torch::optim::SGD sgd(net->parameters(), 1.0);
    torch::optim::StepLR schedule(sgd, 1, 0.5);
    const log::Level before = log::level();
    log::set_level(log::Level::info);
    ::testing::internal::CaptureStderr();
    auto prepared = accelerator.prepare(net, sgd, schedule);
    const std::string said = ::testing::internal::GetCapturedStderr();
    log::set_level(before);
    const bool says = said.find("advances by 2 steps for each optimizer step") != std::string::npos;
    EXPECT_EQ(says, per_process && world().size() == 2 && world().rank() == 0) << said;
  }
}

// Trains on this rank's rows with `options`, and returns the parameters whole.
std::vector<torch::Tensor> trained(const AcceleratorOptions& options) {
  Accelerator accelerator(options);
  auto net = make_net();
  optim::FusedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-2));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  for (int step = 0; step < 3; ++step) {
    torch::manual_seed(7 * step + world().rank());
    accelerator.backward(model(torch::randn({3, 4}, torch::kDouble)).square().mean());
    optimizer.step();
    optimizer.zero_grad();
  }
  const auto whole = model.summon_full_params();
  std::vector<torch::Tensor> values;
  for (const auto& parameter : net->parameters()) values.push_back(parameter.detach().clone());
  return values;
}

TEST(Rarely, OffloadAndNoPrefetchTrainAlike) {
  const auto expected = trained(AcceleratorOptions());
  for (const FsdpOptions& fsdp :
       {FsdpOptions().cpu_offload(true), FsdpOptions().forward_prefetch(false),
        FsdpOptions()
            .sharding_strategy(parallel::ShardingStrategy::shard_grad_op)
            .cpu_offload(true)}) {
    const auto values = trained(AcceleratorOptions().fsdp(fsdp));
    for (std::size_t i = 0; i < values.size(); ++i)
      EXPECT_TRUE(torch::allclose(values[i], expected[i], 0, 1e-12));
  }
}

TEST(Rarely, BuffersTakeTheirDtype) {
  parallel::MixedPrecisionPolicy policy;
  policy.buffer_dtype = torch::kFloat;
  Accelerator accelerator(AcceleratorOptions().fsdp(FsdpOptions().mixed_precision(policy)));
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::BatchNorm1d(8));
  net->to(torch::kDouble);
  auto [model] = std::tuple(accelerator.prepare(net));
  for (const auto& buffer : net->named_buffers()) {
    if (buffer.value().is_floating_point()) {
      EXPECT_EQ(buffer.value().scalar_type(), torch::kFloat) << buffer.key();
    }
  }
}

// Last: it ends the world of all cases.
TEST(TheEnd, LeavesTheAcceleratorAbleToSayWhoItWas) {
  Accelerator accelerator;
  const int index = accelerator.process_index();
  const int processes = accelerator.num_processes();
  accelerator.end_training();
  EXPECT_FALSE(State::is_initialized());
  EXPECT_EQ(accelerator.process_index(), index);
  EXPECT_EQ(accelerator.num_processes(), processes);
  accelerator.print("ended");
  if (processes > 1) {
    EXPECT_NE(message_of([&] { accelerator.wait_for_everyone(); }), "no error");
  }
  accelerator.end_training();
}

}  // namespace
}  // namespace accelerate
