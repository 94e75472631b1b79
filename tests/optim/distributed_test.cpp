// What ranks must agree on: overflowed gradients, counts, random state, batch sizes.
#include "support/distributed.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/core/memory.hpp>
#include <accelerate/core/random.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/optim/optimizer.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <cmath>

namespace accelerate {
namespace {

using testing::world;

template <class O>
void expect_agreement(O&& optimizer, const at::Tensor& weight) {
  const auto state = std::make_shared<GradientState>(GradientAccumulationOptions(), world());
  const auto scaler = std::make_shared<GradScaler>(GradScalerOptions().init_scale(8), world());
  auto prepared = prepare_optimizer(std::forward<O>(optimizer), state, scaler);
  const int last = world().size() - 1;
  for (const bool overflows : {false, true, false}) {
    const at::Tensor before = weight.detach().clone();
    scaler->scale(weight.sum()).backward();
    // As sharded gradients: only the last rank sees the overflow.
    if (overflows && world().rank() == last) weight.mutable_grad().fill_(INFINITY);
    prepared.step();
    EXPECT_EQ(prepared.step_was_skipped(), overflows);
    EXPECT_EQ(weight.equal(before), overflows);
    prepared.zero_grad();
  }
  EXPECT_EQ(scaler->get_scale(), 4.0);
}

TEST(Ranks, SkipAStepTogether) {
  const at::Tensor weight = at::ones({3}).requires_grad_(true);
  expect_agreement(torch::optim::SGD({weight}, torch::optim::SGDOptions(0.1)), weight);
  const at::Tensor fused = at::ones({3}).requires_grad_(true);
  expect_agreement(optim::FusedAdamW({fused}), fused);
}

TEST(Ranks, MayOwnNoGradient) {
  // A rank whose shard is empty takes part in the agreement.
  GradScaler scaler(GradScalerOptions(), world());
  scaler.scale(at::ones({}));
  const at::Tensor weight = at::ones({1}).requires_grad_(true);
  if (world().rank() == 0) weight.mutable_grad() = at::full({1}, NAN);
  EXPECT_FALSE(scaler.step(&scaler, {weight}, [] {}));
}

TEST(Ranks, NormaliseByTheCountsOfAll) {
  // Rank r has r + 1 samples of value 10 r in each of two micro-batches.
  const auto state =
      std::make_shared<GradientState>(GradientAccumulationOptions().num_steps(2), world());
  const at::Tensor weight = at::zeros({1}, at::kDouble).requires_grad_(true);
  auto optimizer =
      prepare_optimizer(torch::optim::SGD({weight}, torch::optim::SGDOptions(1.0)), state);
  const double rank = world().rank();
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    state->begin_micro_batch();
    state->add_backward(rank + 1);
    (weight * 10 * rank * (rank + 1)).sum().backward();
    // What DDP does: the mean over ranks.
    if (state->sync_gradients())
      world().all_reduce(weight.mutable_grad(), comm::ReduceOp::avg).wait();
    optimizer.step();
  }
  double sum = 0, count = 0;
  for (int r = 0; r < world().size(); ++r) {
    sum += 10.0 * r * (r + 1);
    count += r + 1;
  }
  EXPECT_NEAR(weight.item<double>(), -sum / count, 1e-12);
}

TEST(Ranks, DrawAlikeAfterSynchronising) {
  set_seed(11, SeedOptions().device_specific(true).rank(world().rank()));
  synchronize_rng_states({RngType::torch}, world());
  const at::Tensor drawn = at::rand({4}), first = drawn.clone();
  world().broadcast(first, 0).wait();
  EXPECT_TRUE(drawn.equal(first));
  set_seed(11);
  EXPECT_TRUE(at::rand({4}).equal(drawn));
}

TEST(Ranks, FindOneBatchSize) {
  // The last rank has less memory; every attempt that fits trains with a collective.
  const int last = world().size() - 1;
  const auto found = find_executable_batch_size(
      [&](std::int64_t size) {
        if (size > (world().rank() == last ? 20 : 100)) throw std::bad_alloc();
        return size;
      },
      BatchSizeOptions(), world());
  EXPECT_EQ(found, 19);
  const at::Tensor sum = at::full({1}, found);
  world().all_reduce(sum).wait();
  EXPECT_EQ(sum.item<std::int64_t>(), 19 * world().size());

  EXPECT_THROW(find_executable_batch_size([](std::int64_t) { throw std::bad_alloc(); },
                                          BatchSizeOptions(), world()),
               OutOfMemoryError);
  const auto one_fails = [&](std::int64_t) {
    if (world().rank() == last) throw std::range_error("a bug");
  };
  if (world().rank() == last) {
    EXPECT_THROW(find_executable_batch_size(one_fails, BatchSizeOptions(), world()),
                 std::range_error);
  } else {
    EXPECT_THROW(find_executable_batch_size(one_fails, BatchSizeOptions(), world()), StateError);
  }
}

}  // namespace
}  // namespace accelerate
