#include "data/datasets.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/data/loader.hpp>

#include <gtest/gtest.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <set>
#include <thread>

namespace {

using namespace accelerate;
using namespace data_test;

TEST(Loader, GivesTheUsersOwnBatchTypeInTheOrderOfSeedAndEpoch) {
  auto loader = data::prepare_loader(data::loader(stacked(10), options(4)), context());
  static_assert(std::is_same_v<decltype(loader)::BatchType, Example>);
  EXPECT_EQ(loader.size(), 3);
  EXPECT_EQ(loader.total_batch_size(), 4);
  EXPECT_EQ(loader.total_dataset_length(), 10);
  // torch.randperm(10) with seeds 42 and 43.
  EXPECT_EQ(pass(loader), (Batches{{2, 6, 1, 8}, {4, 5, 0, 9}, {3, 7}}));
  EXPECT_EQ(loader.epoch(), 1);
  EXPECT_EQ(pass(loader), (Batches{{8, 4, 9, 0}, {5, 1, 6, 7}, {2, 3}}));
  loader.set_epoch(0);
  EXPECT_EQ(pass(loader).front(), (std::vector<std::int64_t>{2, 6, 1, 8}));
}

TEST(Loader, DataSeedGoesBeforeTheContexts) {
  auto chosen = context(7);
  chosen.configuration.data_seed(42);
  auto loader = data::prepare_loader(data::loader(stacked(10), 4), chosen);
  EXPECT_EQ(pass(loader).front(), (std::vector<std::int64_t>{2, 6, 1, 8}));
}

TEST(Loader, WithoutSeedableSamplerTheOrderIsDrawnFromTheDefaultGenerator) {
  auto chosen = context();
  chosen.configuration.use_seedable_sampler(false);
  at::manual_seed(5);
  auto loader = data::prepare_loader(data::loader(stacked(50), 5), chosen);
  const auto first = pass(loader), second = pass(loader);
  EXPECT_NE(first, second);
  at::manual_seed(5);
  EXPECT_EQ(pass(loader), first);

  // A drawn order survives a resume.
  Json state;
  std::vector<std::int64_t> rest;
  for (auto& batch : loader) {
    if (!state.is_null()) {
      const auto seen = values(batch.target);
      rest.insert(rest.end(), seen.begin(), seen.end());
    } else if (loader.progress().batches == 4) {
      state = loader.state_dict();
    }
  }
  auto resumed = data::prepare_loader(data::loader(stacked(50), 5), chosen);
  resumed.load_state_dict(state);
  EXPECT_EQ(flat(pass(resumed)), rest);
}

TEST(Loader, KnowsTheLastBatchAndCountsSamples) {
  auto loader = data::prepare_loader(
      data::loader(stacked(7), torch::data::samplers::SequentialSampler(7), options(3)), context());
  std::vector<bool> ends;
  std::vector<std::int64_t> real;
  for (auto& batch : loader) {
    ends.push_back(loader.progress().end_of_dataloader);
    real.push_back(loader.progress().real_samples);
    EXPECT_EQ(loader.progress().remainder, 1);
    EXPECT_EQ(loader.progress().local_samples, batch.target.size(0));
  }
  EXPECT_EQ(ends, (std::vector<bool>{false, false, true}));
  EXPECT_EQ(real, (std::vector<std::int64_t>{3, 3, 1}));
}

TEST(Loader, DropsTheLastBatchOrAnIncompleteGroup) {
  auto dropped = data::prepare_loader(
      data::loader(stacked(11), options(2).drop_last(true)).shuffle(false), context());
  EXPECT_EQ(dropped.size(), 5);
  EXPECT_EQ(pass(dropped).back(), (std::vector<std::int64_t>{8, 9}));
  auto chosen = context();
  chosen.gradient_accumulation_steps = 2;
  auto grouped = data::prepare_loader(
      data::loader(stacked(11), options(2)).shuffle(false).drop_last_global(true), chosen);
  EXPECT_EQ(grouped.size(), 4);
  EXPECT_EQ(pass(grouped), (Batches{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_TRUE(grouped.progress().end_of_dataloader);
}

TEST(Loader, TellsTheObserver) {
  struct Observer : LoaderObserver {
    void loader_begins(const LoaderProgress& progress) override { now = &progress, ++begun; }
    void loader_ends(const LoaderProgress&) noexcept override { now = nullptr, ++ended; }
    const LoaderProgress* now = nullptr;
    int begun = 0, ended = 0;
  };
  auto observer = std::make_shared<Observer>();
  auto chosen = context();
  chosen.observer = observer;
  auto loader = data::prepare_loader(data::loader(stacked(4), 2), chosen);
  std::int64_t batches = 0;
  for (auto& batch : loader) {
    (void)batch;
    ASSERT_NE(observer->now, nullptr);
    EXPECT_EQ(observer->now->batches, ++batches);
  }
  EXPECT_EQ(observer->now, nullptr);
  for (auto& batch : loader) {
    (void)batch;
    break;
  }
  EXPECT_EQ(observer->now, nullptr);
  EXPECT_EQ(observer->begun, 2);
  EXPECT_EQ(observer->ended, 2);
}

TEST(Workers, KeepTheOrder) {
  auto expected = data::prepare_loader(data::loader(stacked(100), options(3)), context());
  struct Uneven : torch::data::datasets::Dataset<Uneven> {
    Example get(std::size_t index) override {
      std::this_thread::sleep_for(std::chrono::microseconds(index % 7 * 100));
      return {at::full({2}, static_cast<double>(index)),
              at::full({}, static_cast<std::int64_t>(index), at::kLong)};
    }
    std::optional<std::size_t> size() const override { return 100; }
  };
  auto loader = data::prepare_loader(
      data::loader(Uneven().map(torch::data::transforms::Stack<>()), options(3, 4).max_jobs(6)),
      context());
  for (int epoch = 0; epoch < 3; ++epoch) EXPECT_EQ(pass(loader), pass(expected));
}

TEST(Workers, ShareOneDataset) {
  struct Unique : torch::data::datasets::Dataset<Unique> {
    Example get(std::size_t) override { return {at::ones({1}), at::ones({1})}; }
    std::optional<std::size_t> size() const override { return 8; }
    std::unique_ptr<int> not_copyable = std::make_unique<int>(1);
  };
  auto loader = data::prepare_loader(
      data::loader(std::make_shared<Unique>(), options(2, 3)).collate(data::collate::stack()),
      context());
  std::int64_t batches = 0;
  for (auto& batch : loader) batches += batch.data.size(0);
  EXPECT_EQ(batches, 8);
}

TEST(Workers, ReadAtMostMaxJobsAhead) {
  Numbers numbers(1000);
  auto reads = numbers.reads;
  auto loader = data::prepare_loader(
      data::loader(numbers, options(2, 2).max_jobs(3)).collate(data::collate::stack()), context());
  std::int64_t taken = 0;
  for (auto& batch : loader) {
    (void)batch;
    if (++taken == 10) break;
  }
  EXPECT_LE(*reads, (10 + 3) * 2);
  const std::int64_t after = *reads;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(*reads, after);  // the break ended the reading
}

struct Failing : torch::data::datasets::Dataset<Failing> {
  Example get(std::size_t index) override {
    if (index == 7) throw std::runtime_error("the disk is on fire");
    return {at::full({2}, static_cast<double>(index)),
            at::full({}, static_cast<std::int64_t>(index), at::kLong)};
  }
  std::optional<std::size_t> size() const override { return 12; }
};

TEST(Workers, ErrorsComeOutOfTheLoopWithTheSamples) {
  for (const std::size_t workers : {0, 1, 3}) {
    auto loader = data::prepare_loader(
        data::loader(Failing().map(torch::data::transforms::Stack<>()), options(3, workers))
            .shuffle(false)
            .name("train"),
        context());
    for (int again = 0; again < 2; ++again) {
      std::int64_t good = 0;
      try {
        for (auto& batch : loader) good += batch.target.size(0);
        FAIL() << "nothing was thrown";
      } catch (const DataError& error) {
        const std::string what = error.what();
        EXPECT_NE(what.find("samples 6, 7, 8"), std::string::npos) << what;
        EXPECT_NE(what.find("step 2 of epoch 0 of the loader 'train'"), std::string::npos) << what;
        EXPECT_NE(what.find("the disk is on fire"), std::string::npos) << what;
        EXPECT_THROW(std::rethrow_if_nested(error), std::runtime_error);
      }
      EXPECT_EQ(good, 6);
    }
  }
}

TEST(Workers, ATimeoutIsAnError) {
  struct Slow : torch::data::datasets::Dataset<Slow> {
    Example get(std::size_t) override {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return {at::ones({1}), at::ones({1})};
    }
    std::optional<std::size_t> size() const override { return 2; }
  };
  auto loader = data::prepare_loader(
      data::loader(Slow(), options(1, 1).timeout(std::chrono::milliseconds(20)))
          .collate(data::collate::stack()),
      context());
  EXPECT_NE(message_of([&] { pass(loader); }).find("20 ms"), std::string::npos);
}

TEST(Passes, ALoopLeftEarlyStartsTheSameEpochAnew) {
  for (const std::size_t workers : {0, 2}) {
    auto loader = data::prepare_loader(data::loader(stacked(20), options(3, workers)), context());
    std::vector<std::int64_t> first;
    for (auto& batch : loader) {
      first = values(batch.target);
      break;
    }
    EXPECT_EQ(loader.epoch(), 0);
    EXPECT_EQ(pass(loader).front(), first);
    EXPECT_EQ(loader.epoch(), 1);
  }
}

TEST(Passes, TwoAtOnceAreRefused) {
  auto loader = data::prepare_loader(data::loader(stacked(6), 2), context());
  std::int64_t outer = 0;
  for (auto& batch : loader) {
    (void)batch;
    ++outer;
    EXPECT_THROW(loader.begin(), StateError);
    EXPECT_THROW(loader.skip_first_batches(1), StateError);
    EXPECT_THROW(loader.load_state_dict(loader.state_dict()), StateError);
  }
  EXPECT_EQ(outer, 3);
}

TEST(Passes, SkippingCostsNoReadingHoweverFar) {
  for (const std::int64_t skipped : {1, 1'000'000}) {
    Numbers numbers(4'000'010);
    auto reads = numbers.reads;
    auto loader = data::prepare_loader(
        data::loader(numbers, options(4)).shuffle(false).collate(data::collate::stack()),
        context());
    const std::int64_t position = skipped * 4;
    for (auto& batch : data::skip_first_batches(loader, skipped)) {
      EXPECT_EQ(values(batch.target),
                (std::vector<std::int64_t>{position, position + 1, position + 2, position + 3}));
      EXPECT_EQ(loader.progress().remainder, 2);  // of the whole pass
      break;
    }
    EXPECT_EQ(*reads, 4);
  }
}

TEST(Passes, SkippingIsForOnePass) {
  auto loader = data::prepare_loader(data::loader(stacked(7), 2).shuffle(false), context());
  loader.skip_first_batches(2);
  EXPECT_EQ(pass(loader), (Batches{{4, 5}, {6}}));
  EXPECT_EQ(pass(loader).size(), 4u);
  EXPECT_EQ(loader.size(), 4);
  loader.skip_first_batches(10);
  EXPECT_TRUE(pass(loader).empty());
}

// Runs `plan`, saves after `batches` batches of epoch 1, and gives the rest of that epoch and the
// next.
template <class Plan>
std::pair<Json, std::vector<std::int64_t>> interrupted(const Plan& plan, std::int64_t batches) {
  auto loader = data::prepare_loader(plan, context());
  pass(loader);
  Json state;
  std::vector<std::int64_t> rest;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : loader) {
      if (!state.is_null()) {
        const auto seen = values(batch.target);
        rest.insert(rest.end(), seen.begin(), seen.end());
      } else if (loader.progress().batches == batches) {
        state = Json::parse(loader.state_dict().dump());
      }
    }
  }
  return {state, rest};
}

template <class Plan>
std::vector<std::int64_t> resumed(const Plan& plan, const Json& state) {
  auto loader = data::prepare_loader(plan, context(999));
  loader.load_state_dict(state);
  EXPECT_EQ(loader.state_dict()["position"], state["position"]);
  std::vector<std::int64_t> seen;
  while (loader.epoch() < 3) {
    const auto more = flat(pass(loader));
    seen.insert(seen.end(), more.begin(), more.end());
  }
  return seen;
}

TEST(Resume, GoesOnExactlyAtEveryBatchWithAnyWorkers) {
  for (const std::size_t workers : {0, 2}) {
    const auto plan = data::loader(stacked(23), options(4, workers));
    for (std::int64_t batches = 1; batches <= 6; ++batches) {
      const auto [state, rest] = interrupted(plan, batches);
      EXPECT_EQ(resumed(plan, state), rest) << batches;
    }
  }
}

TEST(Resume, AnotherBatchSizeGetsExactlyWhatWasNotSeen) {
  const auto [state, rest] = interrupted(data::loader(stacked(23), options(4)), 3);
  for (const std::int64_t batch : {1, 2, 3, 8})
    EXPECT_EQ(resumed(data::loader(stacked(23), batch), state), rest) << batch;
}

TEST(Resume, TorchSamplers) {
  const auto random = [] {
    return data::loader(stacked(23), torch::data::samplers::RandomSampler(23), options(4));
  };
  auto [state, rest] = interrupted(random(), 2);
  EXPECT_EQ(resumed(random(), state), rest);
  EXPECT_EQ(std::set<std::int64_t>(rest.begin(), rest.end()).size(), 23u);
  EXPECT_FALSE(state.contains("stream"));  // seed and epoch are enough
  const auto sequential = [] {
    return data::loader(stacked(23), torch::data::samplers::SequentialSampler(0), options(4));
  };
  auto [state2, rest2] = interrupted(sequential(), 2);
  EXPECT_EQ(resumed(sequential(), state2), rest2);
  EXPECT_EQ(data::prepare_loader(sequential(), context()).size(), 6);
}

// An order that depends on everything that went before, with a size that it does not tell.
struct Wandering {
  void reset(std::optional<std::size_t> = std::nullopt) { given = 0; }
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) {
    ++calls;
    if (given >= 23) return std::nullopt;
    std::vector<std::size_t> indices;
    for (; indices.size() < batch_size && given < 23; ++given) {
      state = (state * 5 + 3) % 64;
      indices.push_back(state % 40);
    }
    return indices;
  }
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("state", at::full({2}, 0, at::kLong)
                               .copy_(at::tensor({static_cast<std::int64_t>(state),
                                                  static_cast<std::int64_t>(given)})));
  }
  void load(torch::serialize::InputArchive& archive) {
    at::Tensor saved;
    archive.read("state", saved);
    state = static_cast<std::size_t>(saved[0].item<std::int64_t>());
    given = static_cast<std::size_t>(saved[1].item<std::int64_t>());
  }
  std::size_t state = 1, given = 0;
  std::int64_t calls = 0;
};

