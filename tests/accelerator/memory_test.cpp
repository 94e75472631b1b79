// What programs do with the memory of parameters and gradients, under every strategy, against the
// same program unsharded. All ranks train on the same samples, so that one process gives the same.

#include "support/distributed.hpp"
#include "support/message_of.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/accelerator/prepared_script_module.hpp>
#include <accelerate/parallel/fsdp.hpp>
#include <intercept/key.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace accelerate {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;
using testing::world;

const std::vector<StrategyKind>& kinds() {
  static const std::vector<StrategyKind> all{StrategyKind::automatic, StrategyKind::fsdp,
                                             StrategyKind::zero1, StrategyKind::zero2};
  return all;
}
const std::vector<StrategyKind>& sharding_kinds() {
  static const std::vector<StrategyKind> all{StrategyKind::fsdp, StrategyKind::zero1,
                                             StrategyKind::zero2};
  return all;
}

// Small units, so that there are several.
AcceleratorOptions options_for(StrategyKind kind) {
  AcceleratorOptions options;
  options.strategy(kind);
  if (kind == StrategyKind::fsdp) options.fsdp(FsdpOptions().min_num_params(20));
  return options;
}

torch::nn::Sequential make_net() {
  torch::manual_seed(5);
  torch::nn::Sequential net(torch::nn::Linear(4, 8), torch::nn::Tanh(), torch::nn::Linear(8, 2));
  net->to(torch::kDouble);
  return net;
}

torch::Tensor batch(int step) {
  torch::manual_seed(100 + step);
  return torch::randn({3, 4}, torch::kDouble);
}

void expect_equal(torch::nn::Module& trained, torch::nn::Module& expected, double tolerance,
                  StrategyKind kind) {
  const auto other = expected.named_parameters();
  for (const auto& entry : trained.named_parameters()) {
    EXPECT_TRUE(torch::allclose(entry.value().to(torch::kDouble),
                                other[entry.key()].to(torch::kDouble), 0, tolerance))
        << entry.key() << " under " << to_string(kind);
  }
}

// --- Mixed precision ----------------------------------------------------------------------------

struct NormNetImpl : torch::nn::Module {
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::InstanceNorm2d instance{nullptr};
  torch::nn::Linear head{nullptr};
  NormNetImpl() {
    torch::manual_seed(3);
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 6, 3)));
    norm = register_module("norm", torch::nn::BatchNorm2d(6));
    instance = register_module(
        "instance",
        torch::nn::InstanceNorm2d(
            torch::nn::InstanceNorm2dOptions(6).affine(true).track_running_stats(true)));
    head = register_module("head", torch::nn::Linear(6, 3));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(instance(norm(conv(x))));
    return head(x.mean({2, 3}));
  }
};
TORCH_MODULE(NormNet);

