// What several processes get: run by every rank.
#include "support/distributed.hpp"
#include "data/datasets.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/data/loader.hpp>

#include <gtest/gtest.h>
#include <torch/data/dataloader.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

namespace {

using namespace accelerate;
using namespace data_test;

data::LoaderContext here() {
  data::LoaderContext chosen = context();
  chosen.group = accelerate::testing::world();
  chosen.local_rank = chosen.group.rank();
  chosen.local_world_size = chosen.group.size();
  return chosen;
}

int rank() { return accelerate::testing::world().rank(); }
int world() { return accelerate::testing::world().size(); }

// Of every rank: the samples of each step, and those of them that are real.
struct Seen {
  std::vector<Batches> batches;
  std::vector<Batches> real;
};

template <class Loader>
Seen gather(Loader& loader, bool whole = true) {
  Json own = {{"batches", Json::array()}, {"real", Json::array()}};
  std::int64_t batches = 0;
  for (auto& batch : loader) {
    const auto& progress = loader.progress();
    auto seen = values(batch.target);
    EXPECT_EQ(progress.local_samples, static_cast<std::int64_t>(seen.size()));
    EXPECT_EQ(progress.batches, ++batches);
    own["batches"].push_back(seen);
    seen.resize(progress.local_real_samples);
    own["real"].push_back(seen);
    if (progress.fill_is_last && progress.real_samples >= 0) {
      EXPECT_LE(progress.real_samples, progress.global_samples);
    }
  }
  if (loader.size() && whole) {
    EXPECT_EQ(loader.size(), batches);
  }
  Seen all;
  for (const std::string& bytes : accelerate::testing::world().all_gather_bytes(own.dump())) {
    const Json json = Json::parse(bytes);
    all.batches.push_back(json["batches"].get<Batches>());
    all.real.push_back(json["real"].get<Batches>());
  }
  return all;
}

// Step after step, rank after rank.
std::vector<std::int64_t> in_order(const std::vector<Batches>& ranks) {
  std::vector<std::int64_t> all;
  std::size_t steps = 0;
  for (const auto& batches : ranks) steps = std::max(steps, batches.size());
  for (std::size_t step = 0; step < steps; ++step) {
    for (const auto& batches : ranks) {
      if (step < batches.size()) all.insert(all.end(), batches[step].begin(), batches[step].end());
    }
  }
  return all;
}

std::vector<std::int64_t> upto(std::int64_t n) {
  std::vector<std::int64_t> all(n);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

TEST(Sharded, EverySampleIsRealOnceInTheOrderOfOneProcess) {
  for (const std::int64_t n : {1, 7, 16, 23}) {
    for (const bool split : {false, true}) {
      for (const bool even : {true, false}) {
        for (const std::size_t workers : {0, 2}) {
          auto chosen = here();
          chosen.configuration.split_batches(split).even_batches(even);
          const std::int64_t batch = split ? 4 : 4 / world();
          auto loader =
              data::prepare_loader(data::loader(stacked(n), options(batch, workers)), chosen);
          auto alone = data::prepare_loader(data::loader(stacked(n), 4), context());
          EXPECT_EQ(loader.total_batch_size(), 4);
          for (int epoch = 0; epoch < 2; ++epoch) {
            const Seen seen = gather(loader);
            const auto expected = flat(pass(alone));
            EXPECT_EQ(in_order(seen.real), expected) << n << split << even << workers;
            if (!even) {
              EXPECT_EQ(in_order(seen.batches), expected);
            }
            if (even) {
              for (const auto& batches : seen.batches)
                EXPECT_EQ(batches.size(), seen.batches.front().size());
            }
          }
          if (loader.progress().batches > 0) {
            EXPECT_EQ(loader.progress().remainder, n % 4);
          }
        }
      }
    }
  }
}

// Saved by one process with the whole batch and resumed here, and the other way round: what comes
// is exactly what was not seen, once. `make(context, batch)` prepares a loader; one that cannot
// choose its batches takes `steps` of them alone for one that all processes take together.
template <class Make>
void resumes_on_another_number_of_processes(Make&& make, int steps = 1) {
  auto alone = make(context(), 4 / steps);
  Json from_one;
  std::vector<std::int64_t> rest;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (auto& batch : alone) {
      if (!from_one.is_null()) {
        const auto more = values(batch.target);
        rest.insert(rest.end(), more.begin(), more.end());
      } else if (alone.progress().batches == 3 * steps) {
        from_one = alone.state_dict();
      }
    }
  }
  EXPECT_EQ(rest.size(), 2U * 23 - 12);
  auto loader = make(here(), 4 / world());
  loader.load_state_dict(from_one);
  auto got = in_order(gather(loader, false).real);
  const auto next = in_order(gather(loader).real);
  got.insert(got.end(), next.begin(), next.end());
  EXPECT_EQ(got, rest);

  Json from_many;
  loader.set_epoch(0);
  for (auto& batch : loader) {
    (void)batch;
    if (loader.progress().batches == 3) from_many = loader.state_dict();
  }
  EXPECT_EQ(from_many["position"], from_one["position"]);
  // Where all processes say the same, a checkpoint has it once, and any number of them takes it.
  for (const std::string& other : accelerate::testing::world().all_gather_bytes(from_many.dump()))
    EXPECT_EQ(Json::parse(other), from_many);
  alone.load_state_dict(from_many);
  auto back = flat(pass(alone));
  const auto last = flat(pass(alone));
  back.insert(back.end(), last.begin(), last.end());
  EXPECT_EQ(back, rest);
}

TEST(Sharded, ResumesOnAnotherNumberOfProcesses) {
  for (const bool dispatch : {false, true}) {
    resumes_on_another_number_of_processes([&](data::LoaderContext chosen, std::int64_t batch) {
      chosen.configuration.dispatch_batches(dispatch);
      return data::prepare_loader(data::loader(stacked(23), options(batch, 1)), chosen);
    });
  }
}

TEST(Sharded, RandomSamplersOfTorchShuffleAlikeOnAllRanks) {
  at::manual_seed(100 + rank());
  auto loader = data::prepare_loader(
      data::loader(stacked(24), torch::data::samplers::RandomSampler(24), options(2)), here());
  auto seen = in_order(gather(loader).real);
  EXPECT_NE(seen, upto(24));
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, upto(24));
  auto drawn = here();
  drawn.configuration.use_seedable_sampler(false);
  auto unseeded = data::prepare_loader(data::loader(stacked(24), options(2)), drawn);
  seen = in_order(gather(unseeded).real);
  std::sort(seen.begin(), seen.end());
  EXPECT_EQ(seen, upto(24));
}