TEST(Resume, ASamplerWithAStateOfItsOwn) {
  const auto plan = [] { return data::loader(stacked(40), Wandering(), options(4)); };
  for (std::int64_t batches = 1; batches <= 6; ++batches) {
    const auto [state, rest] = interrupted(plan(), batches);
    EXPECT_TRUE(state.contains("stream"));
    EXPECT_EQ(resumed(plan(), state), rest) << batches;
  }
  auto loader = data::prepare_loader(plan(), context());
  EXPECT_EQ(loader.size(), std::nullopt);
  std::vector<bool> ends;
  for (auto& batch : loader) {
    (void)batch;
    ends.push_back(loader.progress().end_of_dataloader);
  }
  EXPECT_EQ(ends, (std::vector<bool>{false, false, false, false, false, true}));
  EXPECT_EQ(loader.progress().remainder, 3);
}

TEST(Resume, AForeignStateIsRefused) {
  auto loader = data::prepare_loader(data::loader(stacked(23), 4), context());
  auto other = data::prepare_loader(data::loader(stacked(24), 4), context());
  EXPECT_NE(message_of([&] {
              loader.load_state_dict(other.state_dict());
            }).find("had 24 samples, and this one has 23"),
            std::string::npos);
  Json state = loader.state_dict();
  state["unit"] = "batches";
  EXPECT_THROW(loader.load_state_dict(state), DataError);
  EXPECT_THROW(loader.load_state_dict(Json::object()), DataError);
  EXPECT_THROW(loader.load_state_dict(Json("text")), DataError);
  state = loader.state_dict();
  state["position"] = -4;
  EXPECT_THROW(loader.load_state_dict(state), DataError);
  state = loader.state_dict();
  state["stream"] = "00";
  state["stream_in_pass"] = true;
  loader.load_state_dict(state);
  EXPECT_THROW(pass(loader), DataError);
}