TEST(LowPrecision, NormsWithRunningStatisticsKeepTheirDtype) {
  const auto train = [](auto& model, auto& step, auto& net) {
    std::vector<double> losses;
    for (int i = 0; i < 4; ++i) {
      torch::manual_seed(50 + i);
      losses.push_back(step(model(torch::randn({4, 2, 6, 6}))));
    }
    net->eval();
    const torch::NoGradGuard no_grad;
    losses.push_back(
        model(torch::ones({2, 2, 6, 6})).to(torch::kFloat).sum().template item<double>());
    return losses;
  };
  for (const bool low_buffers : {false, true}) {
    for (const StrategyKind kind : kinds()) {
      SCOPED_TRACE(to_string(kind));
      NormNet alone, net;
      Accelerator unsharded(
          AcceleratorOptions()
              .mixed_precision(MixedPrecision::bf16)
              .strategy(world().size() > 1 ? StrategyKind::ddp : StrategyKind::single));
      torch::optim::SGD alone_sgd(alone->parameters(), 0.1);
      auto [alone_model, alone_optimizer] = unsharded.prepare(alone, alone_sgd);
      auto alone_step = [&, &optimizer = alone_optimizer](const torch::Tensor& output) {
        const auto loss = output.square().mean();
        unsharded.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        return loss.template item<double>();
      };
      const auto expected = train(alone_model, alone_step, alone);

      MixedPrecisionPolicy policy;
      if (low_buffers) policy.buffer_dtype = torch::kBFloat16;
      AcceleratorOptions options;
      options.mixed_precision(MixedPrecision::bf16).strategy(kind);
      if (kind == StrategyKind::fsdp) options.fsdp(FsdpOptions().mixed_precision(policy));
      Accelerator accelerator(options);
      torch::optim::SGD sgd(net->parameters(), 0.1);
      auto [model, optimizer] = accelerator.prepare(net, sgd);
      if (kind != StrategyKind::automatic) {
        EXPECT_EQ(net->conv->weight.scalar_type(), torch::kBFloat16);
        EXPECT_EQ(net->norm->weight.scalar_type(), torch::kFloat);
        EXPECT_EQ(net->instance->bias.scalar_type(), torch::kFloat);
      }
      EXPECT_EQ(net->norm->running_mean.scalar_type(), torch::kFloat);
      auto step = [&, &optimizer = optimizer](const torch::Tensor& output) {
        const auto loss = output.square().mean();
        accelerator.backward(loss);
        optimizer.step();
        optimizer.zero_grad();
        return loss.template item<double>();
      };
      const auto run = train(model, step, net);
      for (std::size_t i = 0; i < run.size(); ++i)
        EXPECT_NEAR(run[i], expected[i], 0.02 * std::abs(expected[i]) + 1e-3) << i;
      model.restore();
      expect_equal(*net, *alone, 0.01, kind);
      accelerator.free_memory();
      unsharded.free_memory();
    }
  }
}

struct WaveImpl : torch::nn::Module {
  torch::Tensor scale, wave, other;
  WaveImpl() {
    torch::manual_seed(4);
    scale = register_parameter("scale", torch::randn({5}, torch::kDouble));
    wave = register_parameter("wave", torch::randn({4, 3}, torch::kComplexDouble));
    other = register_parameter("other", torch::randn({4, 3}, torch::kComplexDouble));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = torch::matmul(torch::complex(x, 0.5 * x), wave * other);
    return torch::view_as_real(y).square().sum() * scale.sum();
  }
};
TORCH_MODULE(Wave);

TEST(LowPrecision, ComplexGradientsKeepTheirImaginaryPart) {
  for (const StrategyKind kind : sharding_kinds()) {
    Wave alone, net;
    MixedPrecisionPolicy policy;
    policy.reduce_dtype = torch::kFloat;
    Accelerator accelerator(
        AcceleratorOptions().strategy(kind).fsdp(FsdpOptions().mixed_precision(policy)));
    torch::optim::SGD sgd(net->parameters(), 1e-3), alone_sgd(alone->parameters(), 1e-3);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (int step = 0; step < 3; ++step) {
      accelerator.backward(model(batch(step)));
      optimizer.step();
      optimizer.zero_grad();
      alone(batch(step)).backward();
      alone_sgd.step();
      alone_sgd.zero_grad();
    }
    model.restore();
    EXPECT_TRUE(torch::allclose(net->wave, alone->wave, 0, 1e-6)) << to_string(kind);
    accelerator.free_memory();
  }
}