TEST(Sharded, SkippedStepsAreLeftOutOnAllRanks) {
  auto loader = data::prepare_loader(data::loader(stacked(11), 2).shuffle(false), here());
  loader.skip_first_batches(1);
  const auto all = upto(11);
  EXPECT_EQ(in_order(gather(loader, false).real),
            std::vector<std::int64_t>(all.begin() + 2 * world(), all.end()));
  EXPECT_EQ(loader.progress().remainder, 11 % (2 * world()));
}

TEST(Sharded, ByNode) {
  // Every rank plays a node of its own.
  auto chosen = here();
  chosen.node_rank = rank();
  chosen.num_nodes = world();
  chosen.local_rank = 0;
  chosen.local_world_size = 1;
  chosen.configuration.by_node(true);
  const std::int64_t n = 4 * world() + 1;
  auto loader = data::prepare_loader(data::loader(stacked(n), 2), chosen);
  const Seen seen = gather(loader);
  EXPECT_EQ(loader.progress().remainder, 1);
  EXPECT_FALSE(loader.progress().fill_is_last);
  std::vector<std::int64_t> all;
  for (int node = 0; node < world(); ++node) {
    const auto part = flat(seen.real[node]);
    EXPECT_EQ(seen.batches[node].size(), 3u);
    for (const auto sample : part) {
      const auto range = data::contiguous_part(n, node, world());
      EXPECT_TRUE(sample >= range.begin && sample < range.end);
    }
    all.insert(all.end(), part.begin(), part.end());
  }
  std::sort(all.begin(), all.end());
  EXPECT_EQ(all, upto(n));
}

