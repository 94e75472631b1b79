// Sharded training on several ranks against the same module unsharded.

#include "parallel/fsdp_training.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/parallel/ddp.hpp>
#include <accelerate/parallel/fsdp.hpp>
#include <intercept/key.hpp>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <chrono>
#include <cmath>
#include <map>
#include <optional>
#include <random>
#include <thread>
namespace accelerate::parallel {
namespace {

class FsdpZoo : public ::testing::TestWithParam<std::string> {};

TEST_P(FsdpZoo, TrainsAsUnsharded) {
  zoo::Specimen plain = zoo::make(GetParam(), 3);
  const History expected = train_plain(plain, 5, kInTurns);
  zoo::Specimen specimen = zoo::make(GetParam(), 3);
  Fsdp fsdp(specimen.record, small_units(), world());
  expect_equal(train_sharded(specimen, fsdp, 5, kInTurns), expected, 1e-9);
  fsdp.restore();
  expect_equal(specimen.record, plain.record, 1e-9);
}

INSTANTIATE_TEST_SUITE_P(Modules, FsdpZoo, ::testing::ValuesIn(zoo::names()),
                         [](const auto& info) { return info.param; });

TEST(Fsdp, EveryStrategyTrainsAlike) {
  for (const char* name : {"tied", "odd"}) {
    zoo::Specimen plain = zoo::make(name, 3);
    const History expected = train_plain(plain, 3, kInTurns);
    for (const ShardingStrategy strategy :
         {ShardingStrategy::shard_grad_op, ShardingStrategy::hybrid_shard,
          ShardingStrategy::hybrid_shard_zero2, ShardingStrategy::shard_optimizer,
          ShardingStrategy::no_shard}) {
      for (const bool every : {false, true}) {
        SCOPED_TRACE(::testing::Message() << name << " strategy " << static_cast<int>(strategy)
                                          << " reduce every backward " << every);
        zoo::Specimen specimen = zoo::make(name, 3);
        Fsdp fsdp(
            specimen.record,
            small_units().sharding_strategy(strategy).reduce_every_backward(every).shard_group_size(
                world().size() % 2 == 0 ? 2 : 1),
            world());
        expect_equal(train_sharded(specimen, fsdp, 3, kInTurns), expected, 1e-9);
        fsdp.restore();
        expect_equal(specimen.record, plain.record, 1e-9);
      }
    }
  }
}

// Each rank pauses before some of its operators, forward and backward, at moments of its own.

struct Dawdle final : intercept::RegionPolicy {
  std::mt19937 random{static_cast<unsigned>(17 + world().rank())};
  void pause() {
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
  }
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet below,
            std::vector<c10::IValue>& stack) override {
    pause();
    op.redispatchBoxed(below, &stack);
    if (!stack.empty() && stack.back().isTensor() && stack.back().toTensor().requires_grad()) {
      stack.back().toTensor().register_hook([this](const at::Tensor&) { pause(); });
    }
  }
};

TEST(Fsdp, DelaysChangeNoBit) {
  for (const char* name : {"tied", "odd"}) {
    std::vector<History> runs;
    for (const bool delayed : {false, true}) {
      zoo::Specimen specimen = zoo::make(name, 3);
      Fsdp fsdp(specimen.record, small_units(), world());
      Dawdle dawdle;
      runs.push_back(train_sharded(specimen, fsdp, 3, kInTurns, delayed ? &dawdle : nullptr));
      fsdp.restore();
    }
    expect_equal(runs[1], runs[0], 0);
  }
}

TEST(Fsdp, CommunicatesExactlyWhatItMust) {
  zoo::Specimen specimen = zoo::make("tied", 3);
  Fsdp fsdp(specimen.record, FsdpOptions(), world());
  const std::int64_t units = fsdp.num_units();
  EXPECT_EQ(units, 5) << fsdp.describe_units();  // the root and four blocks
  train_sharded(specimen, fsdp, 1, 1);
  fsdp.reset_statistics();
  train_sharded(specimen, fsdp, 1, 1);
  const FsdpStatistics statistics = fsdp.statistics();
  EXPECT_EQ(statistics.reductions, units);
  // The root stays, and so do the last block of the forward, which is the first of the backward,
  // and the one that is fetched for it meanwhile.
  EXPECT_EQ(statistics.gathers, 2 * units - 3);
  EXPECT_EQ(statistics.prefetched, statistics.gathers);
  EXPECT_EQ(statistics.reduced_parameter_bytes,
            8 * (23 * 16 + 9 * 16 + 4 * (32 + 16 * 40 + 40 + 40 * 16 + 16)));
  fsdp.restore();
}

TEST(Fsdp, WithoutPrefetchEveryUnitButTheKeptOnesIsGatheredTwice) {
  zoo::Specimen specimen = zoo::make("tied", 3);
  Fsdp fsdp(specimen.record, FsdpOptions().prefetch_units(0), world());
  train_sharded(specimen, fsdp, 1, 1);
  fsdp.reset_statistics();
  train_sharded(specimen, fsdp, 1, 1);
  EXPECT_EQ(fsdp.statistics().gathers, 2 * fsdp.num_units() - 2);  // the root, and the last block
  EXPECT_EQ(fsdp.statistics().prefetched, 0);
  fsdp.restore();
}

TEST(Fsdp, ParametersThatStayAreGatheredOnceAStep) {
  for (const auto strategy : {ShardingStrategy::shard_grad_op, ShardingStrategy::shard_optimizer}) {
    zoo::Specimen specimen = zoo::make("tied", 3);
    Fsdp fsdp(specimen.record, FsdpOptions().sharding_strategy(strategy), world());
    train_sharded(specimen, fsdp, 2, 1);
    fsdp.reset_statistics();
    train_sharded(specimen, fsdp, 1, 1);
    EXPECT_EQ(fsdp.statistics().gathers, fsdp.num_units());
    EXPECT_EQ(fsdp.statistics().reductions, fsdp.num_units());
    fsdp.restore();
  }
}

TEST(Fsdp, GradientNormsOfEveryKindAndClipping) {
  zoo::Specimen plain = zoo::make("transformer", 3);
  zoo::Specimen specimen = zoo::make("transformer", 3);
  Fsdp fsdp(specimen.record, small_units(), world());
  seed_for(0, 0);
  zoo::loss_of(plain.forward(plain.input(3))).backward();
  average(parameters_of(plain.record));
  seed_for(0, 0);
  fsdp.before_forward({});
  zoo::loss_of(specimen.forward(specimen.input(3))).backward();
  for (const double p : {1.0, 2.0, 3.0, static_cast<double>(INFINITY)}) {
    EXPECT_NEAR(fsdp.grad_norm(p).item<double>(),
                global_norm(parameters_of(plain.record), p).item<double>(), 1e-9)
        << p;
  }
  const double before = fsdp.grad_norm(2).item<double>();
  fsdp.scale_gradients_(at::scalar_tensor(0.5, at::kDouble));
  EXPECT_NEAR(fsdp.grad_norm(2).item<double>(), before / 2, 1e-12);
  fsdp.clip_grad_value_(1e-4);
  EXPECT_LE(fsdp.grad_norm(INFINITY).item<double>(), 1e-4);
  fsdp.restore();
}

TEST(Fsdp, ShardsCoverEveryParameterOnce) {
  zoo::Specimen specimen = zoo::make("conv_batchnorm", 3);
  std::vector<at::Tensor> before;
  for (const at::Tensor& parameter : parameters_of(specimen.record))
    before.push_back(parameter.detach().clone());
  Fsdp fsdp(specimen.record, small_units(), world());
  const auto shards = fsdp.shards();
  ASSERT_EQ(shards.size(), before.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    const LocalTensor& shard = shards[i];
    const Placement& placement = shard.placement;
    EXPECT_EQ(placement.shape(), before[i].sizes().vec());
    const at::Tensor flat = before[i].as_strided({before[i].numel()}, {1});
    EXPECT_TRUE(
        at::equal(shard.tensor.flatten(), flat.narrow(0, placement.first(), placement.count())));
    const at::Tensor sum = at::full({1}, placement.count(), at::kLong);
    world().all_reduce(sum).wait();
    EXPECT_EQ(sum.item<std::int64_t>(), before[i].numel()) << shard.name;
  }
  fsdp.restore();
}

TEST(Fsdp, RankZerosParametersAreEverybodys) {
  zoo::Specimen specimen = zoo::make("gru", 3 + static_cast<std::uint64_t>(world().rank()));
  zoo::Specimen first = zoo::make("gru", 3);
  Fsdp fsdp(specimen.record, FsdpOptions(), world());
  fsdp.restore();
  expect_equal(specimen.record, first.record, 0);
}

TEST(Fsdp, FullParametersCanBeReadAndChanged) {
  zoo::Specimen specimen = zoo::make("tied", 3);
  zoo::Specimen plain = zoo::make("tied", 3);
  Fsdp fsdp(specimen.record, FsdpOptions().mixed_precision({.param_dtype = at::kFloat}), world());
  {
    const auto full = fsdp.summon_full_params();
    expect_equal(specimen.record, plain.record, 0);
  }
  {
    const auto full = fsdp.summon_full_params(/*write_back=*/true);
    at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters_of(specimen.record)) parameter.mul_(3);
    for (const at::Tensor& parameter : parameters_of(plain.record)) parameter.mul_(3);
  }
  fsdp.restore();
  expect_equal(specimen.record, plain.record, 0);
}

