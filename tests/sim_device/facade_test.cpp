// What a program does on a GPU through the public API, on the simulated device: one process. The
// results are the CPU's, bit for bit, and no use of memory races.

#include "sim_device/sim_device.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/big_model/load.hpp>
#include <accelerate/big_model/sizes.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/optim/offloaded.hpp>
#include <accelerate/parallel/activation_offload.hpp>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace accelerate {
namespace {

struct Products : torch::data::datasets::Dataset<Products> {
  at::Tensor pairs = [] {
    torch::manual_seed(1);
    return torch::rand({256, 2}) * 2 - 1;
  }();
  torch::data::Example<> get(size_t i) override {
    const auto row = pairs[static_cast<std::int64_t>(i)];
    return {row, row.prod(0, true)};
  }
  torch::optional<size_t> size() const override { return 256; }
};

torch::nn::Sequential make_net() {
  torch::manual_seed(2);
  return torch::nn::Sequential(torch::nn::Linear(2, 32), torch::nn::Tanh(),
                               torch::nn::BatchNorm1d(32), torch::nn::Dropout(0.2),
                               torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})),
                               torch::nn::Linear(32, 1));
}

torch::nn::Sequential blocks() {
  torch::manual_seed(4);
  torch::nn::Sequential net;
  for (int i = 0; i < 4; ++i) {
    net->push_back(torch::nn::Linear(64, 64));
    net->push_back(torch::nn::ReLU());
  }
  return net;
}

using Tensors = std::vector<at::Tensor>;

Tensors on_host(const Tensors& tensors) {
  Tensors all;
  for (const at::Tensor& each : tensors) all.push_back(each.detach().cpu());
  return all;
}

void expect_same(const Tensors& found, const Tensors& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i)
    EXPECT_TRUE(at::equal(found[i], expected[i])) << "tensor " << i;
}

struct Way {
  int workers = 0;
  bool offload_activations = false;
  bool evaluate_before_step = false;
  std::function<void(Accelerator&, int step)> at_step = nullptr;
};

// The losses of every step, and the parameters at the end.
Tensors train(const AcceleratorOptions& options, const Way& way = {}) {
  Accelerator accelerator(options);
  const at::Device device = accelerator.device();
  auto net = make_net();
  torch::optim::AdamW adam(net->parameters(), 1e-2);
  auto plan = data::loader(Products().map(torch::data::transforms::Stack<>()),
                           torch::data::DataLoaderOptions(32).workers(way.workers));
  auto [model, optimizer, loader] = accelerator.prepare(net, adam, plan);
  Tensors all;
  torch::manual_seed(5);  // for dropout
  int step = 0;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : loader) {
      EXPECT_EQ(batch.data.device(), device);
      at::Tensor loss, evaluated;
      {
        std::optional<OffloadActivations> away;
        if (way.offload_activations) away.emplace(ActivationOffloadOptions().min_bytes(0));
        loss = torch::mse_loss(model(batch.data), batch.target);
      }
      accelerator.backward(loss);
      if (way.evaluate_before_step) {
        const torch::NoGradGuard no_grad;
        net->eval();
        evaluated = model(batch.data);
        net->train();
      }
      accelerator.clip_grad_norm_(model, 1.0);
      optimizer.step();
      optimizer.zero_grad();
      if (evaluated.defined()) all.push_back(evaluated);
      if (way.at_step) way.at_step(accelerator, step);
      all.push_back(loss.detach());
      ++step;
    }
  }
  const auto whole = model.summon_full_params();
  for (const auto& parameter : net->parameters()) all.push_back(parameter.detach().clone());
  return on_host(all);
}

class OnSim : public ::testing::Test {
 protected:
  void TearDown() override { State::shutdown(); }

  static Tensors on_cpu(AcceleratorOptions options, const Way& way = {}) {
    Tensors all = train(options.cpu(true), way);
    State::shutdown();
    return all;
  }
};

AcceleratorOptions with(StrategyKind kind) { return AcceleratorOptions().strategy(kind); }

