// Compares the sharding rules and the seedable order with Python Accelerate's, entry for entry.
#include "support/python.hpp"

#include <accelerate/data/sampler.hpp>
#include <accelerate/data/shard.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

namespace accelerate::data {
namespace {

using Batches = std::vector<std::vector<std::int64_t>>;

const Json& reference() {
  static const Json json = testing::run_python("data/sharding_reference.py");
  return json;
}

class ShardingParity : public ::testing::Test {
  void SetUp() override {
    if (!testing::has_python()) {
      GTEST_SKIP() << "This LibTorch came without Python, so there is nothing to compare with.";
    }
  }
};

// The batches of a rank over a stream of `length` units. With `lazy` the rule is told only as much
// of the length as it asked for.
Batches batches_of(const ShardRule& rule, std::int64_t length, bool lazy) {
  Batches found;
  for (std::int64_t step = 0;; ++step) {
    const std::int64_t known = lazy ? std::min(length, needed_length(rule, step)) : length;
    const StepShare share = share_of_step(rule, step, known);
    if (!share.exists) return found;
    EXPECT_TRUE(found.empty() || !share_of_step(rule, step - 1, known).last);
    EXPECT_EQ(share.last, !share_of_step(rule, step + 1, length).exists);
    found.push_back(positions(rule, share, known));
  }
}

void compare(ShardRule rule, std::int64_t length, const Json& expected, const std::string& what) {
  for (rule.rank = 0; rule.rank < rule.world; ++rule.rank) {
    SCOPED_TRACE(what + ", rank " + std::to_string(rule.rank) + " of " +
                 std::to_string(rule.world));
    const Batches wanted = expected[rule.rank].get<Batches>();
    const Batches found = batches_of(rule, length, false);
    EXPECT_EQ(found, wanted);
    EXPECT_EQ(batches_of(rule, length, true), wanted);
    // The original's own len() is wrong in places; ours is the number of batches there are.
    EXPECT_EQ(count_steps(rule, rule.rank, length), static_cast<std::int64_t>(wanted.size()));
    // Whatever step one starts at, what follows is what would have followed.
    for (std::size_t skipped = 1; skipped <= wanted.size(); skipped += 2) {
      ShardRule later = rule;
      later.origin = static_cast<std::int64_t>(skipped) * rule.block();
      EXPECT_EQ(batches_of(later, length, true), Batches(wanted.begin() + skipped, wanted.end()))
          << "from " << skipped;
      EXPECT_EQ(count_steps(later, rule.rank, length),
                static_cast<std::int64_t>(wanted.size() - skipped));
    }
  }
}

TEST_F(ShardingParity, MapDatasets) {
  ASSERT_GT(reference()["map"].size(), 2000u);
  for (const Json& entry : reference()["map"]) {
    const std::int64_t n = entry[0], batch = entry[1];
    ShardRule rule;
    rule.world = entry[2];
    const bool split = entry[3];
    rule.batch = split ? batch / rule.world : batch;
    rule.even = entry[4];
    rule.drop_last = entry[5];
    compare(rule, n, entry[6], entry.dump().substr(0, 40));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(ShardingParity, IterableDatasets) {
  ASSERT_GT(reference()["iterable"].size(), 1000u);
  for (const Json& entry : reference()["iterable"]) {
    ShardRule rule;
    rule.world = entry[2];
    const bool split = entry[3];
    rule.batch = entry[1].get<std::int64_t>() / (split ? rule.world : 1);
    rule.drop_last = entry[4];
    // The original gives a flat stream of samples.
    Json batched = Json::array();
    for (const Json& samples : entry[5]) {
      Batches batches;
      for (std::size_t i = 0; i < samples.size(); ++i) {
        if (i % rule.batch == 0) batches.emplace_back();
        batches.back().push_back(samples[i]);
      }
      batched.push_back(batches);
    }
    compare(rule, entry[0], batched, entry.dump().substr(0, 40));
    if (::testing::Test::HasFailure()) return;
  }
}

// Where a sampler makes the batches, they are the units.
TEST_F(ShardingParity, BatchSamplersWithoutABatchSize) {
  for (const Json& entry : reference()["own_batches"]) {
    ShardRule rule;
    rule.world = entry[1];
    rule.even = entry[2];
    Json units = Json::array();
    for (const Json& batches : entry[3]) {
      Batches numbers;
      // Batch b begins at 0, 1, 3, 6, 7, 9, ...
      for (const Json& batch : batches) {
        const std::int64_t first = batch[0];
        numbers.push_back({first / 6 * 3 + (first % 6 == 0 ? 0 : first % 6 == 1 ? 1 : 2)});
      }
      units.push_back(numbers);
    }
    compare(rule, entry[0], units, entry.dump().substr(0, 40));
    if (::testing::Test::HasFailure()) return;
  }
}

TEST_F(ShardingParity, SeedableRandomSampler) {
  for (const Json& entry : reference()["seedable"]) {
    const std::int64_t size = entry[0];
    SeedableRandomSampler sampler(size, entry[1]);
    auto order = shuffled_order(size);
    std::int64_t epoch = 0;
    for (const Json& expected : entry[2]) {
      const auto wanted = expected.get<std::vector<std::size_t>>();
      std::vector<std::size_t> found;
      sampler.reset();
      while (auto batch = sampler.next(3)) found.insert(found.end(), batch->begin(), batch->end());
      EXPECT_EQ(found, wanted);
      order->begin(entry[1].get<std::int64_t>() + epoch++, 0, false);
      order->read(0, size, found.data());
      EXPECT_EQ(found, wanted);
    }
  }
}

TEST(Sharding, LastStepOfADispatcherIsSpread) {
  // Cases D09 and D40 of the original: 9 samples for 2 processes, 11 for 4, batches of 2.
  ShardRule rule;
  rule.batch = 2;
  rule.world = 2;
  rule.spread_last = true;
  EXPECT_EQ(positions(rule, share_of_step(rule, 2, 0, 9), 9), (std::vector<std::int64_t>{8}));
  EXPECT_EQ(positions(rule, share_of_step(rule, 2, 1, 9), 9), (std::vector<std::int64_t>{0}));
  rule.world = 4;
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(positions(rule, share_of_step(rule, 1, rank, 11), 11),
              (std::vector<std::int64_t>{rank < 3 ? 8 + rank : 0}));
  }
  EXPECT_EQ(remainder(rule, 11), 3);
}

TEST(Sharding, IncompleteGroupsOfStepsCanBeDropped) {
  ShardRule rule;
  rule.batch = 2;
  rule.world = 2;
  rule.drop_last = true;
  rule.group = 3;
  EXPECT_EQ(count_steps(rule, 0, 11), 0);
  EXPECT_EQ(count_steps(rule, 0, 12), 3);
  EXPECT_EQ(count_steps(rule, 0, 23), 3);
  EXPECT_EQ(count_steps(rule, 0, 24), 6);
  EXPECT_EQ(remainder(rule, 23), 0);
  EXPECT_TRUE(share_of_step(rule, 2, 0, 23).last);
  EXPECT_FALSE(share_of_step(rule, 3, 0, 23).exists);
}

TEST(Sharding, CountsWhatIsReal) {
  ShardRule rule;
  rule.batch = 3;
  rule.world = 2;
  // 8 samples: the second step has 2 real ones, both on rank 0.
  for (int rank = 0; rank < 2; ++rank) {
    const StepShare share = share_of_step(rule, 1, rank, 8);
    EXPECT_EQ(share.real, rank == 0 ? 2 : 0);
    EXPECT_EQ(share.count, 3);
    EXPECT_EQ(share.global_real, 2);
    EXPECT_EQ(share.global_count, 6);
  }
  EXPECT_EQ(remainder(rule, 8), 2);
  EXPECT_EQ(remainder(rule, 12), 0);
}

TEST(Sharding, AStepFarAwayIsArithmetic) {
  ShardRule rule;
  rule.batch = 32;
  rule.world = 8;
  rule.rank = 7;
  const std::int64_t length = std::numeric_limits<std::int64_t>::max() / 4;
  for (const bool even : {true, false}) {
    rule.even = even;
    EXPECT_EQ(share_of_step(rule, 1'000'000'000'000, length).first,
              1'000'000'000'000 * 256 + 7 * 32);
    EXPECT_FALSE(share_of_step(rule, 1'000'000'000'000, length).last);
  }
}

TEST(Sharding, ContiguousParts) {
  std::int64_t next = 0;
  for (int part = 0; part < 4; ++part) {
    const Range range = contiguous_part(10, part, 4);
    EXPECT_EQ(range.begin, next);
    EXPECT_EQ(range.end - range.begin, part < 2 ? 3 : 2);
    next = range.end;
  }
  EXPECT_EQ(next, 10);
}

}  // namespace
}  // namespace accelerate::data
