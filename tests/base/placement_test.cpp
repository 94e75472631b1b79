// Where parts of tensors lie, compared with cutting lists of indices.

#include <accelerate/base/error.hpp>
#include <accelerate/base/placement.hpp>
#include <support/message_of.hpp>
#include <support/random_placements.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <limits>

namespace accelerate {
namespace {

using testing::for_each_element;
using testing::message_of;
using testing::RandomPlacements;
using Sizes = std::vector<std::int64_t>;

std::int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

// The row-major numbers of the elements that a placement says a rank has, in memory order: the
// definition, element by element.
Sizes elements_by_definition(const Placement& placement) {
  std::vector<Sizes> indices;  // of the whole tensor, by dimension
  for (const std::int64_t size : placement.shape()) {
    indices.emplace_back(static_cast<std::size_t>(size));
    std::iota(indices.back().begin(), indices.back().end(), 0);
  }
  for (const Cut& cut : placement.cuts()) {
    Sizes& list = indices[static_cast<std::size_t>(cut.dimension)];
    const auto block = static_cast<std::int64_t>(list.size()) / cut.blocks;
    const std::int64_t piece = (block + cut.parts - 1) / cut.parts;
    Sizes kept;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::int64_t within = static_cast<std::int64_t>(i) % block;
      if (within >= cut.part * piece && within < (cut.part + 1) * piece) kept.push_back(list[i]);
    }
    list = kept;
  }
  Sizes order = placement.order();
  if (order.empty()) {
    order.resize(placement.shape().size());
    std::iota(order.begin(), order.end(), 0);
  }
  Sizes all{0};
  Sizes strides(placement.shape().size(), 1);
  for (std::size_t d = strides.size(); d-- > 1;) strides[d - 1] = strides[d] * placement.shape()[d];
  for (const std::int64_t d : order) {
    Sizes longer;
    for (const std::int64_t element : all) {
      for (const std::int64_t index : indices[static_cast<std::size_t>(d)])
        longer.push_back(element + index * strides[static_cast<std::size_t>(d)]);
    }
    all = std::move(longer);
  }
  const auto begin = all.begin() + placement.first();
  return {begin, begin + placement.count()};
}

void expect_says(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << '"' << part << "\" is not in: " << message;
}

TEST(Placement, ARunIsAtMostTwoBoxesADimensionLessOne) {
  RandomPlacements random(1);
  std::size_t most = 0;
  for (int i = 0; i < 3000; ++i) {
    const Sizes shape = random.shape();
    const std::int64_t elements = product(shape);
    const std::int64_t first = random.below(elements + 1);
    const std::int64_t count = random.below(elements - first + 1);
    const auto boxes = boxes_of_run(shape, first, count);
    if (!shape.empty()) ASSERT_LE(boxes.size(), 2 * shape.size() - 1);
    most = std::max(most, boxes.size());
    std::int64_t next = first;
    const auto strides = Placement(shape).boxes()[0].strides;
    for (const Box& box : boxes)
      for_each_element(shape, {box, 0, strides},
                       [&](std::int64_t element, std::int64_t) { ASSERT_EQ(element, next++); });
    ASSERT_EQ(next, first + count);
  }
  EXPECT_EQ(most, 7U);  // four dimensions can need as many
}

TEST(Placement, SaysWhereEachElementLies) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    RandomPlacements random(seed);
    const Sizes shape = random.shape();
    for (const Placement& rank : random.layout(shape)) {
      const Sizes expected = elements_by_definition(rank);
      Sizes found(expected.size(), -1);
      for (const PlacedBox& placed : rank.boxes()) {
        for_each_element(shape, placed, [&](std::int64_t element, std::int64_t place) {
          ASSERT_TRUE(place >= 0 && place < rank.count()) << "seed " << seed;
          ASSERT_EQ(found[static_cast<std::size_t>(place)], -1) << "seed " << seed;
          found[static_cast<std::size_t>(place)] = element;
        });
      }
      ASSERT_EQ(found, expected) << "seed " << seed << ", " << rank.text();
    }
  }
}

TEST(Placement, RanksOwnEveryElementOnce) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    RandomPlacements random(seed);
    const Sizes shape = random.shape();
    std::vector<Box> boxes;
    for (const Placement& rank : random.layout(shape)) {
      for (const PlacedBox& placed : rank.boxes()) boxes.push_back(placed.box);
    }
    ASSERT_EQ(partition_problem(shape, boxes), "") << "seed " << seed;
    if (product(shape) == 0) continue;
    // One less, one twice, one moved: none of it passes.
    const auto chosen = static_cast<std::size_t>(random.below(std::ssize(boxes)));
    std::vector<Box> wrong = boxes;
    wrong.erase(wrong.begin() + static_cast<std::ptrdiff_t>(chosen));
    EXPECT_NE(partition_problem(shape, wrong), "") << "seed " << seed;
    wrong = boxes;
    wrong.push_back(boxes[chosen]);
    EXPECT_NE(partition_problem(shape, wrong), "") << "seed " << seed;
    if (shape.empty()) continue;
    wrong = boxes;
    wrong[chosen].offsets[static_cast<std::size_t>(random.below(std::ssize(shape)))] +=
        random.below(2) == 0 ? 1 : -1;
    EXPECT_NE(partition_problem(shape, wrong), "") << "seed " << seed;
  }
}