TEST(Sharded, ByAUsersRule) {
  // Contiguous parts: rank r gets batches r * steps, r * steps + 1, ...
  const auto rule = [](const data::ShardRequest& request) -> std::optional<std::int64_t> {
    const std::int64_t steps = (request.batches + request.world_size - 1) / request.world_size;
    const std::int64_t batch = request.rank * steps + request.step;
    return batch < request.batches ? std::optional(batch) : std::nullopt;
  };
  for (const bool even : {true, false}) {
    auto chosen = here();
    chosen.configuration.even_batches(even);
    const std::int64_t n = 6 * world() - 3;
    auto loader =
        data::prepare_loader(data::loader(stacked(n), 2).shuffle(false).shard_by(rule), chosen);
    const Seen seen = gather(loader);
    std::vector<std::int64_t> all;
    for (const auto& batches : seen.real) {
      const auto part = flat(batches);
      all.insert(all.end(), part.begin(), part.end());
    }
    EXPECT_EQ(all, upto(n));
    for (const auto& batches : seen.batches) {
      if (even) {
        EXPECT_EQ(batches.size(), 3u);
      }
    }
  }
}

TEST(Sharded, DifferencesBetweenRanksAreErrorsOnAll) {
  auto other_size = data::prepare_loader(data::loader(stacked(20 + rank()), 2), here());
  EXPECT_NE(message_of([&] { pass(other_size); })
                .find("disagree on the size of the dataset of the loader 'loader': process 0 has "
                      "\"20\", process 1 has \"21\""),
            std::string::npos);
  struct Typed {
    std::size_t size() const { return 8; }
    Example get(std::size_t) const {
      return {at::zeros({2}, rank() == 1 ? at::kDouble : at::kFloat), at::zeros({}, at::kLong)};
    }
  };
  auto other_dtype =
      data::prepare_loader(data::loader(Typed(), 2).collate(data::collate::stack()), here());
  const std::string message = message_of([&] { pass(other_dtype); });
  EXPECT_NE(
      message.find("data Float [*, 2], target Long [*]\", process 1 has \"data Double [*, 2]"),
      std::string::npos)
      << message;
  auto other_seed = here();
  other_seed.seed = rank();
  auto seeded = data::prepare_loader(data::loader(stacked(20), 2), other_seed);
  EXPECT_NE(message_of([&] { pass(seeded); }).find("disagree on the seed"), std::string::npos);
}

TEST(Sharded, AnErrorInTheFirstBatchReachesAllRanks) {
  struct Failing {
    std::size_t size() const { return 8; }
    Example get(std::size_t index) const {
      if (rank() == 1) throw std::runtime_error("no such file");
      return {at::zeros({2}), at::full({}, static_cast<std::int64_t>(index), at::kLong)};
    }
  };
  auto loader =
      data::prepare_loader(data::loader(Failing(), 2).collate(data::collate::stack()), here());
  const std::string message = message_of([&] { pass(loader); });
  EXPECT_NE(message.find("no such file"), std::string::npos) << message;
  if (rank() != 1) {
    EXPECT_NE(message.find("Process 1 could not read the first batch"), std::string::npos)
        << message;
  }
}

// ---------------------------------------------------------------- streams

struct Counter {
  explicit Counter(std::int64_t size) : size_(size) {}
  void reset() { next_ = 0; }
  std::optional<Example> next() {
    if (next_ >= size_) return std::nullopt;
    ++*reads;
    const std::int64_t value = next_++;
    return Example(at::full({2}, value, at::kFloat), at::full({}, value, at::kLong));
  }
  std::shared_ptr<std::int64_t> reads = std::make_shared<std::int64_t>(0);
  std::int64_t size_, next_ = 0;
};

TEST(Streams, AreShardedOrDispatched) {
  for (const bool dispatch : {false, true}) {
    for (const std::int64_t n : {1, 8, 11, 16}) {
      for (const bool even : {true, false}) {
        for (const std::size_t workers : {0, 1}) {
          auto chosen = here();
          chosen.configuration.dispatch_batches(dispatch).even_batches(even);
          Counter counter(n);
          auto reads = counter.reads;
          auto loader = data::prepare_loader(
              data::loader(counter, options(2, workers)).collate(data::collate::stack()), chosen);
          for (int epoch = 0; epoch < 2; ++epoch) {
            *reads = 0;
            const Seen seen = gather(loader);
            EXPECT_EQ(in_order(seen.real), upto(n)) << dispatch << n << even << workers;
            EXPECT_EQ(*reads, dispatch && rank() > 0 ? 0 : n);
            if (even) {
              for (const auto& batches : seen.batches)
                EXPECT_EQ(batches.size(), seen.batches.front().size());
            }
            if (!seen.batches[rank()].empty()) {
              EXPECT_EQ(loader.progress().remainder, n % (2 * world()));
            }
          }
          loader.skip_first_batches(1);
          const auto all = upto(n);
          const auto expected = std::vector<std::int64_t>(
              all.begin() + std::min<std::int64_t>(n, 2 * world()), all.end());
          EXPECT_EQ(in_order(gather(loader).real), expected);
        }
      }
    }
  }
}

