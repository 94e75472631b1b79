// Sharded strategies through the facade, on one rank and on several.

#include "support/distributed.hpp"
#include "support/message_of.hpp"

#include "accelerator/make_strategy.hpp"
#include "accelerator/resolve.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/accelerator/prepared_script_module.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/parallel/deepspeed.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

namespace accelerate {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using testing::world;

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(6, 16))};
  torch::nn::ModuleList blocks{register_module("blocks", torch::nn::ModuleList())};
  NetImpl() {
    for (int i = 0; i < 3; ++i)
      blocks->push_back(torch::nn::Sequential(torch::nn::Linear(16, 16), torch::nn::Tanh()));
    to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = first(x);
    for (const auto& block : *blocks) x = x + block->as<torch::nn::Sequential>()->forward(x);
    return x;
  }
};
TORCH_MODULE(Net);

torch::Tensor batch_of(int step, int rank) {
  torch::manual_seed(100 * step + rank);
  return torch::randn({4, 6}, torch::kDouble);
}

// Three steps on all ranks' batches by this rank alone.
Net trained_alone() {
  torch::manual_seed(1);
  Net net;
  optim::FusedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    torch::Tensor loss = torch::zeros({}, torch::kDouble);
    for (int rank = 0; rank < world().size(); ++rank)
      loss = loss + net(batch_of(step, rank)).square().mean() / world().size();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5);
    adam.step();
    adam.zero_grad();
  }
  return net;
}

TEST(Sharding, TrainsAsOneProcessDoesWhateverTheOrderOfArguments) {
  const Net expected = trained_alone();
  for (const StrategyKind kind :
       {StrategyKind::fsdp, StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    EXPECT_EQ(accelerator.strategy(), kind);
    torch::manual_seed(1);
    Net net;
    optim::FusedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-2));
    // The optimizer comes first, and must own the shards all the same.
    auto [optimizer, model] = accelerator.prepare(adam, net);
    EXPECT_EQ(model.strategy().name(), to_string(kind));
    for (int step = 0; step < 3; ++step) {
      const torch::Tensor output = model(batch_of(step, world().rank()));
      // Clearing gradients between forward and backward is a habit of many.
      if (step == 1) optimizer.zero_grad();
      accelerator.backward(output.square().mean());
      accelerator.clip_grad_norm_(model, 0.5);
      optimizer.step();
      if (step != 0) optimizer.zero_grad();
    }
    const auto state = model.state_dict();
    for (const auto& [name, tensor] : state) {
      EXPECT_TRUE(torch::allclose(tensor, expected->named_parameters()[name], 0, 1e-12)) << name;
    }
    {
      const auto whole = model.summon_full_params();
      EXPECT_TRUE(torch::allclose(net->first->weight, expected->first->weight, 0, 1e-12));
    }
    model.restore();
    EXPECT_TRUE(torch::allclose(net->first->weight, expected->first->weight, 0, 1e-12));
    accelerator.free_memory();
  }
}

TEST(Sharding, FirstStepKeepsItsGradientsUnlessCleared) {
  // Gradients that were not cleared add up in the shards, as they do in one process.
  Accelerator accelerator(AcceleratorOptions().strategy(StrategyKind::fsdp));
  torch::manual_seed(1);
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.0);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  std::vector<double> norms;
  for (int pass = 0; pass < 2; ++pass) {
    accelerator.backward(model(batch_of(0, 0)).square().mean());
    norms.push_back(accelerator.clip_grad_norm_(model, 1e9).item<double>());
    optimizer.step();
  }
  EXPECT_NEAR(norms[1], 2 * norms[0], 1e-12);
  model.restore();
  accelerator.free_memory();
}

TEST(Sharding, WhatCannotBeIsNamed) {
  Accelerator accelerator(AcceleratorOptions().fsdp(FsdpOptions()));
  EXPECT_EQ(accelerator.strategy(), StrategyKind::fsdp) << "giving FsdpOptions asks for it";
  Net net, other;
  torch::optim::SGD foreign(other->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, foreign);
  EXPECT_THAT(message_of([&] { accelerator.backward(model(batch_of(0, 0)).sum()); }),
              HasSubstr("was made of other parameters"));
  EXPECT_THAT(message_of([&] { accelerator.clip_grad_norm_(model.parameters(), 1.0); }),
              HasSubstr("Give it the prepared module"));
  if (world().size() > 1) {
    EXPECT_THAT(message_of([&] { accelerator.join_uneven_inputs(model, [] {}); }),
                HasSubstr("even_batches"));
  }
  net->to(torch::kFloat);
  EXPECT_THAT(message_of([&] { model(batch_of(0, 0)); }), HasSubstr("moved or cast"));
  accelerator.free_memory();
}

