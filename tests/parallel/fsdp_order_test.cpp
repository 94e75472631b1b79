// Ranks that use different units of one module: what is served, and what is the same error on every
// rank, never another unit's weights.

#include "parallel/control_flow.hpp"
#include "parallel/fsdp_training.hpp"

#include <accelerate/parallel/ddp.hpp>

#include <accelerate/base/error.hpp>

#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/script.h>

#include <chrono>
#include <string>

namespace accelerate::parallel {
namespace {

using Clock = std::chrono::steady_clock;

// Layers of which a forward uses those it is told to, in any order.
struct Experts : torch::nn::Module {
  torch::nn::Linear enter{4, 6}, leave{6, 3};
  torch::nn::ModuleList experts{register_module("experts", torch::nn::ModuleList())};
  std::vector<torch::nn::Linear> second;

  explicit Experts(bool equal_sizes) {
    register_module("enter", enter);
    for (int i = 0; i < 4; ++i) {
      torch::nn::Sequential expert;
      const int hidden = equal_sizes ? 8 : 8 + 5 * i;
      expert->push_back(torch::nn::Linear(6, hidden));
      expert->push_back(torch::nn::Linear(hidden, 6));
      experts->push_back(expert);
    }
    register_module("leave", leave);
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x, const std::vector<int>& chosen) {
    x = enter(x).tanh();
    for (const int i : chosen)
      x = x + experts[static_cast<std::size_t>(i)]->as<torch::nn::Sequential>()->forward(x).tanh();
    return leave(x);
  }
};

FsdpOptions a_unit_each() {
  return FsdpOptions().unit_names(
      {"enter", "experts.0", "experts.1", "experts.2", "experts.3", "leave"});
}

// A step of the module and of its sharded twin.
void step_both(torch::optim::Optimizer& plain, Fsdp& fsdp, torch::optim::Optimizer& sharded) {
  plain.step();
  sharded.step();
  fsdp.after_step(leaves_of(fsdp));
  plain.zero_grad();
  fsdp.before_zero_grad(leaves_of(fsdp));
  sharded.zero_grad();
}

// Every rank's own way through the experts, another in each step.
std::vector<int> chosen_by(int rank, int step) {
  static const std::vector<std::vector<int>> kWays{{0, 2}, {3, 1}, {2}, {1, 3, 0}, {}, {3}};
  return kWays[static_cast<std::size_t>(2 * step + rank) % kWays.size()];
}

std::string what_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const ShardingError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// The same words on all ranks; returns them.
std::string same_everywhere(const std::string& what) {
  for (const std::string& other : world().all_gather_bytes(what)) EXPECT_EQ(other, what);
  return what;
}

TEST(FsdpOrder, RanksThatChooseDifferentUnitsAllThrow) {
  if (world().size() == 1) GTEST_SKIP() << "one process goes one way";
  for (const bool equal_sizes : {true, false}) {
    torch::manual_seed(1);
    auto net = std::make_shared<Experts>(equal_sizes);
    Fsdp fsdp(ModuleRecord(net), a_unit_each(), world());
    const auto begin = Clock::now();
    const std::string what = same_everywhere(what_of([&] {
      fsdp.before_forward({});
      net->forward(at::ones({2, 4}, at::kDouble), {world().rank() == 0 ? 1 : 2}).sum().backward();
    }));
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
    EXPECT_NE(what.find("rank 0 gathers the unit 'experts.1' while rank"), std::string::npos)
        << what;
    EXPECT_NE(what.find("gathers the unit 'experts.2'"), std::string::npos) << what;
    EXPECT_NE(what.find("all_units_every_pass"), std::string::npos) << what;
  }
}

TEST(FsdpOrder, LayersThatOneRankDropsMakeAllThrow) {
  if (world().size() == 1) GTEST_SKIP() << "one process goes one way";
  auto net = std::make_shared<Experts>(true);
  Fsdp fsdp(ModuleRecord(net), a_unit_each(), world());
  // Recorded alike, so that units are fetched ahead when the ranks part.
  for (int step = 0; step < 2; ++step) {
    fsdp.before_forward({});
    net->forward(at::ones({2, 4}, at::kDouble), {0, 1, 2, 3}).sum().backward();
    fsdp.check_gradients(leaves_of(fsdp));
    fsdp.after_step(leaves_of(fsdp));
  }
  const std::string what = same_everywhere(what_of([&] {
    fsdp.before_forward({});
    const std::vector<int> kept =
        world().rank() == 0 ? std::vector<int>{0, 2, 3} : std::vector<int>{0, 1, 2, 3};
    net->forward(at::ones({2, 4}, at::kDouble), kept).sum().backward();
  }));
  EXPECT_NE(what.find("went different ways"), std::string::npos) << what;
}

TEST(FsdpOrder, OneRankThatReadsAParameterMakesAllThrow) {
  if (world().size() == 1) GTEST_SKIP() << "one process reads what it likes";
  for (const bool in_pass : {true, false}) {
    auto net = std::make_shared<Experts>(true);
    Fsdp fsdp(ModuleRecord(net), a_unit_each(), world());
    const auto train = [&](bool look) {
      fsdp.before_forward({});
      const at::Tensor output = net->forward(at::ones({2, 4}, at::kDouble), {0, 1, 2, 3});
      if (look) net->leave->weight.norm();
      if (look) net->experts[1]->as<torch::nn::Sequential>()->ptr(0)->parameters()[0].norm();
      output.sum().backward();
      fsdp.after_backward();
      fsdp.check_gradients(leaves_of(fsdp));
      fsdp.after_step(leaves_of(fsdp));
    };
    train(false);
    world().barrier();  // no rank is told of it while it still trains
    const auto begin = Clock::now();
    const std::string what = same_everywhere(what_of([&] {
      const bool looks = world().rank() == 0;
      if (in_pass) {
        train(looks);
      } else {
        if (looks) net->experts[1]->as<torch::nn::Sequential>()->ptr(0)->parameters()[0].norm();
        train(false);
      }
    }));
    EXPECT_LT(Clock::now() - begin, std::chrono::seconds(5));
    EXPECT_NE(what.find("rank 0 gathers the unit 'experts.1' while rank"), std::string::npos)
        << what;
  }
}

// The program that parts goes on alike afterwards, and gets the right numbers.
TEST(FsdpOrder, RanksThatMeetAgainGoOn) {
  torch::manual_seed(2);
  auto plain = std::make_shared<Experts>(true);
  torch::manual_seed(2);
  auto net = std::make_shared<Experts>(true);
  Fsdp fsdp(ModuleRecord(net), a_unit_each(), world());
  for (int round = 0; round < 3; ++round) {
    if (world().size() > 1) {
      const std::string what = same_everywhere(what_of([&] {
        fsdp.before_forward({});
        net->forward(at::ones({2, 4}, at::kDouble), {world().rank() == 0 ? round : 3})
            .sum()
            .backward();
      }));
      EXPECT_NE(what.find("went different ways"), std::string::npos) << what;
    }
    for (const at::Tensor& leaf : leaves_of(fsdp)) at::Tensor(leaf).mutable_grad().reset();
    fsdp.before_zero_grad(leaves_of(fsdp));
    plain->zero_grad();
    seed_for(round, 0);
    const at::Tensor x = at::randn({2, 4}, at::kDouble);
    plain->forward(x, {0, 1, 2, 3}).sum().backward();
    average(plain->parameters());
    fsdp.before_forward({});
    net->forward(x, {0, 1, 2, 3}).sum().backward();
    fsdp.after_backward();
    fsdp.check_gradients(leaves_of(fsdp));
    for (const auto& shard : fsdp.shards()) {
      const at::Tensor expected = plain->named_parameters()[shard.name].grad().flatten();
      const at::Tensor own = expected.narrow(0, shard.placement.first(), shard.placement.count());
      EXPECT_TRUE(at::allclose(shard.tensor.grad().flatten(), own, 0, 1e-9)) << shard.name;
    }
  }
}

TEST(FsdpOrder, AFailureOfOneRankReachesTheOthers) {
  if (world().size() == 1) GTEST_SKIP() << "nobody to tell";
  ControlFlow flow(world(), {"a", "b"}, {.gather_ranks = world().size()});
  const at::Tensor mine = at::ones({4}), all = at::empty({4 * world().size()});
  const auto gather = [&](int unit) {
    const auto ticket = flow.start({ControlFlow::Event::gather, unit}, all,
                                   [&] { return world().all_gather_into(all, mine); });
    flow.wait(ticket).wait();
  };
  gather(0);
  if (world().rank() == 0) {
    flow.fail("rank 0 failed in its backward pass: no reason");
  } else {
    EXPECT_EQ(what_of([&] { gather(1); }), "rank 0 failed in its backward pass: no reason");
  }
  EXPECT_TRUE(flow.begin_pass());
  gather(1);
  EXPECT_FALSE(flow.begin_pass());
}

// Gathers and reductions of all ranks through a board that they do not share.
TEST(FsdpOrder, MachinesApartAgreeThroughTheStore) {
  if (world().size() == 1) GTEST_SKIP() << "nobody to agree with";
  ControlFlow flow(world(), {"a", "b"},
                   {.gather_ranks = world().size(), .shared = comm::Board::Shared::by_nobody});
  const auto reductions = world().split(0, world().rank(), "reductions");
  for (int round = 0; round < 10; ++round) {
    const at::Tensor mine = at::full({4}, static_cast<float>(world().rank() + round));
    const at::Tensor all = at::empty({4 * world().size()}), sum = mine.clone();
    const auto gather = flow.start({ControlFlow::Event::gather, round % 2}, all,
                                   [&] { return world().all_gather_into(all, mine); });
    const auto reduce = flow.start({ControlFlow::Event::reduce, round % 2}, sum,
                                   [&] { return reductions.all_reduce(sum); });
    flow.wait(round % 3 == 0 ? reduce : gather).wait();
    flow.wait(round % 3 == 0 ? gather : reduce).wait();
    EXPECT_EQ(all[4 * (world().size() - 1)].item<int>(), world().size() - 1 + round);
  }
  const std::string what = same_everywhere(what_of([&] {
    const at::Tensor all = at::empty({4 * world().size()});
    const auto ticket = flow.start({ControlFlow::Event::gather, world().rank() == 0 ? 0 : 1}, all,
                                   [&] { return world().all_gather_into(all, at::ones({4})); });
    flow.wait(ticket).wait();
  }));
  EXPECT_NE(what.find("rank 0 gathers the unit 'a' while rank"), std::string::npos) << what;
  EXPECT_TRUE(flow.begin_pass());
}

// One rank's loss reaches no parameter, with micro-batches before it that did.
TEST(FsdpOrder, ARankWhoseLossReachesNoParameterTakesPart) {
  using S = ShardingStrategy;
  std::vector<S> strategies{S::full_shard, S::shard_grad_op, S::shard_optimizer, S::no_shard};
  // Two groups of two, which wait for each other as well.
  const int group = world().size() == 4 ? 2 : 0;
  if (group > 0) strategies = {S::full_shard, S::hybrid_shard};
  for (const S strategy : strategies) {
    torch::manual_seed(3);
    auto plain = std::make_shared<Experts>(true);
    torch::manual_seed(3);
    auto net = std::make_shared<Experts>(true);
    Fsdp fsdp(ModuleRecord(net), a_unit_each().sharding_strategy(strategy).shard_group_size(group),
              world());
    torch::optim::SGD sgd(plain->parameters(), 0.1), sharded(leaves_of(fsdp), 0.1);
    for (int step = 0; step < 7; ++step) {
      const bool two = step % 2 == 1;
      for (int micro = 0; micro < (two ? 2 : 1); ++micro) {
        seed_for(step, micro);
        const at::Tensor x = at::randn({2, 4}, at::kDouble).requires_grad_();
        // In the last steps no rank's does.
        const bool lost =
            (step > 4 && micro == 1) || step == 6 || (world().rank() + step + micro) % 3 == 0;
        const bool reaches = !lost || (two && micro == 0 && step > 4);
        const auto loss_of = [&](const at::Tensor& y) { return reaches ? y.sum() : x.sum(); };
        loss_of(plain->forward(x, {0, 1, 2, 3})).backward();
        fsdp.before_forward({.grad_enabled = true, .sync = !two || micro == 1});
        loss_of(net->forward(x, {0, 1, 2, 3})).backward();
        if (step % 3 != 2) fsdp.after_backward();  // else check_gradients notices
      }
      fsdp.check_gradients(leaves_of(fsdp));
      average(plain->parameters());
      step_both(sgd, fsdp, sharded);
    }
    fsdp.restore();
    expect_equal(ModuleRecord(net), ModuleRecord(plain), 1e-9);
  }
}

// One rank makes no backward call in a whole window of micro-batches. Where parameters come and go,
// its next forward is not what the others do.
TEST(FsdpOrder, ARankWithoutBackwardsInAWindowTakesPartInTheLast) {
  using S = ShardingStrategy;
  for (const S strategy : {S::shard_optimizer, S::no_shard}) {
    torch::manual_seed(3);
    auto plain = std::make_shared<Experts>(true);
    torch::manual_seed(3);
    auto net = std::make_shared<Experts>(true);
    Fsdp fsdp(ModuleRecord(net), a_unit_each().sharding_strategy(strategy), world());
    torch::optim::SGD sgd(plain->parameters(), 0.1), sharded(leaves_of(fsdp), 0.1);
    for (int step = 0; step < 4; ++step) {
      const bool calls = world().size() == 1 || world().rank() != step % world().size();
      for (int micro = 0; micro < 3; ++micro) {
        seed_for(step, micro);
        const at::Tensor x = at::randn({2, 4}, at::kDouble);
        if (calls) plain->forward(x, {0, 1, 2, 3}).sum().backward();
        fsdp.before_forward({.grad_enabled = true, .sync = micro == 2});
        const at::Tensor output = net->forward(x, {0, 1, 2, 3});
        if (!calls) continue;
        output.sum().backward();
        fsdp.after_backward();
      }
      fsdp.check_gradients(leaves_of(fsdp));
      average(plain->parameters());
      step_both(sgd, fsdp, sharded);
    }
    fsdp.restore();
    expect_equal(ModuleRecord(net), ModuleRecord(plain), 1e-9);
  }
}

// Experts that every rank chooses for itself, trained as in one process.
TEST(FsdpOrder, AllUnitsEveryPassServesRanksThatUseSome) {
  using S = ShardingStrategy;
  for (const S strategy : {S::full_shard, S::shard_grad_op, S::shard_optimizer, S::no_shard}) {
    {
      const bool equal_sizes = strategy != S::full_shard;
      torch::manual_seed(4);
      auto plain = std::make_shared<Experts>(equal_sizes);
      torch::manual_seed(4);
      auto net = std::make_shared<Experts>(equal_sizes);
      Fsdp fsdp(ModuleRecord(net),
                a_unit_each().sharding_strategy(strategy).all_units_every_pass(true), world());
      torch::optim::AdamW adam(plain->parameters(), adam_options());
      torch::optim::AdamW sharded(leaves_of(fsdp), adam_options());
      for (int step = 0; step < 4; ++step) {
        for (int micro = 0; micro < 1 + step % 2; ++micro) {
          const auto chosen = chosen_by(world().rank(), step + micro);
          seed_for(step, micro);
          const at::Tensor x = at::randn({2, 4}, at::kDouble);
          plain->forward(x, chosen).square().sum().backward();
          fsdp.before_forward({.grad_enabled = true, .sync = micro == step % 2});
          net->forward(x, chosen).square().sum().backward();
          fsdp.after_backward();
        }
        // An evaluation in which ranks choose as well.
        {
          const at::NoGradGuard no_grad;
          const at::Tensor x = at::ones({1, 4}, at::kDouble);
          const auto chosen = chosen_by(world().rank(), step + 3);
          const ForwardContext evaluation{.grad_enabled = false};
          fsdp.before_forward(evaluation);
          EXPECT_TRUE(at::allclose(net->forward(x, chosen), plain->forward(x, chosen), 0, 1e-9));
          fsdp.after_forward(evaluation, {});
        }
        average(plain->parameters());
        fsdp.check_gradients(leaves_of(fsdp));
        EXPECT_NEAR(fsdp.grad_norm(2).item<double>(),
                    global_norm(plain->parameters(), 2).item<double>(), 1e-9);
        step_both(adam, fsdp, sharded);
      }
      fsdp.restore();
      expect_equal(ModuleRecord(net), ModuleRecord(plain), 1e-9);
    }
  }
  auto net = std::make_shared<Experts>(true);
  EXPECT_THROW(Fsdp(ModuleRecord(net),
                    a_unit_each().all_units_every_pass(true).resident_limit(2000), world()),
               ShardingError);
}

// torch.jit.fork has threads of its own demand units.
TEST(FsdpOrder, TorchScriptThatForksIsRefusedOrRight) {
  const char* folder = std::getenv("ACCELERATE_TEST_MODULES");
  ASSERT_NE(folder, nullptr);
  const auto load = [&] { return torch::jit::load(std::string(folder) + "/script_forked.pt"); };
  const auto units = FsdpOptions().unit_names({"inner.left", "inner.right", "inner.own"});
  const auto train = [&](Strategy& strategy, torch::jit::Module& module) {
    const auto leaves = [&] {
      std::vector<at::Tensor> all;
      for (const NamedTensor& parameter : strategy.module().parameters())
        all.push_back(strategy.optimizer_leaf(parameter.tensor));
      return all;
    }();
    torch::jit::Module plain = load();
    const ModuleRecord expected(plain);
    torch::optim::SGD sgd(parameters_of(expected), 0.1), prepared(leaves, 0.1);
    for (int step = 0; step < 5; ++step) {
      seed_for(step, 0);
      const at::Tensor x = at::randn({3, 12}, at::kDouble);
      plain.forward({x}).toTensor().square().sum().backward();
      average(parameters_of(expected));
      strategy.before_forward({});
      const at::Tensor output = module.forward({x}).toTensor();
      strategy.after_forward({}, {output});
      strategy.before_backward();
      output.square().sum().backward();
      strategy.after_backward();
      strategy.check_gradients(leaves);
      sgd.step();
      prepared.step();
      strategy.after_step(leaves);
      sgd.zero_grad();
      strategy.before_zero_grad(leaves);
      prepared.zero_grad();
    }
    strategy.restore();
    expect_equal(ModuleRecord(module), expected, 1e-9);
  };
  for (const bool all_units : {false, true}) {
    torch::jit::Module module = load();
    const auto options = FsdpOptions(units).all_units_every_pass(all_units);
    if (world().size() > 1 && !all_units) {
      const std::string what =
          same_everywhere(what_of([&] { Fsdp fsdp(ModuleRecord(module), options, world()); }));
      EXPECT_NE(what.find("'forward' runs parts of the module on other threads"), std::string::npos)
          << what;
      EXPECT_FALSE(intercept::is_tagged(ModuleRecord(module).parameters()[0].tensor));
      continue;
    }
    Fsdp fsdp(ModuleRecord(module), options, world());
    train(fsdp, module);
  }
  if (world().size() == 1) return;
  torch::jit::Module module = load();
  Ddp ddp(ModuleRecord(module), world(), {});
  train(ddp, module);
}

}  // namespace
}  // namespace accelerate::parallel
