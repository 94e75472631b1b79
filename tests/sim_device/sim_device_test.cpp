// The simulated accelerator itself: what it can do, and what its checker finds.

#include "sim_device/sim_device.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace sim {
namespace {

using ::testing::HasSubstr;

const c10::Device kFirst = device(0), kSecond = device(1), kThird = device(2);

const c10::impl::VirtualGuardImpl& guard() {
  static const c10::impl::VirtualGuardImpl only(kFirst.type());
  return only;
}

// The message of the race that `run` ends with; empty when there is none.
std::string race_in(const std::function<void()>& run) {
  std::string message;
  try {
    run();
    guard().synchronizeDevice(0);
  } catch (const RaceError& error) {
    message = error.what();
  }
  forget();
  return message;
}

// ---- what it computes ----

void expect_same(const at::Tensor& on_device, const at::Tensor& on_host) {
  EXPECT_EQ(on_device.device(), kFirst);
  EXPECT_TRUE(at::equal(on_device.cpu(), on_host));
}

TEST(SimDevice, IsTheAcceleratorAndThereAreThree) {
  EXPECT_EQ(at::getAccelerator(), kFirst.type());
  EXPECT_EQ(at::accelerator::deviceCount(), 3);
  EXPECT_TRUE(torch::cuda::is_available());
  EXPECT_EQ(at::ones({2}, kSecond).device(), kSecond);
  EXPECT_THROW(at::ones({2}, device(3)), c10::Error);
}

TEST(SimDevice, ViewsShareMemory) {
  const at::Tensor a = at::arange(12, kFirst).view({3, 4});
  const at::Tensor b = a.t().slice(0, 1, 3);
  EXPECT_TRUE(b.is_alias_of(a));
  expect_same(b, at::arange(12).view({3, 4}).t().slice(0, 1, 3));
  b.add_(100);
  EXPECT_EQ(a[0][1].item<std::int64_t>(), 101);
  std::ostringstream text;
  text << a;
  EXPECT_THAT(text.str(), HasSubstr("101"));
  EXPECT_TRUE(at::equal(a.to(kSecond).to(kThird).cpu(), a.cpu()));
}

TEST(SimDevice, OperatorsGiveTheBitsOfTheCpu) {
  const at::Tensor x = at::randn({6, 7}), y = x.to(kFirst);
  expect_same(std::get<0>(y.sort(1)), std::get<0>(x.sort(1)));
  expect_same(std::get<1>(y.topk(3, 1)), std::get<1>(x.topk(3, 1)));
  expect_same(y.index({torch::tensor({1, 2})}), x.index({torch::tensor({1, 2})}));
  expect_same((y > 0).nonzero(), (x > 0).nonzero());
  expect_same(y.masked_select(y > 0), x.masked_select(x > 0));
  expect_same(at::cat({y, y * 2}, 1), at::cat({x, x * 2}, 1));
  expect_same(at::einsum("ij,kj->ik", {y, y}), at::einsum("ij,kj->ik", {x, x}));
  expect_same(at::_foreach_add({y, y}, 1)[1], x + 1);
  expect_same(y.clone().resize_({2, 3}), x.clone().resize_({2, 3}));
  expect_same(at::empty({0}, kFirst).set_(y), x);
  expect_same(at::fft_fft(y).abs(), at::fft_fft(x).abs());
  expect_same(std::get<1>(at::linalg_svd(y)), std::get<1>(at::linalg_svd(x)));
  expect_same(y.to(at::kDouble), x.to(at::kDouble));
  at::Tensor grown = at::empty({0}, kFirst);
  at::matmul_out(grown, y, y.t());
  expect_same(grown, at::matmul(x, x.t()));
}

TEST(SimDevice, DevicesDoNotMix) {
  const at::Tensor x = at::ones({3});
  EXPECT_THROW(x.to(kFirst).add(x), c10::Error);
  EXPECT_THROW(x.to(kFirst).add(x.to(kSecond)), c10::Error);
}

TEST(SimDevice, EachDeviceHasAGeneratorThatManualSeedSets) {
  at::manual_seed(7);
  const at::Tensor host = at::randn({100});
  EXPECT_TRUE(at::equal(at::randn({100}, kFirst).cpu(), host));
  EXPECT_TRUE(at::equal(at::randn({100}, kSecond).cpu(), host));
  EXPECT_FALSE(at::equal(at::randn({100}, kSecond).cpu(), host));
}

TEST(SimDevice, AnLstmTrains) {
  torch::nn::LSTM lstm(4, 5), other(4, 5);
  {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < lstm->parameters().size(); ++i)
      other->parameters()[i].copy_(lstm->parameters()[i]);
  }
  other->to(kFirst);
  const at::Tensor input = at::randn({3, 2, 4});
  std::get<0>(lstm->forward(input)).square().sum().backward();
  std::get<0>(other->forward(input.to(kFirst))).square().sum().backward();
  for (std::size_t i = 0; i < lstm->parameters().size(); ++i) {
    EXPECT_TRUE(at::allclose(other->parameters()[i].grad().cpu(), lstm->parameters()[i].grad(),
                             1e-4, 1e-6));
  }
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("conv", conv), register_module("norm", norm), register_module("words", words);
    register_module("in", in), register_module("encoder", encoder), register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& images, const at::Tensor& sentences) {
    const at::Tensor seen = in(torch::max_pool2d(torch::relu(norm(conv(images))), 2).flatten(1));
    return out(torch::gelu(encoder(seen.unsqueeze(0) + words(sentences)).mean(0)));
  }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(1, 8, 3).padding(1)};
  torch::nn::BatchNorm2d norm{8};
  torch::nn::Embedding words{20, 32};
  torch::nn::Linear in{8 * 16, 32};
  torch::nn::TransformerEncoder encoder{
      torch::nn::TransformerEncoderLayer(
          torch::nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64).dropout(0.1)),
      2};
  torch::nn::Linear out{32, 5};
};
TORCH_MODULE(Net);