TEST(LowPrecision, WhatAWriteLeavesAloneKeepsItsBits) {
  using Write = std::function<void(torch::Tensor)>;
  const auto row = torch::full({1, 7}, 0.5);
  const auto index = torch::full({1}, 2, torch::kLong);
  const std::vector<std::pair<const char*, Write>> writes{
      {"a row", [](torch::Tensor w) { w[2].fill_(0.5); }},
      {"index_copy_", [&](torch::Tensor w) { w.index_copy_(0, index, row.to(w.scalar_type())); }},
      {"index_put_", [&](torch::Tensor w) { w.index_put_({index}, row.to(w.scalar_type())); }},
      {"a column", [](torch::Tensor w) { w.select(1, 3).zero_(); }},
      {"masked_fill_", [](torch::Tensor w) { w.masked_fill_(w > 0.1, 0.25); }},
      {"clamp_", [](torch::Tensor w) { w.clamp_(-0.125, 0.125); }},
  };
  for (const StrategyKind kind : sharding_kinds()) {
    for (const auto& [name, write] : writes) {
      torch::manual_seed(6);
      torch::nn::Linear net(7, 9), expected(7, 9);
      {
        const torch::NoGradGuard no_grad;
        expected->weight.copy_(net->weight);
      }
      Accelerator accelerator(
          AcceleratorOptions().mixed_precision(MixedPrecision::bf16).strategy(kind));
      torch::optim::SGD sgd(net->parameters(), 0.1);
      auto [model, optimizer] = accelerator.prepare(net, sgd);
      {
        const torch::NoGradGuard no_grad;
        write(net->weight);
        write(expected->weight);
      }
      {
        const auto full = model.summon_full_params();
        EXPECT_TRUE(torch::equal(net->weight, expected->weight))
            << name << " under " << to_string(kind);
      }
      model.restore();
      accelerator.free_memory();
    }
  }
}

