// Runs on several ranks: the group's collectives and those over trees and JSON values.
#include "support/distributed.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/comm/collectives.hpp>
#include <accelerate/comm/group.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <numeric>

namespace accelerate::comm {
namespace {

using testing::world;

const std::vector<at::ScalarType> kDtypes{at::kFloat,    at::kDouble, at::kHalf,
                                          at::kBFloat16, at::kInt,    at::kLong,
                                          at::kChar,     at::kByte,   at::kBool};

at::Tensor ranks_up_to(int size) { return at::arange(size, at::kLong); }

TEST(Group, KnowsItsRanks) {
  EXPECT_EQ(world().name(), "world");
  EXPECT_EQ(static_cast<int>(world().global_ranks().size()), world().size());
  EXPECT_GT(world().timeout().count(), 0);
}

TEST(Group, AllReducesEveryDtype) {
  const int size = world().size();
  for (const auto dtype : kDtypes) {
    if (dtype == at::kBool) continue;
    const auto mine = at::full({5}, world().rank() + 1, at::TensorOptions(dtype));
    for (const auto& [op, expected] :
         {std::pair{ReduceOp::sum, size * (size + 1) / 2}, std::pair{ReduceOp::max, size},
          std::pair{ReduceOp::min, 1}}) {
      auto tensor = mine.clone();
      world().all_reduce(tensor, op).wait();
      EXPECT_TRUE(at::equal(tensor, at::full({5}, expected, at::TensorOptions(dtype))))
          << dtype << tensor;
    }
    if (at::isFloatingType(dtype)) {
      auto tensor = mine.clone();
      world().all_reduce(tensor, ReduceOp::avg).wait();
      EXPECT_TRUE(at::equal(tensor, at::full({5}, (size + 1) / 2.0, at::TensorOptions(dtype))))
          << dtype << tensor;
    }
  }
  auto product = at::full({3}, 2.0);
  world().all_reduce(product, ReduceOp::product).wait();
  EXPECT_EQ(product[0].item<double>(), std::pow(2.0, size));
  EXPECT_THROW(world().all_reduce(at::ones({2}, at::kLong), ReduceOp::avg), ConfigError);
  auto flag = at::full({1}, world().rank() == size - 1, at::TensorOptions(at::kBool));
  world().all_reduce(flag, ReduceOp::max).wait();
  EXPECT_TRUE(flag.item<bool>());
}

TEST(Group, MovesEveryDtype) {
  const int size = world().size();
  auto dtypes = kDtypes;
  dtypes.insert(dtypes.end(), {at::kComplexFloat, at::kFloat8_e4m3fn});

  for (const auto dtype : dtypes) {
    const auto options = at::TensorOptions(dtype);
    auto sent = at::full({2, 3}, 0).to(dtype);
    if (world().rank() == size - 1) sent = at::full({2, 3}, 1).to(dtype);
    world().broadcast(sent, size - 1).wait();
    EXPECT_TRUE(at::equal(sent.to(at::kFloat), at::ones({2, 3}))) << dtype;

    const auto part = at::full({2}, world().rank() % 2).to(dtype);
    const auto whole = at::empty({2 * size}, options);
    world().all_gather_into(whole, part).wait();
    EXPECT_TRUE(at::equal(whole.to(at::kLong), (ranks_up_to(size) % 2).repeat_interleave(2)))
        << dtype;

    const auto given = at::full({size}, world().rank() % 2).to(dtype);
    const auto got = at::empty({size}, options);
    world().all_to_all_into(got, given).wait();
    EXPECT_TRUE(at::equal(got.to(at::kLong), ranks_up_to(size) % 2)) << dtype;
  }
}

TEST(Group, ReduceScatters) {
  const int size = world().size();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kLong}) {
    const auto whole = (ranks_up_to(size).repeat_interleave(3) + world().rank()).to(dtype);
    const auto part = at::empty({3}, at::TensorOptions(dtype));
    world().reduce_scatter_into(part, whole).wait();
    const int expected = size * world().rank() + size * (size - 1) / 2;
    EXPECT_TRUE(at::equal(part, at::full({3}, expected, at::TensorOptions(dtype))))
        << dtype << part;
  }
  const auto part = at::empty({2});
  world()
      .reduce_scatter_into(part, at::full({2 * size}, world().rank() + 1.0), ReduceOp::avg)
      .wait();
  EXPECT_TRUE(at::equal(part, at::full({2}, (size + 1) / 2.0)));
}