// Losses, and parameters and buffers at the end.
std::vector<at::Tensor> train(c10::Device on, bool on_a_side_stream = false) {
  torch::manual_seed(3);
  Net net;
  net->to(on);
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(1e-3));
  const at::Tensor images = torch::randn({16, 1, 8, 8}), targets = torch::randint(5, {16});
  const at::Tensor sentences = torch::randint(20, {6, 16});
  std::optional<c10::OptionalStreamGuard> side;
  if (on_a_side_stream) {
    guard().synchronizeDevice(on.index());
    side.emplace(guard().getStreamFromGlobalPool(on));
  }
  std::vector<at::Tensor> all;
  torch::manual_seed(4);  // for dropout
  for (int step = 0; step < 4; ++step) {
    const at::Tensor scores = net(images.to(on), sentences.to(on));
    const at::Tensor loss = torch::cross_entropy_loss(scores, targets.to(on));
    adam.zero_grad();
    loss.backward();
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    adam.step();
    all.push_back(loss.detach().cpu());
  }
  for (const auto& parameter : net->parameters()) all.push_back(parameter.detach().cpu());
  for (const auto& buffer : net->buffers()) all.push_back(buffer.cpu());
  return all;
}

TEST(SimDevice, TrainsWithTheBitsOfTheCpuOnAnyStream) {
  const auto expected = train(at::kCPU);
  for (const auto& found : {train(kSecond), train(kFirst, /*on_a_side_stream=*/true)}) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i]));
  }
}

TEST(SimDevice, AutocastAndTheScalersOperators) {
  const at::Tensor x = at::ones({4, 4}, kFirst);
  at::autocast::set_autocast_dtype(kFirst.type(), at::kBFloat16);
  at::autocast::set_autocast_enabled(kFirst.type(), true);
  const at::Tensor product = at::matmul(x, x);
  at::autocast::set_autocast_enabled(kFirst.type(), false);
  at::autocast::clear_cache();
  EXPECT_EQ(product.scalar_type(), at::kBFloat16);
  const at::Tensor gradient = at::full({4}, 8.F, kFirst), scale = at::full({1}, 4.F, kFirst);
  at::Tensor found = at::zeros({1}, kFirst), scaled = scale.clone();
  at::Tensor tracker = at::zeros({1}, at::TensorOptions(kFirst).dtype(at::kInt));
  at::_amp_foreach_non_finite_check_and_unscale_({gradient}, found, scale.reciprocal());
  at::_amp_update_scale_(scaled, tracker, found, 2.0, 0.5, 1);
  EXPECT_EQ(gradient[0].item<float>(), 2);
  EXPECT_EQ(scaled.item<float>(), 8);
}

// ---- memory ----

TEST(SimMemory, IsCountedAndKeptAndGivenBack) {
  at::accelerator::emptyCache();
  at::accelerator::resetPeakStats(2);
  constexpr std::int64_t kBytes = 4 << 20;
  const auto before = at::accelerator::getDeviceStats(2).allocated_bytes[0].current;
  { const at::Tensor x = at::empty({kBytes / 4}, kThird); }
  const auto after = at::accelerator::getDeviceStats(2);
  EXPECT_EQ(after.allocated_bytes[0].current, before);
  EXPECT_EQ(after.allocated_bytes[0].peak - before, kBytes);
  EXPECT_EQ(after.reserved_bytes[0].current, kBytes);
  at::accelerator::emptyCache();
  EXPECT_EQ(at::accelerator::getDeviceStats(2).reserved_bytes[0].current, 0);
}