TEST_F(OnSim, EveryStrategyTrains) {
  for (const StrategyKind kind : {StrategyKind::single, StrategyKind::ddp, StrategyKind::fsdp,
                                  StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
    SCOPED_TRACE(to_string(kind));
    const Tensors expected = on_cpu(with(kind));
    const auto before = sim::statistics().operators;
    expect_same(train(with(kind)), expected);
    EXPECT_GT(sim::statistics().operators, before + 1000);
    State::shutdown();
  }
}

TEST_F(OnSim, AnyDeviceTrains) {
  const Tensors expected = on_cpu({});
  expect_same(train(AcceleratorOptions().device("cuda:2")), expected);
}

TEST_F(OnSim, BatchesComeAhead) {
  const Tensors expected = on_cpu({});
  for (const int ahead : {0, 1, 4}) {
    for (const int workers : {0, 2}) {
      SCOPED_TRACE(::testing::Message() << ahead << " ahead, " << workers << " workers");
      const auto options =
          data::DataLoaderConfiguration().prefetch_to_device(ahead).non_blocking(true);
      expect_same(train(AcceleratorOptions().dataloader(options), {.workers = workers}), expected);
      State::shutdown();
    }
  }
}

TEST_F(OnSim, ALoopRunsOnAStreamOfItsOwn) {
  Accelerator accelerator;
  auto plan = data::loader(Products().map(torch::data::transforms::Stack<>()), 16);
  auto loader = accelerator.prepare(plan);
  const c10::impl::VirtualGuardImpl guard(accelerator.device().type());
  const c10::StreamGuard on(guard.getStreamFromGlobalPool(accelerator.device()));
  at::Tensor sum = at::zeros({}, accelerator.device());
  for (auto& batch : loader) sum.add_(batch.data.prod(1).sum() - batch.target.sum());
  EXPECT_EQ(sum.item<float>(), 0);
}

TEST_F(OnSim, LowPrecisionTrains) {
  for (const MixedPrecision precision : {MixedPrecision::bf16, MixedPrecision::fp16}) {
    for (const StrategyKind kind : {StrategyKind::ddp, StrategyKind::fsdp}) {
      SCOPED_TRACE(to_string(kind));
      const Tensors expected = on_cpu(with(kind));
      const Tensors found = train(with(kind).mixed_precision(precision));
      ASSERT_EQ(found.size(), expected.size());
      for (int step = 0; step < 4; ++step) {
        const auto i = static_cast<std::size_t>(step);
        EXPECT_NEAR(found[i].item<float>(), expected[i].item<float>(), 0.05);
      }
      State::shutdown();
    }
  }
}

TEST_F(OnSim, AnOverflowIsSkippedAndTheScaleHalved) {
  Accelerator accelerator(AcceleratorOptions()
                              .mixed_precision(MixedPrecision::fp16)
                              .grad_scaler(GradScalerOptions().init_scale(std::ldexp(1.0, 30))));
  auto net = blocks();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  int skipped = 0;
  double last = 0;
  for (int step = 0; step < 30; ++step) {
    const auto loss = model(torch::ones({4, 64}, accelerator.device())).sub(1).square().mean();
    accelerator.backward(loss);
    optimizer.step();
    skipped += accelerator.optimizer_step_was_skipped() ? 1 : 0;
    optimizer.zero_grad();
    last = loss.item<double>();
  }
  EXPECT_GT(skipped, 0);
  EXPECT_LT(skipped, 30);
  EXPECT_LT(last, 1);
}

TEST_F(OnSim, ActivationsGoToTheHostAndComeBack) {
  for (const StrategyKind kind : {StrategyKind::single, StrategyKind::fsdp}) {
    const Tensors expected = on_cpu(with(kind));
    expect_same(train(with(kind), {.offload_activations = true}), expected);
    State::shutdown();
  }
}

TEST_F(OnSim, WhatIsOffloadedMayNotBeWrittenTo) {
  const at::Tensor x = torch::randn({8, 12}, sim::device(0)).requires_grad_();
  const at::Tensor moved = x * 1;
  at::Tensor y;
  {
    const OffloadActivations offload(ActivationOffloadOptions().min_bytes(0));
    y = moved.exp() * moved;
  }
  torch::cuda::synchronize();
  moved.add_(1);
  EXPECT_THROW(y.sum().backward(), StateError);
}

// The optimizer rewrites pinned shards, and a forward may still copy them.
TEST_F(OnSim, ShardsInHostMemoryAreCopiedBeforeTheyChange) {
  const auto fsdp = [](bool offload) {
    return with(StrategyKind::fsdp).fsdp(FsdpOptions().cpu_offload(offload).min_num_params(20));
  };
  for (const bool evaluate : {false, true}) {
    const Way way{.evaluate_before_step = evaluate};
    const Tensors expected = on_cpu(fsdp(false), way);
    expect_same(train(fsdp(true), way), expected);
    State::shutdown();
  }
}

TEST_F(OnSim, ShardsInHostMemoryAreCopiedBeforeAStateIsLoaded) {
  Accelerator accelerator(
      with(StrategyKind::fsdp).fsdp(FsdpOptions().cpu_offload(true).min_num_params(20)));
  auto net = blocks();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  const io::TemporaryFolder folder;
  const at::Tensor x = torch::ones({2, 64}, accelerator.device());
  const torch::NoGradGuard no_grad;
  const at::Tensor first = model(x);
  const auto saved = accelerator.save_state(folder.path() / "state");
  {
    const auto whole = model.summon_full_params(/*writeback=*/true);
    for (at::Tensor& parameter : net->parameters()) parameter.add_(1);
  }
  const at::Tensor other = model(x);
  accelerator.load_state(saved);
  EXPECT_TRUE(at::equal(model(x), first));
  EXPECT_FALSE(at::equal(other, first));
}

TEST_F(OnSim, OptimizerStateOffTheDevice) {
  const auto run = [](at::Device device) {
    auto net = blocks();
    net->to(device);
    optim::OffloadedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-3),
                               optim::OffloadOptions().block_bytes(20000));
    for (int i = 0; i < 4; ++i) {
      net->forward(torch::ones({4, 64}, device)).square().mean().backward();
      adam.step();
      adam.zero_grad();
    }
    return on_host(net->parameters());
  };
  expect_same(run(sim::device(0)), run(at::kCPU));
}