TEST(Placement, AnyLayoutGoesIntoAnyOther) {
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    RandomPlacements random(seed);
    const Sizes shape = random.shape();
    // One holds the elements' numbers, and they go where the boxes of both meet.
    const auto from = random.layout(shape);
    for (const Placement& rank : random.layout(shape)) {
      Sizes memory(static_cast<std::size_t>(rank.count()), -1);
      for (const PlacedBox& to : rank.boxes()) {
        for (const Placement& other : from) {
          const Sizes values = elements_by_definition(other);
          for (const PlacedBox& own : other.boxes()) {
            const auto common = intersect(own.box, to.box);
            if (!common) continue;
            ASSERT_EQ(common, intersect(to.box, own.box));
            PlacedBox source{*common, own.offset, own.strides};
            PlacedBox target{*common, to.offset, to.strides};
            for (std::size_t d = 0; d < shape.size(); ++d) {
              source.offset += (common->offsets[d] - own.box.offsets[d]) * own.strides[d];
              target.offset += (common->offsets[d] - to.box.offsets[d]) * to.strides[d];
            }
            Sizes taken;
            for_each_element(shape, source, [&](std::int64_t, std::int64_t place) {
              taken.push_back(values[static_cast<std::size_t>(place)]);
            });
            std::size_t next = 0;
            for_each_element(shape, target, [&](std::int64_t, std::int64_t place) {
              ASSERT_EQ(memory[static_cast<std::size_t>(place)], -1) << "seed " << seed;
              memory[static_cast<std::size_t>(place)] = taken[next++];
            });
          }
        }
      }
      ASSERT_EQ(memory, elements_by_definition(rank)) << "seed " << seed;
    }
  }
}

TEST(Placement, AFusedWeightIsCutWithinItsBlocks) {
  // Queries, keys and values of 4 heads of 2 rows each, over 2 ranks.
  const Placement qkv = Placement({24, 8}).cut({"tp", 0, 2, 1, 3});
  EXPECT_EQ(qkv.local_shape(), (Sizes{12, 8}));
  const auto boxes = qkv.boxes();
  ASSERT_EQ(boxes.size(), 3U);
  EXPECT_EQ(boxes[0].box, (Box{{4, 0}, {4, 8}}));
  EXPECT_EQ(boxes[1].box, (Box{{12, 0}, {4, 8}}));
  EXPECT_EQ(boxes[2].box, (Box{{20, 0}, {4, 8}}));
  EXPECT_EQ(boxes[2].offset, 64);
  // Sharding takes a run of that; a box of text says where.
  const auto shard = qkv.run(36, 24).boxes();
  ASSERT_EQ(shard.size(), 3U);
  EXPECT_EQ(shard[0].box.text(), "[12:13, 4:8]");
  EXPECT_EQ(shard[1].box.text(), "[13:15, 0:8]");
  EXPECT_EQ(shard[2].box.text(), "[15:16, 0:4]");
  EXPECT_EQ(shard[2].offset, 20);
  EXPECT_EQ(qkv.run(36, 24).text(), "tp 1/2 of 3 in 0: 36+24");
  // Into one piece again where nothing was cut.
  EXPECT_EQ(Placement({24, 8}).cut({"tp", 0, 1, 0, 3}).boxes().size(), 1U);
  EXPECT_TRUE(Placement({24, 8}).cut({"tp", 0, 1, 0, 3}).is_whole());
}

TEST(Placement, PiecesMayBeUneven) {
  const Placement vocabulary({50257, 2});
  for (const auto& [part, rows] :
       {std::pair{0, 12565}, std::pair{1, 12565}, std::pair{2, 12565}, std::pair{3, 12562}})
    EXPECT_EQ(vocabulary.cut({"tp", 0, 4, part}).local_shape(), (Sizes{rows, 2})) << part;
  EXPECT_EQ(Placement({5}).cut({"tp", 0, 4, 2}).count(), 1);
  EXPECT_EQ(Placement({5}).cut({"tp", 0, 4, 3}).count(), 0);
  EXPECT_TRUE(Placement({5}).cut({"tp", 0, 4, 3}).boxes().empty());
  EXPECT_EQ(
      Placement({5}).cut({"tp", 0, std::int64_t{1} << 62, (std::int64_t{1} << 62) - 1}).count(), 0);
}

TEST(Placement, StridesSayWhereAWholeLocalTensorLies) {
  const auto boxes = Placement({4, 6}).cut({"tp", 1, 2, 0, 3}).boxes({1, 4});
  ASSERT_EQ(boxes.size(), 3U);
  EXPECT_EQ(boxes[1].box, (Box{{0, 2}, {4, 1}}));
  EXPECT_EQ(boxes[1].offset, 4);
  EXPECT_EQ(memory_order({2, 3, 4, 5}, {60, 1, 15, 3}), (Sizes{0, 2, 3, 1}));
  EXPECT_EQ(memory_order({2, 3}, {3, 1}), Sizes{});
  EXPECT_EQ(memory_order({2, 1, 3}, {3, 77, 1}), Sizes{});
  EXPECT_EQ(memory_order({2, 3}, {7, 2}), Sizes{});
}