TEST(Group, AllToAllWithUnequalSplits) {
  // Rank r sends r + 1 rows to each rank.
  const int size = world().size();
  const int rank = world().rank();
  const auto input = at::full({size * (rank + 1), 2}, rank, at::kFloat);
  const auto output = at::empty({size * (size + 1) / 2, 2});
  std::vector<std::int64_t> from(size);
  std::iota(from.begin(), from.end(), 1);
  world().all_to_all_into(output, input, from, std::vector<std::int64_t>(size, rank + 1)).wait();
  const auto expected = ranks_up_to(size).repeat_interleave(ranks_up_to(size) + 1).to(at::kFloat);
  EXPECT_TRUE(at::equal(output.select(1, 0), expected)) << output;
  EXPECT_THROW(world().all_to_all_into(output, input, {1}, {1}), ConfigError);
}

TEST(Group, SendsAndReceives) {
  const int size = world().size();
  const int next = (world().rank() + 1) % size;
  const int previous = (world().rank() + size - 1) % size;
  const auto mine = at::full({1000}, world().rank(), at::kFloat);
  const auto theirs = at::empty({1000});
  const auto theirs_too = at::empty({1}, at::kInt);
  auto receiving_too = world().recv(theirs_too, previous, 8);
  auto receiving = world().recv(theirs, previous, 7);
  auto sending = world().send(mine, next, 7);
  auto sending_too = world().send(at::full({1}, -5, at::kInt), next, 8);
  sending.wait();
  receiving.wait();
  sending_too.wait();
  receiving_too.wait();
  EXPECT_TRUE(at::equal(theirs, at::full({1000}, previous, at::kFloat)));
  EXPECT_EQ(theirs_too.item<int>(), -5);
}

TEST(Group, RefusesWhatCannotWork) {
  EXPECT_THROW(world().all_reduce(at::Tensor()), ConfigError);
  EXPECT_THROW(world().all_reduce(at::ones({2, 3}).t()), ConfigError);
  EXPECT_THROW(world().broadcast(at::ones({2}), world().size()), ConfigError);
  EXPECT_THROW(world().all_gather_into(at::ones({2}), at::ones({2})), ConfigError);
  EXPECT_THROW(world().scatter_bytes({}, world().rank()), ConfigError);
  world().barrier();
}

TEST(Group, ExchangesBytesOfAnyLength) {
  for (const std::size_t length : {0, 3, 504, 505, 100000}) {
    const std::string mine(length * (world().rank() + 1), static_cast<char>('a' + world().rank()));
    const auto all = world().all_gather_bytes(mine);
    ASSERT_EQ(static_cast<int>(all.size()), world().size());
    for (int rank = 0; rank < world().size(); ++rank) {
      EXPECT_EQ(all[rank], std::string(length * (rank + 1), static_cast<char>('a' + rank)));
    }
    const int source = world().size() - 1;
    EXPECT_EQ(world().broadcast_bytes(mine, source), all[source]);
    std::vector<std::string> parts;
    if (world().rank() == source) parts = all;
    EXPECT_EQ(world().scatter_bytes(parts, source), mine);
  }
}

TEST(Group, Splits) {
  const int rank = world().rank();
  const Group evens_and_odds = world().split(rank % 2, -rank, "parity");
  EXPECT_EQ(evens_and_odds.name(), "parity");
  EXPECT_EQ(evens_and_odds.size(), (world().size() + 1 - rank % 2) / 2);
  // Ordered by key, which is the negative rank here.
  EXPECT_TRUE(
      std::is_sorted(evens_and_odds.global_ranks().rbegin(), evens_and_odds.global_ranks().rend()));
  EXPECT_EQ(evens_and_odds.global_ranks()[evens_and_odds.rank()], rank);
  const auto tensor = at::full({1}, rank, at::kFloat);
  evens_and_odds.all_reduce(tensor).wait();
  float expected = 0;
  for (int other = rank % 2; other < world().size(); other += 2)
    expected += static_cast<float>(other);
  EXPECT_EQ(tensor.item<float>(), expected);

  const Group alone = world().split(rank, 0, "alone");
  EXPECT_EQ(alone.size(), 1);
  EXPECT_EQ(alone.global_ranks(), std::vector<int>{rank});
  const Group again = world().split(0, 0, "again");
  EXPECT_EQ(again.rank(), rank);
  again.barrier();
}

