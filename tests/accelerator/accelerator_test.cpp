// The facade, on one rank and on several.

#include "support/distributed.hpp"
#include "support/message_of.hpp"

#include "accelerator/resolve.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/optim/fused.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>

namespace accelerate {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using testing::world;

/// y = weight * x, with x the sample's index.
struct ScaleImpl : torch::nn::Module {
  torch::Tensor weight = register_parameter("weight", torch::zeros({1}, torch::kDouble));
  torch::Tensor forward(const torch::Tensor& x) { return weight * x; }
  std::pair<torch::Tensor, int64_t> describe(const torch::Tensor& x) { return {weight * x, 3}; }
};
TORCH_MODULE(Scale);

struct Numbers : torch::data::datasets::Dataset<Numbers> {
  explicit Numbers(int64_t count) : count(count) {}
  torch::data::Example<> get(size_t i) override {
    return {torch::full({1}, static_cast<double>(i), torch::kDouble),
            torch::full({1}, static_cast<int64_t>(i))};
  }
  torch::optional<size_t> size() const override { return count; }
  int64_t count;
};

auto numbers(int64_t count, int64_t batch_size) {
  return data::loader(Numbers(count).map(torch::data::transforms::Stack<>()),
                      torch::data::DataLoaderOptions().batch_size(batch_size))
      .shuffle(false);
}

TEST(Prepare, TakesAnyOrderAndKeepsTypes) {
  Accelerator accelerator;
  Scale scale;
  torch::optim::SGD sgd(scale->parameters(), 0.1);
  auto schedule = optim::constant_schedule(sgd);
  auto [loader, scheduler, optimizer, model] =
      accelerator.prepare(numbers(8, 2), schedule, sgd, scale);
  static_assert(std::is_same_v<decltype(model), PreparedModule<ScaleImpl>>);
  static_assert(std::is_same_v<decltype(optimizer), PreparedOptimizer<torch::optim::SGD>>);
  static_assert(std::is_same_v<decltype(scheduler), PreparedScheduler<optim::LambdaLR>>);
  EXPECT_EQ(&model.module(), scale.get());
  EXPECT_EQ(&optimizer.optimizer(), &sgd);
  EXPECT_EQ(&scheduler.scheduler(), &schedule);
  for (auto& batch : loader) {
    accelerator.backward(model(batch.data).mean());
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();
  }
  EXPECT_NE(scale->weight.item<double>(), 0.0);
}

TEST(Prepare, OwnsWhatItIsGivenAndReferencesTheRest) {
  Accelerator accelerator;
  ScaleImpl plain;
  auto referenced = accelerator.prepare(plain);
  EXPECT_EQ(&referenced.module(), &plain);
  auto shared = std::make_shared<ScaleImpl>();
  auto from_pointer = accelerator.prepare(shared);
  EXPECT_EQ(from_pointer.unwrap(), shared);
  auto sgd = std::make_unique<torch::optim::SGD>(shared->parameters(), 0.1);
  auto optimizer = accelerator.prepare(std::move(sgd));
  from_pointer(torch::ones({2}, torch::kDouble));
  optimizer.zero_grad();
}

TEST(Prepare, IsIdempotent) {
  Accelerator accelerator;
  Scale scale;
  torch::optim::SGD sgd(scale->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(scale, sgd);
  EXPECT_EQ(accelerator.prepare(model).core(), model.core());
  EXPECT_EQ(accelerator.prepare(scale).core(), model.core());
  EXPECT_EQ(accelerator.prepare(sgd).core(), optimizer.core());
}

TEST(Prepare, OtherMethodsAndReturnTypes) {
  Accelerator accelerator;
  Scale scale;
  auto model = accelerator.prepare(scale);
  const auto [y, three] = model.call<&ScaleImpl::describe>(torch::ones({2}, torch::kDouble));
  EXPECT_EQ(y.size(0), 2);
  EXPECT_EQ(three, 3);
  EXPECT_EQ(model->forward(torch::ones({2}, torch::kDouble)).size(0), 2);
}

TEST(Prepare, SchedulerOfAnUnpreparedOptimizerIsAnError) {
  Accelerator accelerator;
  Scale scale;
  torch::optim::SGD sgd(scale->parameters(), 0.1);
  torch::optim::SGD other(scale->parameters(), 0.1);
  (void)accelerator.prepare(sgd);
  auto schedule = optim::constant_schedule(other);
  EXPECT_THAT(message_of([&] { (void)accelerator.prepare(schedule); }),
              HasSubstr("has not been prepared"));
}

TEST(Prepare, ModuleOnAnotherDeviceIsAnErrorWithoutPlacement) {
  Accelerator accelerator(AcceleratorOptions().device_placement(false));
  struct Elsewhere : torch::nn::Module {
    torch::Tensor weight = register_parameter("weight", torch::empty({1}, torch::kMeta));
    torch::Tensor forward(const torch::Tensor& x) { return weight * x; }
  } elsewhere;
  EXPECT_THAT(message_of([&] { (void)accelerator.prepare(elsewhere); }), HasSubstr("meta"));
}

TEST(Prepare, ADispatchedModuleIsRefusedUntilItsOffloadingEnds) {
  const io::TemporaryFolder folder;
  torch::manual_seed(1);  // the same on all ranks
  torch::nn::Linear net(3, 2);
  const torch::Tensor input = torch::ones({1, 3});
  const torch::Tensor expected = net->forward(input);
  for (const bool on_disk : {true, false}) {
    auto dispatched = on_disk ? disk_offload(net, folder.path()) : cpu_offload(net, torch::kCPU);
    Accelerator accelerator;
    for (const auto& prepare :
         {std::function<void()>([&] { (void)accelerator.prepare(net); }),
          std::function<void()>([&] { (void)accelerator.prepare_for_evaluation(net); })}) {
      const std::string message = message_of<StateError>(prepare);
      EXPECT_THAT(message, HasSubstr("weight"));
      EXPECT_THAT(message, HasSubstr("dispatched by a device map"));
      EXPECT_THAT(message, HasSubstr("remove_offload()"));
    }
    {
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(torch::equal(dispatched(input), expected));
    }
    dispatched.remove_offload();
    EXPECT_TRUE(torch::equal(accelerator.prepare(net)(input), expected));
  }
}

TEST(Backward, AccumulationNeedsThePreparedOptimizer) {
  Accelerator accelerator(AcceleratorOptions().gradient_accumulation_steps(2));
  Scale scale;
  auto model = accelerator.prepare(scale);
  auto scope = accelerator.accumulate(model);
  const auto loss = model(torch::ones({2}, torch::kDouble)).mean();
  EXPECT_THAT(message_of([&] { accelerator.backward(loss); }), HasSubstr("No prepared optimizer"));
}

TEST(Backward, RefusesWhatIsNoLoss) {
  Accelerator accelerator;
  EXPECT_THAT(message_of([&] { accelerator.backward(torch::ones({2}, torch::requires_grad())); }),
              HasSubstr("[2]"));
  EXPECT_THAT(message_of([&] { accelerator.backward(torch::ones({})); }),
              HasSubstr("does not require gradients"));
  EXPECT_THAT(message_of([&] { accelerator.backward(torch::Tensor()); }), HasSubstr("undefined"));
}

TEST(Backward, CountsMakeTheMeanOfAllTokens) {
  // Micro-batches of unequal sizes on every rank; the truth is one mean over everything.
  constexpr int64_t kSteps = 3;
  Accelerator accelerator(AcceleratorOptions().gradient_accumulation_steps(kSteps));
  Scale scale;
  torch::optim::SGD sgd(scale->parameters(), 1.0);
  auto [model, optimizer] = accelerator.prepare(scale, sgd);
  const auto tokens = [](int rank, int64_t micro) {
    return torch::arange(1, 2 + rank + 2 * micro, torch::kDouble);
  };
  double sum = 0;
  double count = 0;
  for (int rank = 0; rank < world().size(); ++rank) {
    for (int64_t micro = 0; micro < kSteps; ++micro) {
      sum += tokens(rank, micro).sum().item<double>();
      count += static_cast<double>(tokens(rank, micro).numel());
    }
  }
  for (int64_t micro = 0; micro < kSteps; ++micro) {
    auto scope = accelerator.accumulate(model);
    const auto x = tokens(world().rank(), micro);
    accelerator.backward(model(x).sum(), static_cast<double>(x.numel()));
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_NEAR(scale->weight.item<double>(), -sum / count, 1e-12);
}

TEST(Accumulate, StepsAtTheEndOfTheWindowAndOfTheLoader) {
  Accelerator accelerator(AcceleratorOptions().gradient_accumulation_steps(2));
  Scale scale;
  torch::optim::SGD sgd(scale->parameters(), 1.0);
  auto [model, optimizer, loader] = accelerator.prepare(scale, sgd, numbers(5 * world().size(), 1));
  std::vector<bool> synced;
  for (auto& batch : loader) {
    auto scope = accelerator.accumulate(model);
    accelerator.backward(model(batch.data).mean());
    synced.push_back(accelerator.sync_gradients());
    if (!accelerator.sync_gradients()) {
      EXPECT_THROW(accelerator.clip_grad_norm_(model, 1.0), StateError);
    }
    const double before = scale->weight.item<double>();
    optimizer.step();
    EXPECT_EQ(scale->weight.item<double>() != before, accelerator.sync_gradients());
    optimizer.zero_grad();
  }
  EXPECT_THAT(synced, ElementsAre(false, true, false, true, true));
  accelerator.verify_parameters(model);
}

TEST(Clip, LooseParametersGiveTheSameNorm) {
  Accelerator accelerator;
  torch::manual_seed(1);
  torch::nn::Linear linear(4, 4);
  auto model = accelerator.prepare(linear);
  accelerator.backward(model(torch::ones({2, 4})).square().sum());
  const auto norm = accelerator.clip_grad_norm_(model, std::numeric_limits<double>::infinity());
  EXPECT_FLOAT_EQ(accelerator.clip_grad_norm_(linear->parameters(), 0.5).item<float>(),
                  norm.item<float>());
  EXPECT_NEAR(model.strategy().grad_norm(2).item<double>(), 0.5, 1e-5);
}

TEST(Metrics, GatherLeavesRepeatedSamplesOut) {
  for (const bool even : {true, false}) {
    for (const int64_t count : {1, 5, 7, 8, 11}) {
      if (!even && count < 2 * world().size()) continue;
      Accelerator accelerator(
          AcceleratorOptions().dataloader(data::DataLoaderConfiguration().even_batches(even)));
      auto loader = accelerator.prepare(numbers(count, 2));
      std::vector<int64_t> seen;
      auto all = accelerator.collect_for_metrics<torch::Tensor>();
      for (auto& batch : loader) {
        all.add(batch.target);
        // With uneven batches a rank may have none in the last round: only whole rounds are
        // gathered.
        if (!even) continue;
        const auto [numbers, ids] =
            accelerator.gather_for_metrics(std::pair(batch.data, batch.target));
        EXPECT_EQ(numbers.size(0), ids.size(0));
        for (int64_t i = 0; i < ids.size(0); ++i) seen.push_back(ids[i].item<int64_t>());
      }
      std::vector<int64_t> expected(count);
      std::iota(expected.begin(), expected.end(), 0);
      if (even) {
        EXPECT_EQ(seen, expected);
      }
      const auto collected = all.gather();
      EXPECT_TRUE(torch::equal(collected.flatten(), torch::arange(count))) << collected;
    }
  }
}

TEST(Metrics, ALossCannotBeFreedOfRepeatedSamples) {
  if (world().size() == 1) GTEST_SKIP() << "one process repeats nothing";
  Accelerator accelerator;
  auto loader = accelerator.prepare(numbers(world().size() + 1, 1));
  int64_t batches = 0;
  for (auto& batch : loader) {
    if (++batches == 1) {
      EXPECT_NO_THROW(accelerator.gather_for_metrics(batch.data.mean()));
    } else {
      EXPECT_NO_THROW(accelerator.gather_for_metrics(batch.data));
    }
  }
  auto uneven = accelerator.prepare(numbers(2 * world().size() + 1, 2));
  for (auto& batch : uneven) {
    if (accelerator.gradient_state().end_of_dataloader()) {
      EXPECT_THROW(accelerator.gather_for_metrics(torch::ones({3})), DataError);
    }
    (void)batch;
  }
}

TEST(Split, IsContiguousAndPadsWithTheLastItem) {
  EXPECT_EQ(split_between(std::string("ABC"), 0, 2), "AB");
  EXPECT_EQ(split_between(std::string("ABC"), 1, 2), "C");
  EXPECT_EQ(split_between(std::string("ABC"), 1, 2, true), "CC");
  EXPECT_THAT(split_between(std::vector<int>{1, 2}, 0, 4, true), ElementsAre(1));
  for (int rank = 1; rank < 4; ++rank)
    EXPECT_THAT(split_between(std::vector<int>{1, 2}, rank, 4, true), ElementsAre(2));
  EXPECT_TRUE(split_between(std::vector<int>{1, 2}, 3, 4).empty());
  EXPECT_TRUE(split_between(std::vector<int>{}, 0, 2, true).empty());
  const auto rows = split_between(torch::arange(5), 1, 2, true);
  EXPECT_TRUE(torch::equal(rows, torch::tensor({3, 4, 4}))) << rows;
  const std::map<std::string, std::vector<int>> lists{{"a", {1, 2, 3}}, {"b", {4, 5, 6}}};
  EXPECT_THAT(split_between(lists, 1, 2).at("b"), ElementsAre(6));
  EXPECT_THROW(split_between(std::map<std::string, std::vector<int>>{{"a", {1}}, {"b", {}}}, 0, 2),
               DataError);
  EXPECT_THROW(split_between(torch::ones({}), 0, 2), DataError);
}

TEST(Processes, MainGoesFirstAndItsFailureReachesAll) {
  Accelerator accelerator;
  std::vector<int> order;
  const torch::Tensor first = torch::zeros({1});
  accelerator.main_process_first([&] { order.push_back(accelerator.process_index()); });
  EXPECT_THAT(order, ElementsAre(accelerator.process_index()));
  bool ran = false;
  const std::string message = message_of([&] {
    accelerator.main_process_first([&] {
      if (accelerator.is_main_process()) throw DataError("the file is not there");
      ran = true;
    });
  });
  EXPECT_THAT(message, HasSubstr("the file is not there"));
  EXPECT_FALSE(ran);
  int runs = 0;
  accelerator.on_main_process([&] { ++runs; });
  accelerator.on_last_process([&] { runs += 10; });
  EXPECT_EQ(runs,
            (accelerator.is_main_process() ? 1 : 0) + (accelerator.is_last_process() ? 10 : 0));
}

TEST(Processes, TriggerOfOneIsSeenByAllOnce) {
  Accelerator accelerator;
  EXPECT_FALSE(accelerator.check_trigger());
  if (accelerator.is_last_process()) accelerator.set_trigger();
  EXPECT_TRUE(accelerator.check_trigger());
  EXPECT_FALSE(accelerator.check_trigger());
}

TEST(Processes, ObjectsTravel) {
  Accelerator accelerator;
  const auto all = accelerator.gather_object(Json{{"rank", accelerator.process_index()}});
  ASSERT_EQ(all.size(), static_cast<size_t>(world().size()));
  for (int rank = 0; rank < world().size(); ++rank) EXPECT_EQ(all[rank].at("rank"), rank);
  std::vector<Json> list{accelerator.process_index(), "x"};
  accelerator.broadcast_object_list(list, world().size() - 1);
  EXPECT_EQ(list[0], world().size() - 1);
}

TEST(Precision, Bf16ComputesInBf16AndReturnsFp32) {
  Accelerator accelerator(AcceleratorOptions().mixed_precision(MixedPrecision::bf16));
  torch::manual_seed(2);
  torch::nn::Linear linear(8, 8);
  torch::optim::SGD sgd(linear->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(linear, sgd);
  const auto x = torch::randn({4, 8});
  const auto y = model(x);
  EXPECT_EQ(y.scalar_type(), torch::kFloat);
  const auto exact = linear->forward(x);
  EXPECT_FALSE(torch::equal(y, exact)) << "nothing was computed in bf16";
  EXPECT_LT((y - exact).abs().max().item<float>(), 0.05);
  accelerator.backward(y.square().mean());
  EXPECT_EQ(linear->weight.grad().scalar_type(), torch::kFloat);
  optimizer.step();
  auto scope = accelerator.autocast();
  EXPECT_EQ(torch::mm(x, linear->weight.t()).scalar_type(), torch::kBFloat16);
}

TEST(Precision, WhatTheDeviceCannotDoIsRefused) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "this is about the CPU";
  EXPECT_THROW(Accelerator(AcceleratorOptions().mixed_precision(MixedPrecision::fp16)),
               PrecisionError);
  EXPECT_THROW(Accelerator(AcceleratorOptions().mixed_precision(MixedPrecision::fp8)),
               UnsupportedError);
}

TEST(Profile, WritesATraceOfEachCycle) {
  Accelerator accelerator;
  char pattern[] = "/tmp/accelerate-profile-XXXXXX";
  const std::string folder = mkdtemp(pattern);
  const auto multiply = [] { return torch::mm(torch::ones({8, 8}), torch::ones({8, 8})); };
  accelerator.profile(ProfileOptions().output_trace_dir(folder).record_shapes(true),
                      [&](Profiler&) { multiply(); });
  const auto trace_of = [&](const std::string& name) {
    std::ifstream file(folder + "/" + name);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string rank = std::to_string(world().rank());
  EXPECT_THAT(trace_of("profile_" + rank + ".json"), HasSubstr("aten::mm"));
  // Steps 0 wait, 1 warm up, 2 active; twice.
  accelerator.profile(ProfileOptions().output_trace_dir(folder).schedule(
                          ProfileSchedule().wait(1).warmup(1).active(1).repeat(2)),
                      [&](Profiler& profiler) {
                        for (int step = 0; step < 9; ++step) {
                          if (step % 3 == 2) multiply();
                          if (step % 3 != 2) torch::ones({3}).cumsum(0);
                          profiler.step();
                        }
                        EXPECT_EQ(profiler.files().size(), 2U);
                      });
  for (const char* cycle : {"_0", "_1"}) {
    const std::string trace = trace_of("profile_" + rank + cycle + ".json");
    EXPECT_THAT(trace, HasSubstr("aten::mm"));
    EXPECT_THAT(trace, ::testing::Not(HasSubstr("aten::cumsum")))
        << "waiting and warming up were kept";
  }
  EXPECT_THROW(
      accelerator.profile(ProfileOptions().schedule(ProfileSchedule().active(0)), [](Profiler&) {}),
      ConfigError);
  EXPECT_THROW(accelerator.profile(ProfileOptions().output_trace_dir("/proc/nowhere"),
                                   [&](Profiler&) { multiply(); }),
               ConfigError);
  for (const auto& file : std::filesystem::directory_iterator(folder))
    std::filesystem::remove(file);
  std::filesystem::remove(folder);
}

TEST(State, OneProcessHasOne) {
  Accelerator accelerator;
  EXPECT_EQ(&accelerator.state(), &State::instance());
  const bool debug = accelerator.state().options().debug();
  EXPECT_THAT(message_of([&] { Accelerator(AcceleratorOptions().debug(!debug)); }),
              HasSubstr("already set up"));
  EXPECT_THROW(Accelerator(AcceleratorOptions().strategy(StrategyKind::single).debug(!debug)),
               StateError);
  if (world().size() > 1) {
    EXPECT_THROW(Accelerator(AcceleratorOptions().strategy(StrategyKind::single)), ConfigError);
  }
}

TEST(State, RandomNumbersAreSynchronisedBeforeEachPass) {
  Accelerator accelerator(AcceleratorOptions().rng_types({RngType::torch, RngType::generator}));
  auto loader = accelerator.prepare(numbers(world().size(), 1));
  torch::manual_seed(50 + world().rank());
  torch::Tensor drawn;
  for (auto& batch : loader) {
    drawn = torch::rand({4});
    (void)batch;
  }
  const auto all = accelerator.gather(drawn).view({world().size(), 4});
  for (int rank = 1; rank < world().size(); ++rank) EXPECT_TRUE(torch::equal(all[rank], all[0]));
}

TEST(Resolve, ArgumentBeforeEnvironmentBeforeFileBeforeDefault) {
  const Json file{{"mixed_precision", "bf16"}, {"gradient_accumulation_steps", 8}, {"timeout", 5}};
  const Environment environment{{"ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"},
                                {"ACCELERATE_TIMEOUT", "2.5"}};
  auto resolved = resolve(AcceleratorOptions().gradient_accumulation_steps(2), environment, file);
  EXPECT_EQ(resolved.gradient_accumulation.num_steps(), 2);
  EXPECT_EQ(resolved.mixed_precision, MixedPrecision::bf16);
  EXPECT_EQ(resolved.state.timeout(), std::chrono::milliseconds(2500));
  resolved = resolve(AcceleratorOptions(), environment, file);
  EXPECT_EQ(resolved.gradient_accumulation.num_steps(), 4);
  resolved = resolve(AcceleratorOptions(), Environment(), file);
  EXPECT_EQ(resolved.gradient_accumulation.num_steps(), 8);
  EXPECT_EQ(resolved.state.timeout(), std::chrono::milliseconds(5000));
  resolved = resolve(AcceleratorOptions(), Environment(), Json::object());
  EXPECT_EQ(resolved.gradient_accumulation.num_steps(), 1);
  EXPECT_EQ(resolved.mixed_precision, MixedPrecision::no);
  EXPECT_EQ(resolved.strategy, StrategyKind::automatic);
  EXPECT_FALSE(resolved.state.timeout().has_value());
}

TEST(Resolve, SaysWhereSomethingUnusableWasSaid) {
  const auto with = [](const char* name, const char* value) {
    return message_of([&] {
      resolve(AcceleratorOptions(), Environment{{name, value}}, Json::object());
    });
  };
  EXPECT_THAT(with("ACCELERATE_MIXED_PRECISION", "int4"), HasSubstr("ACCELERATE_MIXED_PRECISION"));
  EXPECT_THAT(with("ACCELERATE_STRATEGY", "fast"), HasSubstr("ddp"));
  EXPECT_THAT(with("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "two"), HasSubstr("two"));
  EXPECT_THAT(with("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "0"), HasSubstr("at least 1"));
  EXPECT_THAT(with("ACCELERATE_TIMEOUT", "-1"), HasSubstr("ACCELERATE_TIMEOUT"));
  EXPECT_THAT(with("ACCELERATE_TIMEOUT", "0"), HasSubstr("greater than 0"));
  EXPECT_THAT(with("ACCELERATE_TORCH_DEVICE", "gpu7"), HasSubstr("cuda:0"));
  EXPECT_THAT(with("ACCELERATE_DEBUG_MODE", "perhaps"), HasSubstr("perhaps"));
  EXPECT_THAT(message_of([] {
                resolve(AcceleratorOptions(), Environment(), Json{{"mixed_percision", "no"}});
              }),
              HasSubstr("mixed_percision"));
  EXPECT_THROW(resolve(AcceleratorOptions()
                           .gradient_accumulation(GradientAccumulationOptions().num_steps(2))
                           .gradient_accumulation_steps(3),
                       Environment(), Json::object()),
               ConfigError);
  EXPECT_THROW(
      read_config_file(AcceleratorOptions().config_file("/nonexistent/file.json"), Environment()),
      ConfigError);
}

TEST(Resolve, NamesWhatLibTorchDoesNotHave) {
  for (const auto& [name, value] :
       std::vector<std::pair<std::string, std::string>>{{"ACCELERATE_USE_XLA", "true"},
                                                        {"ACCELERATE_USE_TPU", "1"},
                                                        {"ACCELERATE_USE_MPS_DEVICE", "yes"},
                                                        {"ACCELERATE_DYNAMO_BACKEND", "inductor"},
                                                        {"ACCELERATE_USE_MEGATRON_LM", "true"},
                                                        {"ACCELERATE_TORCH_DEVICE", "mps"}}) {
    EXPECT_THROW(resolve(AcceleratorOptions(), Environment{{name, value}}, Json::object()),
                 UnsupportedError)
        << name;
  }
  EXPECT_NO_THROW(resolve(AcceleratorOptions(), Environment{{"ACCELERATE_DYNAMO_BACKEND", "no"}},
                          Json::object()));
}

}  // namespace
}  // namespace accelerate