TEST(Sharding, AnOptimizerThatHasSteppedIsTooLate) {
  Accelerator accelerator(AcceleratorOptions().strategy(StrategyKind::zero1));
  Net net;
  torch::optim::AdamW adam(net->parameters(), 0.1);
  net(batch_of(0, 0)).sum().backward();
  adam.step();
  adam.zero_grad();
  EXPECT_THAT(message_of([&] { accelerator.prepare(net, adam); }),
              HasSubstr("before the first step"));
  accelerator.free_memory();
}

TEST(Sharding, TorchScriptUnderTheFacade) {
  Accelerator accelerator(AcceleratorOptions().strategy(StrategyKind::fsdp));
  torch::manual_seed(2);
  torch::jit::Module script("net");
  script.register_parameter("weight", torch::randn({5, 6}, torch::kDouble).requires_grad_(), false);
  script.register_parameter("bias", torch::randn({5}, torch::kDouble).requires_grad_(), false);
  script.define(
      "def forward(self, x):\n  return torch.tanh(torch.linear(x, self.weight, self.bias))\n");
  std::vector<torch::Tensor> parameters;
  std::vector<torch::Tensor> plain;
  for (const auto& parameter : script.parameters()) {
    parameters.push_back(parameter);
    plain.push_back(parameter.detach().clone().requires_grad_());
  }
  torch::optim::SGD sgd(parameters, 0.5);
  auto [model, optimizer] = accelerator.prepare(script, sgd);
  const torch::Tensor x = batch_of(0, 0);
  for (int step = 0; step < 3; ++step) {
    accelerator.backward(model(x).toTensor().square().mean());
    optimizer.step();
    optimizer.zero_grad();
    torch::linear(x, plain[0], plain[1]).tanh().square().mean().backward();
    for (auto& parameter : plain) {
      parameter.data().sub_(0.5 * parameter.grad());
      parameter.mutable_grad().reset();
    }
  }
  model.restore();
  for (std::size_t i = 0; i < plain.size(); ++i)
    EXPECT_TRUE(torch::allclose(parameters[i], plain[i], 0, 1e-12));
  accelerator.free_memory();
}

TEST(Sharding, OutputsAreCastAsThePolicySays) {
  MixedPrecisionPolicy policy;
  policy.output_dtype = at::kBFloat16;
  Accelerator accelerator(AcceleratorOptions()
                              .mixed_precision(MixedPrecision::bf16)
                              .fsdp(FsdpOptions().mixed_precision(policy)));
  torch::nn::Linear net(4, 4);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  EXPECT_EQ(net->weight.scalar_type(), at::kBFloat16) << "units are gathered in the compute dtype";
  const torch::Tensor output = model(torch::ones({2, 4}));
  EXPECT_EQ(output.scalar_type(), at::kBFloat16);
  accelerator.backward(output.to(at::kFloat).sum());
  EXPECT_EQ(optimizer.parameters().front().scalar_type(), at::kFloat) << "shards stay in fp32";
  optimizer.step();
  optimizer.zero_grad();
  model.restore();
  EXPECT_EQ(net->weight.scalar_type(), at::kFloat);
  accelerator.free_memory();
}

TEST(Choose, TakesTheLeastCommunicationThatFits) {
  constexpr std::int64_t kGiB = std::int64_t{1} << 30;
  const auto choice = [&](std::int64_t parameters, std::int64_t memory, int processes) {
    return choose_strategy({parameters * kGiB, parameters * kGiB, memory * kGiB, processes});
  };
  EXPECT_EQ(choice(1, 80, 1).kind, StrategyKind::single);
  EXPECT_EQ(choice(1, 80, 8).kind, StrategyKind::ddp);     // 4 of 48 GiB
  EXPECT_EQ(choice(13, 80, 8).kind, StrategyKind::zero2);  // 52 whole, 13 + 39/8
  EXPECT_EQ(choice(60, 80, 8).kind, StrategyKind::fsdp);   // 240 whole, 60 + 180/8, 30
  EXPECT_THAT(choice(1, 80, 8).why, HasSubstr("ddp"));
  EXPECT_THAT(choice(400, 80, 8).why, HasSubstr("tight"));
}