TEST(Placement, RefusesWhatCannotBe) {
  const Placement placement({6, 4});
  expect_says(message_of<ShardingError>([&] {
                placement.cut({"tp", 2, 2, 0});
              }),
              {"'tp'", "no dimension 2"});
  expect_says(message_of<ShardingError>([&] {
                placement.cut({"tp", -1, 2, 0});
              }),
              {"no dimension -1"});
  expect_says(message_of<ShardingError>([&] {
                placement.cut({"tp", 0, 2, 2});
              }),
              {"no part 2 of 2"});
  expect_says(message_of<ShardingError>([&] {
                placement.cut({"tp", 0, 0, 0});
              }),
              {"no part 0 of 0"});
  expect_says(message_of<ShardingError>([&] {
                placement.cut({"tp", 1, 2, 0, 3});
              }),
              {"3 blocks of equal size"});
  expect_says(message_of<ShardingError>([&] {
                placement.run(1, 2).cut({"tp", 0, 2, 0});
              }),
              {"only a run"});
  expect_says(message_of<ShardingError>([&] { placement.run(20, 5); }),
              {"has 24 elements", "5 of them from 20"});
  expect_says(message_of<ShardingError>([&] { placement.run(-1, 5); }), {"from -1"});
  expect_says(message_of<ShardingError>(
                  [&] { placement.run(1, std::numeric_limits<std::int64_t>::max()); }),
              {"24 elements"});
  expect_says(message_of<ShardingError>([&] {
                placement.run(1, 2).boxes({4, 1});
              }),
              {"has 2 elements"});
  expect_says(message_of<ShardingError>([&] { Placement({2, -1}); }), {"[2, -1]"});
  expect_says(message_of<ShardingError>([&] {
                Placement({std::int64_t{1} << 40, std::int64_t{1} << 40});
              }),
              {"cannot be placed"});
  expect_says(message_of<ShardingError>([&] {
                Placement({2, 3}, {0, 0});
              }),
              {"no order of the 2 dimensions"});
}

TEST(Placement, PartitionProblemsAreNamed) {
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  const Sizes shape{4, 4};
  expect_says(partition_problem(shape, {{{0, 0}, {4, 3}}}), {"12 of the 16"});
  expect_says(partition_problem(shape, {{{0, 0}, {4, 4}}, {{0, 0}, {1, 1}}}), {"more than the 16"});
  expect_says(partition_problem(shape, {{{0, 0}, {2, 4}}, {{1, 0}, {2, 4}}}),
              {"[0:2, 0:4] and [1:3, 0:4] overlap"});
  for (const Box& box : std::vector<Box>{{{-1, 0}, {4, 4}},
                                         {{0, 0}, {-4, -4}},
                                         {{1, 0}, {4, 4}},
                                         {{most, 0}, {most, 4}},
                                         {{0, 1}, {4, most}},
                                         {{0}, {4}},
                                         {{0, 0, 0}, {4, 4, 1}},
                                         {{0, 0}, {4}},
                                         {{}, {}}})
    expect_says(partition_problem(shape, {box}), {"does not lie in a tensor of shape [4, 4]"});
  expect_says(partition_problem({most, most}, {}), {"cannot be"});
  EXPECT_EQ(partition_problem({0, 3}, {}), "");
  EXPECT_EQ(partition_problem({0, 3}, {{{0, 0}, {0, 3}}}), "");
  EXPECT_EQ(partition_problem({}, {{{}, {}}}), "");
  expect_says(partition_problem({}, {}), {"0 of the 1"});
}

TEST(Placement, ManyBoxesAreComparedInLittleTime) {
  // A grid; half slabs and half strips, of which each overlaps many others in one dimension; and
  // the same box again and again.
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Box> grid, mixed, same;
  for (std::int64_t i = 0; i < 200; ++i) {
    for (std::int64_t j = 0; j < 200; ++j) grid.push_back({{i * 3, j * 5}, {3, 5}});
  }
  EXPECT_EQ(partition_problem({600, 1000}, grid), "");
  std::swap(grid[7].offsets, grid[20'001].offsets);
  grid[7].offsets[1] += 1;
  EXPECT_NE(partition_problem({600, 1000}, grid), "");
  for (std::int64_t i = 0; i < 20'000; ++i) {
    mixed.push_back({{i, 0}, {1, 20'000}});
    mixed.push_back({{0, 20'000 + i}, {20'000, 1}});
    same.push_back({{5}, {1}});
  }
  EXPECT_EQ(partition_problem({20'000, 40'000}, mixed), "");
  EXPECT_NE(partition_problem({20'000}, same), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
}

}  // namespace
}  // namespace accelerate
