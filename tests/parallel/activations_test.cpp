// Checkpointing and offloading of activations: the same losses and gradients, bit for bit, and less
// memory. Memory is counted by the allocator, never timed.
#include "support/distributed.hpp"
#include "support/zoo.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/core/random.hpp>
#include <accelerate/parallel/activation_checkpointing.hpp>
#include <accelerate/parallel/activation_offload.hpp>
#include <accelerate/parallel/ddp.hpp>
#include <accelerate/parallel/fsdp.hpp>
#include <accelerate/precision/autocast.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <atomic>

namespace accelerate {
namespace {

using accelerate::testing::world;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// What an attention-less transformer block is: dropout, an odd output, several saved tensors.
struct BlockImpl : torch::nn::Cloneable<BlockImpl> {
  explicit BlockImpl(std::int64_t own_width) : width(own_width) { reset(); }
  void reset() override {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
    drop = register_module("drop", torch::nn::Dropout(0.3));
  }
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return x + drop(down(torch::gelu(up(norm(x)))));
  }
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear up = nullptr, down = nullptr;
  torch::nn::Dropout drop = nullptr;
  std::int64_t width;
  int calls = 0;
};
TORCH_MODULE(Block);

// A user's model whose forward calls its blocks itself, under checkpoint or not.
struct Tower : torch::nn::Module {
  explicit Tower(std::int64_t depth = 3, std::int64_t width = 16) {
    torch::manual_seed(3);
    for (std::int64_t i = 0; i < depth; ++i) blocks->push_back(Block(width));
    register_module("blocks", blocks);
    head = register_module("head", torch::nn::Linear(width, 4));
    to(at::kDouble);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) {
      auto own = std::static_pointer_cast<BlockImpl>(block);
      x = checkpointed ? checkpoint(options, &BlockImpl::forward, own, x) : own->forward(x);
    }
    return head(x);
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head = nullptr;
  bool checkpointed = false;
  ActivationCheckpointOptions options;
};

struct Pass {
  std::vector<at::Tensor> tensors;  // loss, gradients, and what the generator gives afterwards
};

Pass run(Tower& tower, const at::Tensor& input) {
  torch::manual_seed(11);
  for (auto& parameter : tower.parameters()) parameter.mutable_grad().reset();
  const at::Tensor x = input.detach().clone().requires_grad_();
  const at::Tensor loss = zoo::loss_of(tower.forward(x));
  loss.backward();
  Pass pass{{loss.detach(), x.grad(), torch::rand(3)}};
  for (const auto& parameter : tower.parameters()) pass.tensors.push_back(parameter.grad());
  return pass;
}

void expect_same_bits(const Pass& a, const Pass& b) {
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (std::size_t i = 0; i < a.tensors.size(); ++i)
    EXPECT_TRUE(at::equal(a.tensors[i], b.tensors[i])) << "tensor " << i;
}

const at::Tensor& batch() {
  static const at::Tensor input = [] {
    torch::manual_seed(5);
    return torch::randn({6, 16}, at::kDouble);
  }();
  return input;
}

TEST(Checkpoint, ChangesNoBitWithDropoutAndCallsTwice) {
  Tower tower;
  const Pass plain = run(tower, batch());
  tower.checkpointed = true;
  for (const bool early_stop : {true, false}) {
    tower.options.early_stop(early_stop);
    for (auto& block : *tower.blocks) std::static_pointer_cast<BlockImpl>(block)->calls = 0;
    expect_same_bits(plain, run(tower, batch()));
    EXPECT_EQ(std::static_pointer_cast<BlockImpl>(tower.blocks[0])->calls, 2);
  }
  // Without the random state other activations are dropped: the test above can fail.
  tower.options.preserve_rng_state(false);
  const Pass other = run(tower, batch());
  EXPECT_TRUE(at::equal(other.tensors[0], plain.tensors[0]));
  EXPECT_FALSE(at::equal(other.tensors[1], plain.tensors[1]));
}

TEST(Checkpoint, NestsTakesAnyInputsAndGivesAnyOutput) {
  torch::manual_seed(1);
  const at::Tensor weight = torch::randn({8, 8}, at::kDouble).requires_grad_();
  const at::Tensor x = torch::randn({4, 8}, at::kDouble).requires_grad_();
  const at::Tensor no_gradient = torch::randn({4, 8}, at::kDouble);
  int inner_calls = 0;
  const auto inner = [&](const at::Tensor& a, double factor) {
    ++inner_calls;
    return torch::dropout(a.matmul(weight), 0.4, true).sigmoid() * factor;
  };
  const auto outer = [&](const std::pair<at::Tensor, at::Tensor>& pair, const std::string& how,
                         bool nested) {
    const at::Tensor first = nested ? checkpoint(inner, pair.first, 2.0) : inner(pair.first, 2.0);
    const at::Tensor second = how == "add" ? (first + pair.second).tanh() : first;
    return std::make_tuple(second, first.exp(), 7);
  };
  std::vector<std::vector<at::Tensor>> results;
  for (const int kind : {0, 1, 2}) {
    torch::manual_seed(2);
    inner_calls = 0;
    const auto pair = std::make_pair(x, no_gradient);
    const auto [a, b, seven] = kind == 0 ? outer(pair, "add", false)
                                         : checkpoint(outer, pair, std::string("add"), kind == 2);
    EXPECT_EQ(seven, 7);
    const at::Tensor loss = a.sum() + b.square().sum();
    auto gradients = torch::autograd::grad({loss}, {x, weight}, {}, /*retain_graph=*/true);
    auto again = torch::autograd::grad({loss}, {x, weight}, {}, /*retain_graph=*/false);
    EXPECT_TRUE(at::equal(gradients[0], again[0])) << "the second backward over a retained graph";
    gradients.push_back(loss);
    gradients.push_back(torch::rand(2));
    results.push_back(gradients);
    EXPECT_THROW(torch::autograd::grad({loss}, {x}), c10::Error);  // the graph is gone
    EXPECT_GE(inner_calls, 1 + 2 * kind);
  }
  for (const auto& each : results) {
    for (std::size_t i = 0; i < each.size(); ++i)
      EXPECT_TRUE(at::equal(each[i], results[0][i])) << i;
  }
}

TEST(Checkpoint, GradientsOfGradientsAndGradientsInside) {
  torch::manual_seed(1);
  const at::Tensor x = torch::randn({5}, at::kDouble).requires_grad_();
  const at::Tensor w = torch::randn({5}, at::kDouble).requires_grad_();
  const auto function = [&](const at::Tensor& a) { return ((a * w).sin() * a.exp()).sum(); };
  const auto second_order = [&](bool checkpointed) {
    const at::Tensor y = checkpointed ? checkpoint(function, x) : function(x);
    const auto first = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].square().sum()}, {x, w});
  };
  const auto expected = second_order(false);
  const auto found = second_order(true);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i]));

  // A gradient taken inside the function: a force, in the language of physics.
  const auto force = [&](const at::Tensor& a) {
    return torch::autograd::grad({function(a)}, {a}, {}, true, true)[0].square().sum();
  };
  for (const bool early_stop : {true, false}) {
    const at::Tensor y = checkpoint(ActivationCheckpointOptions().early_stop(early_stop), force, x);
    EXPECT_TRUE(
        at::equal(torch::autograd::grad({y}, {w})[0], torch::autograd::grad({force(x)}, {w})[0]));
  }
}

