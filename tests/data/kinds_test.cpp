// Datasets of every kind, collation, the checks of batches, and trees as bytes.
#include "data/datasets.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/core/tree_codec.hpp>
#include <accelerate/data/loader.hpp>

#include <gtest/gtest.h>
#include <torch/data/dataloader.h>
#include <nlohmann/json.hpp>

#include <array>
#include <map>
#include <tuple>
#include <unordered_map>

namespace {

struct Sequence {
  at::Tensor tokens, mask;
};

}  // namespace

template <>
struct accelerate::TreeTraits<Sequence> {
  template <class Self, class Visitor>
  static void visit(Self& self, Visitor&& visitor) {
    visitor("tokens", self.tokens);
    visitor("mask", self.mask);
  }
};

namespace {

using namespace accelerate;
using namespace data_test;

// Examples 0 .. size - 1, shuffled by the default generator when asked; counts what is read.
struct Counter {
  explicit Counter(std::int64_t size) : size_(size) {}
  void reset(std::int64_t epoch) { next_ = 0, offset_ = 100 * epoch; }
  std::optional<Example> next() {
    if (next_ >= size_) return std::nullopt;
    ++*reads;
    const std::int64_t value = offset_ + next_++;
    return Example(at::full({2}, value, at::kFloat), at::full({}, value, at::kLong));
  }
  std::shared_ptr<std::int64_t> reads = std::make_shared<std::int64_t>(0);
  std::int64_t size_, next_ = 0, offset_ = 0;
};
struct Seekable : Counter {
  using Counter::Counter;
  void skip(std::size_t count) { next_ += static_cast<std::int64_t>(count); }
};

TEST(Streams, ExamplesAreBatchedInOrder) {
  for (const std::size_t workers : {0, 2}) {
    auto loader = data::prepare_loader(
        data::loader(Counter(5), options(2, workers)).collate(data::collate::stack()), context());
    EXPECT_EQ(loader.size(), std::nullopt);
    std::vector<std::int64_t> remainders;
    Batches batches;
    for (auto& batch : loader) {
      batches.push_back(values(batch.target));
      remainders.push_back(loader.progress().remainder);
      EXPECT_EQ(loader.progress().end_of_dataloader, batches.size() == 3);
      EXPECT_EQ(loader.progress().real_samples, batch.target.size(0));
    }
    EXPECT_EQ(batches, (Batches{{0, 1}, {2, 3}, {4}}));
    EXPECT_EQ(remainders, (std::vector<std::int64_t>{-1, 1, 1}));
    EXPECT_EQ(pass(loader), (Batches{{100, 101}, {102, 103}, {104}}));
  }
}

TEST(Streams, SkipAndResume) {
  const auto check = [](auto stream, std::int64_t reads_allowed) {
    auto reads = stream.reads;
    auto loader =
        data::prepare_loader(data::loader(stream, 2).collate(data::collate::stack()), context());
    Json state;
    for (auto& batch : loader) {
      (void)batch;
      if (loader.progress().batches == 3) state = loader.state_dict();
    }
    *reads = 0;
    loader.load_state_dict(state);
    EXPECT_EQ(pass(loader), (Batches{{6, 7}, {8}}));
    EXPECT_EQ(*reads, reads_allowed);
  };
  check(Counter(9), 9);
  check(Seekable(9), 3);  // without reading what is left out
}

TEST(Streams, AnEmptyOneIsAnError) {
  auto loader = data::prepare_loader(
      data::loader(Counter(0), 2).collate(data::collate::stack()).name("train"), context());
  EXPECT_NE(message_of([&] { pass(loader); }).find("the stream is empty"), std::string::npos);
}

TEST(Streams, ErrorsComeOutOfTheLoop) {
  struct Broken : Counter {
    using Counter::Counter;
    std::optional<Example> next() {
      if (next_ == 3) throw std::runtime_error("connection reset");
      return Counter::next();
    }
  };
  for (const std::size_t workers : {0, 1}) {
    auto loader = data::prepare_loader(
        data::loader(Broken(9), options(2, workers)).collate(data::collate::stack()), context());
    const std::string what = message_of([&] { pass(loader); });
    EXPECT_NE(what.find("connection reset"), std::string::npos) << what;
  }
}

// LibTorch's kinds of streams.
struct Chunks : torch::data::datasets::StatefulDataset<Chunks> {
  std::optional<std::vector<Example>> get_batch(std::size_t size) override {
    if (next_ >= 7) return std::nullopt;
    std::vector<Example> examples;
    for (; examples.size() < size && next_ < 7; ++next_)
      examples.emplace_back(at::full({2}, next_, at::kFloat), at::full({}, next_, at::kLong));
    return examples;
  }
  std::optional<std::size_t> size() const override { return std::nullopt; }
  void reset() override { next_ = 0; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}
  std::int64_t next_ = 0;
};

TEST(Streams, StatefulDatasetsOfTorch) {
  auto examples =
      data::prepare_loader(data::loader(Chunks(), 3).collate(data::collate::stack()), context());
  for (int epoch = 0; epoch < 2; ++epoch)
    EXPECT_EQ(pass(examples), (Batches{{0, 1, 2}, {3, 4, 5}, {6}}));
  auto batches = data::prepare_loader(
      data::loader(Chunks().map(torch::data::transforms::Stack<>()), options(3, 1)), context());
  for (int epoch = 0; epoch < 2; ++epoch)
    EXPECT_EQ(pass(batches), (Batches{{0, 1, 2}, {3, 4, 5}, {6}}));
  EXPECT_EQ(batches.progress().remainder, 1);
  batches.skip_first_batches(2);
  EXPECT_EQ(pass(batches), (Batches{{6}}));
}

TEST(ReadyMade, LoadersOfTorchAreIterated) {
  for (const std::size_t workers : {0, 2}) {
    auto made = torch::data::make_data_loader(stacked(10), torch::data::samplers::RandomSampler(10),
                                              options(4, workers));
    auto loader = data::prepare_loader(made, context());
    const auto first = pass(loader);
    EXPECT_EQ(first.size(), 3u);
    auto all = flat(first);
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
    EXPECT_TRUE(loader.progress().end_of_dataloader);
    EXPECT_NE(pass(loader), first);
    // Its order follows from seed and epoch like any other.
    loader.set_epoch(0);
    for (auto& batch : loader) {
      EXPECT_EQ(values(batch.target), first.front());
      break;
    }
    EXPECT_EQ(pass(loader), first);
  }
  auto owned = data::prepare_loader(torch::data::make_data_loader(Chunks(), options(4)), context());
  std::size_t examples = 0;
  for (auto& batch : owned) examples += batch.size();
  EXPECT_EQ(examples, 7u);
}

TEST(Datasets, NeedNotDeriveFromAnything) {
  struct Squares {
    std::size_t size() const { return 5; }
    std::pair<at::Tensor, std::int64_t> get(std::size_t index) const {
      const auto number = static_cast<std::int64_t>(index);
      return {at::full({3}, number, at::kFloat), number * number};
    }
  };
  auto loader = data::prepare_loader(
      data::loader(Squares(), 2).shuffle(false).collate(data::collate::stack()), context());
  static_assert(std::is_same_v<decltype(loader)::BatchType, std::pair<at::Tensor, at::Tensor>>);
  std::vector<std::int64_t> squares;
  for (auto& [data, square] : loader) {
    for (const std::int64_t value : values(square)) squares.push_back(value);
  }
  EXPECT_EQ(squares, (std::vector<std::int64_t>{0, 1, 4, 9, 16}));

  auto raw = data::prepare_loader(data::loader(Squares(), 2), context());
  static_assert(
      std::is_same_v<decltype(raw)::BatchType, std::vector<std::pair<at::Tensor, std::int64_t>>>);
  for (auto& batch : raw) EXPECT_LE(batch.size(), 2u);
}

TEST(Collate, StacksEveryKindOfField) {
  using Item = std::tuple<at::Tensor, std::map<std::string, std::pair<double, std::string>>,
                          std::vector<at::Tensor>, std::array<bool, 2>, Sequence>;
  std::vector<Item> items;
  for (int i = 0; i < 3; ++i) {
    const at::Tensor tensor = at::full({2}, i, at::kFloat);
    items.emplace_back(
        tensor,
        std::map<std::string, std::pair<double, std::string>>{{"a", {0.5 * i, std::to_string(i)}}},
        std::vector<at::Tensor>{tensor, tensor + 1}, std::array<bool, 2>{true, i == 1},
        Sequence{tensor, tensor});
  }
  const auto batch = data::collate::stack()(items);
  EXPECT_EQ(std::get<0>(batch).sizes(), (std::vector<std::int64_t>{3, 2}));
  EXPECT_EQ(std::get<1>(batch).at("a").first.scalar_type(), at::kDouble);
  EXPECT_EQ(std::get<1>(batch).at("a").first[2].item<double>(), 1.0);
  EXPECT_EQ(std::get<1>(batch).at("a").second, (std::vector<std::string>{"0", "1", "2"}));
  EXPECT_EQ(values(std::get<2>(batch)[1].select(1, 0)), (std::vector<std::int64_t>{1, 2, 3}));
  EXPECT_EQ(std::get<3>(batch)[1].scalar_type(), at::kBool);
  EXPECT_EQ(std::get<4>(batch).mask.sizes(), (std::vector<std::int64_t>{3, 2}));
  items[1] = items[0];
  std::get<2>(items[1]).pop_back();
  EXPECT_NE(message_of([&] {
              data::collate::stack()(items);
            }).find("'2' differ in their number of entries: 2 and 1"),
            std::string::npos);
}

TEST(Collate, PadsToTheLongest) {
  std::vector<Example> examples;
  for (const std::int64_t length : {2, 4, 1})
    examples.emplace_back(at::ones({length, 3}), at::full({}, length, at::kLong));
  const auto batch = data::collate::pad(-1, 0)(examples);
  EXPECT_EQ(batch.data.sizes(), (std::vector<std::int64_t>{3, 4, 3}));
  EXPECT_EQ(values(batch.data.select(2, 0)),
            (std::vector<std::int64_t>{1, 1, -1, -1, 1, 1, 1, 1, 1, -1, -1, -1}));
  EXPECT_EQ(values(batch.target), (std::vector<std::int64_t>{2, 4, 1}));
  EXPECT_EQ(data::collate::pad()(examples).data.sizes(), batch.data.sizes());
  EXPECT_NE(message_of([&] {
              data::collate::pad(0, -1)(examples);
            }).find("dimension 0, which is not padded"),
            std::string::npos);
  const std::string stacked = message_of([&] { data::collate::stack()(examples); });
  EXPECT_NE(stacked.find("'data' differ in shape: that of example 0 of the batch is Float [2, 3], "
                         "that of example 1 is Float [4, 3]"),
            std::string::npos)
      << stacked;
  examples[1].data = at::ones({4, 3}, at::kLong);
  EXPECT_NE(message_of([&] { data::collate::pad()(examples); }).find("Long [4, 3]"),
            std::string::npos);
}

TEST(Collate, PadsEachFieldWithItsOwnValue) {
  std::vector<Example> examples;
  for (const std::int64_t length : {2, 1})
    examples.emplace_back(at::ones({length}, at::kLong), at::ones({length}, at::kLong));
  const auto batch = data::collate::pad(PadValues(0).field("target", -100))(examples);
  EXPECT_EQ(values(batch.data), (std::vector<std::int64_t>{1, 1, 1, 0}));
  EXPECT_EQ(values(batch.target), (std::vector<std::int64_t>{1, 1, 1, -100}));
  // What lies under a name has its value too, and the longest name counts.
  using Nested = std::pair<std::map<std::string, at::Tensor>, at::Tensor>;
  std::vector<Nested> nested;
  for (const Example& example : examples)
    nested.push_back({{{"a", example.data}, {"b", example.data}}, example.data});
  const auto [fields, other] =
      data::collate::pad(PadValues(-1).field("0", -2).field("0.b", -3))(nested);
  EXPECT_EQ(values(fields.at("a")), (std::vector<std::int64_t>{1, 1, 1, -2}));
  EXPECT_EQ(values(fields.at("b")), (std::vector<std::int64_t>{1, 1, 1, -3}));
  EXPECT_EQ(values(other), (std::vector<std::int64_t>{1, 1, 1, -1}));

  EXPECT_NE(message_of([&] {
              data::collate::pad(PadValues(0).field("targets", -100))(examples);
            }).find("the field 'targets', and there is none of that name"),
            std::string::npos);
  EXPECT_NE(message_of([&] {
              data::collate::pad(0.5)(examples);
            }).find("'data' is of Long, which cannot hold 0.5"),
            std::string::npos);
}

// Sample i of `Odd` has another structure than the rest.
template <class Change>
struct Odd {
  std::size_t size() const { return 6; }
  std::map<std::string, at::Tensor> get_batch(c10::ArrayRef<std::size_t> indices) const {
    std::map<std::string, at::Tensor> batch{
        {"image", at::zeros({static_cast<std::int64_t>(indices.size()), 4})},
        {"label", at::zeros({1})}};
    if (indices.front() == 2) change(batch);
    return batch;
  }
  Change change;
};

TEST(Checks, ABatchUnlikeTheOthersIsAnError) {
  const auto message = [](auto change, bool varying = false) {
    auto loader = data::prepare_loader(data::loader(Odd<decltype(change)>{change}, 2)
                                           .shuffle(false)
                                           .name("train")
                                           .varying_shapes(varying),
                                       context());
    return message_of([&] {
      for (auto& batch : loader) (void)batch;
    });
  };
  EXPECT_NE(message([](auto& batch) { batch["image"] = batch["image"].to(at::kDouble); })
                .find("'train' differs from the ones before it in 'image': found Double [*, 4], "
                      "expected Float [*, 4]"),
            std::string::npos);
  const auto wide = [](auto& batch) { batch["image"] = at::zeros({2, 5}); };
  EXPECT_NE(
      message(wide).find(
          "found Float [*, 5], expected Float [*, 4] (* is any size). If shapes are meant to vary"),
      std::string::npos)
      << message(wide);
  EXPECT_EQ(message(wide, true), "nothing was thrown");
  EXPECT_NE(message(
                [](auto& batch) {
                  batch["image"] = at::zeros({2, 4, 1});
                },
                true)
                .find("found Float [*, *, *]"),
            std::string::npos);
  EXPECT_NE(
      message([](auto& batch) { batch["image"] = at::Tensor(); }).find("found an undefined tensor"),
      std::string::npos);
  EXPECT_NE(message([](auto& batch) {
              batch.erase("label"), batch["mask"] = at::zeros({1});
            }).find("missing: 'label'; not there before: 'mask'"),
            std::string::npos);
  EXPECT_EQ(message([](auto& batch) { batch["image"] = at::zeros({1, 4}); }), "nothing was thrown");
}

TEST(Device, BatchesArriveOnTheAcceleratorCUDA) {
  if (!at::hasCUDA())
    GTEST_SKIP() << "No CUDA device: copies to an accelerator are not tested here.";
  for (const std::size_t workers : {0, 2}) {
    for (const std::int64_t ahead : {0, 1, 3}) {
      auto chosen = context();
      chosen.device = at::Device(at::kCUDA, 0);
      chosen.configuration.prefetch_to_device(ahead);
      auto loader = data::prepare_loader(data::loader(stacked(500), options(7, workers)), chosen);
      auto host = data::prepare_loader(data::loader(stacked(500), 7), context());
      for (int epoch = 0; epoch < 2; ++epoch) {
        Batches found;
        for (auto& batch : loader) {
          EXPECT_EQ(batch.data.device(), chosen.device);
          EXPECT_EQ(batch.target.device(), chosen.device);
          found.push_back(values(batch.target));
        }
        EXPECT_EQ(found, pass(host));
      }
      // Reading ahead does not move the saved position or the end flag.
      for (auto& batch : loader) {
        (void)batch;
        EXPECT_EQ(loader.state_dict()["position"], 7 * loader.progress().batches);
        EXPECT_FALSE(loader.progress().end_of_dataloader);
        if (loader.progress().batches == 5) break;
      }
    }
  }
}

TEST(Device, BatchesStayWhereTheyAreWithoutDevicePlacement) {
  auto chosen = context();
  chosen.device = at::kMeta;
  auto moved = data::prepare_loader(data::loader(stacked(4), 2), chosen);
  for (auto& batch : moved) EXPECT_TRUE(batch.data.is_meta());
  chosen.device_placement = false;
  auto left = data::prepare_loader(data::loader(stacked(4), 2), chosen);
  for (auto& batch : left) EXPECT_TRUE(batch.data.is_cpu());
}

enum class Color { red, green };

TEST(TreeCodec, KeepsEverything) {
  using Tree =
      std::tuple<at::Tensor, std::vector<std::string>,
                 std::map<std::string, std::optional<at::Tensor>>, std::unordered_map<int, double>,
                 std::array<std::int16_t, 2>, torch::data::Example<Sequence, Color>,
                 std::pair<bool, float>, torch::data::TensorExample>;
  Tree tree;
  std::get<0>(tree) = at::arange(6).view({2, 3}).t();
  std::get<1>(tree) = {"one", "", std::string("nul\0byte", 8)};
  std::get<2>(tree) = {
      {"none", std::nullopt}, {"undefined", at::Tensor()}, {"half", at::ones({3}, at::kHalf)}};
  std::get<3>(tree) = {{3, 0.1}, {-4, std::numeric_limits<double>::infinity()}};
  std::get<4>(tree) = {7, -7};
  std::get<5>(tree) = {{at::zeros({0, 4}), at::full({}, true, at::kBool)}, Color::green};
  std::get<6>(tree) = {true, 0.25f};
  std::get<7>(tree) = torch::data::TensorExample(at::full({2}, 5, at::kInt));
  const std::string bytes = tree::encode(tree);
  const Tree back = tree::decode<Tree>(bytes);
  EXPECT_TRUE(at::equal(std::get<0>(back), std::get<0>(tree)));
  EXPECT_EQ(std::get<1>(back), std::get<1>(tree));
  EXPECT_FALSE(std::get<2>(back).at("none").has_value());
  EXPECT_FALSE(std::get<2>(back).at("undefined")->defined());
  EXPECT_TRUE(at::equal(*std::get<2>(back).at("half"), at::ones({3}, at::kHalf)));
  EXPECT_EQ(std::get<3>(back), std::get<3>(tree));
  EXPECT_EQ(std::get<4>(back), std::get<4>(tree));
  EXPECT_EQ(std::get<5>(back).data.tokens.sizes(), (std::vector<std::int64_t>{0, 4}));
  EXPECT_TRUE(std::get<5>(back).data.mask.item<bool>());
  EXPECT_EQ(std::get<5>(back).target, Color::green);
  EXPECT_EQ(std::get<6>(back), std::get<6>(tree));
  EXPECT_TRUE(at::equal(std::get<7>(back).data, std::get<7>(tree).data));
  // Whatever is cut off or changed is an error, not a crash.
  for (std::size_t size = 0; size < bytes.size(); ++size)
    EXPECT_THROW(tree::decode<Tree>(bytes.substr(0, size)), DataError) << size;
  for (std::size_t at = 0; at < bytes.size(); ++at) {
    for (const char flip : {'\x01', '\x80', '\xff'}) {
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      try {
        tree::decode<Tree>(damaged);
      } catch (const DataError&) {
      }
    }
  }
  EXPECT_THROW(tree::encode(at::ones({2, 2}).to_sparse()), UnsupportedError);
}

}  // namespace
