// The interceptor by itself: tagged storages, who is told of what, and regions.

#include <accelerate/base/error.hpp>
#include <intercept/key.hpp>
#include <intercept/tagged_storage.hpp>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <thread>

namespace accelerate::intercept {
namespace {

struct Recorder final : TaggedStorage::Owner {
  explicit Recorder(at::Tensor contents) : home(std::move(contents)) {}
  at::Tensor home;
  std::vector<std::string> events;
  void demand(TaggedStorage& storage) override {
    events.push_back("demand");
    const Below below;
    storage.fill(home.clone());
    storage.set_ready(true);
  }
  void unheld(TaggedStorage&) noexcept override { events.push_back("unheld"); }
  std::string advice() const override { return "Ask the recorder."; }
  void written(TaggedStorage&, const at::Tensor& view, const std::string& op) override {
    events.push_back(op + "@" + std::to_string(view.storage_offset()));
  }
};

class Tagged : public ::testing::Test {
 protected:
  void leave() {
    storage.set_ready(false);
    storage.empty();
    owner.events.clear();
  }
  Recorder owner{at::arange(12, at::kFloat)};
  TaggedStorage storage{0, "block", 12, at::kFloat, at::kCPU, owner};
  at::Tensor weight = storage.view({3, 4}, {4, 1}, 0);
};

TEST_F(Tagged, ComesWhenAnOperatorTouchesIt) {
  EXPECT_TRUE(is_tagged(weight));
  EXPECT_TRUE(owner.events.empty());
  const at::Tensor x = at::ones({2, 4});
  EXPECT_TRUE(at::equal(at::mm(x, weight.t()), at::mm(x, owner.home.view({3, 4}).t())));
  EXPECT_EQ(owner.events, (std::vector<std::string>{"demand"}));
  leave();
  EXPECT_EQ(weight.sum().item<float>(), 66);  // not one of the typed operators
  EXPECT_EQ(owner.events, (std::vector<std::string>{"demand"}));
}

TEST_F(Tagged, ListsAndOptionalsAreSeen) {
  EXPECT_TRUE(at::equal(at::cat({at::zeros({1, 4}), weight})[1], owner.home.slice(0, 0, 4)));
  EXPECT_EQ(owner.events.size(), 1u);
  leave();
  const at::Tensor bias = storage.view({3}, {1}, 0);
  at::linear(at::ones({1, 2}), at::ones({3, 2}), bias);
  EXPECT_EQ(owner.events.size(), 1u);
  leave();
  at::layer_norm(at::ones({2, 3}), {3}, bias, bias);
  EXPECT_EQ(owner.events.size(), 1u);
  leave();
  const at::Tensor index = at::tensor({1, 0});
  EXPECT_EQ(weight.index({index}).sizes(), (at::IntArrayRef{2, 4}));
  EXPECT_EQ(owner.events.size(), 1u);
}

TEST_F(Tagged, ViewsAndMetadataNeedNoMemory) {
  const at::Tensor view = weight.t().narrow(0, 1, 2).unsqueeze(0).detach();
  EXPECT_TRUE(is_tagged(view));
  EXPECT_EQ(at::zeros_like(weight).sizes(), weight.sizes());
  EXPECT_TRUE(owner.events.empty());
  EXPECT_FALSE(is_tagged(at::zeros_like(weight)));
  EXPECT_FALSE(is_tagged(weight.clone()));
  EXPECT_FALSE(is_tagged(weight.to(at::kDouble)));
}

TEST_F(Tagged, AViewMadeWhileAbsentSeesTheMemoryLater) {
  const at::Tensor column = weight.select(1, 2);
  EXPECT_EQ(column.sum().item<float>(), 2 + 6 + 10);
  leave();
  EXPECT_EQ(column.sum().item<float>(), 2 + 6 + 10);
}

TEST_F(Tagged, RawAccessWhileAbsentRaisesASentence) {
  try {
    weight.data_ptr<float>();
    FAIL() << "an address was given out";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what())
                  .find("The parameters of 'block' are not in memory now, so their data has no "
                        "address. Use them "
                        "through tensor operators. Ask the recorder."),
              std::string::npos);
  }
  EXPECT_ANY_THROW(weight.const_data_ptr<float>());
  EXPECT_ANY_THROW((weight.accessor<float, 2>().data()));
  EXPECT_ANY_THROW(weight.storage().data_ptr());
  weight.sum();
  EXPECT_EQ(weight.const_data_ptr<float>()[5], 5);
  leave();
  EXPECT_ANY_THROW(weight.const_data_ptr<float>());
}

TEST_F(Tagged, WritesAreReportedAfterTheyHappened) {
  weight.mul_(2);
  weight.select(0, 1).zero_();
  at::add_out(weight, at::ones({3, 4}), at::ones({3, 4}));
  at::_foreach_mul_(at::TensorList(weight), 3);
  EXPECT_EQ(owner.events, (std::vector<std::string>{"demand", "aten::mul_@0", "aten::zero_@4",
                                                    "aten::add@0", "aten::_foreach_mul_@0"}));
  EXPECT_EQ(weight.sum().item<float>(), 12 * 6);
}

