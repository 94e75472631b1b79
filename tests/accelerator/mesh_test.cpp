// Processes laid out along axes. Run with COPIES, two and two processes hold the same data: what
// the library computes must then be what the data-parallel processes alone would compute.

#include "support/distributed.hpp"
#include "support/message_of.hpp"

#include "accelerator/make_strategy.hpp"
#include "accelerator/resolve.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/optim/fused.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <numeric>
#include <optional>
#include <set>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using testing::data_parallel;
using ::testing::HasSubstr;
using testing::message_of;
using testing::world;

constexpr StrategyKind kStrategies[] = {StrategyKind::ddp, StrategyKind::fsdp, StrategyKind::zero2};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t width = 16) {
    layers = register_module("layers", torch::nn::Sequential());
    layers->push_back(torch::nn::Linear(4, width));
    layers->push_back(torch::nn::Tanh());
    layers->push_back(torch::nn::Linear(width, width));
    layers->push_back(torch::nn::Tanh());
    layers->push_back(torch::nn::Linear(width, 1));
    to(torch::kDouble);
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers->forward(x).squeeze(1); }
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Net);

constexpr std::int64_t kSamples = 24, kBatch = 3, kMicroBatches = 2;

/// Sample i, whose features and target follow from i.
torch::Tensor features(const torch::Tensor& ids) {
  const auto places = torch::arange(1, 5, torch::kDouble);
  return torch::sin(ids.to(torch::kDouble).unsqueeze(1) * places);
}
torch::Tensor target(const torch::Tensor& ids) { return torch::cos(ids.to(torch::kDouble)); }

struct Numbers {
  at::Tensor get_batch(c10::ArrayRef<std::size_t> indices) {
    return at::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()));
  }
  std::optional<std::size_t> size() const { return kSamples; }
};

auto numbers(bool shuffle) {
  return data::loader(Numbers(), torch::data::DataLoaderOptions().batch_size(kBatch))
      .shuffle(shuffle);
}

std::vector<std::int64_t> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).contiguous();
  return {flat.const_data_ptr<std::int64_t>(), flat.const_data_ptr<std::int64_t>() + flat.numel()};
}

struct Trained {
  std::vector<double> losses, norms, rates;
  std::vector<at::Tensor> parameters;
};

Trained trained_alone() {
  torch::manual_seed(7);
  Net net;
  optim::FusedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-2));
  const std::int64_t window = kBatch * kMicroBatches * data_parallel().size();
  Trained result;
  for (std::int64_t begin = 0; begin < kSamples; begin += window) {
    const auto ids = torch::arange(begin, begin + window);
    const auto loss = (net(features(ids)) - target(ids)).square().mean();
    result.losses.push_back(loss.item<double>());
    adam.zero_grad();
    loss.backward();
    result.norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), 0.05));
    adam.step();
    const auto steps =
        static_cast<double>(data_parallel().size()) * static_cast<double>(result.losses.size());
    adam.param_groups()[0].options().set_lr(1e-2 * std::pow(0.9, steps));
    result.rates.push_back(adam.param_groups()[0].options().get_lr());
  }
  result.parameters = net->parameters();
  return result;
}

void expect_near(const std::vector<double>& found, const std::vector<double>& expected,
                 const char* what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (std::size_t i = 0; i < found.size(); ++i)
    EXPECT_NEAR(found[i], expected[i], 1e-9) << what << " " << i;
}

std::vector<AcceleratorOptions> ways_to_train() {
  std::vector<AcceleratorOptions> all;
  for (const StrategyKind strategy : kStrategies)
    all.push_back(AcceleratorOptions().strategy(strategy));
  if (data_parallel().size() % 2 != 0) return all;
  const auto half = FsdpOptions().shard_group_size(data_parallel().size() / 2);
  all.push_back(AcceleratorOptions().strategy(StrategyKind::zero2).fsdp(half));
  all.push_back(AcceleratorOptions()
                    .strategy(StrategyKind::fsdp)
                    .fsdp(FsdpOptions(half).sharding_strategy(ShardingStrategy::hybrid_shard)));
  return all;
}