TEST_F(OnSim, SavesWhileItTrainsAndGoesOnFromThere) {
  for (const StrategyKind kind : {StrategyKind::single, StrategyKind::fsdp}) {
    for (const bool in_background : {false, true}) {
      SCOPED_TRACE(::testing::Message() << to_string(kind) << ", asynchronous " << in_background);
      const io::TemporaryFolder folder;
      std::filesystem::path saved;
      Accelerator accelerator(with(kind));
      auto net = blocks();
      torch::optim::AdamW adam(net->parameters(), 1e-2);
      auto [model, optimizer] = accelerator.prepare(net, adam);
      const auto step = [&, &model = model, &optimizer = optimizer] {
        const at::Tensor x = torch::randn({4, 64}, accelerator.device());
        const at::Tensor loss = model(x).square().mean();
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        return loss.detach();
      };
      for (int i = 0; i < 3; ++i) step();
      saved = accelerator.save_state(folder.path() / "state",
                                     SaveStateOptions().asynchronous(in_background));
      Tensors first, again;
      for (int i = 0; i < 3; ++i) first.push_back(step());
      accelerator.load_state(saved);
      for (int i = 0; i < 3; ++i) again.push_back(step());
      expect_same(again, first);
      State::shutdown();
    }
  }
}

TEST_F(OnSim, ModelsLieOnThreeDevicesTheHostAndTheDisk) {
  EXPECT_EQ(get_max_memory().size(), 4);
  auto whole = blocks();
  const torch::NoGradGuard no_grad;
  const at::Tensor input = torch::randn({3, 64}), expected = whole->forward(input);
  const io::TemporaryFolder folder;
  const auto file = folder.path() / "model.safetensors";
  std::vector<NamedTensor> weights;
  for (const auto& each : whole->named_parameters()) weights.push_back({each.key(), each.value()});
  checkpoints::save_file(weights, file);
  const Place zero = Place::accelerator(0), one = Place::accelerator(1),
              two = Place::accelerator(2), host = Place::cpu(), disk = Place::disk();
  const std::vector<DeviceMap> maps{{{"", zero}},
                                    {{"0", zero}, {"2", one}, {"4", two}, {"6", zero}},
                                    {{"0", zero}, {"2", zero}, {"4", one}, {"6", two}},
                                    {{"0", host}, {"2", zero}, {"4", disk}, {"6", two}},
                                    {{"0", zero}, {"2", host}, {"4", disk}, {"6", disk}}};
  for (std::size_t i = 0; i < maps.size(); ++i) {
    for (const std::int64_t limit : {0, 1, 40000}) {
      SCOPED_TRACE(::testing::Message() << "map " << i << ", resident limit " << limit);
      auto model = load_checkpoint_and_dispatch(
          init_empty_weights(blocks), file, maps[i], {},
          OffloadOptions().resident_limit(limit).offload_dir(folder.path() / "offload"));
      for (int run = 0; run < 4; ++run) EXPECT_TRUE(at::equal(model(input).cpu(), expected));
    }
  }
}

TEST_F(OnSim, ALargeWeightComesFromTheDisk) {
  const auto large = [] {
    torch::manual_seed(6);
    return torch::nn::Sequential(torch::nn::Linear(3000, 3000), torch::nn::ReLU(),
                                 torch::nn::Linear(3000, 2));
  };
  auto whole = large();
  const torch::NoGradGuard no_grad;
  const at::Tensor input = torch::randn({2, 3000}), expected = whole->forward(input);
  const io::TemporaryFolder folder;
  const auto file = folder.path() / "large.safetensors";
  std::vector<NamedTensor> weights;
  for (const auto& each : whole->named_parameters()) weights.push_back({each.key(), each.value()});
  checkpoints::save_file(weights, file);
  auto model =
      load_checkpoint_and_dispatch(init_empty_weights(large), file,
                                   DeviceMap{{"0", Place::disk()}, {"2", Place::accelerator(0)}},
                                   {}, OffloadOptions().offload_dir(folder.path() / "offload"));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(model(input).cpu(), expected));
}

}  // namespace
}  // namespace accelerate