TEST(Checkpoint, AutocastIsThatOfForward) {
  torch::manual_seed(1);
  torch::nn::Linear linear(16, 16);
  const at::Tensor x = torch::randn({4, 16}).requires_grad_();
  std::vector<at::Tensor> gradients;
  for (const bool checkpointed : {false, true}) {
    at::Tensor y;
    {
      const AutocastScope scope(at::kCPU, at::kBFloat16);
      const auto function = [&](const at::Tensor& a) { return torch::gelu(linear(linear(a))); };
      y = checkpointed ? checkpoint(function, x) : function(x);
    }
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    gradients.push_back(torch::autograd::grad({y.to(at::kFloat).square().sum()}, {x})[0]);
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  }
  EXPECT_TRUE(at::equal(gradients[0], gradients[1]));
}

TEST(Checkpoint, OfTorchScript) {
  constexpr const char* kSource = R"(
    def f(x, w):
        for i in range(3):
            x = torch.sigmoid(torch.matmul(x, w))
        return x
  )";
  torch::manual_seed(1);
  const at::Tensor x = torch::randn({4, 4}, at::kDouble).requires_grad_();
  const at::Tensor w = torch::randn({4, 4}, at::kDouble).requires_grad_();
  at::Tensor expected = x;
  for (int i = 0; i < 3; ++i) expected = torch::sigmoid(torch::matmul(expected, w));
  expected = torch::autograd::grad({expected.sum()}, {w})[0];
  // The interpreter profiles first and optimizes later. Then it adds in another order, and saves
  // other tensors of the same shapes, which must not happen between forward and backward.
  const auto compiled = torch::jit::compile(kSource);
  for (int i = 0; i < 4; ++i) {
    const auto function = [&](const at::Tensor& a) {
      return compiled->run_method("f", a, w).toTensor();
    };
    const auto found = torch::autograd::grad({checkpoint(function, x).sum()}, {w})[0];
    EXPECT_TRUE(at::allclose(expected, found, 1e-12, 1e-12)) << i;
    function(x);
    EXPECT_TRUE(torch::jit::getGraphExecutorOptimize());
  }
  // Where the program makes it happen, by other calls in between, it is noticed or it is right.
  for (int calls = 1; calls < 4; ++calls) {
    const auto fresh = torch::jit::compile(kSource);
    const auto function = [&](const at::Tensor& a) {
      return fresh->run_method("f", a, w).toTensor();
    };
    const at::Tensor y = checkpoint(function, x);
    for (int i = 0; i < calls; ++i) function(x);
    try {
      const auto found = torch::autograd::grad({y.sum()}, {w})[0];
      EXPECT_TRUE(at::allclose(expected, found, 1e-12, 1e-12)) << calls;
    } catch (const StateError& error) {
      EXPECT_THAT(error.what(), HasSubstr("did something else"));
    }
  }
}