TEST(Mesh, CountsNothingTwice) {
  const Trained expected = trained_alone();
  for (AcceleratorOptions options : ways_to_train()) {
    for (const bool counted : {false, true}) {
      SCOPED_TRACE(to_string(*options.strategy()));
      Accelerator accelerator(options.gradient_accumulation_steps(kMicroBatches));
      // Each process builds another module; the first one's counts.
      torch::manual_seed(7 + world().rank());
      Net net;
      optim::FusedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-2));
      auto schedule = optim::LambdaLR(
          adam, [](std::int64_t step) { return std::pow(0.9, static_cast<double>(step)); });
      auto [model, optimizer, scheduler, loader] =
          accelerator.prepare(net, adam, schedule, numbers(/*shuffle=*/false));
      Trained found;
      std::vector<std::int64_t> seen, metrics;
      auto collected = accelerator.collect_for_metrics<torch::Tensor>();
      torch::Tensor loss_sum = torch::zeros({}, torch::kDouble);
      for (auto& ids : loader) {
        const auto scope = accelerator.accumulate(model);
        const auto errors = (model(features(ids)) - target(ids)).square();
        if (counted) {
          accelerator.backward(errors.sum(), kBatch);
        } else {
          accelerator.backward(errors.mean());
        }
        loss_sum += errors.sum().detach();
        collected.add(ids);
        for (const auto id : values(accelerator.gather_for_metrics(ids))) metrics.push_back(id);
        for (const auto id : values(accelerator.gather(ids))) seen.push_back(id);
        if (accelerator.sync_gradients()) {
          const auto samples = accelerator.reduce(
              torch::tensor(static_cast<double>(kBatch * kMicroBatches), torch::kDouble));
          found.losses.push_back((accelerator.reduce(loss_sum) / samples).item<double>());
          loss_sum.zero_();
          found.norms.push_back(accelerator.clip_grad_norm_(model, 0.05).item<double>());
        }
        optimizer.step();
        scheduler.step();
        if (accelerator.sync_gradients())
          found.rates.push_back(adam.param_groups()[0].options().get_lr());
        optimizer.zero_grad();
      }
      expect_near(found.losses, expected.losses, "loss");
      expect_near(found.norms, expected.norms, "norm");
      expect_near(found.rates, expected.rates, "learning rate");
      std::vector<std::int64_t> all(kSamples);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(metrics, all);
      EXPECT_EQ(values(collected.gather()), all);
      EXPECT_EQ(seen, all);
      const auto state = model.state_dict();
      ASSERT_EQ(state.size(), expected.parameters.size());
      for (std::size_t p = 0; p < state.size(); ++p) {
        EXPECT_TRUE(torch::allclose(state[p].tensor, expected.parameters[p], 1e-9, 1e-9))
            << state[p].name;
      }
    }
  }
}

TEST(Mesh, SaysWhoIsWho) {
  Accelerator accelerator;
  const int copies = accelerator.mesh().has("copy") ? accelerator.axis_size("copy") : 1;
  EXPECT_EQ(accelerator.data_parallel_size() * copies, accelerator.num_processes());
  EXPECT_EQ(accelerator.data_parallel_rank(), accelerator.process_index() / copies);
  if (copies > 1) {
    EXPECT_EQ(accelerator.axis_rank("copy"), accelerator.process_index() % copies);
  }
  EXPECT_EQ(accelerator.axis_size("dp_replicate") * accelerator.axis_size("dp_shard"),
            accelerator.data_parallel_size());
  EXPECT_EQ(accelerator.axis_size("tp"), 1);
  EXPECT_THROW(accelerator.axis_size("width"), ConfigError);
  const auto parts = accelerator.split_between_processes(std::string("abcdefgh"));
  std::string all;
  for (const Json& part : accelerator.gather_object(parts)) all += part.get<std::string>();
  EXPECT_EQ(all, "abcdefgh");
}