TEST(Collectives, GatherATree) {
  using Tree = std::tuple<at::Tensor, std::map<std::string, at::Tensor>, std::vector<at::Tensor>,
                          std::string>;
  const int size = world().size();
  const auto rank = static_cast<double>(world().rank());
  const Tree mine{
      at::full({2, 3}, rank),
      {{"flag", at::full({1}, rank > 0, at::kBool)}, {"id", at::full({2}, rank, at::kInt)}},
      {at::scalar_tensor(rank), at::Tensor()},
      "kept"};
  const auto [data, map, list, text] = gather(mine, world());
  EXPECT_EQ(data.sizes(), at::IntArrayRef({2 * size, 3}));
  EXPECT_TRUE(at::equal(data.select(1, 2), ranks_up_to(size).repeat_interleave(2).to(at::kFloat)));
  EXPECT_TRUE(at::equal(map.at("flag"), ranks_up_to(size) > 0));
  EXPECT_TRUE(at::equal(map.at("id").to(at::kLong), ranks_up_to(size).repeat_interleave(2)));
  EXPECT_TRUE(at::equal(list[0], ranks_up_to(size).to(at::kFloat)));
  EXPECT_FALSE(list[1].defined());
  EXPECT_EQ(text, "kept");
  EXPECT_EQ(gather(at::empty({0, 4}), world()).sizes(), at::IntArrayRef({0, 4}));
  // A tensor that is not contiguous, and one that wants gradients.
  EXPECT_TRUE(at::equal(gather(at::arange(6).view({2, 3}).t(), world()).slice(0, 0, 3),
                        at::arange(6).view({2, 3}).t()));
}

TEST(Collectives, GatherOfUnequalShapesFailsOnEveryRank) {
  const auto uneven = at::ones({world().rank() == 0 ? 3 : 2, 4});
  try {
    gather(std::pair{at::ones({1}), uneven}, world());
    ADD_FAILURE() << "no error";
  } catch (const DistributedError& error) {
    EXPECT_EQ(error.operation(), "gather");
    const std::string what = error.what();
    EXPECT_NE(what.find("rank 0: Float[3, 4]; rank 1: Float[2, 4]"), std::string::npos) << what;
    EXPECT_NE(what.find("pad_across_processes"), std::string::npos) << what;
  }
  std::vector<at::Tensor> more(world().rank() == 0 ? 1 : 2, at::ones({1}));
  EXPECT_THROW(gather(more, world()), DistributedError);
}

TEST(Collectives, Reduce) {
  const int size = world().size();
  const auto mine = at::full({2}, world().rank() + 1.0);
  EXPECT_TRUE(at::equal(reduce(mine, world()), at::full({2}, size * (size + 1) / 2.0)));
  EXPECT_TRUE(
      at::equal(reduce(mine, world(), Reduction::mean, 4.0), at::full({2}, (size + 1) * 2.0)));
  EXPECT_TRUE(at::equal(mine, at::full({2}, world().rank() + 1.0)));
  EXPECT_THROW(reduce(at::ones({2}, at::kLong), world(), Reduction::mean), ConfigError);
}

TEST(Collectives, Broadcast) {
  const std::map<std::string, at::Tensor> mine{{"a", at::full({2}, world().rank(), at::kFloat)},
                                               {"b", at::full({1}, world().rank(), at::kBool)}};
  const auto sent = broadcast(mine, world(), 1);
  EXPECT_TRUE(at::equal(sent.at("a"), at::ones({2})));
  EXPECT_TRUE(sent.at("b").item<bool>());
  EXPECT_TRUE(at::equal(mine.at("a"), at::ones({2})));  // in place
  const auto transposed = at::full({2, 3}, world().rank(), at::kFloat).t();
  broadcast(transposed, world(), 1);
  EXPECT_TRUE(at::equal(transposed, at::ones({3, 2})));
}