TEST(Checkpoint, WhatDiffersTheSecondTimeIsNamed) {
  const at::Tensor x = torch::ones({3, 4}).requires_grad_();
  const auto message = [&](const auto& function, bool early_stop = true) -> std::string {
    const at::Tensor y =
        checkpoint(ActivationCheckpointOptions().early_stop(early_stop), function, x);
    try {
      y.sum().backward();
    } catch (const StateError& error) {
      return error.what();
    }
    return "nothing was thrown";
  };
  int call = 0;
  EXPECT_THAT(
      message([&](const at::Tensor& a) { return a.narrow(0, 0, 3 - call++).exp(); }),
      HasSubstr("was Float [3, 4] on cpu from torch::autograd::generated::ExpBackward0 and is now "
                "Float [2, 4] on cpu"));
  call = 0;
  EXPECT_THAT(
      message([&](const at::Tensor& a) { return call++ == 0 ? a.exp() : a.tanh(); }),
      HasSubstr("is now Float [3, 4] on cpu from torch::autograd::generated::TanhBackward0"));
  call = 0;
  EXPECT_THAT(message([&](const at::Tensor& a) { return call++ == 0 ? a.exp() : a + 1; }),
              HasSubstr("it saved 0 tensors, and 1 the first time"));
  call = 0;
  EXPECT_THAT(message([&](const at::Tensor& a) { return call++ == 0 ? a.exp() : a.exp().exp(); },
                      /*early_stop=*/false),
              HasSubstr("more than the 1 tensors"));
  // Errors of the function itself arrive as they are, and leave the random state alone.
  call = 0;
  const at::Tensor y = checkpoint(
      [&](const at::Tensor& a) {
        if (call++ > 0) throw DataError("no more data");
        return a.exp();
      },
      x);
  torch::manual_seed(4);
  const RngState before = RngState::capture();
  EXPECT_THROW(y.sum().backward(), DataError);
  EXPECT_EQ(RngState::capture(), before);
}