TEST(Streams, ResumeOnAnotherNumberOfProcesses) {
  for (const bool dispatch : {false, true}) {
    for (const std::size_t workers : {0, 1}) {
      resumes_on_another_number_of_processes([&](data::LoaderContext chosen, std::int64_t batch) {
        chosen.configuration.dispatch_batches(dispatch);
        return data::prepare_loader(
            data::loader(Counter(23), options(batch, workers)).collate(data::collate::stack()),
            chosen);
      });
    }
  }
}

TEST(ReadyMade, LoadersOfTorchAreSharded) {
  at::manual_seed(50 + rank());
  for (const bool dispatch : {false, true}) {
    auto chosen = here();
    chosen.configuration.dispatch_batches(dispatch);
    auto loader =
        data::prepare_loader(torch::data::make_data_loader(
                                 stacked(21), torch::data::samplers::RandomSampler(21), options(2)),
                             chosen);
    for (int epoch = 0; epoch < 2; ++epoch) {
      const Seen seen = gather(loader);
      auto all = in_order(seen.real);
      std::sort(all.begin(), all.end());
      EXPECT_EQ(all, upto(21));
      for (const auto& batches : seen.batches)
        EXPECT_EQ(batches.size(), seen.batches.front().size());
    }
  }
}

TEST(Samplers, ThatMakeTheBatchesAreSharded) {
  struct Growing {
    void reset() { next_ = 0, first_ = 0; }
    std::optional<std::vector<std::size_t>> next() {
      if (next_ == 5) return std::nullopt;
      std::vector<std::size_t> batch(++next_);
      for (auto& index : batch) index = first_++;
      return batch;
    }
    std::size_t next_ = 0, first_ = 0;
  };
  auto loader = data::prepare_loader(data::loader(stacked(15), Growing(), options(1)), here());
  const Seen seen = gather(loader);
  EXPECT_EQ(in_order(seen.real), upto(15));
  EXPECT_EQ(seen.batches[0].front(), (std::vector<std::int64_t>{0}));
  EXPECT_EQ(seen.batches[1].front(), (std::vector<std::int64_t>{1, 2}));
}

TEST(ReadyMade, AndSamplersThatMakeTheBatchesResumeOnAnotherNumberOfProcesses) {
  for (const bool dispatch : {false, true}) {
    resumes_on_another_number_of_processes(
        [&](data::LoaderContext chosen, std::int64_t batch) {
          chosen.configuration.dispatch_batches(dispatch);
          return data::prepare_loader(
              torch::data::make_data_loader(
                  stacked(23), torch::data::samplers::SequentialSampler(23), options(batch)),
              chosen);
        },
        world());
  }
  struct Chunks {
    void reset() { first = 0; }
    std::optional<std::vector<std::size_t>> next() {
      if (first == 23) return std::nullopt;
      std::vector<std::size_t> chunk(std::min<std::size_t>(size, 23 - first));
      for (auto& index : chunk) index = first++;
      return chunk;
    }
    std::size_t size = 0, first = 0;
  };
  resumes_on_another_number_of_processes(
      [&](data::LoaderContext chosen, std::int64_t batch) {
        return data::prepare_loader(
            data::loader(stacked(23), Chunks{static_cast<std::size_t>(batch)}, options(1)), chosen);
      },
      world());
}

// ---------------------------------------------------------------- dispatch

