// What changes after prepare(), and what ends: parameters that are loaded, frozen, added; modules
// and optimizers that are gone while another lies at their address; gradients that are cleared
// early. The truth is the same program on the whole batch in one process without this library.

#include "support/distributed.hpp"
#include "support/message_of.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/optim/fused.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

namespace accelerate {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::world;

const std::vector<StrategyKind>& kinds() {
  static const std::vector<StrategyKind> all{StrategyKind::automatic, StrategyKind::fsdp,
                                             StrategyKind::zero1, StrategyKind::zero2};
  return all;
}

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::uint64_t seed = 7) {
    torch::manual_seed(seed);
    first = register_module("first", torch::nn::Linear(6, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
    last = register_module("last", torch::nn::Linear(8, 2));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    auto hidden = torch::tanh(second(torch::tanh(first(x))));
    return extra ? last(hidden) + extra(hidden) : last(hidden);
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, last{nullptr}, extra{nullptr};
};
TORCH_MODULE(Net);

constexpr std::int64_t kRows = 4;

torch::Tensor whole_batch(std::int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 + step));
  return torch::randn({kRows * world().size(), 6}, generator, torch::kDouble);
}
torch::Tensor own_rows(const torch::Tensor& batch) {
  return batch.narrow(0, kRows * world().rank(), kRows);
}

// The module's parameters whole.
std::vector<torch::Tensor> values(const PreparedModuleBase& model) {
  std::vector<torch::Tensor> all;
  for (const auto& entry : model.state_dict()) all.push_back(entry.tensor.detach().clone());
  return all;
}
std::vector<torch::Tensor> values(torch::nn::Module& module) {
  std::vector<torch::Tensor> all;
  for (const auto& parameter : module.parameters()) all.push_back(parameter.detach().clone());
  for (const auto& buffer : module.buffers()) all.push_back(buffer.detach().clone());
  return all;
}
double apart(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  if (a.size() != b.size()) return 1e9;
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    most = std::max(most, (a[i] - b[i]).abs().max().item<double>());
  return most;
}

template <class Model, class Optimizer>
void train(Accelerator& accelerator, Model& model, Optimizer& optimizer, std::int64_t from,
           std::int64_t to) {
  for (std::int64_t step = from; step < to; ++step) {
    accelerator.backward(model(own_rows(whole_batch(step))).square().mean());
    optimizer.step();
    optimizer.zero_grad();
  }
}
void train_alone(NetImpl& net, torch::optim::Optimizer& optimizer, std::int64_t from,
                 std::int64_t to) {
  for (std::int64_t step = from; step < to; ++step) {
    net.forward(whole_batch(step)).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(Changes, FrozenThenUnfrozenParametersTrain) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Net net, alone;
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
    torch::optim::SGD sgd_alone(alone->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
    const auto freeze = [&](bool first, bool rest) {
      for (auto* each : {net.get(), alone.get()}) {
        for (auto& parameter : each->first->parameters()) parameter.requires_grad_(!first);
        for (auto* layer : {&each->second, &each->last})
          for (auto& parameter : (*layer)->parameters()) parameter.requires_grad_(!rest);
      }
    };
    freeze(true, false);
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    train(accelerator, model, optimizer, 0, 2);
    train_alone(*alone, sgd_alone, 0, 2);
    freeze(false, false);
    train(accelerator, model, optimizer, 2, 4);
    train_alone(*alone, sgd_alone, 2, 4);
    freeze(false, true);
    train(accelerator, model, optimizer, 4, 6);
    train_alone(*alone, sgd_alone, 4, 6);
    EXPECT_LT(apart(values(model), values(*alone)), 1e-9);
  }
}

TEST(Changes, AModuleFrozenAsAWholeForAWhileTrainsOn) {
  // As the two parts of an adversarial network freeze each other in every step.
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Net net, alone;
    torch::optim::SGD sgd(net->parameters(), 0.1);
    torch::optim::SGD sgd_alone(alone->parameters(), 0.1);
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (std::int64_t step = 0; step < 3; ++step) {
      train(accelerator, model, optimizer, step, step + 1);
      train_alone(*alone, sgd_alone, step, step + 1);
      for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
      auto input = own_rows(whole_batch(step)).clone().requires_grad_(true);
      accelerator.backward(model(input).sum());
      EXPECT_TRUE(input.grad().defined());
      for (auto& parameter : net->parameters()) parameter.requires_grad_(true);
    }
    EXPECT_LT(apart(values(model), values(*alone)), 1e-9);
  }
}

