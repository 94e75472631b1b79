// Backwards inside backwards, on threads, and that end with an exception; several optimizers over
// one module: every strategy against the same program without the library.

#include "support/distributed.hpp"
#include "support/message_of.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/parallel/fsdp.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <thread>

namespace accelerate {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::world;

constexpr int kWidth = 6;

struct NetImpl : torch::nn::Module {
  torch::nn::ModuleList blocks{register_module("blocks", torch::nn::ModuleList())};
  NetImpl() {
    for (int i = 0; i < 5; ++i) blocks->push_back(torch::nn::Linear(kWidth, kWidth));
    to(torch::kDouble);
  }
  torch::Tensor block(int i, const torch::Tensor& x) {
    return blocks[static_cast<std::size_t>(i)]->as<torch::nn::Linear>()->forward(x).tanh();
  }
  std::vector<torch::Tensor> parameters_of(int first, int last) {
    std::vector<torch::Tensor> some;
    for (int i = first; i <= last; ++i) {
      for (const auto& parameter : blocks[static_cast<std::size_t>(i)]->parameters())
        some.push_back(parameter);
    }
    return some;
  }
  std::function<torch::Tensor(NetImpl&, torch::Tensor)> body;
  torch::Tensor forward(const torch::Tensor& x) { return body(*this, x); }
};
TORCH_MODULE(Net);
using Body = std::function<torch::Tensor(NetImpl&, torch::Tensor)>;

Net make_net(Body body = nullptr) {
  torch::manual_seed(7);
  Net net;
  net->body = std::move(body);
  return net;
}

torch::Tensor batch(int step, int rank) {
  torch::manual_seed(100 * step + rank + 1);
  return torch::randn({3, kWidth}, torch::kDouble);
}

struct Way {
  StrategyKind kind;
  const char* name;
};
std::vector<Way> ways() {
  return {{StrategyKind::automatic, "automatic"},
          {StrategyKind::fsdp, "fsdp"},
          {StrategyKind::zero1, "zero1"},
          {StrategyKind::zero2, "zero2"},
          {StrategyKind::zero3, "zero3"}};
}
bool is_ddp(const Way& way) { return way.kind == StrategyKind::automatic && world().size() > 1; }
AcceleratorOptions options(const Way& way) {
  auto options = AcceleratorOptions().strategy(is_ddp(way) ? StrategyKind::ddp : way.kind);
  if (way.kind != StrategyKind::automatic) options.fsdp(FsdpOptions().unit_types({"LinearImpl"}));
  return options;
}

// The same step without the library: every rank's loss, averaged.
void plain_backward(NetImpl& net, int step) {
  torch::Tensor loss = torch::zeros({}, torch::kDouble);
  for (int rank = 0; rank < world().size(); ++rank)
    loss = loss + net.forward(batch(step, rank)).square().mean() / world().size();
  loss.backward();
}

void expect_equal(PreparedModule<NetImpl>& model, const Net& expected, const Way& way) {
  const auto plain = expected->named_parameters();
  for (const auto& [name, tensor] : model.state_dict())
    EXPECT_LT((tensor - plain[name]).abs().max().item<double>(), 1e-9) << way.name << " " << name;
}

// Computes its function again in backward, as a program's own checkpointing does: `times` inner
// backwards, each of a part of the batch.
struct Again : torch::autograd::Function<Again> {
  using Call = std::function<torch::Tensor(const torch::Tensor&)>;
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& x,
                               std::shared_ptr<Call> call, int times) {
    ctx->save_for_backward({x});
    ctx->saved_data["call"] = reinterpret_cast<std::int64_t>(new std::shared_ptr<Call>(call));
    ctx->saved_data["times"] = times;
    return (*call)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    auto* call = reinterpret_cast<std::shared_ptr<Call>*>(ctx->saved_data["call"].toInt());
    const torch::AutoGradMode with_gradients(true);
    const auto times = ctx->saved_data["times"].toInt();
    const auto inputs = ctx->get_saved_variables()[0].detach().tensor_split(times);
    const auto outer = gradients[0].tensor_split(times);
    std::vector<torch::Tensor> result;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const torch::Tensor input = inputs[i].clone().requires_grad_(true);
      torch::autograd::backward({(**call)(input)}, {outer[i]});
      result.push_back(input.grad());
    }
    delete call;
    return {torch::cat(result), torch::Tensor(), torch::Tensor()};
  }
};
torch::Tensor again(const torch::Tensor& x, int times,
                    std::function<torch::Tensor(const torch::Tensor&)> call) {
  return Again::apply(x, std::make_shared<Again::Call>(std::move(call)), times);
}