TEST(Resume, SetEpochOfTheSameEpochKeepsThePosition) {
  auto loader = data::prepare_loader(data::loader(stacked(10), 2), context());
  Json state;
  for (auto& batch : loader) {
    (void)batch;
    if (loader.progress().batches == 2) state = loader.state_dict();
  }
  loader.load_state_dict(state);
  loader.set_epoch(0);
  EXPECT_EQ(pass(loader).size(), 3u);
  loader.load_state_dict(state);
  loader.set_epoch(4);
  EXPECT_EQ(pass(loader).size(), 5u);
}

TEST(Samplers, ThatMakeTheBatches) {
  struct ByLength {
    void reset() { next_ = 0; }
    std::optional<std::vector<std::size_t>> next() {
      static const std::vector<std::vector<std::size_t>> batches = {{0}, {1, 2, 3}, {4, 5}};
      if (next_ == batches.size()) return std::nullopt;
      return batches[next_++];
    }
    std::size_t next_ = 0;
  };
  for (const std::size_t workers : {0, 2}) {
    auto loader =
        data::prepare_loader(data::loader(stacked(6), ByLength(), options(1, workers)), context());
    std::vector<std::int64_t> real;
    Batches batches;
    for (auto& batch : loader) {
      batches.push_back(values(batch.target));
      real.push_back(loader.progress().real_samples);
    }
    EXPECT_EQ(batches, (Batches{{0}, {1, 2, 3}, {4, 5}}));
    EXPECT_EQ(real, (std::vector<std::int64_t>{1, 3, 2}));
    loader.skip_first_batches(1);
    EXPECT_EQ(pass(loader), (Batches{{1, 2, 3}, {4, 5}}));
  }
}