TEST(Changes, AModuleFrozenInPrepareIsPreparedAgain) {
  Net net, alone;
  torch::optim::SGD sgd(net->parameters(), 0.1), sgd_alone(alone->parameters(), 0.1);
  for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
  Accelerator accelerator;
  auto [frozen, optimizer] = accelerator.prepare(net, sgd);
  for (auto& parameter : net->parameters()) parameter.requires_grad_(true);
  if (world().size() > 1) {
    frozen(own_rows(whole_batch(0))).square().mean().backward();
    EXPECT_THAT(message_of<StateError>([&, &optimizer = optimizer] { optimizer.step(); }),
                HasSubstr("Give it to prepare()"));
    optimizer.zero_grad();
  }
  auto model = accelerator.prepare(net);
  train(accelerator, model, optimizer, 0, 2);
  train_alone(*alone, sgd_alone, 0, 2);
  EXPECT_LT(apart(values(model), values(*alone)), 1e-9);
}

TEST(Changes, GroupsAddedToTheOptimizerStep) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Net net, alone;
    using torch::optim::SGD;
    SGD sgd(net->last->parameters(), torch::optim::SGDOptions(0.1));
    SGD sgd_alone(alone->last->parameters(), torch::optim::SGDOptions(0.1));
    for (auto* each : {net.get(), alone.get()}) {
      for (auto* layer : {&each->first, &each->second})
        for (auto& parameter : (*layer)->parameters()) parameter.requires_grad_(false);
    }
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    train(accelerator, model, optimizer, 0, 2);
    train_alone(*alone, sgd_alone, 0, 2);
    for (auto [each, own] : {std::pair{net.get(), &sgd}, std::pair{alone.get(), &sgd_alone}}) {
      for (auto& parameter : each->first->parameters()) parameter.requires_grad_(true);
      own->add_param_group(torch::optim::OptimizerParamGroup(each->first->parameters()));
    }
    train(accelerator, model, optimizer, 2, 4);
    train_alone(*alone, sgd_alone, 2, 4);
    EXPECT_LT(apart(values(model), values(*alone)), 1e-9);
  }
}

TEST(Changes, AParameterRegisteredLaterTrainsOrIsRefused) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Net net, alone;
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
    torch::optim::SGD sgd_alone(alone->parameters(), torch::optim::SGDOptions(0.1));
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    train(accelerator, model, optimizer, 0, 1);
    train_alone(*alone, sgd_alone, 0, 1);
    const bool sharded = model.strategy().owns_leaves();
    for (auto [each, own] : {std::pair{net.get(), &sgd}, std::pair{alone.get(), &sgd_alone}}) {
      // Other numbers on each rank: those of rank 0 count, as in prepare().
      torch::manual_seed(3 + (each == net.get() ? world().rank() : 0));
      each->extra = each->register_module("extra", torch::nn::Linear(8, 2));
      each->extra->to(torch::kDouble);
      own->add_param_group(torch::optim::OptimizerParamGroup(each->extra->parameters()));
    }
    if (sharded) {
      const auto message =
          message_of<StateError>([&, &model = model] { (void)model(own_rows(whole_batch(1))); });
      EXPECT_THAT(message, HasSubstr("'extra.weight' was registered after prepare()"));
      EXPECT_THAT(message, HasSubstr("restore()"));
      continue;
    }
    train(accelerator, model, optimizer, 1, 3);
    train_alone(*alone, sgd_alone, 1, 3);
    EXPECT_EQ(model.state_dict().size(), 8U);
    EXPECT_LT(apart(values(model), values(*alone)), 1e-9);
  }
}

