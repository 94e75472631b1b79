#include "data/datasets.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/data/loader.hpp>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <numeric>
#include <set>
#include <thread>

namespace {

using namespace accelerate;
using namespace data_test;
using Batches = std::vector<std::vector<std::int64_t>>;

data::LoaderContext context(std::int64_t seed = 42) {
  data::LoaderContext context;
  context.seed = seed;
  return context;
}

std::vector<std::int64_t> flat(const Batches& batches) {
  std::vector<std::int64_t> all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

template <class Function>
std::string message_of(Function&& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

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

TEST(Loader, WorkersKeepTheOrder) {
  auto expected = data::prepare_loader(data::loader(stacked(100), options(3)), context());
  auto loader = data::prepare_loader(data::loader(stacked(100), options(3, 3)), context());
  for (int epoch = 0; epoch < 3; ++epoch) EXPECT_EQ(pass(loader), pass(expected));
}

}  // namespace