TEST(Checkpoint, WritesInBetweenAreSeen) {
  torch::nn::Linear linear(4, 4);
  at::Tensor x = torch::ones({3, 4}).requires_grad_();
  const at::Tensor y = checkpoint([&](const at::Tensor& a) { return linear(linear(a)).exp(); }, x);
  {
    const torch::NoGradGuard no_grad;
    linear->weight.add_(1);
  }
  EXPECT_THROW(y.sum().backward(), StateError);
  at::Tensor input = x * 1;
  const at::Tensor z = checkpoint([&](const at::Tensor& a) { return linear(a).exp(); }, input);
  input.add_(1);
  EXPECT_THROW(z.sum().backward(), c10::Error);
}

TEST(Checkpoint, WithoutGradientsItIsACall) {
  int calls = 0;
  const auto function = [&](const at::Tensor& a) {
    ++calls;
    return a.exp();
  };
  const torch::NoGradGuard no_grad;
  EXPECT_FALSE(checkpoint(function, torch::ones(2).requires_grad_()).requires_grad());
  EXPECT_EQ(calls, 1);
}

TEST(Checkpoint, NeedsLessMemory) {
  tracking::count_cpu_tensors();
  const at::Tensor input = torch::randn({256, 64}, at::kDouble);
  const auto peak = [&](Tower& tower, auto&&... scope) {
    (void)sizeof...(scope);
    torch::manual_seed(1);
    tracking::reset_peak();
    const std::int64_t before = tracking::tensor_bytes().current;
    const at::Tensor loss = zoo::loss_of(tower.forward(input));
    const std::int64_t kept = tracking::tensor_bytes().current - before;
    loss.backward();
    const std::int64_t most = tracking::tensor_bytes().peak - before;
    tower.zero_grad();
    return std::make_pair(kept, most);
  };
  Tower tower(8, 64);
  peak(tower);  // what is allocated once is there now
  const auto [plain_kept, plain_peak] = peak(tower);
  tower.checkpointed = true;
  const auto [kept, most] = peak(tower);
  // Of a block's some 14 tensors of the input's size one is kept. A peak is a block's and all
  // inputs.
  EXPECT_LT(kept * 8, plain_kept);
  EXPECT_LT(most * 2, plain_peak);
  // All is released with the graph.
  tower.zero_grad(/*set_to_none=*/true);
  const std::int64_t before = tracking::tensor_bytes().current;
  { const at::Tensor unused = tower.forward(input); }
  EXPECT_EQ(tracking::tensor_bytes().current, before);
}

TEST(Offload, ChangesNoBitAndComesBack) {
  Tower tower;
  const Pass plain = run(tower, batch());
  for (const bool checkpointed : {false, true}) {
    tower.checkpointed = checkpointed;
    const OffloadActivations offload(ActivationOffloadOptions().min_bytes(256).host_tensors(true));
    expect_same_bits(plain, run(tower, batch()));
    const auto statistics = offload.statistics();
    EXPECT_GE(statistics.tensors, 3);
    EXPECT_GE(statistics.brought_back, statistics.tensors);
    EXPECT_EQ(statistics.resident_bytes, 0);
    EXPECT_GT(statistics.peak_bytes, 0);
    EXPECT_LE(statistics.peak_bytes, statistics.bytes);
    // Under checkpoint: the inputs of two blocks and of the head; the first's is the caller's leaf.
    EXPECT_EQ(statistics.tensors < 8, checkpointed);
    EXPECT_GT(statistics.kept, 0);  // weights among them
  }
  // By default what is in host memory stays there.
  const OffloadActivations idle(ActivationOffloadOptions().min_bytes(0));
  run(tower, batch());
  EXPECT_EQ(idle.statistics().tensors, 0);
  EXPECT_THROW(OffloadActivations(ActivationOffloadOptions().min_bytes(-1)), ConfigError);
}