TEST(Changes, EvaluationBetweenForwardAndBackwardChangesNothing) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    const auto run = [&](bool evaluates) {
      torch::manual_seed(4);
      torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8),
                                torch::nn::Linear(8, 2));
      net->to(torch::kDouble);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      Accelerator accelerator(AcceleratorOptions().strategy(kind));
      auto [model, optimizer] = accelerator.prepare(net, sgd);
      for (std::int64_t step = 0; step < 3; ++step) {
        const auto loss = model(own_rows(whole_batch(step))).square().mean();
        if (evaluates) {
          model.eval();
          const torch::NoGradGuard no_grad;
          (void)model(own_rows(whole_batch(50)));
          model.train();
        }
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
      }
      std::vector<torch::Tensor> parameters;
      const auto state = model.state_dict();
      for (const auto& entry : state)
        if (entry.name.ends_with("weight") || entry.name.ends_with("bias"))
          parameters.push_back(entry.tensor.clone());
      return parameters;
    };
    EXPECT_LT(apart(run(true), run(false)), 1e-12);
  }
}

TEST(Changes, PreparedForEvaluationAndThenForTraining) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Net net, alone;
    torch::optim::SGD sgd(net->parameters(), 0.1), sgd_alone(alone->parameters(), 0.1);
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    auto evaluated = accelerator.prepare_for_evaluation(net);
    auto optimizer = accelerator.prepare(sgd);
    auto model = accelerator.prepare(net);
    train(accelerator, model, optimizer, 0, 2);
    train_alone(*alone, sgd_alone, 0, 2);
    EXPECT_LT(apart(values(model), values(*alone)), 1e-9);
    const torch::NoGradGuard no_grad;
    EXPECT_LT(
        (evaluated(whole_batch(9)) - alone->forward(whole_batch(9))).abs().max().item<double>(),
        1e-9);
  }
}

// One fold: a new module and optimizer, trained; compared with the same alone.
template <class Place>
void train_a_fold(Accelerator& accelerator, std::uint64_t fold, const Place& place) {
  NetImpl alone(fold);
  torch::optim::Adam adam_alone(alone.parameters(), torch::optim::AdamOptions(0.01));
  train_alone(alone, adam_alone, 0, 3);
  place([&](auto& model, auto& optimizer) {
    train(accelerator, model, optimizer, 0, 3);
    EXPECT_LT(apart(values(model), values(alone)), 1e-9) << "fold " << fold;
  });
}

TEST(Ends, FoldsAtTheSameAddresses) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    std::optional<NetImpl> net;
    std::optional<torch::optim::Adam> adam;
    for (std::uint64_t fold = 1; fold <= 3; ++fold) {
      net.emplace(fold);
      adam.emplace(net->parameters(), torch::optim::AdamOptions(0.01));
      train_a_fold(accelerator, fold, [&](const auto& go) {
        auto [model, optimizer] = accelerator.prepare(*net, *adam);
        go(model, optimizer);
      });
    }
  }
}

TEST(Ends, FoldsWhoseHandlesOutliveThem) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    std::optional<torch::optim::Adam> adam;
    std::optional<torch::optim::StepLR> schedule;
    std::optional<PreparedModule<NetImpl>> model;
    std::optional<PreparedOptimizer<torch::optim::Adam>> optimizer, before;
    std::optional<PreparedScheduler<torch::optim::StepLR>> scheduler;
    for (std::uint64_t fold = 1; fold <= 3; ++fold) {
      Net net(fold);
      adam.emplace(net->parameters(), torch::optim::AdamOptions(0.01));
      schedule.emplace(*adam, 100, 0.5);
      train_a_fold(accelerator, fold, [&](const auto& go) {
        model = accelerator.prepare(net);
        before = optimizer;
        optimizer = accelerator.prepare(*adam);
        scheduler = accelerator.prepare(*schedule);
        ASSERT_EQ(scheduler->core()->optimizers().back(), optimizer->core());
        go(*model, *optimizer);
        if (!before) return;
        EXPECT_NE(before->core(), optimizer->core());
        EXPECT_THAT(message_of<StateError>([&] { before->step(); }), HasSubstr("destroyed"));
        EXPECT_THAT(message_of<StateError>([&] { before->zero_grad(); }), HasSubstr("destroyed"));
        EXPECT_THAT(message_of<StateError>([&] { (void)before->parameters(); }),
                    HasSubstr("destroyed"));
      });
    }
  }
}