void train_alike(const Body& body, const std::function<bool(const Way&)>& holds,
                 bool through_accelerator, bool static_graph = false) {
  for (const Way& way : ways()) {
    if (!holds(way)) continue;
    SCOPED_TRACE(way.name);
    Net expected = make_net(body);
    torch::optim::AdamW plain(expected->parameters(), 1e-2);
    for (int step = 0; step < 4; ++step) {
      plain_backward(*expected, step);
      plain.step();
      plain.zero_grad();
    }
    auto options_of_it = options(way);
    if (is_ddp(way)) options_of_it.ddp(DdpOptions().static_graph(static_graph));
    Accelerator accelerator(options_of_it);
    Net net = make_net(body);
    torch::optim::AdamW adam(net->parameters(), 1e-2);
    auto [model, optimizer] = accelerator.prepare(net, adam);
    for (int step = 0; step < 4; ++step) {
      const auto loss = model(batch(step, world().rank())).square().mean();
      if (through_accelerator) {
        accelerator.backward(loss);
      } else {
        loss.backward();
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    expect_equal(model, expected, way);
  }
}

TEST(Nested, BackwardsInsideABackward) {
  const Body once = [](NetImpl& net, torch::Tensor x) {
    x = net.block(0, x);
    x = again(x, 1, [&net](const torch::Tensor& y) { return net.block(1, y); });
    x = net.block(2, x);
    x = again(x, 1, [&net](const torch::Tensor& y) { return net.block(3, y); });
    return net.block(4, x);
  };
  train_alike(
      once, [](const Way&) { return true; }, true);
  train_alike(
      once, [](const Way&) { return true; }, false);
}

TEST(Nested, ReachAParameterSeveralTimes) {
  const Body often = [](NetImpl& net, torch::Tensor x) {
    x = net.block(0, x);
    x = again(x, 2, [&net](const torch::Tensor& y) { return net.block(1, y); });
    x = again(x, 3, [&net](const torch::Tensor& y) { return net.block(1, net.block(2, y)); });
    x = net.block(1, x) + net.block(3, x);
    // A graph that ends in a checkpointed part, so that inner backwards come first of all.
    return again(x, 1, [&net](const torch::Tensor& y) { return net.block(4, y); });
  };
  const auto sharded = [](const Way& way) { return !is_ddp(way); };
  train_alike(often, sharded, true);
  train_alike(often, sharded, false);
  // Data parallelism has to know that it will be so.
  train_alike(often, is_ddp, true, /*static_graph=*/true);
  if (world().size() == 1) return;
  Accelerator accelerator(AcceleratorOptions().strategy(StrategyKind::ddp));
  Net net = make_net(often);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  const auto loss = model(batch(0, world().rank())).square().mean();
  EXPECT_THAT(message_of<StateError>([&] { accelerator.backward(loss); }),
              HasSubstr("DdpOptions::static_graph"));
}

TEST(Threads, TrainOneModuleTogether) {
  if (world().size() > 1) GTEST_SKIP() << "one thread at a time where there are several ranks";
  const Body body = [](NetImpl& net, torch::Tensor x) {
    for (int i = 0; i < 5; ++i) x = net.block(i, x);
    return x;
  };
  constexpr int kThreads = 4;
  for (const Way& way : ways()) {
    Net expected = make_net(body);
    torch::optim::SGD plain(expected->parameters(), 0.1);
    Accelerator accelerator(options(way));
    Net net = make_net(body);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (int step = 0; step < 6; ++step) {
      std::vector<torch::Tensor> inputs;
      for (int t = 0; t < kThreads; ++t) inputs.push_back(batch(step, t));
      for (const auto& input : inputs) expected->forward(input).square().mean().backward();
      plain.step();
      plain.zero_grad();
      std::vector<std::thread> threads;
      for (const auto& input : inputs) {
        threads.emplace_back([&, step, &model = model] {
          const auto loss = model(input).square().mean();
          if (step % 2 == 0) {
            loss.backward();
          } else {
            accelerator.backward(loss);
          }
        });
      }
      for (auto& thread : threads) thread.join();
      optimizer.step();
      optimizer.zero_grad();
    }
    expect_equal(model, expected, way);
  }
}

// Passes its input on, and throws in backward if it is asked to.
struct Fuse : torch::autograd::Function<Fuse> {
  static torch::Tensor forward(torch::autograd::AutogradContext* ctx, const torch::Tensor& x,
                               bool blows) {
    ctx->saved_data["blows"] = blows;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    if (ctx->saved_data["blows"].toBool()) throw std::runtime_error("the fuse has blown");
    return {gradients[0], torch::Tensor()};
  }
};

TEST(Exceptions, InBackwardLeaveNothingBehindOnceGradientsAreCleared) {
  for (const Way& way : ways()) {
    for (const bool through_accelerator : {true, false}) {
      SCOPED_TRACE(std::string(way.name) + (through_accelerator ? " accelerator" : " bare"));
      int blows_at = -1;
      const Body body = [&blows_at](NetImpl& net, torch::Tensor x) {
        for (int i = 0; i < 5; ++i) x = Fuse::apply(net.block(i, x), blows_at == i);
        return x;
      };
      Net expected = make_net(body);
      torch::optim::AdamW plain(expected->parameters(), 1e-2);
      Accelerator accelerator(options(way));
      Net net = make_net(body);
      torch::optim::AdamW adam(net->parameters(), 1e-2);
      auto [model, optimizer] = accelerator.prepare(net, adam);
      const auto backward = [&, &model = model](int step) {
        const auto loss = model(batch(step, world().rank())).square().mean();
        if (through_accelerator) {
          accelerator.backward(loss);
        } else {
          loss.backward();
        }
      };
      for (int step = 0; step < 5; ++step) {
        // In every step but the second, which has what the first one left.
        if (step != 1) {
          blows_at = 4 - step;
          EXPECT_EQ(message_of<std::exception>([&] { backward(step); }), "the fuse has blown");
          blows_at = -1;
          optimizer.zero_grad();
        }
        backward(step);
        optimizer.step();
        optimizer.zero_grad();
        plain_backward(*expected, step);
        plain.step();
        plain.zero_grad();
      }
      expect_equal(model, expected, way);
    }
  }
}

TEST(Exceptions, WithoutClearingAStepIsRefusedOrThatOfThePlainProgram) {
  for (const Way& way : ways()) {
    SCOPED_TRACE(way.name);
    int blows_at = 2;
    const Body body = [&blows_at](NetImpl& net, torch::Tensor x) {
      for (int i = 0; i < 5; ++i) x = Fuse::apply(net.block(i, x), blows_at == i);
      return x;
    };
    Accelerator accelerator(options(way));
    Net net = make_net(body);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    EXPECT_ANY_THROW(accelerator.backward(model(batch(0, world().rank())).square().mean()));
    if (accelerator.strategy() == StrategyKind::single) {
      optimizer.step();  // as it is without the library
      continue;
    }
    EXPECT_THAT(message_of<StateError>([&, &optimizer = optimizer] { optimizer.step(); }),
                HasSubstr("ended with an exception"));
    // Nor after another backward, which adds to what the failed one left.
    blows_at = -1;
    accelerator.backward(model(batch(0, world().rank())).square().mean());
    EXPECT_THAT(message_of<StateError>([&, &optimizer = optimizer] { optimizer.step(); }),
                HasSubstr("zero_grad()"));
    optimizer.zero_grad();
    accelerator.backward(model(batch(0, world().rank())).square().mean());
    optimizer.step();
    Net expected = make_net(body);
    torch::optim::SGD plain(expected->parameters(), 0.1);
    plain_backward(*expected, 0);
    plain.step();
    expect_equal(model, expected, way);
  }
}

// Blocks 0 and 1 make, 2 and 3 judge, 4 belongs to no optimizer.
TEST(SeveralOptimizers, OverOneModuleTakeTurns) {
  const Body body = [](NetImpl& net, torch::Tensor x) { return x; };
  const auto make = [](NetImpl& net, const torch::Tensor& x) {
    return net.block(4, net.block(1, net.block(0, x)));
  };
  const auto judge = [](NetImpl& net, const torch::Tensor& x) {
    return net.block(3, net.block(2, x)).square().mean();
  };
  // Both losses are computed before either optimizer steps, and the gradients of one wait while
  // the other steps.
  const auto loop = [&](const auto& forward, const auto& backward, auto& maker, auto& judges) {
    for (int step = 0; step < 4; ++step) {
      const auto [made, judged] = forward(step);
      maker.zero_grad();
      backward(made);
      judges.zero_grad();
      const auto other = forward(step + 10).second;
      maker.step();
      backward(judged + other);
      judges.step();
    }
  };
  using Losses = std::pair<torch::Tensor, torch::Tensor>;
  const auto losses = [&](NetImpl& net, const torch::Tensor& x) {
    return Losses{make(net, x).square().mean(), judge(net, x)};
  };
  for (const Way& way : ways()) {
    if (is_ddp(way)) continue;
    SCOPED_TRACE(way.name);
    Net expected = make_net(body);
    torch::optim::SGD plain_maker(expected->parameters_of(0, 1), 0.1);
    torch::optim::AdamW plain_judges(expected->parameters_of(2, 3), 1e-2);
    loop(
        [&](int step) {
          Losses sum{torch::zeros({}, torch::kDouble), torch::zeros({}, torch::kDouble)};
          for (int rank = 0; rank < world().size(); ++rank) {
            const auto [made, judged] = losses(*expected, batch(step, rank));
            sum.first = sum.first + made / world().size();
            sum.second = sum.second + judged / world().size();
          }
          return sum;
        },
        [](const torch::Tensor& loss) { loss.backward(); }, plain_maker, plain_judges);
    Accelerator accelerator(options(way));
    Net net = make_net(body);
    torch::optim::SGD maker(net->parameters_of(0, 1), 0.1);
    torch::optim::AdamW judges(net->parameters_of(2, 3), 1e-2);
    auto [model, prepared_maker, prepared_judges] = accelerator.prepare(net, maker, judges);
    loop(
        [&, &model = model](int step) {
          const auto x = batch(step, world().rank());
          return losses(model.module(), model(x));
        },
        [&](const torch::Tensor& loss) { accelerator.backward(loss); }, prepared_maker,
        prepared_judges);
    expect_equal(model, expected, way);
  }
}

TEST(SeveralOptimizers, KeepTheirMicroBatchesWhileAnotherStepsAndClears) {
  const Body body = [](NetImpl& net, torch::Tensor x) {
    return net.block(1, net.block(0, x)) + net.block(3, net.block(2, x));
  };
  for (const Way& way : ways()) {
    if (is_ddp(way)) continue;
    SCOPED_TRACE(way.name);
    Net expected = make_net(body);
    torch::optim::SGD plain_one(expected->parameters_of(0, 1), 0.1);
    torch::optim::SGD plain_other(expected->parameters_of(2, 3), 0.1);
    for (int step = 0; step < 3; ++step) {
      // `one` steps after each forward, `other` after two.
      for (int micro = 0; micro < 2; ++micro) {
        plain_one.zero_grad();
        plain_backward(*expected, 2 * step + micro);
        if (micro == 1) plain_one.step();
      }
      plain_other.step();
      plain_other.zero_grad();
    }
    Accelerator accelerator(options(way));
    Net net = make_net(body);
    torch::optim::SGD one(net->parameters_of(0, 1), 0.1);
    torch::optim::SGD other(net->parameters_of(2, 3), 0.1);
    auto [model, prepared_one, prepared_other] = accelerator.prepare(net, one, other);
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        prepared_one.zero_grad();
        const auto run = [&, &model = model] {
          accelerator.backward(model(batch(2 * step + micro, world().rank())).square().mean());
        };
        if (micro == 0) {
          const auto scope = accelerator.no_sync(model);
          run();
        } else {
          run();
          prepared_one.step();
        }
      }
      prepared_other.step();
      prepared_other.zero_grad();
    }
    expect_equal(model, expected, way);
  }
}

}  // namespace
}  // namespace accelerate