TEST(Resolve, ReadsWhatPythonsLauncherSaysOfSharding) {
  const auto resolved = resolve(AcceleratorOptions(),
                                Environment{{"ACCELERATE_USE_FSDP", "true"},
                                            {"FSDP_SHARDING_STRATEGY", "4"},
                                            {"FSDP_RESHARD_AFTER_FORWARD", "2"},
                                            {"FSDP_BACKWARD_PREFETCH", "BACKWARD_POST"},
                                            {"FSDP_OFFLOAD_PARAMS", "true"},
                                            {"FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP"},
                                            {"FSDP_TRANSFORMER_CLS_TO_WRAP", "Block,Head"},
                                            {"FSDP_MIN_NUM_PARAMS", "10"}},
                                Json{{"mixed_precision", "bf16"}});
  EXPECT_EQ(resolved.strategy, StrategyKind::fsdp);
  EXPECT_EQ(resolved.fsdp.sharding_strategy(), ShardingStrategy::hybrid_shard);
  EXPECT_EQ(resolved.fsdp.reshard_after_forward().group_size, 2);
  EXPECT_EQ(resolved.fsdp.backward_prefetch(), BackwardPrefetch::backward_post);
  EXPECT_TRUE(resolved.fsdp.cpu_offload());
  EXPECT_EQ(resolved.fsdp.unit_types(), (std::vector<std::string>{"Block", "Head"}));
  EXPECT_EQ(resolved.fsdp.min_num_params(), 0) << "the policy is by type";
  EXPECT_EQ(resolved.fsdp.mixed_precision().param_dtype, at::kBFloat16);
  EXPECT_EQ(resolved.fsdp.mixed_precision().reduce_dtype, at::kFloat);
}

TEST(Resolve, ReadsShardingFromTheFileAndNamesWhatIsWrongInIt) {
  const auto resolved =
      resolve(AcceleratorOptions(), Environment(),
              Json{{"strategy", "zero2"},
                   {"fsdp", {{"resident_limit", "2GiB"}, {"unit_names", {"a", "b.c"}}}}});
  EXPECT_EQ(resolved.strategy, StrategyKind::zero2);
  EXPECT_EQ(resolved.fsdp.sharding_strategy(), ShardingStrategy::shard_optimizer);
  EXPECT_EQ(resolved.fsdp.resident_limit(), std::int64_t{2} << 30);
  EXPECT_EQ(resolved.fsdp.unit_names(), (std::vector<std::string>{"a", "b.c"}));
  const auto with = [](Json fsdp, const char* strategy = "fsdp") {
    return message_of([&] {
      resolve(AcceleratorOptions(), Environment(), Json{{"strategy", strategy}, {"fsdp", fsdp}});
    });
  };
  EXPECT_THAT(with({{"sharding_stategy", "full_shard"}}), HasSubstr("fsdp.sharding_stategy"));
  EXPECT_THAT(with({{"sharding_strategy", "half"}}), HasSubstr("hybrid_shard"));
  EXPECT_THAT(with({{"resident_limit", "much"}}), HasSubstr("2GiB"));
  EXPECT_THAT(with({{"cpu_offload", "perhaps"}}), HasSubstr("perhaps"));
  EXPECT_THAT(with(Json::object(), "ddp"), HasSubstr("no use for"));
  EXPECT_THAT(message_of([] {
                resolve(
                    AcceleratorOptions(),
                    Environment{{"ACCELERATE_USE_FSDP", "1"}, {"FSDP_AUTO_WRAP_POLICY", "random"}},
                    Json::object());
              }),
              HasSubstr("size_based_wrap"));
  MixedPrecisionPolicy policy;
  policy.param_dtype = at::kHalf;
  EXPECT_THAT(message_of([&] {
                resolve(AcceleratorOptions().fsdp(FsdpOptions().mixed_precision(policy)),
                        Environment(), Json::object());
              }),
              HasSubstr("mixed_precision"));
}