TEST(LowPrecision, AFrozenFloat8ParameterIsNoObstacleToClipping) {
  struct NetImpl : torch::nn::Module {
    torch::nn::Linear linear{register_module("linear", torch::nn::Linear(4, 4))};
    torch::Tensor table = register_parameter(
        "table", torch::randn({4, 4}).to(torch::kFloat8_e4m3fn), /*requires_grad=*/false);
    torch::Tensor forward(const torch::Tensor& x) {
      return linear(torch::matmul(x, table.to(torch::kFloat)));
    }
  };
  for (const StrategyKind kind : kinds()) {
    torch::manual_seed(5);
    auto net = std::make_shared<NetImpl>();
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    torch::optim::SGD sgd(net->linear->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    accelerator.backward(model(torch::ones({2, 4})).square().sum());
    EXPECT_GT(accelerator.clip_grad_norm_(model, 0.01).item<double>(), 0.01) << to_string(kind);
    EXPECT_NEAR(model.strategy().grad_norm(2).item<double>(), 0.01, 1e-5);
    optimizer.step();
    model.restore();
    accelerator.free_memory();
  }
}

// --- Views and shared memory --------------------------------------------------------------------

TEST(Views, WritesThroughViewsOfAnotherDtypeAreKept) {
  const auto write = [](Wave& net) {
    const torch::NoGradGuard no_grad;
    torch::view_as_real(net->other).select(-1, 1).fill_(3);
    torch::real(net->other).select(0, 1).mul_(2);
    torch::view_as_real(net->wave).mul_(0.5);
    net->scale.view(torch::kLong).narrow(0, 1, 2).zero_();
  };
  for (const StrategyKind kind : kinds()) {
    Wave alone, net;
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    torch::optim::SGD sgd(net->parameters(), 1e-3), alone_sgd(alone->parameters(), 1e-3);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (int step = 0; step < 3; ++step) {
      write(net);
      accelerator.backward(model(batch(step)));
      optimizer.step();
      optimizer.zero_grad();
      write(alone);
      alone(batch(step)).backward();
      alone_sgd.step();
      alone_sgd.zero_grad();
    }
    write(net);
    write(alone);
    model.restore();
    EXPECT_TRUE(torch::allclose(net->wave, alone->wave, 0, 1e-9)) << to_string(kind);
    EXPECT_TRUE(torch::allclose(net->other, alone->other, 0, 1e-9)) << to_string(kind);
    EXPECT_TRUE(torch::allclose(net->scale, alone->scale, 0, 1e-9)) << to_string(kind);
    accelerator.free_memory();
  }
}

struct PairImpl : torch::nn::Module {
  torch::Tensor a, b, extra;
  explicit PairImpl(torch::Tensor first, torch::Tensor second, torch::Tensor buffer = {}) {
    a = register_parameter("a", std::move(first));
    b = register_parameter("b", std::move(second));
    if (buffer.defined()) extra = register_buffer("extra", std::move(buffer));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::matmul(torch::matmul(x, a), b).square().mean();
  }
};
TORCH_MODULE(Pair);

TEST(SharedMemory, IsRefusedByNameWhereShardingWouldTakeItApart) {
  struct Case {
    const char* what;
    Pair net;
    std::vector<std::string> names;
    torch::Tensor outside;
  };
  const auto table = [] { return torch::linspace(-1, 1, 16, torch::kDouble).view({4, 4}); };
  const auto make = [&] {
    const auto one = table(), other = table(), third = table();
    const auto flat = torch::linspace(-1, 1, 32, torch::kDouble), inside = flat.clone();
    const auto of = [](const torch::Tensor& whole, int64_t at) {
      return whole.narrow(0, at, 16).view({4, 4});
    };
    return std::vector<Case>{
        {"two over one storage", Pair(one, one.detach()), {"parameter 'a'", "parameter 'b'"}, {}},
        {"a transpose", Pair(other, other.t().detach()), {"parameter 'a'", "parameter 'b'"}, {}},
        {"a flat buffer outside", Pair(of(flat, 0), of(flat, 16)), {"'a'", "flat buffer"}, flat},
        {"a flat buffer inside", Pair(of(inside, 0), of(inside, 16), inside), {"'extra'"}, {}},
        {"a detached value", Pair(third, table(), third.detach()), {"'a'", "'extra'"}, {}},
    };
  };
  for (const StrategyKind kind : kinds()) {
    for (Case& each : make()) {
      SCOPED_TRACE(std::string(each.what) + " under " + std::string(to_string(kind)));
      Accelerator accelerator(AcceleratorOptions().strategy(kind));
      torch::optim::SGD sgd(each.net->parameters(), 0.1);
      if (kind == StrategyKind::automatic) {
        auto [model, optimizer] = accelerator.prepare(each.net, sgd);
        accelerator.backward(model(batch(0)));
        optimizer.step();
        EXPECT_TRUE(each.net->a.storage().is_alias_of(
            (each.net->extra.defined() ? each.net->extra : each.net->b).storage()));
      } else {
        const std::string message =
            message_of<ShardingError>([&] { accelerator.prepare(each.net, sgd); });
        for (const std::string& name : each.names) EXPECT_THAT(message, HasSubstr(name));
        EXPECT_THAT(message, HasSubstr("set_data(tensor.detach().clone())"));
        EXPECT_FALSE(intercept::is_tagged(each.net->a)) << "the module is as it was";
      }
      accelerator.free_memory();
    }
  }
}

TEST(SharedMemory, ParametersThatLieBesideEachOtherShareNothing) {
  for (const StrategyKind kind : sharding_kinds()) {
    auto alone = make_net();
    auto net = make_net();
    {
      // As after flatten_parameters(), vector_to_parameters() or a restore().
      const torch::Tensor flat = torch::nn::utils::parameters_to_vector(net->parameters()).detach();
      torch::nn::utils::vector_to_parameters(flat, net->parameters());
    }
    Accelerator accelerator(options_for(kind));
    torch::optim::SGD sgd(net->parameters(), 0.1), alone_sgd(alone->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    accelerator.backward(model(batch(0)).square().sum());
    optimizer.step();
    alone->forward(batch(0)).square().sum().backward();
    alone_sgd.step();
    model.restore();
    expect_equal(*net, *alone, 1e-9, kind);
    accelerator.free_memory();
  }
  // Columns of one matrix, whose rows nobody else has.
  torch::Tensor both = torch::randn({4, 8}, torch::kDouble);
  Pair columns(both.narrow(1, 0, 4), both.narrow(1, 4, 4));
  both.reset();
  Accelerator accelerator(AcceleratorOptions().strategy(StrategyKind::fsdp));
  torch::optim::SGD sgd(columns->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(columns, sgd);
  accelerator.backward(model(batch(0)));
  optimizer.step();
  model.restore();
  accelerator.free_memory();
}

// --- Calls on the module's own parameters -------------------------------------------------------

TEST(OnTheModule, ZeroGradClearsTheShardsGradients) {
  enum class When { after_step, before_forward, before_backward, twice_and_between };
  for (const When when :
       {When::after_step, When::before_forward, When::before_backward, When::twice_and_between}) {
    for (const StrategyKind kind : kinds()) {
      SCOPED_TRACE(std::string(to_string(kind)) + " " + std::to_string(static_cast<int>(when)));
      auto alone = make_net();
      auto net = make_net();
      Accelerator accelerator(options_for(kind));
      torch::optim::SGD sgd(net->parameters(), 0.1), alone_sgd(alone->parameters(), 0.1);
      auto [model, optimizer] = accelerator.prepare(net, sgd);
      const auto run = [&](auto& forward, auto& module, auto& stepper, const auto& backward) {
        for (int step = 0; step < 4; ++step) {
          if (when == When::before_forward) module->zero_grad();
          auto loss = forward(batch(step)).square().sum();
          if (when == When::before_backward) module->zero_grad();
          if (when == When::twice_and_between) {
            backward(loss);
            module->zero_grad();
            loss = forward(batch(step)).square().mean();
          }
          backward(loss);
          stepper.step();
          if (when == When::after_step) module->zero_grad();
          // Every other step keeps its gradients.
          if (when == When::twice_and_between && step % 2 == 0) module->zero_grad();
        }
      };
      run(model, net, optimizer, [&](const torch::Tensor& loss) { accelerator.backward(loss); });
      auto forward = [&](const torch::Tensor& x) { return alone->forward(x); };
      run(forward, alone, alone_sgd, [](const torch::Tensor& loss) { loss.backward(); });
      model.restore();
      expect_equal(*net, *alone, 1e-9, kind);
      accelerator.free_memory();
    }
  }
}

TEST(OnTheModule, ZeroGradOfOnePartLeavesTheRestAlone) {
  for (const StrategyKind kind : kinds()) {
    auto alone = make_net();
    auto net = make_net();
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    torch::optim::SGD sgd(net->parameters(), 0.1), alone_sgd(alone->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (int step = 0; step < 3; ++step) {
      const auto loss = model(batch(step)).square().sum();
      // Gradients that are taken and not accumulated change nothing of this.
      torch::autograd::grad({loss}, {net->parameters()[0]}, {}, /*retain_graph=*/true);
      accelerator.backward(loss);
      net->children()[0]->zero_grad();
      net->parameters()[3].mutable_grad().reset();
      optimizer.step();
      alone->forward(batch(step)).square().sum().backward();
      alone->children()[0]->zero_grad();
      alone->parameters()[3].mutable_grad().reset();
      alone_sgd.step();
    }
    model.restore();
    expect_equal(*net, *alone, 1e-9, kind);
    accelerator.free_memory();
  }
}

TEST(OnTheModule, WhatIsNotReducedYetIsClearedToo) {
  for (const StrategyKind kind : sharding_kinds()) {
    auto alone = make_net();
    auto net = make_net();
    Accelerator accelerator(options_for(kind));
    torch::optim::SGD sgd(net->parameters(), 0.1), alone_sgd(alone->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    {
      const auto scope = accelerator.no_sync(model);
      accelerator.backward(model(batch(0)).square().sum());
    }
    net->zero_grad();
    accelerator.backward(model(batch(1)).square().sum());
    optimizer.step();
    alone->forward(batch(1)).square().sum().backward();
    alone_sgd.step();
    model.restore();
    expect_equal(*net, *alone, 1e-9, kind);
    accelerator.free_memory();
  }
}

TEST(OnTheModule, ClippingByTorchIsRightOrNamesTheRightCall) {
  for (const double p : {2.0, static_cast<double>(INFINITY)}) {
    for (const StrategyKind kind : kinds()) {
      SCOPED_TRACE(std::string(to_string(kind)) + " " + std::to_string(p));
      auto net = make_net();
      Accelerator accelerator(AcceleratorOptions().strategy(kind));
      torch::optim::SGD sgd(net->parameters(), 0.1);
      auto [model, optimizer] = accelerator.prepare(net, sgd);
      accelerator.backward(model(batch(0)).square().sum());
      const bool sharded = kind != StrategyKind::automatic;
      const auto by_module = [&] { torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5, p); };
      const auto by_leaves = [&, &optimizer = optimizer] {
        torch::nn::utils::clip_grad_norm_(optimizer.parameters(), 0.5, p);
      };
      const auto right_call = HasSubstr("accelerator.clip_grad_norm_(model, max_norm)");
      if (sharded) {
        EXPECT_THAT(message_of<StateError>(by_module), right_call);
        EXPECT_THAT(message_of<StateError>([&] { net->zero_grad(/*set_to_none=*/false); }),
                    HasSubstr("zero_grad() of the prepared optimizer"));
        EXPECT_THAT(
            message_of<StateError>([&] { torch::optim::SGD(net->parameters(), 0.1).step(); }),
            HasSubstr("given to prepare()"));
      } else {
        EXPECT_EQ(message_of(by_module), "no error");
      }
      if (sharded && world().size() > 1) {
        EXPECT_THAT(message_of<StateError>(by_leaves), right_call);
        EXPECT_THAT(message_of<StateError>([&, &optimizer = optimizer] {
                      accelerator.clip_grad_norm_(optimizer.parameters(), 0.01);
                    }),
                    HasSubstr("Give it the prepared module"));
      } else {
        by_leaves();
        EXPECT_NEAR(model.strategy().grad_norm(p).item<double>(), 0.5, 1e-5);
      }
      // Limits on single elements, and factors that are numbers, are the same everywhere.
      torch::nn::utils::clip_grad_value_(optimizer.parameters(), 0.005);
      for (const auto& parameter : optimizer.parameters()) {
        if (parameter.grad().defined()) parameter.mutable_grad().mul_(0.5);
      }
      EXPECT_NEAR(model.strategy().grad_norm(INFINITY).item<double>(), 0.0025, 1e-5);
      optimizer.step();
      optimizer.zero_grad();
      EXPECT_FALSE(net->parameters()[0].grad().defined());
      accelerator.free_memory();
    }
  }
}

// --- Optimizers ---------------------------------------------------------------------------------

TEST(Optimizers, LbfgsTrainsWholeParametersOnly) {
  for (const StrategyKind kind : kinds()) {
    auto alone = make_net();
    auto net = make_net();
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    const auto options = torch::optim::LBFGSOptions(0.5).max_iter(4);
    torch::optim::LBFGS lbfgs(net->parameters(), options), other(alone->parameters(), options);
    if (kind != StrategyKind::automatic && world().size() > 1) {
      EXPECT_THAT(message_of<UnsupportedError>([&] { accelerator.prepare(net, lbfgs); }),
                  AllOf(HasSubstr("LBFGS"), HasSubstr("ddp")));
      accelerator.free_memory();
      continue;
    }
    auto [model, optimizer] = accelerator.prepare(net, lbfgs);
    for (int step = 0; step < 2; ++step) {
      optimizer.step([&, &model = model, &optimizer = optimizer] {
        optimizer.zero_grad();
        const auto loss = model(batch(step)).square().mean();
        accelerator.backward(loss);
        return loss;
      });
      other.step([&] {
        other.zero_grad();
        const auto loss = alone->forward(batch(step)).square().mean();
        loss.backward();
        return loss;
      });
    }
    model.restore();
    expect_equal(*net, *alone, 1e-9, kind);
    accelerator.free_memory();
  }
}

TEST(Optimizers, AParameterThatIsListedTwiceIsSteppedOnce) {
  for (const StrategyKind kind : kinds()) {
    auto alone = make_net();
    auto net = make_net();
    auto listed = net->parameters();
    listed.push_back(listed[0]);
    listed.insert(listed.begin(), listed[2]);
    const auto options = torch::optim::SGDOptions(0.1).momentum(0.9);
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    torch::optim::SGD sgd(listed, options), alone_sgd(alone->parameters(), options);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    EXPECT_EQ(optimizer.parameters().size(), 4U);
    for (int step = 0; step < 3; ++step) {
      accelerator.backward(model(batch(step)).square().sum());
      optimizer.step();
      optimizer.zero_grad();
      alone->forward(batch(step)).square().sum().backward();
      alone_sgd.step();
      alone_sgd.zero_grad();
    }
    model.restore();
    expect_equal(*net, *alone, 1e-9, kind);
    accelerator.free_memory();
  }
  auto net = make_net();
  const auto all = net->parameters();
  torch::optim::SGD groups(
      {torch::optim::OptimizerParamGroup(all), torch::optim::OptimizerParamGroup({all[1]})},
      torch::optim::SGDOptions(0.1));
  Accelerator accelerator;
  EXPECT_THAT(message_of<ConfigError>([&] { accelerator.prepare(net, groups); }),
              HasSubstr("parameter groups 0 and 1"));
}

TEST(Optimizers, AdagradIsPreparedThoughItsConstructorMadeState) {
  for (const StrategyKind kind : kinds()) {
    auto alone = make_net();
    auto net = make_net();
    const auto options = torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.2);
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    torch::optim::Adagrad adagrad(net->parameters(), options), other(alone->parameters(), options);
    auto [model, optimizer] = accelerator.prepare(net, adagrad);
    for (int step = 0; step < 3; ++step) {
      accelerator.backward(model(batch(step)).square().sum());
      optimizer.step();
      optimizer.zero_grad();
      alone->forward(batch(step)).square().sum().backward();
      other.step();
      other.zero_grad();
    }
    EXPECT_EQ(adagrad.state().size(), 4U) << "of the leaves, and of nothing else";
    model.restore();
    expect_equal(*net, *alone, 1e-9, kind);
    accelerator.free_memory();
  }
  auto net = make_net();
  torch::optim::Adagrad stepped(net->parameters(), 0.1);
  net->forward(batch(0)).sum().backward();
  stepped.step();
  Accelerator accelerator(AcceleratorOptions().strategy(StrategyKind::fsdp));
  EXPECT_THAT(message_of<StateError>([&] { accelerator.prepare(net, stepped); }),
              HasSubstr("before the first step"));
  accelerator.free_memory();
}

struct TiedImpl : torch::nn::Module {
  torch::nn::Embedding embed{nullptr};
  torch::nn::Linear head{nullptr};
  TiedImpl() {
    torch::manual_seed(2);
    embed = register_module("embed", torch::nn::Embedding(11, 6));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(6, 11).bias(false)));
    to(torch::kDouble);
    head->weight = embed->weight;
  }
  torch::Tensor forward(const torch::Tensor& tokens) { return head(embed(tokens)); }
};
TORCH_MODULE(Tied);

TEST(Tied, ByAssignmentIsNoticed) {
  const auto tokens = torch::arange(10).view({2, 5});
  for (const StrategyKind kind : kinds()) {
    Tied alone, net;
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    torch::optim::AdamW adam(net->parameters(), 0.01), other(alone->parameters(), 0.01);
    auto [model, optimizer] = accelerator.prepare(net, adam);
    for (int step = 0; step < 3; ++step) {
      accelerator.backward(model(tokens).square().mean());
      optimizer.step();
      optimizer.zero_grad();
      alone(tokens).square().mean().backward();
      other.step();
      other.zero_grad();
    }
    EXPECT_EQ(model.strategy().module().parameters().size(), 1U);
    std::map<std::string, torch::Tensor> state;
    for (const auto& [name, tensor] : model.strategy().state_dict()) state[name] = tensor;
    ASSERT_TRUE(state.contains("embed.weight") && state.contains("head.weight"));
    EXPECT_TRUE(torch::allclose(state["head.weight"], alone->embed->weight, 0, 1e-9))
        << to_string(kind);
    model.restore();
    EXPECT_TRUE(torch::allclose(net->embed->weight, alone->embed->weight, 0, 1e-9));
    EXPECT_TRUE(net->head->weight.is_same(net->embed->weight));
    accelerator.free_memory();
  }
}

}  // namespace
}  // namespace accelerate