TEST(Fsdp, WritesThroughOperatorsReachTheShards) {
  zoo::Specimen specimen = zoo::make("tied", 3);
  zoo::Specimen plain = zoo::make("tied", 3);
  Fsdp fsdp(specimen.record, FsdpOptions(), world());
  for (const zoo::Specimen* each : {&specimen, &plain}) {
    at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters_of(each->record)) parameter.select(0, 1).add_(2);
  }
  fsdp.restore();
  expect_equal(specimen.record, plain.record, 0);
}

TEST(Fsdp, EvaluationBetweenTrainingSteps) {
  zoo::Specimen plain = zoo::make("conv_batchnorm", 3);
  zoo::Specimen specimen = zoo::make("conv_batchnorm", 3);
  Fsdp fsdp(specimen.record, small_units(), world());
  for (int round = 0; round < 2; ++round) {
    expect_equal(train_sharded(specimen, fsdp, 2, 1), train_plain(plain, 2, 1), 1e-9);
    plain.record.train(false);
    specimen.record.train(false);
    torch::manual_seed(9);
    const at::Tensor input = plain.input(2);
    at::NoGradGuard no_grad;
    const ForwardContext context{.grad_enabled = false};
    fsdp.before_forward(context);
    const at::Tensor output = specimen.forward(input);
    fsdp.after_forward(context, {});
    EXPECT_TRUE(at::allclose(output, plain.forward(input), 0, 1e-9));
    plain.record.train(true);
    specimen.record.train(true);
  }
  fsdp.restore();
}