TEST(Offload, KeepsViewsResultsAndVersions) {
  const at::Tensor x = torch::randn({8, 12}, at::kDouble).requires_grad_();
  const auto function = [&](const at::Tensor& a) {
    const auto parts = a.chunk(3, 1);  // views that are not dense
    const at::Tensor wide = parts[0].sum(1, true).expand({8, 4});
    return (parts[0] * parts[1].sigmoid() * wide).exp().mul(parts[2].t().contiguous().t()).sum();
  };
  const auto expected = torch::autograd::grad({function(x)}, {x})[0];
  {
    const OffloadActivations offload(ActivationOffloadOptions().min_bytes(0).host_tensors(true));
    const at::Tensor y = function(x);
    EXPECT_TRUE(at::equal(torch::autograd::grad({y}, {x}, {}, true)[0], expected));
    EXPECT_TRUE(at::equal(torch::autograd::grad({y}, {x})[0], expected));
  }
  // A small tensor is kept as it is: who writes to it is found out.
  at::Tensor kept = x * 1;
  at::Tensor y;
  {
    const OffloadActivations offload;
    y = kept.exp() * kept;
  }
  kept.add_(1);
  EXPECT_THROW(y.sum().backward(), StateError);
}

TEST(Offload, OnAGpuCopiesRunOnAStreamOfTheirOwn) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "needs a GPU";
  Tower tower;
  tower.to(at::kCUDA);
  const at::Tensor input = batch().to(at::kCUDA);
  const Pass plain = run(tower, input);
  for (int i = 0; i < 20; ++i) {
    const OffloadActivations offload(ActivationOffloadOptions().min_bytes(0));
    expect_same_bits(plain, run(tower, input));
    EXPECT_GT(offload.statistics().tensors, 10);
  }
}

// ---- by policy ----

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl() {
    torch::manual_seed(9);
    body = register_module(
        "body", torch::nn::Sequential({{"in", torch::nn::AnyModule(torch::nn::Linear(16, 16))},
                                       {"relu", torch::nn::AnyModule(torch::nn::ReLU())},
                                       {"one", torch::nn::AnyModule(Block(16))},
                                       {"two", torch::nn::AnyModule(Block(16))},
                                       {"three", torch::nn::AnyModule(Block(16))}}));
    list->push_back(Block(16));
    register_module("list", list);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    return std::static_pointer_cast<BlockImpl>(list[0])->forward(body->forward(x));
  }
  torch::nn::Sequential body = nullptr;
  torch::nn::ModuleList list;
};
TORCH_MODULE(Classifier);

std::vector<std::string> names_of(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& each : module.named_parameters()) names.push_back(each.key());
  for (const auto& each : module.named_modules())
    names.push_back(each.key() + each.value()->name());
  return names;
}