TEST(DeepSpeed, ItsFileDecidesAndMustAgree) {
  const Json json = Json::parse(R"({
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
                          "stage3_max_live_parameters": 1e6, "stage3_prefetch_bucket_size": 0},
    "bf16": {"enabled": true}, "communication_data_type": "bf16",
    "gradient_accumulation_steps": 4, "gradient_clipping": 0.5,
    "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"})");
  parallel::DeepSpeedContext context;
  context.micro_batch_size = 8;
  context.gradient_accumulation_steps = 4;
  const auto config = parallel::DeepSpeedConfig::read(json, context);
  const auto resolved =
      resolve(AcceleratorOptions().deepspeed(config), Environment(), Json::object());
  EXPECT_EQ(resolved.strategy, StrategyKind::zero3);
  EXPECT_EQ(resolved.mixed_precision, MixedPrecision::bf16);
  EXPECT_EQ(resolved.gradient_accumulation.num_steps(), 4);
  EXPECT_TRUE(resolved.fsdp.cpu_offload());
  EXPECT_FALSE(resolved.fsdp.forward_prefetch());
  EXPECT_EQ(resolved.fsdp.resident_limit(), 2'000'000);
  EXPECT_EQ(resolved.fsdp.mixed_precision().reduce_dtype, at::kBFloat16);
  const auto with = [&](AcceleratorOptions options) {
    return message_of([&] { resolve(options.deepspeed(config), Environment(), Json::object()); });
  };
  EXPECT_THAT(with(AcceleratorOptions().strategy(StrategyKind::ddp)), HasSubstr("ZeRO stage 3"));
  EXPECT_THAT(with(AcceleratorOptions().mixed_precision(MixedPrecision::fp16)),
              HasSubstr("mixed precision bf16"));
  EXPECT_THAT(with(AcceleratorOptions().gradient_accumulation_steps(3)),
              HasSubstr("3 micro-batches"));
}

TEST(DeepSpeed, PythonsVariablesSayIt) {
  const auto resolved = resolve(AcceleratorOptions(),
                                Environment{{"ACCELERATE_USE_DEEPSPEED", "true"},
                                            {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "1"},
                                            {"ACCELERATE_GRADIENT_CLIPPING", "0.25"},
                                            {"ACCELERATE_MIXED_PRECISION", "bf16"}},
                                Json::object());
  EXPECT_EQ(resolved.strategy, StrategyKind::zero1);
  EXPECT_EQ(resolved.mixed_precision, MixedPrecision::bf16);
  EXPECT_EQ(resolved.deepspeed->gradient_clipping, 0.25);
  EXPECT_THAT(message_of([] {
                resolve(AcceleratorOptions(),
                        Environment{{"ACCELERATE_USE_DEEPSPEED", "true"},
                                    {"ACCELERATE_DEEPSPEED_ZERO_STAGE", "two"}},
                        Json::object());
              }),
              HasSubstr("ACCELERATE_DEEPSPEED_ZERO_STAGE"));
}

TEST(DeepSpeed, ClipsInTheOptimizersStep) {
  const Net expected = trained_alone();
  const auto config = parallel::DeepSpeedConfig::read(
      Json::parse(R"({"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5,
                      "train_micro_batch_size_per_gpu": 4})"),
      {.world_size = world().size()});
  Accelerator accelerator(AcceleratorOptions().deepspeed(config));
  torch::manual_seed(1);
  Net net;
  optim::FusedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-2));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  for (int step = 0; step < 3; ++step) {
    accelerator.backward(model(batch_of(step, world().rank())).square().mean());
    optimizer.step();
    optimizer.zero_grad();
  }
  model.restore();
  EXPECT_TRUE(torch::allclose(net->first->weight, expected->first->weight, 0, 1e-12));
  accelerator.free_memory();
}

TEST(DeepSpeed, StateOnDiskNeedsAnOptimizerThatCan) {
  const auto config = parallel::DeepSpeedConfig::read(
      Json::parse(R"({"zero_optimization": {"stage": 1, "offload_optimizer":
                       {"device": "nvme", "nvme_path": "/nowhere"}},
                      "train_micro_batch_size_per_gpu": 4})"),
      {.world_size = world().size()});
  Accelerator accelerator(AcceleratorOptions().deepspeed(config));
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  EXPECT_THAT(message_of([&] { accelerator.prepare(net, sgd); }), HasSubstr("OffloadedAdamW"));
  accelerator.free_memory();
}

}  // namespace
}  // namespace accelerate