TEST(Fsdp, MixedPrecisionGathersAndReducesInItsDtypes) {
  for (const bool reduce_fp32 : {false, true}) {
    zoo::Specimen plain = zoo::make("attention", 3, at::kFloat);
    const History expected = train_plain(plain, 5, 1);
    zoo::Specimen specimen = zoo::make("attention", 3, at::kFloat);
    MixedPrecisionPolicy policy{.param_dtype = at::kBFloat16};
    if (reduce_fp32) policy.reduce_dtype = at::kFloat;
    Fsdp fsdp(specimen.record, FsdpOptions().mixed_precision(policy), world());
    EXPECT_EQ(specimen.record.parameters()[0].tensor.scalar_type(), at::kBFloat16);
    const auto make_input = specimen.input;
    specimen.input = [make_input](std::int64_t samples) {
      return make_input(samples).to(at::kBFloat16);
    };
    const History run = train_sharded(specimen, fsdp, 5, 1);
    for (std::size_t i = 0; i < run.losses.size(); ++i)
      EXPECT_NEAR(run.losses[i], expected.losses[i], 0.02 * expected.losses[i]);
    for (const at::Tensor& leaf : leaves_of(fsdp)) EXPECT_EQ(leaf.scalar_type(), at::kFloat);
    const FsdpStatistics statistics = fsdp.statistics();
    const double ratio = static_cast<double>(statistics.reduced_parameter_bytes) /
                         static_cast<double>(statistics.gathered_parameter_bytes);
    EXPECT_NEAR(ratio, reduce_fp32 ? 2 : 1,
                1e-6);  // one unit: gathered once and reduced once a step
    fsdp.restore();
    EXPECT_EQ(specimen.record.parameters()[0].tensor.scalar_type(), at::kFloat);
  }
}