TEST(Ends, WhatAFunctionReturns) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Accelerator accelerator(AcceleratorOptions().strategy(kind).gradient_accumulation_steps(2));
    const auto moved = [&](std::uint64_t seed) {
      Net net(seed);
      torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
      return accelerator.prepare(net, std::move(adam));
    };
    {
      auto [model, optimizer] = moved(5);
      for (int micro = 0; micro < 2; ++micro) {
        auto scope = accelerator.accumulate(model);
        accelerator.backward(model(own_rows(whole_batch(0))).square().mean());
        optimizer.step();
        optimizer.zero_grad();
      }
      NetImpl alone(5);
      torch::optim::Adam adam_alone(alone.parameters(), torch::optim::AdamOptions(0.01));
      train_alone(alone, adam_alone, 0, 1);
      EXPECT_LT(apart(values(model), values(alone)), 1e-9);
    }
    const auto referenced = [&] {
      Net net;
      torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
      return accelerator.prepare(net, adam);
    };
    auto [model, optimizer] = referenced();
    const auto loss = model(own_rows(whole_batch(0))).square().mean();
    EXPECT_THAT(message_of<StateError>([&] { accelerator.backward(loss); }),
                HasSubstr("std::move(adam)"));
    EXPECT_THAT(message_of<StateError>([&, &optimizer = optimizer] { optimizer.step(); }),
                HasSubstr("std::move(adam)"));
  }
}

TEST(Ends, AModuleThatASharedPointerOwnsIsKept) {
  Accelerator accelerator;
  auto net = std::make_unique<Net>(3);
  const auto expected = (*net)->forward(whole_batch(0)).detach();
  auto model = accelerator.prepare(**net);  // a reference to what the holder owns
  net.reset();
  EXPECT_TRUE(torch::equal(model(whole_batch(0)), expected));
}

TEST(Ends, AModuleOutlivesItsHandles) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    Net net, alone;
    torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
    torch::optim::Adam adam_alone(alone->parameters(), torch::optim::AdamOptions(0.01));
    for (int epoch = 0; epoch < 3; ++epoch) {
      auto [model, optimizer] = accelerator.prepare(net, adam);
      train(accelerator, model, optimizer, 2 * epoch, 2 * epoch + 2);
      train_alone(*alone, adam_alone, 2 * epoch, 2 * epoch + 2);
      EXPECT_LT(apart(values(model), values(*alone)), 1e-9) << "epoch " << epoch;
    }
  }
}

TEST(Windows, ClearingFirstIsRight) {
  // zero_grad(); backward(); step(): the commonest order in PyTorch.
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Accelerator accelerator(AcceleratorOptions().strategy(kind).gradient_accumulation_steps(3));
    Net net, alone;
    torch::optim::SGD sgd(net->parameters(), 0.1), sgd_alone(alone->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (std::int64_t window = 0; window < 2; ++window) {
      for (std::int64_t micro = 0; micro < 3; ++micro) {
        auto scope = accelerator.accumulate(model);
        optimizer.zero_grad();
        accelerator.backward(model(own_rows(whole_batch(3 * window + micro))).square().mean());
        optimizer.step();
        (alone->forward(whole_batch(3 * window + micro)).square().mean() / 3).backward();
      }
      sgd_alone.step();
      sgd_alone.zero_grad();
    }
    EXPECT_LT(apart(values(model), values(*alone)), 1e-9);
  }
}

TEST(Windows, DiscardedGradientsAreGone) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Accelerator accelerator(AcceleratorOptions().strategy(kind).gradient_accumulation_steps(2));
    Net net, alone;
    torch::optim::SGD sgd(net->parameters(), 0.1), sgd_alone(alone->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (std::int64_t micro = 0; micro < 4; ++micro) {
      auto scope = accelerator.accumulate(model);
      accelerator.backward(model(own_rows(whole_batch(micro))).square().mean());
      if (micro == 0 || micro == 3) optimizer.discard_gradients();
      optimizer.step();
      optimizer.zero_grad();
    }
    // What is left of the two windows is the second micro-batch of the first.
    (alone->forward(whole_batch(1)).square().mean() / 2).backward();
    sgd_alone.step();
    EXPECT_LT(apart(values(model), values(*alone)), 1e-9);
  }
}

// Passes its input on, and throws in backward.
struct Blows : torch::autograd::Function<Blows> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("blown");
  }
};