TEST(SimMemory, Ends) {
  const auto total = static_cast<std::int64_t>(at::accelerator::getMemoryInfo(2).second);
  const auto options = at::TensorOptions(kThird).dtype(at::kByte);
  EXPECT_THROW(at::empty({total + 1}, options), c10::OutOfMemoryError);
  EXPECT_EQ(at::empty({total}, options).numel(), total);
}

TEST(SimMemory, IsNoNumberAtFirst) {
  EXPECT_TRUE(at::isnan(at::empty({5}, kFirst)).all().item<bool>());
}

TEST(SimMemory, HostCodeCannotTouchIt) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const at::Tensor x = at::zeros({4}, kFirst);
  EXPECT_EXIT(*static_cast<volatile float*>(x.data_ptr()) = 1,
              ::testing::ExitedWithCode(kTouchedExitCode), "host code touched memory of device 0");
}

// ---- races ----

class SimRaces : public ::testing::Test {
 protected:
  const c10::Stream side = guard().getStreamFromGlobalPool(kFirst);
  const c10::Stream main = guard().getStream(kFirst);
  const at::Tensor host = at::randn({64, 64}).pin_memory();

  at::Tensor fetch() {
    const c10::StreamGuard on(side);
    return host.to(kFirst, /*non_blocking=*/true);
  }
  void wait(const c10::Stream& waiting, const c10::Stream& for_stream) {
    c10::Event done(kFirst.type());
    done.record(for_stream);
    done.block(waiting);
  }
  template <class Act>
  auto on_side(Act act) {
    const c10::StreamGuard on(side);
    return act();
  }
};

TEST_F(SimRaces, ACopyOnASideStreamIsWaitedFor) {
  EXPECT_TRUE(host.is_pinned());
  const std::string message = race_in([&] { fetch().add(1); });
  EXPECT_THAT(message, HasSubstr("aten::add.out on cuda:0, default stream reads what aten::copy_ "
                                 "(host to device) on cuda:0, stream"));
  EXPECT_EQ(race_in([&] {
              for (int i = 0; i < 3; ++i) {
                const at::Tensor x = fetch();
                wait(main, side);
                guard().recordDataPtrOnStream(x.storage().data_ptr(), main);
                EXPECT_TRUE(at::equal((x + 1).cpu(), host + 1));
              }
            }),
            "");
}

TEST_F(SimRaces, AnEventThatIsRecordedTooEarlyOrdersNothing) {
  EXPECT_NE(race_in([&] {
              c10::Event early(kFirst.type());
              early.record(side);
              const at::Tensor x = fetch();
              early.block(main);
              x.add(1);
            }),
            "");
}

TEST_F(SimRaces, FreedMemoryBelongsToTheStreamItWasAllocatedOn) {
  const auto use_and_free = [&](const std::function<void()>& before_the_next) {
    return race_in([&] {
      at::Tensor x = fetch();
      wait(main, side);
      const at::Tensor y = x + 1;
      x.reset();
      before_the_next();
      fetch();
    });
  };
  EXPECT_THAT(use_and_free([] {}), HasSubstr("freed without recordStream"));
  EXPECT_EQ(use_and_free([&] { wait(side, main); }), "");
}

TEST_F(SimRaces, RecordStreamOfAForeignPointerIsIgnoredAsByCuda) {
  const std::string message = race_in([&] {
    at::Tensor x = fetch();
    wait(main, side);
    at::Tensor alias = at::empty({0}, x.options());
    alias.set_(c10::Storage(c10::Storage::use_byte_size_t(), x.nbytes(),
                            c10::DataPtr(x.mutable_data_ptr(), x.device())),
               0, x.sizes(), x.strides());
    const at::Tensor y = alias + 1;
    guard().recordDataPtrOnStream(alias.storage().data_ptr(), main);
    alias.reset();
    x.reset();
    fetch();
  });
  EXPECT_THAT(message, HasSubstr("not the allocator's own"));
}