TEST(Samplers, RandomSamplersOfTorchLeaveTheDefaultGeneratorAlone) {
  at::manual_seed(11);
  const auto expected = values(at::randint(1 << 20, {4}));
  at::manual_seed(11);
  auto plan = data::loader(
      stacked(30), std::make_shared<torch::data::samplers::SequentialSampler>(30), options(4));
  auto loader = data::prepare_loader(plan, context());
  pass(loader);
  EXPECT_EQ(values(at::randint(1 << 20, {4})), expected);
}

TEST(Settings, ThatCannotBeAreRefused) {
  const auto prepare = [](auto plan, data::LoaderContext chosen) {
    return message_of([&] { data::prepare_loader(plan, chosen); });
  };
  EXPECT_NE(prepare(data::loader(stacked(5), 0), context()).find("batch size of 0"),
            std::string::npos);
  EXPECT_NE(prepare(data::loader(stacked(0), 2).name("train"), context())
                .find("dataset of the loader 'train' is empty"),
            std::string::npos);
  EXPECT_NE(prepare(data::loader(stacked(3), options(4).drop_last(true)), context())
                .find("3 samples are fewer than the 4"),
            std::string::npos);
  auto sampled = context();
  sampled.configuration.by_node(true);
  EXPECT_NE(
      prepare(data::loader(stacked(5), torch::data::samplers::SequentialSampler(5), options(2)),
              sampled)
          .find("by_node"),
      std::string::npos);
  struct Sizeless : torch::data::datasets::Dataset<Sizeless> {
    Example get(std::size_t) override { return {}; }
    std::optional<std::size_t> size() const override { return std::nullopt; }
  };
  EXPECT_NE(prepare(data::loader(Sizeless(), 2), context()).find("does not know its size"),
            std::string::npos);
  auto loader = data::prepare_loader(data::loader(stacked(4), 2), context());
  EXPECT_THROW(loader.set_epoch(-1), ConfigError);
  EXPECT_THROW(loader.skip_first_batches(-1), ConfigError);
}