// What two processes drew, one after the other.
bool alike(const comm::Group& group, const torch::Tensor& drawn) {
  const auto all = comm::gather(drawn.unsqueeze(0), group);
  for (std::int64_t i = 1; i < all.size(0); ++i) {
    if (!torch::equal(all[i], all[0])) return false;
  }
  return true;
}

TEST(Mesh, CopiesReadAndDrawAlike) {
  Accelerator accelerator(
      AcceleratorOptions().dataloader(data::DataLoaderConfiguration().use_seedable_sampler(false)));
  const comm::Group& same = copies(accelerator.mesh());
  torch::manual_seed(30 + world().rank());
  Net net;
  auto [model, loader] = accelerator.prepare(net, numbers(/*shuffle=*/true));
  EXPECT_TRUE(alike(same, torch::rand({4})));
  for (int epoch = 0; epoch < 2; ++epoch) {
    // Something that one process alone does.
    if (accelerator.is_main_process()) torch::rand({3});
    std::set<std::int64_t> all;
    for (auto& ids : loader) {
      EXPECT_TRUE(alike(same, ids));
      EXPECT_TRUE(alike(same, torch::rand({4})));
      for (const auto id : values(accelerator.gather(ids))) all.insert(id);
    }
    EXPECT_EQ(all.size(), static_cast<std::size_t>(kSamples));
  }
}

// Who reads it counts.
struct Stream {
  std::int64_t at = 0;
  std::optional<torch::data::Example<>> next() {
    if (at == 20) return std::nullopt;
    ++at;
    return torch::data::Example<>{torch::full({1}, at - 1 + 1000 * world().rank()),
                                  torch::full({1}, at - 1)};
  }
  void reset() { at = 0; }
};

TEST(Mesh, OneProcessReadsForAll) {
  if (data_parallel().size() == 1) GTEST_SKIP() << "each reads for itself";
  Accelerator accelerator(
      AcceleratorOptions().dataloader(data::DataLoaderConfiguration().dispatch_batches(true)));
  auto loader =
      accelerator.prepare(data::loader(Stream(), torch::data::DataLoaderOptions().batch_size(2))
                              .collate(data::collate::stack()));
  std::vector<std::int64_t> all;
  for (auto& batch : loader) {
    EXPECT_TRUE(alike(copies(accelerator.mesh()), batch.data));
    for (const auto id : values(accelerator.gather_for_metrics(batch.data))) all.push_back(id);
  }
  std::vector<std::int64_t> expected(20);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(all, expected);
}

// One step, and then what `then` does with the prepared module.
void trained_once(StrategyKind strategy, int seed,
                  const std::function<void(Accelerator&, PreparedModule<NetImpl>&)>& then) {
  Accelerator accelerator(AcceleratorOptions().strategy(strategy));
  torch::manual_seed(seed);
  Net net(200);
  optim::FusedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-2));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  const auto ids = torch::arange(6) + 6 * accelerator.data_parallel_rank();
  accelerator.backward((model(features(ids)) - target(ids)).square().mean());
  optimizer.step();
  optimizer.zero_grad();
  then(accelerator, model);
  accelerator.wait_for_everyone();
}

TEST(Mesh, EveryByteIsSavedOnce) {
  const fs::path folder = world().broadcast_bytes(
      (fs::temp_directory_path() / ("accelerate_mesh_" + std::to_string(::getpid()))).string());
  for (const StrategyKind strategy : kStrategies) {
    SCOPED_TRACE(to_string(strategy));
    std::vector<NamedTensor> state;
    trained_once(strategy, 3, [&](Accelerator& accelerator, auto& model) {
      state = model.state_dict(parallel::StateDictOptions().offload_to_cpu(true));
      double bytes = 0, written = 0;
      for (const auto& entry : state) bytes += 3.0 * static_cast<double>(entry.tensor.nbytes());
      accelerator.save_state(folder);
      for (const auto& file : fs::recursive_directory_iterator(folder)) {
        if (file.is_regular_file()) written += static_cast<double>(file.file_size());
      }
      EXPECT_GE(written, bytes);
      EXPECT_LT(written, 1.2 * bytes);
    });
    trained_once(strategy, 4, [&](Accelerator& accelerator, auto& model) {
      accelerator.load_state(folder);
      const auto loaded = model.state_dict();
      ASSERT_EQ(loaded.size(), state.size());
      for (std::size_t i = 0; i < state.size(); ++i)
        EXPECT_TRUE(torch::equal(loaded[i].tensor, state[i].tensor)) << state[i].name;
    });
  }
  if (world().rank() == 0) fs::remove_all(folder);
}