TEST(Policy, RunsChildrenOfASequentialUnderCheckpoint) {
  const auto step = [](Classifier& net) {
    torch::manual_seed(7);
    net->zero_grad();
    const at::Tensor loss = zoo::loss_of(net->forward(batch()));
    loss.backward();
    std::vector<at::Tensor> all{loss.detach(), torch::rand(2)};
    for (const auto& parameter : net->parameters()) all.push_back(parameter.grad().clone());
    return Pass{all};
  };
  Classifier net;
  const Pass plain = step(net);
  const auto names = names_of(*net);
  const auto two = std::static_pointer_cast<BlockImpl>(net->body->ptr(3));
  const auto one = std::static_pointer_cast<BlockImpl>(net->body->ptr(2));
  EXPECT_THAT(
      apply_activation_checkpointing(*net, ActivationCheckpointPolicy().names({"body.two"})),
      ElementsAre("body.two"));
  one->calls = two->calls = 0;
  expect_same_bits(plain, step(net));
  EXPECT_EQ(one->calls, 1);
  EXPECT_EQ(two->calls, 2);
  // By default all children that have parameters; one is so already.
  EXPECT_THAT(apply_activation_checkpointing(*net),
              ElementsAre("body.in", "body.one", "body.two", "body.three"));
  one->calls = two->calls = 0;
  expect_same_bits(plain, step(net));
  EXPECT_EQ(one->calls, 2);
  EXPECT_EQ(two->calls, 2);
  // Nothing else is different, and copies are checkpointed too.
  EXPECT_EQ(names_of(*net), names);
  EXPECT_EQ(net->body->ptr(3), two);
  EXPECT_EQ(net->body[2]->name(), one->name());
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(net->body->clone());
  const auto copied = std::static_pointer_cast<BlockImpl>(copy->ptr(2));
  ASSERT_NE(copied, one);
  copied->calls = 0;
  copy->forward(batch()).sum().backward();
  EXPECT_EQ(copied->calls, 2);
}

TEST(Policy, ChoosesByTypeAndEveryNth) {
  Classifier net;
  // The Block in the ModuleList is of the type too, and is called by the user's forward.
  try {
    apply_activation_checkpointing(*net, ActivationCheckpointPolicy().types({"BlockImpl"}));
    FAIL() << "an entry of a ModuleList was accepted";
  } catch (const UnsupportedError& error) {
    EXPECT_THAT(error.what(), HasSubstr("The module 'list.0' cannot"));
    EXPECT_THAT(error.what(), HasSubstr("an entry of torch::nn::ModuleListImpl 'list'"));
  }
  const auto one = std::static_pointer_cast<BlockImpl>(net->body->ptr(2));
  one->calls = 0;
  net->forward(batch()).sum().backward();
  EXPECT_EQ(one->calls, 1) << "refused, and changed all the same";
  EXPECT_THAT(apply_activation_checkpointing(
                  *net->body, ActivationCheckpointPolicy().types({"BlockImpl"}).every_n(2)),
              ElementsAre("one", "three"));
  EXPECT_THROW(
      apply_activation_checkpointing(*net, ActivationCheckpointPolicy().types({"Nothing"})),
      ConfigError);
  EXPECT_THROW(
      apply_activation_checkpointing(*net, ActivationCheckpointPolicy().names({"body.up"})),
      ConfigError);
  EXPECT_THROW(apply_activation_checkpointing(*net, ActivationCheckpointPolicy().every_n(0)),
               ConfigError);
  EXPECT_THROW(apply_activation_checkpointing(*net->list), ConfigError);
  EXPECT_THROW(apply_activation_checkpointing(*one, ActivationCheckpointPolicy().names({"up"})),
               UnsupportedError);
}

// ---- with what prepares a module ----

at::Tensor by_rank(const at::Tensor& all) {
  return all.chunk(world().size())[static_cast<std::size_t>(world().rank())];
}