TEST(Fsdp, AMeanInFp16ThatFitsDoesNotOverflowOnTheWay) {
  torch::nn::Linear linear(4, 4);
  const ModuleRecord record(linear.ptr());
  Fsdp fsdp(record, FsdpOptions().mixed_precision({.reduce_dtype = at::kHalf}), world());
  fsdp.before_forward({});
  // fp16 ends at 65504; each rank's gradient is below, and the sum of two above.
  (linear(at::ones({1, 4})).sum() * 60000.0).backward();
  fsdp.after_backward();
  for (const at::Tensor& leaf : leaves_of(fsdp)) {
    EXPECT_TRUE(at::allclose(leaf.grad(), at::full_like(leaf, 60000.0), 1e-3, 0)) << leaf.grad();
  }
  fsdp.restore();
}

TEST(Fsdp, IgnoredModulesAreLeftAlone) {
  zoo::Specimen specimen = zoo::make("lstm", 3);
  Fsdp fsdp(specimen.record, FsdpOptions().ignored_modules({"head"}), world());
  for (const NamedTensor& parameter : specimen.record.parameters()) {
    EXPECT_EQ(intercept::is_tagged(parameter.tensor), !parameter.name.starts_with("head"))
        << parameter.name;
    if (!parameter.name.starts_with("head")) continue;
    EXPECT_TRUE(fsdp.optimizer_leaf(parameter.tensor).is_same(parameter.tensor));
  }
  fsdp.restore();
}

// What went over the whole world's groups in one step.

std::map<std::string, comm::Traffic::Count> traffic_of_a_step(zoo::Specimen& specimen, Fsdp& fsdp) {
  train_sharded(specimen, fsdp, 1, 1);  // records the trace
  fsdp.reset_statistics();
  world().reset_traffic();
  train_sharded(specimen, fsdp, 1, 1);
  return world().traffic().by_kind;
}

TEST(Fsdp, VolumesAreThoseOfTheStrategy) {
  if (world().size() == 1) GTEST_SKIP() << "one process sends nothing";
  using Kind = ShardingStrategy;
  struct Expected {
    Kind strategy;
    int gathers_of_a_block;
  };
  // Blocks that come and go are gathered twice, less the last of the forward; the root once.
  for (const auto& [strategy, gathers] :
       {Expected{Kind::full_shard, 2}, Expected{Kind::shard_grad_op, 1},
        Expected{Kind::shard_optimizer, 1}, Expected{Kind::no_shard, 0}}) {
    zoo::Specimen specimen = zoo::make("tied", 3);
    std::int64_t elements = 0;
    for (const at::Tensor& parameter : parameters_of(specimen.record))
      elements += parameter.numel();
    Fsdp fsdp(specimen.record, FsdpOptions().sharding_strategy(strategy).prefetch_units(0),
              world());
    const auto units = fsdp.num_units();
    auto traffic = traffic_of_a_step(specimen, fsdp);
    const FsdpStatistics statistics = fsdp.statistics();
    // The strategy's own count is what was sent, and without the padding the exact volume.
    if (gathers == 0) {
      EXPECT_EQ(traffic["all_gather"].calls, 0);
      EXPECT_EQ(traffic["reduce_scatter"].calls, 0);
      fsdp.restore();
      continue;
    }
    EXPECT_EQ(traffic["all_gather"].bytes, statistics.gathered_bytes);
    EXPECT_EQ(traffic["reduce_scatter"].bytes, statistics.reduced_bytes);
    EXPECT_EQ(traffic["reduce_scatter"].calls, units);
    EXPECT_EQ(statistics.reduced_parameter_bytes, 8 * elements);
    const std::int64_t kept = gathers == 2 ? 2 : 0;  // the root, and the last block
    EXPECT_EQ(traffic["all_gather"].calls, gathers * units - kept);
    const std::int64_t block = (elements - 23 * 16 - 9 * 16) / 4;
    const std::int64_t volume =
        gathers == 2 ? 2 * elements - block - (elements - 4 * block) : elements;
    EXPECT_EQ(statistics.gathered_parameter_bytes, 8 * volume);
    fsdp.restore();
  }
  // Data parallelism: one all-reduce of all gradients, which on the wire is two volumes.
  zoo::Specimen specimen = zoo::make("tied", 3);
  std::int64_t elements = 0;
  for (const at::Tensor& parameter : parameters_of(specimen.record)) elements += parameter.numel();
  Ddp ddp(specimen.record, world(), DdpOptions());
  world().reset_traffic();
  ddp.before_forward({});
  const at::Tensor output = specimen.forward(specimen.input(2));
  ddp.after_forward({}, {output});
  zoo::loss_of(output).backward();
  ddp.after_backward();
  EXPECT_EQ(world().traffic().by_kind["all_reduce"].bytes, 8 * elements);
}