TEST(Settings, AUsersOwnShardingDecidesWhatComes) {
  const auto plan =
      data::loader(stacked(7), 2)
          .shuffle(false)
          .shard_by([](const data::ShardRequest& request) -> std::optional<std::int64_t> {
            return request.batches - 1 - request.step;
          });
  auto loader = data::prepare_loader(plan, context());
  EXPECT_EQ(loader.size(), 4);
  EXPECT_EQ(pass(loader), (Batches{{6}, {4, 5}, {2, 3}, {0, 1}}));
  loader.skip_first_batches(3);
  EXPECT_EQ(pass(loader), (Batches{{0, 1}}));
  const auto outside = data::loader(stacked(7), 2).shard_by([](const data::ShardRequest&) {
    return std::optional<std::int64_t>(4);
  });
  auto refused = data::prepare_loader(outside, context());
  EXPECT_NE(message_of([&] { pass(refused); }).find("shard_by gave batch 4"), std::string::npos);
}

TEST(Settings, ByNodeReadsItsPartOnly) {
  for (int node = 0; node < 3; ++node) {
    auto chosen = context();
    chosen.num_nodes = 1;
    chosen.configuration.by_node(true);
    auto loader = data::prepare_loader(data::loader(stacked(6), 2), chosen);
    EXPECT_EQ(flat(pass(loader)).size(), 6u);
    EXPECT_EQ(loader.progress().real_samples, 2);
    EXPECT_EQ(loader.progress().remainder, 0);
  }
}

}  // namespace