TEST(Windows, AFailedBackwardIsCleared) {
  for (const StrategyKind kind : kinds()) {
    SCOPED_TRACE(to_string(kind));
    Accelerator accelerator(AcceleratorOptions().strategy(kind).gradient_accumulation_steps(2));
    Net net, alone;
    torch::optim::SGD sgd(net->parameters(), 0.1), sgd_alone(alone->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (std::int64_t micro = 0; micro < 4; ++micro) {
      auto scope = accelerator.accumulate(model);
      const auto output = model(own_rows(whole_batch(micro)));
      if (micro == 1) {
        EXPECT_THROW(accelerator.backward(Blows::apply(output).sum() + output.sum()),
                     std::runtime_error);
        optimizer.zero_grad();
        continue;
      }
      accelerator.backward(output.square().mean());
      optimizer.step();
      optimizer.zero_grad();
    }
    for (std::int64_t micro = 2; micro < 4; ++micro)
      (alone->forward(whole_batch(micro)).square().mean() / 2).backward();
    sgd_alone.step();
    EXPECT_LT(apart(values(model), values(*alone)), 1e-9);
  }
}

TEST(Windows, AWindowOfOneIsClearedAtAnyTime) {
  Accelerator accelerator;
  Net net, alone;
  torch::optim::SGD sgd(net->parameters(), 0.1), sgd_alone(alone->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (std::int64_t step = 0; step < 3; ++step) {
    auto scope = accelerator.accumulate(model);
    accelerator.backward(model(own_rows(whole_batch(step))).square().mean());
    if (step == 1) {  // a bad batch
      optimizer.zero_grad();
      continue;
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  train_alone(*alone, sgd_alone, 0, 1);
  train_alone(*alone, sgd_alone, 2, 3);
  EXPECT_LT(apart(values(model), values(*alone)), 1e-9);
}

template <class O, class Options>
void expect_notices_own_step(const Options& options) {
  SCOPED_TRACE(c10::demangle(typeid(O).name()));
  enum class Next { step, clear, accumulate, backward };
  for (const Next next : {Next::step, Next::clear, Next::accumulate, Next::backward}) {
    Accelerator accelerator(AcceleratorOptions().gradient_accumulation_steps(2));
    Net net;
    O own(net->parameters(), options);
    auto [model, optimizer] = accelerator.prepare(net, own);
    for (std::int64_t micro = 0; micro < 3; ++micro) {
      auto scope = accelerator.accumulate(model);
      accelerator.backward(model(own_rows(whole_batch(micro))).square().mean());
      if (micro == 2) {
        own.step();
        break;
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto loss = model(own_rows(whole_batch(3))).square().mean();
    EXPECT_THAT(message_of<StateError>([&, &model = model, &optimizer = optimizer] {
                  if (next == Next::step) optimizer.step();
                  if (next == Next::clear) optimizer.zero_grad();
                  if (next == Next::accumulate) (void)accelerator.accumulate(model);
                  if (next == Next::backward) accelerator.backward(loss);
                }),
                HasSubstr("own step() was called inside an accumulation window"))
        << static_cast<int>(next);
  }
}

TEST(Windows, TheOptimizersOwnStepIsNoticed) {
  expect_notices_own_step<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  expect_notices_own_step<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_notices_own_step<torch::optim::SGD>(torch::optim::SGDOptions(0.1).weight_decay(0.1));
  expect_notices_own_step<torch::optim::Adam>(torch::optim::AdamOptions(0.1));
  expect_notices_own_step<torch::optim::AdamW>(torch::optim::AdamWOptions(0.1));
  expect_notices_own_step<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.1));
  expect_notices_own_step<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1));
  expect_notices_own_step<optim::FusedAdamW>(optim::FusedAdamWOptions(0.1));
  expect_notices_own_step<optim::FusedSGD>(optim::FusedSGDOptions(0.1));
  expect_notices_own_step<optim::FusedSGD>(optim::FusedSGDOptions(0.1).momentum(0.9));
}

TEST(Windows, WritingToParametersIsNoStep) {
  Accelerator accelerator(AcceleratorOptions().gradient_accumulation_steps(2));
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (std::int64_t micro = 0; micro < 4; ++micro) {
    auto scope = accelerator.accumulate(model);
    accelerator.backward(model(own_rows(whole_batch(micro))).square().mean());
    for (auto& parameter : net->parameters()) parameter.data().mul_(0.99);
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.verify_parameters(model);
}

}  // namespace
}  // namespace accelerate