TEST(Fsdp, ReshardingOverASmallerGroupGathersThere) {
  zoo::Specimen plain = zoo::make("tied", 3);
  zoo::Specimen specimen = zoo::make("tied", 3);
  const int ranks = world().size();
  if (ranks == 3) {
    EXPECT_THROW(Fsdp(specimen.record, FsdpOptions().reshard_after_forward(2), world()),
                 ShardingError);
    return;
  }
  Fsdp fsdp(specimen.record, FsdpOptions().reshard_after_forward(2).prefetch_units(0), world());
  expect_equal(train_sharded(specimen, fsdp, 5, kInTurns), train_plain(plain, 5, kInTurns), 1e-9);
  if (ranks == 4) {
    fsdp.reset_statistics();
    train_sharded(specimen, fsdp, 1, 1);
    // In backward blocks come from their neighbours: those bytes are not gathered from all.
    const FsdpStatistics statistics = fsdp.statistics();
    EXPECT_EQ(statistics.gathers, 2 * fsdp.num_units() - 2);
    EXPECT_EQ(statistics.gathered_parameter_bytes, statistics.reduced_parameter_bytes);
    train_plain(plain, 1, 1);
  }
  fsdp.restore();
  expect_equal(specimen.record, plain.record, 1e-9);
}

TEST(Fsdp, PrefetchAfterTheGradientsOfAUnit) {
  zoo::Specimen plain = zoo::make("tied", 3);
  zoo::Specimen specimen = zoo::make("tied", 3);
  Fsdp fsdp(specimen.record, FsdpOptions().backward_prefetch(BackwardPrefetch::backward_post),
            world());
  expect_equal(train_sharded(specimen, fsdp, 4, 1), train_plain(plain, 4, 1), 1e-9);
  fsdp.reset_statistics();
  train_sharded(specimen, fsdp, 1, 1);
  // Only the first block of the backward has nobody before it.
  EXPECT_GE(fsdp.statistics().prefetched, fsdp.statistics().gathers - 1);
  fsdp.restore();
}

// Blocks of which a rank may leave a part out.

TEST(Fsdp, StateDictsOfEveryTypeComeBack) {
  for (const StateDictType type :
       {StateDictType::full, StateDictType::sharded, StateDictType::local}) {
    zoo::Specimen specimen = zoo::make("tied", 3);
    zoo::Specimen plain = zoo::make("tied", 3);
    Fsdp fsdp(specimen.record, FsdpOptions(), world());
    train_sharded(specimen, fsdp, 2, 1);
    train_plain(plain, 2, 1);
    const auto options = StateDictOptions().type(type).offload_to_cpu(true);
    const auto state = fsdp.state_dict(options);
    if (type == StateDictType::full) {
      Strategy whole(plain.record);
      const auto expected = whole.state_dict();
      ASSERT_EQ(state.size(), expected.size()) << "a tied tensor has each of its names";
      for (std::size_t i = 0; i < state.size(); ++i) {
        EXPECT_EQ(state[i].name, expected[i].name);
        EXPECT_TRUE(at::allclose(state[i].tensor, expected[i].tensor, 0, 1e-9)) << state[i].name;
      }
      const bool first = world().rank() == 0;
      EXPECT_EQ(fsdp.state_dict(StateDictOptions().rank0_only(true)).empty(), !first);
    }
    train_sharded(specimen, fsdp, 3, 1);
    fsdp.load_state_dict(state, options);
    // The values count from the very next forward on.
    fsdp.before_forward({.grad_enabled = true, .sync = true});
    torch::manual_seed(5);
    const at::Tensor input = specimen.input(2);
    torch::manual_seed(6);
    const at::Tensor output = specimen.forward(input);
    torch::manual_seed(6);
    EXPECT_TRUE(at::allclose(output, plain.forward(input), 0, 1e-9));
    zoo::loss_of(output).backward();
    fsdp.before_zero_grad(leaves_of(fsdp));

    auto wrong = state;
    wrong.front().name = "nobody";
    EXPECT_THROW(fsdp.load_state_dict(wrong, options), CheckpointError);
    wrong = state;
    wrong.front().tensor = at::ones({1, 2, 3});
    EXPECT_THROW(fsdp.load_state_dict(wrong, options, /*strict=*/false), CheckpointError);
    fsdp.restore();
    expect_equal(specimen.record, plain.record, 1e-9);
  }
}

}  // namespace
}  // namespace accelerate::parallel