TEST_F(SimRaces, ReadersMayMeetAndWritersMayNot) {
  const auto meet = [&](auto on_one, auto on_other) {
    return race_in([&] {
      const at::Tensor x = at::zeros({64, 64}, kFirst);
      guard().synchronizeStream(main);
      const at::Tensor kept = on_side([&] { return on_one(x); });
      on_other(x);
      guard().synchronizeDevice(0);
    });
  };
  const auto read = [](const at::Tensor& x) { return x + 1; };
  const auto write = [](const at::Tensor& x) { return x.add_(1); };
  EXPECT_EQ(meet(read, read), "");
  EXPECT_THAT(meet(read, write), HasSubstr("writes what aten::add.out"));
  EXPECT_THAT(meet(write, read), HasSubstr("reads what aten::add.out"));
  EXPECT_THAT(meet(write, write), HasSubstr("what aten::add.out on cuda:0"));
  EXPECT_EQ(meet([](const at::Tensor& x) { return x[0].add_(1); },
                 [](const at::Tensor& x) { return x[1].add_(1); }),
            "");
}

TEST_F(SimRaces, NewMemoryBelongsToItsStreamFirst) {
  const auto fill = [&](bool wait_first) {
    return race_in([&] {
      { const at::Tensor before = at::ones({64, 64}, kFirst) + 1; }
      const at::Tensor x = at::empty({64, 64}, kFirst);
      if (wait_first) wait(side, main);
      on_side([&] { x.copy_(host, true); });
      wait(main, side);
    });
  };
  EXPECT_THAT(fill(false), HasSubstr("the allocation"));
  EXPECT_EQ(fill(true), "");
}

TEST_F(SimRaces, BackwardMeetsAGradientThatIsWritten) {
  EXPECT_NE(race_in([&] {
              at::Tensor weight = at::ones({8}, kFirst).requires_grad_();
              weight.mutable_grad() = at::zeros({8}, kFirst);
              guard().synchronizeDevice(0);
              const at::Tensor loss = (weight * 2).sum();
              on_side([&] { weight.grad().add_(1); });
              loss.backward();
            }),
            "");
}

TEST_F(SimRaces, CopiesBetweenDevicesOrderBothStreams) {
  EXPECT_NE(race_in([&] { fetch().to(kSecond); }), "");
  EXPECT_EQ(race_in([&] {
              const at::Tensor x = at::ones({8}, kFirst), y = x.to(kSecond);
              x.add_(1);
              y.add_(1);
              y.copy_(x, true);
              EXPECT_EQ(y[0].item<float>(), 2);
            }),
            "");
}

TEST_F(SimRaces, TheHostWaitsBeforeItChangesPinnedMemory) {
  const auto change = [&](bool wait_first) {
    return race_in([&] {
      const at::Tensor source = at::ones({1000}).pin_memory();
      const at::Tensor x = source.to(kFirst, true);
      if (wait_first) guard().synchronizeStream(main);
      source.fill_(2);
      EXPECT_EQ(x.sum().item<float>(), 1000);
    });
  };
  EXPECT_THAT(change(false), HasSubstr("it was changed while aten::copy_ (host to device)"));
  EXPECT_EQ(change(true), "");
}

TEST_F(SimRaces, TheHostHasNoValuesBeforeItHasWaited) {
  EXPECT_EQ(race_in([&] {
              const at::Tensor x = at::ones({4}, kFirst);
              const at::Tensor y = x.to(at::kCPU, /*non_blocking=*/true);
              EXPECT_TRUE(y.is_pinned() && std::isnan(y[0].item<float>()));
              c10::Event done(kFirst.type());
              done.record(main);
              EXPECT_FALSE(done.query());
              EXPECT_TRUE(done.query());
              EXPECT_EQ(y[0].item<float>(), 1);
            }),
            "");
}

TEST_F(SimRaces, PinnedMemoryIsMemoryToo) {
  const auto there_and_back = [&](bool wait_first) {
    return race_in([&] {
      const at::Tensor x = at::ones({4}, kFirst), y = x.to(at::kCPU, true);
      if (wait_first) wait(side, main);
      const at::Tensor z = on_side([&] { return y.to(kFirst, true); });
      wait(main, side);
      EXPECT_EQ(z.sum().item<float>(), 4);
    });
  };
  EXPECT_THAT(there_and_back(false), HasSubstr("pinned memory of the host"));
  EXPECT_EQ(there_and_back(true), "");
}

TEST_F(SimRaces, ARaceThatIsSwallowedEndsTheProcessWithAnErrorCode) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto swallow = [&] {
    try {
      fetch().add(1);
    } catch (...) {
    }
    std::exit(0);
  };
  EXPECT_EXIT(swallow(), ::testing::ExitedWithCode(kRacedExitCode), "1 race");
}

}  // namespace
}  // namespace sim