TEST_F(Tagged, ReplacingTheStorageIsRefused) {
  EXPECT_THROW(weight.resize_({4, 4}), ShardingError);
  EXPECT_THROW(weight.set_(at::zeros({3, 4})), ShardingError);
  weight.sum();
  EXPECT_EQ(weight.sizes(), (at::IntArrayRef{3, 4}));
}

TEST(TaggedLife, AfterItsOwnerEveryUseRaisesASentence) {
  Recorder owner{at::ones(4)};
  auto storage = std::make_unique<TaggedStorage>(0, "gone", 4, at::kFloat, at::kCPU, owner);
  const at::Tensor weight = storage->view({4}, {1}, 0);
  weight.sum();
  storage.reset();
  EXPECT_THROW(weight.sum(), StateError);
  EXPECT_ANY_THROW(weight.data_ptr<float>());
}

TEST_F(Tagged, AutocastKeepsNoCopyOfIt) {
  at::Tensor leaf = weight;
  leaf.requires_grad_(true);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::increment_nesting();
  at::mm(at::ones({2, 4}), leaf.t());
  at::linear(at::ones({2, 4}), leaf);
  owner.home.fill_(3);
  leave();
  EXPECT_EQ(at::linear(at::ones({1, 4}), leaf).flatten()[0].item<float>(), 12)
      << "a copy of the old weight was used";
  EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
  at::autocast::decrement_nesting();
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
}

TEST_F(Tagged, InferenceModeAndDoubleBackward) {
  at::Tensor leaf = weight;
  leaf.requires_grad_(true);
  {
    const c10::InferenceMode inference;
    EXPECT_EQ(leaf.sum().item<float>(), 66);
  }
  leave();
  const at::Tensor x = at::ones({2, 4}).requires_grad_(true);
  const at::Tensor y = at::mm(x, leaf.t()).pow(2).sum();
  const at::Tensor g = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true)[0];
  leave();
  g.pow(2).sum().backward();
  const at::Tensor plain = owner.home.view({3, 4}).clone().requires_grad_(true);
  const at::Tensor x2 = at::ones({2, 4}).requires_grad_(true);
  torch::autograd::grad({at::mm(x2, plain.t()).pow(2).sum()}, {x2}, {}, true, true)[0]
      .pow(2)
      .sum()
      .backward();
  EXPECT_TRUE(at::allclose(leaf.grad(), plain.grad()));
  EXPECT_TRUE(at::allclose(x.grad(), x2.grad()));
}

struct Doubler final : RegionPolicy {
  std::vector<std::string> seen;
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet below,
            torch::jit::Stack& stack) override {
    seen.push_back(op.schema().name());
    op.redispatchBoxed(below, &stack);
    if (stack.back().isTensor()) stack.back() = stack.back().toTensor() * 2;
  }
};

TEST(Region, SeesEveryOperatorOfItsThread) {
  Doubler policy;
  at::Tensor made, product;
  const at::Tensor x = at::ones({2, 2});
  {
    const Region region(policy);
    made = at::ones({2});
    product = at::mm(x, x);
    std::thread([&] { at::zeros({3}); }).join();
  }
  at::ones({2});
  EXPECT_EQ(policy.seen, (std::vector<std::string>{"aten::ones", "aten::mm"}));
  EXPECT_EQ(made.sum().item<float>(), 4);
  EXPECT_EQ(product.sum().item<float>(), 16);
}

TEST_F(Tagged, RegionsAndTagsMeet) {
  Doubler policy;
  const Region region(policy);
  EXPECT_EQ(at::mm(at::ones({1, 4}), weight.t()).sizes(), (at::IntArrayRef{1, 3}));
  EXPECT_EQ(policy.seen, (std::vector<std::string>{"aten::ones", "aten::mm"}));
  EXPECT_EQ(owner.events.size(), 1u);
}

void other_library(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*) {}

TEST(InterceptorDeathTest, AnotherUserOfTheKeyIsNamed) {
  GTEST_FLAG_SET(death_test_style,
                 "threadsafe");  // a fresh process, in which nothing is installed yet
  EXPECT_EXIT(
      {
        torch::Library other(torch::Library::IMPL, "aten", kTag, __FILE__, __LINE__);
        other.impl("mm", torch::CppFunction::makeFromBoxedFunction<&other_library>());
        try {
          install();
        } catch (const UnsupportedError& error) {
          std::cerr << error.what();
          std::_Exit(7);
        }
        std::_Exit(0);
      },
      ::testing::ExitedWithCode(7), "Another library .* a kernel for aten::mm");
}

}  // namespace
}  // namespace accelerate::intercept
