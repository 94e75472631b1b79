// Training on a GPU through the facade: alone, and several processes that share one device over
// Gloo or MPI; NCCL in a group of one. Skipped, and said so, where there is no device.

#include "support/distributed.hpp"

#include "comm/nccl_backend.hpp"

#include <accelerate/accelerate.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <cstdlib>

namespace accelerate {
namespace {

using testing::world;

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "NOT RUN: this machine has no CUDA device.";
  }
};

torch::nn::Sequential make_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(8, 32), torch::nn::Tanh(),
                               torch::nn::Linear(32, 4));
}

// Four steps on all ranks, each on its rows of a batch, and of `alone` on the whole batch.
template <class Model, class Optimizer>
void train_both(Accelerator& accelerator, Model& model, Optimizer& optimizer,
                torch::nn::Sequential alone, torch::optim::Optimizer& optimizer_alone,
                std::int64_t features) {
  for (int step = 0; step < 4; ++step) {
    torch::manual_seed(step);
    const auto batch =
        torch::randn({4 * world().size(), features}, torch::kDouble).to(accelerator.device());
    accelerator.backward(model(batch.narrow(0, 4 * world().rank(), 4)).square().mean());
    accelerator.clip_grad_norm_(model, 0.5);
    optimizer.step();
    optimizer.zero_grad();
    alone->forward(batch).square().mean().backward();
    torch::nn::utils::clip_grad_norm_(alone->parameters(), 0.5);
    optimizer_alone.step();
    optimizer_alone.zero_grad();
  }
}

TEST_F(Cuda, TrainsAsOneProcessOnTheWholeBatch) {
  Accelerator accelerator;
  ASSERT_TRUE(accelerator.device().is_cuda());
  auto net = make_net();
  auto alone = make_net();
  net->to(torch::kDouble);
  alone->to(accelerator.device(), torch::kDouble);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::SGD sgd_alone(alone->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  train_both(accelerator, model, optimizer, alone, sgd_alone, 8);
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_LT((net->parameters()[i] - alone->parameters()[i]).abs().max().item<double>(), 1e-10);
  }
  accelerator.verify_parameters(model);
}

TEST_F(Cuda, Fp16TrainsAndSkipsOverflowingStepsOnAllRanks) {
  Accelerator accelerator(AcceleratorOptions()
                              .mixed_precision(MixedPrecision::fp16)
                              .grad_scaler(GradScalerOptions().init_scale(65536.0 * 65536.0)));
  auto net = make_net();
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  const auto batch = torch::randn({16, 8}, accelerator.device());
  int skipped = 0;
  double first = 0;
  double last = 0;
  for (int step = 0; step < 60; ++step) {
    const auto output = model(batch);
    EXPECT_EQ(output.scalar_type(), torch::kFloat);
    const auto loss = output.square().mean();
    accelerator.backward(loss);
    optimizer.step();
    skipped += accelerator.optimizer_step_was_skipped() ? 1 : 0;
    optimizer.zero_grad();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  EXPECT_GT(skipped, 0) << "so high a scale must overflow";
  EXPECT_LT(skipped, 40);
  EXPECT_LT(last, 0.5 * first);
  accelerator.verify_parameters(model);
}

// Keeps the stream busy for a while that differs from call to call, so that what is not ordered by
// events comes out of order. A simulated device runs everything at once, so there it is in vain.
torch::Tensor dawdle(torch::Tensor x) {
  if (std::getenv("ACCELERATE_TEST_NO_DELAYS") != nullptr) return x;
  static unsigned calls = 0;
  calls = calls * 1103515245U + 12345U;
  const auto size = static_cast<std::int64_t>(64 + (calls >> 16) % 1024);
  auto busy = torch::ones({size, size}, x.options().requires_grad(false));
  for (int i = 0; i < 8; ++i) busy = busy.matmul(busy) / static_cast<double>(size);
  return x + 0 * busy[0][0];
}

TEST_F(Cuda, ShardedTrainsAsOneProcessWhateverTheDelays) {
  const auto make_blocks = [] {
    torch::manual_seed(3);
    torch::nn::Sequential net;
    for (int i = 0; i < 6; ++i) {
      net->push_back(torch::nn::Linear(32, 32));
      net->push_back(torch::nn::Functional(torch::tanh));
      net->push_back(torch::nn::Functional(dawdle));
    }
    net->to(torch::kDouble);
    return net;
  };
  for (const StrategyKind kind :
       {StrategyKind::fsdp, StrategyKind::zero1, StrategyKind::zero2, StrategyKind::zero3}) {
    SCOPED_TRACE(to_string(kind));
    Accelerator accelerator(AcceleratorOptions().strategy(kind));
    ASSERT_TRUE(accelerator.device().is_cuda());
    auto net = make_blocks();
    auto alone = make_blocks();
    alone->to(accelerator.device());
    torch::optim::AdamW adam(net->parameters(), 1e-2);
    torch::optim::AdamW adam_alone(alone->parameters(), 1e-2);
    auto [model, optimizer] = accelerator.prepare(net, adam);
    train_both(accelerator, model, optimizer, alone, adam_alone, 32);
    const auto probe = torch::ones({2, 32}, torch::kDouble).to(accelerator.device());
    const torch::NoGradGuard no_grad;
    EXPECT_LT((model(probe) - alone->forward(probe)).abs().max().item<double>(), 1e-9);
  }
}

TEST_F(Cuda, NcclReducesInAGroupOfOne) {
  if (const std::string missing = comm::nccl_missing(); !missing.empty())
    GTEST_SKIP() << "NOT RUN: built without NCCL: " << missing;
  const auto backend = comm::make_nccl_backend(c10::make_intrusive<c10d::HashStore>(), 0, 1,
                                               std::chrono::seconds(30));
  std::vector<torch::Tensor> tensors{torch::full({1000}, 3.0, torch::kCUDA)};
  backend->allreduce(tensors)->wait();
  torch::cuda::synchronize();
  EXPECT_EQ(tensors[0].sum().item<float>(), 3000.0F);
}

}  // namespace
}  // namespace accelerate