std::size_t open_files() {
  const fs::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

TEST(Groups, APreparedModuleGivesItsGroupsBack) {
  const auto prepare = [](int width) {
    Accelerator accelerator(
        AcceleratorOptions().fsdp(FsdpOptions().reshard_after_forward(2 - width % 2)));
    Net net(width);
    optim::FusedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-2));
    auto [model, optimizer] = accelerator.prepare(net, adam);
    accelerator.backward(model(features(torch::arange(4))).sum());
    optimizer.step();
  };
  for (int i = 0; i < 2; ++i) prepare(16 + i);
  const std::size_t before = open_files();
  for (int i = 0; i < 4; ++i) prepare(16 + i);
  EXPECT_LE(open_files(), before);
}

TEST(Groups, ModulesThatLiveTogetherHaveGroupsOfTheirOwn) {
  Accelerator accelerator(AcceleratorOptions().strategy(StrategyKind::fsdp));
  Net a, b;
  auto both = a->parameters();
  for (const auto& parameter : b->parameters()) both.push_back(parameter);
  optim::FusedAdamW adam(both, optim::FusedAdamWOptions(1e-2));
  auto [one, two, optimizer] = accelerator.prepare(a, b, adam);
  const auto ids = torch::arange(4);
  for (int i = 0; i < 3; ++i) {
    const auto y = one(features(ids)) + two(features(ids));
    EXPECT_TRUE(alike(data_parallel(), y.detach()));
    accelerator.backward(y.sum());
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(Groups, ACallsOwnGroupsEndWithIt) {
  const auto search = [] {
    return find_executable_batch_size(
        [](std::int64_t size) {
          if (size > 100) throw std::bad_alloc();
          return size;
        },
        BatchSizeOptions(), world());
  };
  // A split closes what was dropped before.
  const auto close_dropped = [] { world().split(world().rank(), 0, "alone"); };
  close_dropped();
  const std::size_t before = open_files();
  for (int i = 0; i < 3; ++i) search();
  close_dropped();
  EXPECT_EQ(open_files(), before);
}

TEST(Groups, OneThatIsNotAtTheSamePlaceEverywhereIsNotUsedAgain) {
  if (world().size() == 1) GTEST_SKIP() << "alone";
  const auto split = [] {
    return world().split(0, world().rank(), "in_turn", comm::Sharing::in_turn);
  };
  const auto sum_over = [](const comm::Group& group) {
    const at::Tensor sum = at::ones({1});
    group.all_reduce(sum).wait();
    return sum.item<int>();
  };
  const void* first = nullptr;
  {
    const auto group = split();
    first = group.impl().get();
    EXPECT_EQ(sum_over(group), world().size());
    EXPECT_NE(split().impl().get(), first);
  }
  const bool last = world().rank() == world().size() - 1;
  std::optional<comm::Group> late;
  const at::Tensor sum = at::ones({1});
  comm::Work work;
  {
    const auto group = split();
    EXPECT_EQ(group.impl().get(), first);
    // All but one begin something, and let go of the group.
    if (last) {
      late = group;
    } else {
      work = group.all_reduce(sum);
    }
  }
  const auto group = split();
  EXPECT_NE(group.impl().get(), first);
  EXPECT_EQ(sum_over(group), world().size());
  if (last) work = late->all_reduce(sum);
  work.wait();
  EXPECT_EQ(sum.item<int>(), world().size());
}

// -------------------------------------------------------------------------------- configuration

using Axes = comm::Mesh::Axes;

Axes wide(const MeshAxes& mesh) {
  Axes result;
  for (const auto& axis : mesh.axes) {
    if (axis.second > 1) result.push_back(axis);
  }
  return result;
}

TEST(ParallelismConfig, SizesMultiplyToTheProcesses) {
  EXPECT_EQ(wide(mesh_axes(ParallelismConfig(), 8)), (Axes{{"dp_replicate", 8}}));
  EXPECT_FALSE(mesh_axes(ParallelismConfig(), 8).divided);
  const auto mesh =
      mesh_axes(ParallelismConfig().dp_replicate_size(2).dp_shard_size(-1).tp_size(2).further_axes(
                    {{"ep", 3}}),
                24);
  EXPECT_EQ(wide(mesh), (Axes{{"dp_replicate", 2}, {"dp_shard", 2}, {"ep", 3}, {"tp", 2}}));
  EXPECT_TRUE(mesh.divided);
  EXPECT_EQ(mesh.data_parallel, 4);
  EXPECT_EQ(mesh.axes.back().first, "tp");
  EXPECT_EQ(mesh.axes.front().first, "pp");
  EXPECT_EQ(wide(mesh_axes(ParallelismConfig().tp_size(2), 8)),
            (Axes{{"dp_replicate", 4}, {"tp", 2}}));
  EXPECT_EQ(wide(mesh_axes(ParallelismConfig().tp_size(0), 8)), (Axes{{"tp", 8}}));
  // What Python's launcher sets where nothing was said.
  EXPECT_EQ(
      wide(mesh_axes(ParallelismConfig().dp_replicate_size(1).dp_shard_size(1).tp_size(1), 4)),
      (Axes{{"dp_replicate", 4}}));
}

TEST(ParallelismConfig, SaysWhatDoesNotFit) {
  const auto said = [](const ParallelismConfig& config, int processes) {
    return message_of([&] { mesh_axes(config, processes); });
  };
  EXPECT_THAT(said(ParallelismConfig().tp_size(3), 4), HasSubstr("tp 3"));
  EXPECT_THAT(said(ParallelismConfig().dp_shard_size(2), 4), HasSubstr("Multiply one"));
  EXPECT_THAT(said(ParallelismConfig().dp_shard_size(8), 4), HasSubstr("4 processes"));
  EXPECT_THAT(said(ParallelismConfig().dp_shard_size(0).tp_size(-1), 4),
              HasSubstr("dp_shard and tp"));
  EXPECT_THAT(said(ParallelismConfig().tp_size(-2), 4), HasSubstr("-2"));
  EXPECT_THAT(said(ParallelismConfig().cp_size(2).sp_size(2), 4), HasSubstr("two ways"));
  EXPECT_THAT(said(ParallelismConfig().further_axes({{"tp", 2}}), 4), HasSubstr("another axis"));
  EXPECT_THAT(said(ParallelismConfig().further_axes({{"", 2}}), 4), HasSubstr("no name"));
}

TEST(ParallelismConfig, ComesFromEnvironmentAndFile) {
  const Json file{{"parallelism_config",
                   {{"dp_shard_size", 2},
                    {"parallelism_config_dp_replicate_size", 4},
                    {"further_axes", {{"copy", 2}}}}}};
  const auto config = [](const Environment& environment, const Json& json) {
    return resolve(AcceleratorOptions(), environment, json).state.parallelism_config();
  };
  EXPECT_EQ(config(Environment(), Json::object()), std::nullopt);
  EXPECT_EQ(config(Environment(), file),
            ParallelismConfig().dp_shard_size(2).dp_replicate_size(4).further_axes({{"copy", 2}}));
  const Environment environment{{"ACCELERATE_USE_PARALLELISM_CONFIG", "true"},
                                {"PARALLELISM_CONFIG_DP_SHARD_SIZE", "8"},
                                {"PARALLELISM_CONFIG_FURTHER_AXES", "ep=2, name=3"}};
  EXPECT_EQ(config(environment, file),
            ParallelismConfig().dp_shard_size(8).dp_replicate_size(4).further_axes(
                {{"ep", 2}, {"name", 3}}));
  // As in Python Accelerate, the variables alone do nothing.
  EXPECT_EQ(config(Environment{{"PARALLELISM_CONFIG_TP_SIZE", "8"}}, Json::object()), std::nullopt);
  EXPECT_THAT(message_of([&] {
                config(Environment{{"ACCELERATE_USE_PARALLELISM_CONFIG", "1"},
                                   {"PARALLELISM_CONFIG_TP_SIZE", "two"}},
                       Json::object());
              }),
              HasSubstr("PARALLELISM_CONFIG_TP_SIZE is \"two\""));
  EXPECT_THAT(message_of([&] {
                config(Environment(), Json{{"parallelism_config", {{"tensor", 2}}}});
              }),
              HasSubstr("parallelism_config.tensor"));
}

TEST(ParallelismConfig, RefusesWhatNoStrategyCanUse) {
  for (const char* axis : {"tp", "cp", "sp", "pp"}) {
    EXPECT_THROW(check_axes({{"dp_replicate", 2}, {axis, 2}}), UnsupportedError) << axis;
    EXPECT_NO_THROW(check_axes({{"dp_replicate", 2}, {axis, 1}, {"ep", 2}}));
  }
}

TEST(ParallelismConfig, DividesDataParallelProcessesForTheStrategy) {
  const auto follow = [](int replicate, int shard, StrategyKind strategy, FsdpOptions fsdp) {
    const auto mesh = mesh_axes(
        ParallelismConfig().dp_replicate_size(replicate).dp_shard_size(shard), replicate * shard);
    follow_axes(mesh, strategy, fsdp);
    return std::tuple(strategy, fsdp.sharding_strategy(), fsdp.shard_group_size());
  };
  using S = ShardingStrategy;
  const auto automatic = StrategyKind::automatic, fsdp = StrategyKind::fsdp,
             zero2 = StrategyKind::zero2, ddp = StrategyKind::ddp;
  EXPECT_EQ(follow(2, 4, automatic, {}), std::tuple(fsdp, S::hybrid_shard, 4));
  EXPECT_EQ(follow(1, 4, fsdp, {}), std::tuple(fsdp, S::full_shard, 4));
  EXPECT_EQ(follow(2, 2, fsdp, FsdpOptions().sharding_strategy(S::shard_grad_op)),
            std::tuple(fsdp, S::hybrid_shard_zero2, 2));
  EXPECT_EQ(follow(2, 2, zero2, FsdpOptions().sharding_strategy(S::shard_optimizer)),
            std::tuple(zero2, S::shard_optimizer, 2));
  EXPECT_EQ(std::get<0>(follow(4, 1, automatic, {})), ddp);
  EXPECT_THROW(follow(1, 4, ddp, {}), ConfigError);
  EXPECT_THROW(follow(4, 1, fsdp, {}), ConfigError);
  EXPECT_THROW(follow(2, 2, fsdp, FsdpOptions().shard_group_size(4)), ConfigError);
  EXPECT_THROW(follow(2, 2, fsdp, FsdpOptions().sharding_strategy(S::no_shard)), ConfigError);
}

TEST(ParallelismConfig, ShardGroupSizeIsTheMeshsDpShard) {
  if (data_parallel().size() != 4) GTEST_SKIP() << "needs 4 data-parallel processes";
  using S = ShardingStrategy;
  const auto sizes = [](const FsdpOptions& options) {
    Accelerator accelerator(AcceleratorOptions().fsdp(options));
    return std::pair(accelerator.axis_size("dp_replicate"), accelerator.axis_size("dp_shard"));
  };
  EXPECT_EQ(sizes(FsdpOptions()), std::pair(1, 4));
  EXPECT_EQ(sizes(FsdpOptions().sharding_strategy(S::hybrid_shard).shard_group_size(2)),
            std::pair(2, 2));
  EXPECT_EQ(sizes(FsdpOptions().sharding_strategy(S::no_shard)), std::pair(4, 1));
  EXPECT_THROW(sizes(FsdpOptions().sharding_strategy(S::hybrid_shard).shard_group_size(3)),
               ShardingError);
}

}  // namespace
}  // namespace accelerate
