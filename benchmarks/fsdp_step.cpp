// A training step of a stack of blocks, sharded over the ranks that start it; fsdp_step.py is the
// same with PyTorch's fully_shard. Prints one line of JSON: seconds a step (the least of several
// rounds), and what was communicated.
//
//   accelerate-cpp launch -n 2 build/bin/fsdp_step
//   torchrun --nproc-per-node 2 benchmarks/fsdp_step.py

#include <accelerate/accelerate.hpp>
#include <accelerate/optim/fused.hpp>

#include <ATen/Parallel.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <iostream>

namespace {

constexpr std::int64_t kWidth = 512;
constexpr int kBlocks = 8;
constexpr std::int64_t kTokens = 512;

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({kWidth})};
  torch::nn::Linear up{kWidth, 4 * kWidth}, down{4 * kWidth, kWidth};
  BlockImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
};
TORCH_MODULE(Block);

struct Net : torch::nn::Module {
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{kWidth, kWidth};
  Net() {
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    register_module("head", head);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(x);
  }
};

}  // namespace

int main() try {
  using namespace accelerate;
  at::set_num_threads(1);
  Accelerator accelerator(AcceleratorOptions().cpu(true).fsdp(FsdpOptions()));
  torch::manual_seed(0);
  auto net = std::make_shared<Net>();
  optim::FusedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-4));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  auto& fsdp = dynamic_cast<parallel::Fsdp&>(model.strategy());
  const at::Tensor x = torch::randn({kTokens, kWidth});
  const auto step = [&, &model = model, &optimizer = optimizer] {
    accelerator.backward(model(x).pow(2).mean());
    optimizer.step();
    optimizer.zero_grad();
  };
  for (int i = 0; i < 3; ++i) step();
  fsdp.reset_statistics();
  double least = 1e9;
  constexpr int kRounds = 10;
  for (int round = 0; round < kRounds; ++round) {
    accelerator.wait_for_everyone();
    const auto begin = std::chrono::steady_clock::now();
    step();
    least = std::min(
        least, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  const auto statistics = fsdp.statistics();
  if (accelerator.is_main_process()) {
    std::printf(
        "{\"seconds_per_step\": %.6f, \"ranks\": %d, \"units\": %lld, \"gathers_per_step\": "
        "%.2f, \"prefetched\": %.3f, \"peak_resident_bytes\": %lld}\n",
        least, accelerator.num_processes(), static_cast<long long>(fsdp.num_units()),
        static_cast<double>(statistics.gathers) / kRounds,
        static_cast<double>(statistics.prefetched) / static_cast<double>(statistics.gathers),
        static_cast<long long>(statistics.peak_resident_bytes));
  }
  accelerator.end_training();
  return 0;
} catch (const std::exception& error) {
  std::cerr << accelerate::describe(error) << '\n';
  return 1;
}