// Leaves after three steps of SGD, and the units gathered in the last.
template <class Forward>
std::vector<at::Tensor> train_sharded(const std::shared_ptr<torch::nn::Module>& module,
                                      Forward forward, parallel::FsdpOptions options,
                                      parallel::FsdpStatistics* statistics = nullptr) {
  parallel::Fsdp fsdp{ModuleRecord(module), options, world()};
  std::vector<at::Tensor> leaves, result;
  for (const auto& shard : fsdp.shards()) leaves.push_back(shard.tensor);
  for (int i = 0; i < 3; ++i) {
    fsdp.reset_statistics();
    torch::manual_seed(i);
    fsdp.before_forward({.grad_enabled = true, .sync = true});
    const at::Tensor output = forward(by_rank(torch::randn({12, 16}, at::kDouble)));
    fsdp.after_forward({.grad_enabled = true, .sync = true}, {output});
    const at::Tensor loss = zoo::loss_of(output);
    result.push_back(loss.detach().clone());
    loss.backward();
    if (statistics != nullptr) *statistics = fsdp.statistics();
    const torch::NoGradGuard no_grad;
    for (at::Tensor& leaf : leaves) {
      if (leaf.grad().defined()) leaf.sub_(leaf.grad(), 0.1);
      leaf.mutable_grad().reset();
    }
    fsdp.after_step(leaves);
  }
  for (const at::Tensor& leaf : leaves) result.push_back(leaf.detach().clone());
  return result;
}

TEST(Checkpoint, OfShardedParametersGathersAgainAndChangesNoBit) {
  for (const auto sharding :
       {parallel::ShardingStrategy::full_shard, parallel::ShardingStrategy::shard_grad_op,
        parallel::ShardingStrategy::shard_optimizer}) {
    const auto options =
        parallel::FsdpOptions().sharding_strategy(sharding).unit_types({"BlockImpl"});
    std::vector<std::vector<at::Tensor>> results;
    parallel::FsdpStatistics statistics;
    for (const bool checkpointed : {false, true}) {
      auto tower = std::make_shared<Tower>();
      tower->checkpointed = checkpointed;
      results.push_back(train_sharded(
          tower, [&](const at::Tensor& x) { return tower->forward(x); }, options, &statistics));
    }
    EXPECT_TRUE(at::equal(torch::cat([&] {
                            std::vector<at::Tensor> flat;
                            for (const auto& each : results[0]) flat.push_back(each.flatten());
                            return flat;
                          }()),
                          torch::cat([&] {
                            std::vector<at::Tensor> flat;
                            for (const auto& each : results[1]) flat.push_back(each.flatten());
                            return flat;
                          }())));
    // Three blocks and the root. The block that ends forward begins backward, and is kept.
    if (sharding == parallel::ShardingStrategy::full_shard) {
      EXPECT_EQ(statistics.gathers, 4 + 2);
      EXPECT_GE(statistics.prefetched, 5);
    }
  }
}

TEST(Policy, AndShardingInEitherOrder) {
  std::vector<std::vector<at::Tensor>> results;
  for (const int when : {0, 1, 2}) {
    Classifier net;
    if (when == 1) apply_activation_checkpointing(*net);
    results.push_back(train_sharded(
        net.ptr(),
        [&](const at::Tensor& x) {
          if (when == 2) apply_activation_checkpointing(*net);
          return net->forward(x);
        },
        parallel::FsdpOptions().unit_types({"BlockImpl"})));
  }
  for (const auto& each : results) {
    for (std::size_t i = 0; i < each.size(); ++i)
      EXPECT_TRUE(at::equal(each[i], results[0][i])) << i;
  }
}

TEST(Offload, WithShardedParameters) {
  std::vector<std::vector<at::Tensor>> results;
  for (const bool offloaded : {false, true}) {
    auto tower = std::make_shared<Tower>();
    std::int64_t moved = 0;
    results.push_back(train_sharded(
        tower,
        [&](const at::Tensor& x) {
          const OffloadActivations offload(
              ActivationOffloadOptions().min_bytes(offloaded ? 0 : 1 << 30).host_tensors(true));
          auto output = tower->forward(x);
          moved += offload.statistics().tensors;
          return output;
        },
        parallel::FsdpOptions().unit_types({"BlockImpl"})));
    EXPECT_EQ(moved > 0, offloaded);
  }
  for (std::size_t i = 0; i < results[0].size(); ++i)
    EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i;
}

}  // namespace
}  // namespace accelerate
