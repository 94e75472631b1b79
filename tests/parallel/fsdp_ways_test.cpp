// Ranks that do not do the same, what may differ between them and what may not, and what programs
// do wrong with sharded modules.

#include "parallel/fsdp_training.hpp"

#include <accelerate/base/error.hpp>

#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <string>

namespace accelerate::parallel {
namespace {

TEST(Fsdp, FrozenTorchScriptModulesHaveNothingToShard) {
  torch::jit::Module module("net");
  module.register_parameter("weight", at::ones({2, 2}), /*is_buffer=*/false);
  module.define("def forward(self, x):\n  return x.matmul(self.weight)\n");
  module.eval();
  const torch::jit::Module frozen = torch::jit::freeze(module);
  try {
    Fsdp fsdp(ModuleRecord(frozen), FsdpOptions(), world());
    FAIL();
  } catch (const ShardingError& error) {
    EXPECT_NE(std::string(error.what()).find("torch.jit.freeze"), std::string::npos)
        << error.what();
  }
}

struct TwoHeads : torch::nn::Module {
  torch::nn::Linear a{4, 3}, b{4, 3}, never{4, 3};
  TwoHeads() {
    register_module("a", a);
    register_module("b", b);
    register_module("never", never);
  }
  at::Tensor forward(const at::Tensor& x, bool first) { return first ? a(x) : b(x); }
};

// Every leaf has its part of the gradient that `plain` has, and none where there is none.
void expect_gradients_of(const torch::nn::Module& plain, const Fsdp& fsdp) {
  for (const auto& shard : fsdp.shards()) {
    const at::Tensor expected = plain.named_parameters()[shard.name].grad();
    ASSERT_EQ(shard.tensor.grad().defined(), expected.defined()) << shard.name;
    if (!expected.defined()) continue;
    const at::Tensor own =
        expected.flatten().narrow(0, shard.placement.first(), shard.placement.count());
    EXPECT_TRUE(at::allclose(shard.tensor.grad().flatten(), own, 1e-5, 1e-6)) << shard.name;
  }
}

TEST(Fsdp, ParametersThatOnlySomeRanksUse) {
  torch::manual_seed(1);
  auto plain = std::make_shared<TwoHeads>();
  torch::manual_seed(1);
  auto net = std::make_shared<TwoHeads>();
  Fsdp fsdp{ModuleRecord(net), FsdpOptions(), world()};
  seed_for(0, 0);
  const at::Tensor x = at::randn({2, 4});
  plain->forward(x, world().rank() == 0).sum().backward();
  average(plain->parameters());
  fsdp.before_forward({});
  net->forward(x, world().rank() == 0).sum().backward();
  expect_gradients_of(*plain, fsdp);
  EXPECT_EQ(fsdp.optimizer_leaf(net->never->weight).grad().defined(), false)
      << "a zero gradient would let AdamW move it";
  fsdp.restore();
}

TEST(Fsdp, AForwardMoreOnOneRankIsNamedOnEveryRank) {
  if (world().size() == 1) GTEST_SKIP() << "one process goes one way";
  zoo::Specimen specimen = zoo::make("tied", 3);
  Fsdp fsdp(specimen.record, small_units(), world());
  train_sharded(specimen, fsdp, 2, 1);
  fsdp.before_forward({});
  const at::Tensor output = specimen.forward(specimen.input(3));
  try {
    if (world().rank() == 0) {
      fsdp.before_forward({});
      specimen.forward(specimen.input(3));
    } else {
      zoo::loss_of(output).backward();
    }
    FAIL() << "one rank ran a forward more and nobody noticed";
  } catch (const ShardingError& error) {
    EXPECT_NE(std::string(error.what()).find("The ranks went different ways: rank 0 gathers"),
              std::string::npos)
        << error.what();
  }
  world().barrier();
}

struct Branches : torch::nn::Module {
  torch::nn::ModuleList blocks{register_module("blocks", torch::nn::ModuleList())};
  Branches() {
    for (int i = 0; i < 8; ++i) blocks->push_back(std::make_shared<TwoHeads>());
  }
  at::Tensor forward(at::Tensor x, int left_out) {
    for (int i = 0; i < 8; ++i) {
      auto& block = *blocks[i]->as<TwoHeads>();
      at::Tensor y = block.a(x);
      if (i != left_out) y = y + block.b(x);
      x = at::constant_pad_nd(y.tanh(), {0, 1});
    }
    return x;
  }
};

TEST(Fsdp, PartsThatOneRankLeavesOutKeepNobodyWaiting) {
  torch::manual_seed(4);
  auto plain = std::make_shared<Branches>();
  torch::manual_seed(4);
  auto net = std::make_shared<Branches>();
  Fsdp fsdp(ModuleRecord(net), small_units(), world());
  EXPECT_GE(fsdp.num_units(), 8);
  for (int step = 0; step < 3; ++step) {
    // The last but one block is among the first in backward.
    const int left_out = (world().rank() + step) % 2 == 0 ? 6 : -1;
    plain->zero_grad();
    plain->forward(at::ones({2, 4}), left_out).sum().backward();
    average(plain->parameters());
    fsdp.before_forward({});
    net->forward(at::ones({2, 4}), left_out).sum().backward();
    fsdp.after_backward();
    fsdp.check_gradients(leaves_of(fsdp));
    expect_gradients_of(*plain, fsdp);
    for (const at::Tensor& leaf : leaves_of(fsdp)) at::Tensor(leaf).mutable_grad().reset();
    fsdp.before_zero_grad(leaves_of(fsdp));
  }
  fsdp.restore();
}

TEST(Fsdp, DifferentWaysAreNamedOnEveryRank) {
  if (world().size() == 1) GTEST_SKIP() << "one process goes one way";
  auto net = std::make_shared<TwoHeads>();
  Fsdp fsdp(ModuleRecord(net), FsdpOptions().unit_names({"a", "b"}), world());
  try {
    fsdp.before_forward({});
    net->forward(at::ones({2, 4}), world().rank() == 0).sum().backward();
    FAIL() << "ranks used different units and nobody noticed";
  } catch (const ShardingError& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("'a'"), std::string::npos) << what;
    EXPECT_NE(what.find("'b'"), std::string::npos) << what;
  }
  world().barrier();
}

TEST(Fsdp, MisuseIsNamedOnEveryRank) {
  zoo::Specimen specimen = zoo::make("tied", 3);
  EXPECT_THROW(Fsdp(specimen.record, FsdpOptions().unit_types({"NoSuchImpl"}), world()),
               ConfigError);
  EXPECT_THROW(Fsdp(specimen.record, FsdpOptions().resident_limit(64), world()), ShardingError);
  EXPECT_THROW(
      Fsdp(ModuleRecord(std::make_shared<torch::nn::ModuleListImpl>()), FsdpOptions(), world()),
      ShardingError);
  if (world().size() > 1) {
    const ModuleRecord different(std::make_shared<torch::nn::LinearImpl>(4, 3 + world().rank()));
    try {
      Fsdp fsdp(different, FsdpOptions(), world());
      FAIL() << "ranks with different modules were accepted";
    } catch (const ShardingError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 has weight Float [4, 4]"), std::string::npos)
          << error.what();
    }
  }
  const auto parameters = parameters_of(specimen.record);
  for (const at::Tensor& parameter : parameters)
    ASSERT_FALSE(intercept::is_tagged(parameter)) << "refused, and changed all the same";
  Fsdp fsdp(specimen.record, FsdpOptions(), world());
  EXPECT_THROW(Fsdp(specimen.record, FsdpOptions(), world()), ShardingError);
  // Stepping in the middle of an accumulation.
  fsdp.before_forward({.grad_enabled = true, .sync = false});
  zoo::loss_of(specimen.forward(specimen.input(2))).backward();
  EXPECT_THROW(fsdp.check_gradients(leaves_of(fsdp)), StateError);
  fsdp.before_zero_grad(leaves_of(fsdp));
  fsdp.check_gradients(leaves_of(fsdp));
  fsdp.restore();
  EXPECT_THROW(fsdp.before_forward({}), StateError);
}

TEST(Fsdp, MovingTheModuleAfterwardsIsNamed) {
  auto net = std::make_shared<TwoHeads>();
  Fsdp fsdp{ModuleRecord(net), FsdpOptions(), world()};
  net->to(at::kDouble);
  EXPECT_THROW(fsdp.before_forward({}), StateError);
}

TEST(Fsdp, AfterDestructionParametersAreWholeOrSaySo) {
  auto net = std::make_shared<TwoHeads>();
  const at::Tensor expected = net->a->weight.detach().clone();
  { const Fsdp fsdp{ModuleRecord(net), FsdpOptions().sync_module_states(false), world()}; }
  if (world().size() == 1) {
    EXPECT_TRUE(at::equal(net->a->weight, expected));
  } else {
    EXPECT_THROW(net->a->weight.sum(), StateError);
  }
}

}  // namespace
}  // namespace accelerate::parallel