TEST(Collectives, PadAcrossProcesses) {
  const int size = world().size();
  const int rank = world().rank();
  const auto mine = at::full({rank + 1, 2}, 7.0);
  const auto padded = pad_across_processes(mine, world(), 0, -1);
  EXPECT_EQ(padded.sizes(), at::IntArrayRef({size, 2}));
  EXPECT_TRUE(at::equal(padded.slice(0, 0, rank + 1), mine));
  EXPECT_EQ(padded.slice(0, rank + 1).eq(-1).sum().item<int>(), 2 * (size - rank - 1));
  const auto first = pad_across_processes(mine.t(), world(), -1, 0, true);
  EXPECT_EQ(first.sizes(), at::IntArrayRef({2, size}));
  EXPECT_TRUE(at::equal(first.slice(1, size - rank - 1), mine.t()));
  EXPECT_EQ(pad_across_processes(mine, world(), 5).size(0), rank + 1);
  EXPECT_EQ(gather(padded, world()).size(0), size * size);
}

TEST(Collectives, PadsEachFieldWithItsOwnValue) {
  using Batch = std::map<std::string, at::Tensor>;
  const int size = world().size();
  const int rank = world().rank();
  const Batch mine{{"ids", at::full({1, rank + 1}, 7, at::kLong)},
                   {"labels", at::full({1, rank + 1}, 7, at::kLong)},
                   {"mask", at::ones({1, rank + 1}, at::kBool)}};
  const auto values = PadValues(5).field("labels", -100).field("mask", 0);
  const Batch padded = pad_across_processes(mine, world(), 1, values);
  for (const auto& [name, value] : {std::pair{"ids", 5}, {"labels", -100}, {"mask", 0}}) {
    const at::Tensor& field = padded.at(name);
    EXPECT_EQ(field.sizes(), at::IntArrayRef({1, size}));
    EXPECT_EQ(field.slice(1, rank + 1).eq(value).sum().item<int>(), size - rank - 1) << name;
    EXPECT_TRUE(at::equal(field.slice(1, 0, rank + 1), mine.at(name))) << name;
  }
  const auto what = [&](const PadValues& given) {
    try {
      pad_across_processes(mine, world(), 1, given);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_NE(what(PadValues(0).field("lables", -100)).find("The fields are: ids, labels, mask"),
            std::string::npos);
  // It was true before, without a word.
  EXPECT_NE(what(PadValues(-100)).find("'mask' is of Bool, which cannot hold -100"),
            std::string::npos);
}

TEST(Collectives, Objects) {
  const int size = world().size();
  const auto lists = gather_object(Json::array({world().rank(), "x"}), world());
  ASSERT_EQ(static_cast<int>(lists.size()), 2 * size);
  EXPECT_EQ(lists[2], 1);
  EXPECT_EQ(lists[3], "x");
  const auto values = gather_object(Json{{"rank", world().rank()}, {"nan", std::nan("")}}, world());
  ASSERT_EQ(static_cast<int>(values.size()), size);
  EXPECT_EQ(values[1]["rank"], 1);
  EXPECT_TRUE(std::isnan(values[1]["nan"].get<double>()));
  // Only rank 0 has something to say.
  EXPECT_EQ(
      gather_object(world().rank() == 0 ? Json::array({1, 2}) : Json::array(), world()).size(), 2u);

  std::vector<Json> objects(2);
  if (world().rank() == 1) objects = {Json{{"lr", 0.1}}, std::string(3000, 'z')};
  broadcast_object_list(objects, world(), 1);
  EXPECT_EQ(objects[0]["lr"], 0.1);
  EXPECT_EQ(objects[1].get<std::string>().size(), 3000u);
}

TEST(Collectives, SliceAndConcatenate) {
  const std::pair<at::Tensor, int> tree{at::arange(6), 3};
  const auto [rows, number] = slice(tree, 2, 4);
  EXPECT_TRUE(at::equal(rows, at::arange(2, 4)));
  EXPECT_EQ(number, 3);
  const auto joined = concatenate(std::vector{tree, std::pair<at::Tensor, int>{at::arange(2), 4}});
  EXPECT_EQ(joined.first.size(0), 8);
  EXPECT_EQ(joined.second, 3);
  EXPECT_THROW(concatenate(std::vector<at::Tensor>{}), DataError);
}

}  // namespace
}  // namespace accelerate::comm