TEST(Dispatch, MapDatasetsWithStridesOfTheOriginal) {
  auto chosen = here();
  chosen.configuration.dispatch_batches(true);
  Numbers numbers(9);
  auto reads = numbers.reads;
  auto loader = data::prepare_loader(
      data::loader(numbers, 2).shuffle(false).collate(data::collate::stack()), chosen);
  EXPECT_EQ(loader.size(), world() == 2 ? 3 : 2);
  const Seen seen = gather(loader);
  if (world() == 2) {
    EXPECT_EQ(seen.batches[0], (Batches{{0, 1}, {4, 5}, {8}}));
    EXPECT_EQ(seen.batches[1], (Batches{{2, 3}, {6, 7}, {0}}));
  }
  EXPECT_EQ(in_order(seen.real), upto(9));
  if (rank() > 0) {
    EXPECT_EQ(*reads, 0);
  }
  // Position 4 is the same for one process: dispatching or not does not matter to a resume.
  Json state;
  for (auto& batch : loader) {
    (void)batch;
    if (loader.progress().batches == 1) state = loader.state_dict();
  }
  auto alone = data::prepare_loader(data::loader(stacked(9), 2).shuffle(false), context());
  alone.load_state_dict(state);
  const auto all = upto(9);
  EXPECT_EQ(flat(pass(alone)), std::vector<std::int64_t>(all.begin() + 2 * world(), all.end()));
}

TEST(Dispatch, UnequalShapesStringsAndOptionals) {
  using Item = std::tuple<at::Tensor, std::string, std::map<std::string, double>,
                          std::optional<std::int64_t>>;
  struct Mixed {
    std::size_t size() const { return 8; }
    Item get(std::size_t index) const {
      if (rank() > 0) throw std::runtime_error("only process 0 may read");
      const auto number = static_cast<std::int64_t>(index);
      return {at::full({number + 1}, number, at::kLong),
              "sample " + std::to_string(index),
              {{"half", 0.5 * number}},
              index % 2 == 0 ? std::optional(number) : std::nullopt};
    }
  };
  auto chosen = here();
  chosen.configuration.dispatch_batches(true);
  auto loader = data::prepare_loader(data::loader(Mixed(), options(1, 2)).shuffle(false), chosen);
  std::int64_t step = 0;
  for (auto& batch : loader) {
    ASSERT_EQ(batch.size(), 1u);
    const auto& [tensor, text, map, optional] = batch.front();
    const std::int64_t expected = step++ * world() + rank();
    EXPECT_EQ(tensor.size(0), expected + 1);
    EXPECT_EQ(text, "sample " + std::to_string(expected));
    EXPECT_EQ(map.at("half"), 0.5 * expected);
    EXPECT_EQ(optional, expected % 2 == 0 ? std::optional(expected) : std::nullopt);
  }
  EXPECT_EQ(step, 8 / world());
}

TEST(Dispatch, AReadingErrorReachesAllRanks) {
  struct Failing {
    std::size_t size() const { return 16; }
    Example get(std::size_t index) const {
      if (index == 9) throw std::runtime_error("bad sector");
      return {at::zeros({2}), at::full({}, static_cast<std::int64_t>(index), at::kLong)};
    }
  };
  for (const std::size_t workers : {0, 2}) {
    auto chosen = here();
    chosen.configuration.dispatch_batches(true);
    auto loader = data::prepare_loader(
        data::loader(Failing(), options(2, workers)).shuffle(false).collate(data::collate::stack()),
        chosen);
    std::int64_t good = 0;
    const std::string message = message_of([&] {
      for (auto& batch : loader) good += batch.target.size(0);
    });
    EXPECT_NE(message.find("bad sector"), std::string::npos) << message;
    EXPECT_EQ(good, 9 / (2 * world()) * 2);
  }
}

TEST(Settings, ThatDoNotGoTogetherAreRefused) {
  const auto refused = [](auto plan, const auto& configure) {
    auto chosen = here();
    configure(chosen.configuration);
    return message_of([&] { data::prepare_loader(plan, chosen); });
  };
  EXPECT_NE(refused(data::loader(stacked(8), 3), [](auto& c) { c.split_batches(true); })
                .find("batch size of the loader 'loader' (3) must be a multiple of the number of "
                      "processes"),
            std::string::npos);
  const auto by_rule = data::loader(stacked(8), 2).shard_by([](const data::ShardRequest&) {
    return std::optional<std::int64_t>();
  });
  EXPECT_NE(refused(by_rule, [](auto& c) { c.dispatch_batches(true); }).find("shard_by"),
            std::string::npos);
  EXPECT_NE(
      refused(data::loader(Counter(4), 2), [](auto& c) { c.by_node(true); }).find("random access"),
      std::string::npos);
}

}  // namespace
