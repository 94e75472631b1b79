// Units that come and go under modules that know nothing of it, in one process: their parameters
// lie in a home copy when they are not in memory.

#include <intercept/home.hpp>
#include <intercept/storage_holds.hpp>
#include <support/zoo.hpp>

#include <accelerate/base/error.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <atomic>
#include <set>

namespace accelerate::intercept {
namespace {

// Parameters of two dtypes or devices do not occur here; every module with parameters of its own
// becomes a unit.
std::vector<UnitPlan> units_by_module(const ModuleRecord& record, Stay root = Stay::while_used) {
  std::vector<UnitPlan> plans;
  std::set<const void*> taken;
  const auto walk = [&](const auto& self, const ModuleNode& node) -> void {
    UnitPlan plan{
        node.name.empty() ? "root" : node.name, {}, node.name.empty() ? root : Stay::while_used};
    for (const NamedTensor& parameter : node.parameters) {
      if (!parameter.tensor.defined() || parameter.tensor.numel() == 0) continue;
      if (taken.insert(parameter.tensor.unsafeGetTensorImpl()).second)
        plan.parameters.push_back(parameter);
    }
    if (!plan.parameters.empty()) plans.push_back(std::move(plan));
    for (const ModuleNode& child : node.children) self(self, child);
  };
  walk(walk, record.root());
  return plans;
}

struct Sharded {
  Sharded(const ModuleRecord& record, EngineOptions options = {}, Stay root = Stay::while_used)
      : engine(units_by_module(record, root), options, home,
               [this](const Unit& unit, at::Tensor flat) { home.adopt(unit, std::move(flat)); }) {}
  Home home;
  Engine engine;
};

std::vector<at::Tensor> parameters_of(const ModuleRecord& record) {
  std::vector<at::Tensor> all;
  for (const NamedTensor& parameter : record.parameters()) all.push_back(parameter.tensor);
  return all;
}

// Trains a while, in one pass a step where there is an engine, and returns the losses.
std::vector<double> train(zoo::Specimen& specimen, Engine* engine, int steps) {
  torch::optim::AdamW adam(parameters_of(specimen.record), torch::optim::AdamWOptions(1e-2));
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    torch::manual_seed(100 + step);
    const at::Tensor input = specimen.input(4);
    if (engine) engine->begin_pass(Engine::Pass::training);
    const at::Tensor loss = zoo::loss_of(specimen.forward(input));
    loss.backward();
    if (engine) engine->end_pass();
    adam.step();
    adam.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

class Zoo : public ::testing::TestWithParam<std::string> {};

TEST_P(Zoo, TrainsAsIfNothingWere) {
  zoo::Specimen plain = zoo::make(GetParam(), 3);
  const std::vector<double> expected = train(plain, nullptr, 5);
  for (const int parts : {1, 3}) {
    for (const int prefetch : {0, 1, 2}) {
      SCOPED_TRACE(testing::Message() << "parts " << parts << " prefetch " << prefetch);
      zoo::Specimen specimen = zoo::make(GetParam(), 3);
      Sharded sharded(specimen.record,
                      {.parts = parts, .prefetch = prefetch, .prefetch_in_backward = prefetch},
                      parts == 1 ? Stay::through_pass : Stay::while_used);
      sharded.home.delay_up_to_microseconds = 50;
      const std::vector<double> losses = train(specimen, &sharded.engine, 5);
      for (std::size_t i = 0; i < losses.size(); ++i)
        EXPECT_NEAR(losses[i], expected[i], 1e-12) << "step " << i;
      sharded.engine.check_tagged();
      sharded.engine.restore();
      const auto reference = parameters_of(plain.record);
      const auto trained = parameters_of(specimen.record);
      for (std::size_t i = 0; i < reference.size(); ++i) {
        EXPECT_FALSE(is_tagged(trained[i]));
        EXPECT_EQ(trained[i].strides(), reference[i].strides());
        EXPECT_TRUE(at::allclose(trained[i], reference[i], 0, 1e-12))
            << plain.record.parameters()[i].name;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modules, Zoo, ::testing::ValuesIn(zoo::names()),
                         [](const auto& info) { return info.param; });

TEST(Engine, FromTheSecondStepOnUnitsArePrefetchedAndBroughtTwice) {
  zoo::Specimen specimen = zoo::make("tied", 1);
  Sharded sharded(specimen.record, {}, Stay::through_pass);
  const auto step = [&] {
    sharded.engine.begin_pass(Engine::Pass::training);
    zoo::loss_of(specimen.forward(specimen.input(2))).backward();
    sharded.engine.end_pass();
  };
  step();
  sharded.engine.reset_statistics();
  step();
  const EngineStatistics statistics = sharded.engine.statistics();
  const auto units = static_cast<std::int64_t>(sharded.engine.units().size());
  EXPECT_GE(units, 10);
  EXPECT_EQ(statistics.prefetched, statistics.brought);
  EXPECT_LE(statistics.brought, 2 * units);
  EXPECT_GE(statistics.brought, 2 * units - 8);
}

TEST(Engine, AtMostTheWindowIsInMemory) {
  zoo::Specimen specimen = zoo::make("tied", 1);
  Sharded sharded(specimen.record, {.prefetch = 1});
  std::int64_t largest = 0;
  std::int64_t all = 0;
  for (const auto& unit : sharded.engine.units()) {
    largest = std::max(largest, unit->storage().bytes());
    all += unit->storage().bytes();
  }
  train(specimen, &sharded.engine, 3);
  EXPECT_LE(sharded.engine.statistics().peak_resident_bytes, 2 * largest);
  EXPECT_LT(2 * largest, all);
  sharded.engine.begin_pass(Engine::Pass::inference);  // lets go what the optimizer touched last
  sharded.engine.end_pass();
  for (const auto& unit : sharded.engine.units())
    EXPECT_FALSE(unit->storage().contents().defined()) << unit->name();
}

TEST(Engine, ALimitIsKeptAndOneThatCannotBeIsRefused) {
  zoo::Specimen specimen = zoo::make("tied", 1);
  std::int64_t largest = 0;
  {
    Sharded probe(specimen.record);
    for (const auto& unit : probe.engine.units())
      largest = std::max(largest, unit->storage().bytes());
    probe.engine.restore();
  }
  {
    Sharded sharded(specimen.record,
                    {.prefetch = 4, .prefetch_in_backward = 4, .resident_limit = largest});
    train(specimen, &sharded.engine, 3);
    EXPECT_LE(sharded.engine.statistics().peak_resident_bytes, largest);
    sharded.engine.restore();
  }
  try {
    Sharded refused(specimen.record, {.resident_limit = largest - 1});
    FAIL();
  } catch (const ShardingError& error) {
    EXPECT_NE(std::string(error.what()).find("split the module into smaller units"),
              std::string::npos);
  }
  EXPECT_FALSE(is_tagged(specimen.record.parameters().front().tensor))
      << "a refusal must leave the module as it was";
}

TEST(Engine, AForeachOverAllUnitsHoldsThemAll) {
  zoo::Specimen specimen = zoo::make("tied", 1);
  const auto parameters = parameters_of(specimen.record);
  const auto expected = at::_foreach_norm(parameters);
  Sharded sharded(specimen.record);
  const auto norms = at::_foreach_norm(parameters);
  for (std::size_t i = 0; i < norms.size(); ++i) EXPECT_TRUE(at::equal(norms[i], expected[i]));
  int present = 0;
  for (const auto& unit : sharded.engine.units()) present += unit->storage().contents().defined();
  EXPECT_EQ(present, 1) << "only the last one touched stays after the operator";
}

TEST(Engine, AParameterReadOutsideAForwardIsWhole) {
  zoo::Specimen specimen = zoo::make("odd", 1);
  const double expected = specimen.record.parameters()[2].tensor.sum().item<double>();
  Sharded sharded(specimen.record);
  EXPECT_EQ(specimen.record.parameters()[2].tensor.sum().item<double>(), expected);
}

TEST(Engine, FullParametersAreOrdinaryAndTheirChangesAreKept) {
  zoo::Specimen specimen = zoo::make("gru", 1);
  const at::Tensor weight = specimen.record.parameters()[0].tensor;
  const at::Tensor before = weight.detach().clone();
  Sharded sharded(specimen.record, {.compute_dtype = at::kFloat});
  EXPECT_EQ(weight.scalar_type(), at::kFloat);
  {
    const auto full = sharded.engine.full_parameters(/*write_back=*/false);
    EXPECT_EQ(weight.scalar_type(), at::kDouble);
    EXPECT_FALSE(is_tagged(weight));
    EXPECT_TRUE(at::equal(weight, before));
    at::NoGradGuard no_grad;
    weight.data_ptr<double>()[0] = 17;  // not kept
  }
  {
    const auto full = sharded.engine.full_parameters(/*write_back=*/true);
    EXPECT_TRUE(at::equal(weight, before));
    weight.data_ptr<double>()[0] = 18;
  }
  EXPECT_TRUE(is_tagged(weight));
  EXPECT_EQ(weight.flatten()[0].item<double>(), 18);
  sharded.engine.restore();
  EXPECT_EQ(weight.data_ptr<double>()[0], 18);
  EXPECT_TRUE(at::equal(weight.flatten().slice(0, 1), before.flatten().slice(0, 1)));
}

TEST(Engine, ChangedParametersBetweenForwardAndBackwardRaise) {
  zoo::Specimen specimen = zoo::make("lstm", 1);
  Sharded sharded(specimen.record);
  const at::Tensor loss = zoo::loss_of(specimen.forward(specimen.input(2)));
  sharded.engine.refresh();
  EXPECT_ANY_THROW(loss.backward());
}

TEST(Engine, AnExceptionInForwardLeavesItUsable) {
  zoo::Specimen plain = zoo::make("tied", 1);
  zoo::Specimen specimen = zoo::make("tied", 1);
  Sharded sharded(specimen.record);
  train(specimen, &sharded.engine, 2);
  train(plain, nullptr, 2);
  sharded.engine.begin_pass(Engine::Pass::training);
  EXPECT_ANY_THROW(specimen.forward(at::full({2, 8}, 99, at::kLong)));  // no such token
  sharded.home.fail_at = 4;
  EXPECT_THROW(specimen.forward(specimen.input(2)),
               std::runtime_error);  // a unit that does not arrive
  EXPECT_EQ(train(specimen, &sharded.engine, 2).size(), 2u);
  train(plain, nullptr, 2);
  torch::manual_seed(0);
  const at::Tensor input = plain.input(2);
  plain.record.train(false);
  specimen.record.train(false);
  EXPECT_TRUE(at::allclose(plain.forward(input), specimen.forward(input), 0, 1e-12));
}

TEST(Engine, MisuseIsNamed) {
  zoo::Specimen specimen = zoo::make("lstm", 1);
  {
    Sharded sharded(specimen.record);
    EXPECT_THROW(Sharded again(specimen.record), ShardingError);
    const at::Tensor weight = specimen.record.parameters()[0].tensor;
    at::NoGradGuard no_grad;
    at::Tensor(weight).set_data(weight.to(at::kFloat));  // what module->to(kFloat) does
    EXPECT_THROW(sharded.engine.check_tagged(), StateError);
  }
  EXPECT_THROW(specimen.forward(specimen.input(2)), std::exception)
      << "the strategy is gone and nothing was restored";
}

TEST(Engine, ACopyOfTheModuleIsAModuleOfItsOwn) {
  zoo::Specimen specimen = zoo::make("attention", 1);
  Sharded sharded(specimen.record);
  for (const NamedTensor& parameter : specimen.record.parameters()) {
    const at::Tensor copy = parameter.tensor.detach().clone();  // as torch::nn::Module::clone does
    EXPECT_FALSE(is_tagged(copy));
    EXPECT_TRUE(at::equal(copy, parameter.tensor));
  }
}

TEST(Engine, SeveralThreadsAtOnce) {
  zoo::Specimen specimen = zoo::make("tied", 1);
  specimen.record.train(false);
  torch::manual_seed(0);
  const at::Tensor input = specimen.input(3);
  const at::Tensor expected = [&] {
    at::NoGradGuard no_grad;
    return specimen.forward(input);
  }();
  Sharded sharded(specimen.record);
  sharded.home.delay_up_to_microseconds = 20;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      at::NoGradGuard no_grad;
      for (int i = 0; i < 20; ++i) wrong += !at::equal(specimen.forward(input), expected);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Engine, AnOperatorThatStillRunsKeepsNothingStale) {
  for (const Stay stay : {Stay::while_used, Stay::always}) {
    zoo::Specimen specimen = zoo::make("odd", 1);
    Home home;
    auto plans = units_by_module(specimen.record);
    for (UnitPlan& plan : plans) plan.stay = stay;
    Engine engine(plans, {}, home,
                  [&](const Unit& unit, at::Tensor flat) { home.adopt(unit, std::move(flat)); });
    const at::Tensor weight = specimen.record.parameters()[0].tensor;
    {
      StorageHolds running;  // as an operator on another thread has
      running.add(weight);
      const void* const address = weight.const_data_ptr();
      for (auto& [index, flat] : home.flats) flat.fill_(2);
      engine.refresh();
      EXPECT_EQ(weight.sum().item<double>(), 2.0 * static_cast<double>(weight.numel()));
      EXPECT_EQ(weight.const_data_ptr(), address) << "it reads there";
    }
    for (auto& [index, flat] : home.flats) flat.fill_(3);
    engine.refresh();
    EXPECT_EQ(weight.sum().item<double>(), 3.0 * static_cast<double>(weight.numel()));
    engine.restore();
  }
}

TEST(Engine, AChangeOfOneUnitLeavesTheOthersAlone) {
  zoo::Specimen specimen = zoo::make("lstm", 1);
  Sharded sharded(specimen.record);
  const auto versions = [&] {
    std::vector<std::int64_t> all;
    for (const NamedTensor& parameter : specimen.record.parameters())
      all.push_back(static_cast<std::int64_t>(parameter.tensor._version()));
    return all;
  };
  const auto before = versions();
  const Unit& unit = *sharded.engine.units().front();
  std::vector<bool> changed(unit.parameters().size(), false);
  changed.back() = true;
  sharded.engine.refresh(unit, changed);
  const auto after = versions();
  for (std::size_t i = 0; i < after.size(); ++i) {
    const bool is_it =
        specimen.record.parameters()[i].tensor.is_same(unit.parameters().back().parameter);
    EXPECT_EQ(after[i] - before[i], is_it ? 1 : 0) << specimen.record.parameters()[i].name;
  }
}

TEST(Engine, DataOfTheSameKindIsTaken) {
  zoo::Specimen specimen = zoo::make("lstm", 1);
  Sharded sharded(specimen.record);
  const auto parameters = parameters_of(specimen.record);
  const at::Tensor values = torch::nn::utils::parameters_to_vector(parameters) * 2;
  torch::nn::utils::vector_to_parameters(values, parameters);
  sharded.engine.check_tagged();
  for (const at::Tensor& parameter : parameters) EXPECT_TRUE(is_tagged(parameter));
  EXPECT_TRUE(at::equal(torch::nn::utils::parameters_to_vector(parameters), values));
  sharded.engine.restore();
  EXPECT_TRUE(at::equal(torch::nn::utils::parameters_to_vector(parameters), values));
}

TEST(Engine, MemoryThatStaysIsFilledAgainAfterAChange) {
  zoo::Specimen specimen = zoo::make("odd", 1);
  Home home;
  auto plans = units_by_module(specimen.record);
  for (UnitPlan& plan : plans) plan.stay = Stay::always;
  Engine engine(plans, {}, home,
                [&](const Unit& unit, at::Tensor flat) { home.adopt(unit, std::move(flat)); });
  const at::Tensor weight = specimen.record.parameters()[0].tensor;
  weight.sum();
  const void* address = weight.const_data_ptr();
  for (auto& [index, flat] : home.flats) flat.fill_(2);
  engine.refresh();
  EXPECT_ANY_THROW(weight.const_data_ptr()) << "out of date";
  EXPECT_EQ(weight.sum().item<double>(), 2.0 * static_cast<double>(weight.numel()));
  EXPECT_EQ(weight.const_data_ptr(), address);
}

// Trains on leaves that lie at home, as an optimizer of sharded parameters does.
void train_leaves(zoo::Specimen& specimen, Engine& engine, Leaves& leaves, Gradients& gradients,
                  int steps, int micro_batches) {
  torch::optim::AdamW adam(leaves.all(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < steps; ++step) {
    torch::manual_seed(100 + step);
    for (int micro = 0; micro < micro_batches; ++micro) {
      engine.begin_pass(Engine::Pass::training);
      gradients.set_reduce(micro + 1 == micro_batches);
      zoo::loss_of(specimen.forward(specimen.input(4))).backward();
      EXPECT_FALSE(engine.in_pass(Engine::Pass::training)) << "the end of backward ends the pass";
    }
    adam.step();
    adam.zero_grad();
    engine.refresh();
  }
}

TEST_P(Zoo, GradientsReachTheLeaves) {
  for (const int micro_batches : {1, 3}) {
    zoo::Specimen plain = zoo::make(GetParam(), 3);
    {
      torch::optim::AdamW adam(parameters_of(plain.record), torch::optim::AdamWOptions(1e-2));
      for (int step = 0; step < 5; ++step) {
        torch::manual_seed(100 + step);
        for (int micro = 0; micro < micro_batches; ++micro)
          zoo::loss_of(plain.forward(plain.input(4))).backward();
        adam.step();
        adam.zero_grad();
      }
    }
    for (const int parts : {1, 3}) {
      SCOPED_TRACE(testing::Message() << "parts " << parts << " micro-batches " << micro_batches);
      zoo::Specimen specimen = zoo::make(GetParam(), 3);
      Sharded sharded(specimen.record, {.parts = parts}, Stay::through_pass);
      Leaves leaves(sharded.engine, sharded.home);
      Gradients gradients(sharded.engine, leaves);
      train_leaves(specimen, sharded.engine, leaves, gradients, 5, micro_batches);
      EXPECT_EQ(leaves.finished, 5);
      for (const NamedTensor& parameter : specimen.record.parameters()) {
        const at::Tensor& gradient = parameter.tensor.grad();  // or what stands for it
        EXPECT_TRUE(!gradient.defined() || parameter.tensor.numel() == 0 || is_tagged(gradient))
            << parameter.name;
      }
      sharded.engine.restore();
      const auto reference = parameters_of(plain.record);
      const auto trained = parameters_of(specimen.record);
      for (std::size_t i = 0; i < reference.size(); ++i) {
        EXPECT_TRUE(at::allclose(trained[i], reference[i], 0, 1e-12))
            << plain.record.parameters()[i].name;
      }
    }
  }
}

TEST(Gradients, ReduceInTheReverseOfTheForwardWhateverIsUnused) {
  zoo::Specimen specimen = zoo::make("odd", 1);
  Sharded sharded(specimen.record);
  Leaves leaves(sharded.engine, sharded.home);
  Gradients gradients(sharded.engine, leaves);
  train_leaves(specimen, sharded.engine, leaves, gradients, 1, 1);
  std::vector<std::string> names;
  for (const int index : leaves.order)
    names.push_back(sharded.engine.units()[static_cast<std::size_t>(index)]->name());
  EXPECT_EQ(names,
            (std::vector<std::string>{"unused", "heads.b", "heads.a", "lists.1.1", "lists.1.0",
                                      "shared", "lists.0.1", "root", "lists.0.0"}))
      << "the frozen unit is not reduced at all";
}

TEST(Gradients, GraphsOfGradientsRaiseOrWork) {
  zoo::Specimen specimen = zoo::make("lstm", 1);
  zoo::Specimen plain = zoo::make("lstm", 1);
  Sharded sharded(specimen.record);
  Leaves leaves(sharded.engine, sharded.home);
  Gradients gradients(sharded.engine, leaves);
  const at::Tensor input = plain.input(2);
  EXPECT_THROW(zoo::loss_of(specimen.forward(input))
                   .backward({}, /*retain_graph=*/true, /*create_graph=*/true),
               ShardingError);
  gradients.settle();
  const auto penalty = [&](zoo::Specimen& of) {
    const at::Tensor x = input.detach().clone().requires_grad_(true);
    const at::Tensor g =
        torch::autograd::grad({zoo::loss_of(of.forward(x))}, {x}, {}, true, true)[0];
    g.pow(2).sum().backward();
  };
  penalty(plain);
  penalty(specimen);
  const auto all = leaves.all();
  for (std::size_t i = 0; i < all.size(); ++i) {
    const at::Tensor& expected = plain.record.parameters()[i].tensor.grad();
    ASSERT_EQ(expected.defined(), all[i].grad().defined()) << plain.record.parameters()[i].name;
    if (!expected.defined()) continue;
    EXPECT_TRUE(at::allclose(expected, all[i].grad(), 0, 1e-12))
        << plain.record.parameters()[i].name;
  }
}

TEST(Gradients, ABackwardThatFailsLeavesNothingBehind) {
  zoo::Specimen specimen = zoo::make("tied", 1);
  zoo::Specimen plain = zoo::make("tied", 1);
  Sharded sharded(specimen.record);
  Leaves leaves(sharded.engine, sharded.home);
  Gradients gradients(sharded.engine, leaves);
  torch::manual_seed(1);
  const at::Tensor input = plain.input(2);
  plain.record.train(false);
  specimen.record.train(false);
  {
    const at::Tensor loss = zoo::loss_of(specimen.forward(input));
    sharded.home.fail_at = 5;
    EXPECT_THROW(loss.backward(), std::runtime_error);
  }
  zoo::loss_of(specimen.forward(input)).backward();
  zoo::loss_of(plain.forward(input)).backward();
  const auto full = sharded.engine.full_parameters(false);
  EXPECT_EQ(leaves.finished, 1);
  EXPECT_TRUE(at::allclose(leaves.leaves[0][0].grad(), plain.record.parameters()[0].tensor.grad(),
                           0, 1e-12));
}

TEST(Gradients, ReachAcrossAScopeOfFullParameters) {
  zoo::Specimen specimen = zoo::make("lstm", 1);
  zoo::Specimen plain = zoo::make("lstm", 1);
  Sharded sharded(specimen.record);
  Leaves leaves(sharded.engine, sharded.home);
  Gradients gradients(sharded.engine, leaves);
  const at::Tensor input = plain.input(2);
  const at::Tensor loss = zoo::loss_of(specimen.forward(input));
  { const auto full = sharded.engine.full_parameters(/*write_back=*/true); }
  loss.backward();
  zoo::loss_of(plain.forward(input)).backward();
  EXPECT_TRUE(at::allclose(leaves.leaves[0][0].grad(), plain.record.parameters()[0].tensor.grad(),
                           0, 1e-12));
  const at::Tensor other = zoo::loss_of(specimen.forward(input));
  const auto full = sharded.engine.full_parameters(false);
  EXPECT_THROW(other.backward(), StateError);
}

TEST(Gradients, ThatComeByAGraphOfBeforeAreNamed) {
  zoo::Specimen specimen = zoo::make("lstm", 1);
  const at::Tensor loss = zoo::loss_of(specimen.forward(specimen.input(2)));
  Sharded sharded(specimen.record);
  Leaves leaves(sharded.engine, sharded.home);
  Gradients gradients(sharded.engine, leaves);
  try {
    loss.backward();
    FAIL() << "its gradients were taken for those of the shards";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("made before prepare()"), std::string::npos);
  }
}

TEST(Gradients, AUsersOwnHookIsStillCalled) {
  struct Count final : torch::autograd::PostAccumulateGradHook {
    int* calls;
    void operator()(const at::Tensor&) override { ++*calls; }
  };
  zoo::Specimen specimen = zoo::make("lstm", 1);
  int calls = 0;
  auto hook = std::make_unique<Count>();
  hook->calls = &calls;
  const at::Tensor weight = specimen.record.parameters()[0].tensor;
  torch::autograd::impl::set_post_acc_grad_hooks(weight, std::move(hook));
  {
    Sharded sharded(specimen.record);
    Leaves leaves(sharded.engine, sharded.home);
    Gradients gradients(sharded.engine, leaves);
    zoo::loss_of(specimen.forward(specimen.input(2))).backward();
    EXPECT_EQ(calls, 1);
    sharded.engine.restore();
  }
  zoo::loss_of(specimen.forward(specimen.input(2))).backward();
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(weight.grad().defined());
}

}  // namespace
}  // namespace accelerate::intercept
