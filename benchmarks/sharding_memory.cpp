// The most that parameters, gradients and optimizer state take in a training step of a model of
// more than 50 M parameters, by a counting allocator, beside what the strategy's formula says.
// Prints a line of JSON for each rank.
//
//   accelerate-cpp launch -n 4 build/bin/sharding_memory fsdp bf16

#include <accelerate/accelerate.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/tracking/memory_tracker.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <ATen/Parallel.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include <iostream>

namespace {

constexpr std::int64_t kWidth = 512;
constexpr int kBlocks = 25;
constexpr std::int64_t kTokens = 8;

struct BlockImpl : torch::nn::Module {
  torch::nn::Linear up{kWidth, 4 * kWidth}, down{4 * kWidth, kWidth};
  BlockImpl() {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::gelu(up(x))); }
};
TORCH_MODULE(Block);

struct Net : torch::nn::Module {
  torch::nn::ModuleList blocks;
  Net() {
    for (int i = 0; i < kBlocks; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return x;
  }
};

}  // namespace

int main(int argc, char** argv) try {
  using namespace accelerate;
  using tracking::PeakWatch;
  if (argc != 3) {
    std::cerr << "usage: sharding_memory STRATEGY no|bf16\n";
    return 1;
  }
  tracking::count_cpu_tensors();
  at::set_num_threads(1);
  const StrategyKind strategy = strategy_from_string(argv[1]);
  const MixedPrecision precision = mixed_precision_from_string(argv[2]);
  Accelerator accelerator(
      AcceleratorOptions().cpu(true).strategy(strategy).mixed_precision(precision).ddp(
          DdpOptions().gradient_as_bucket_view(true)));
  torch::manual_seed(0);
  auto net = [] {
    const MemoryKindScope kind(MemoryKind::parameters);
    return std::make_shared<Net>();
  }();
  std::int64_t elements = 0;
  for (const auto& parameter : net->parameters()) elements += parameter.numel();
  optim::FusedAdamW adam(net->parameters(), optim::FusedAdamWOptions(1e-4));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  const at::Tensor x = at::randn({kTokens, kWidth});
  tracking::PeakBytes steady;
  for (int step = 0; step < 4; ++step) {
    const PeakWatch watch;
    accelerator.backward(model(x).pow(2).mean());
    optimizer.step();
    optimizer.zero_grad();
    if (step > 0) steady.merge(watch.peaks());  // the first step makes the optimizer's state
  }

  // Bytes of each rank. A unit is a block; fp32 gradients are reduced.
  const double all = static_cast<double>(elements);
  const double unit = all / kBlocks;
  const double share = all / accelerator.num_processes();
  const double whole = precision == MixedPrecision::no ? 4 : 2;
  const bool alone = accelerator.num_processes() == 1;
  double parameters = 4 * all, gradients = 4 * all, states = 8 * all;
  if (auto* fsdp = dynamic_cast<parallel::Fsdp*>(&model.strategy())) {
    states = 8 * share;
    gradients = 4 * share;
    parameters = 4 * share;
    if (fsdp->options().sharding_strategy() == ShardingStrategy::full_shard) {
      parameters += 2 * whole * unit;  // the unit in use and the one that is fetched ahead
    } else {
      parameters = precision == MixedPrecision::no ? 4 * all : 2 * all + 4 * share;
    }
    // One unit collects while the one before is reduced, which writes this rank's part.
    gradients += alone ? 4 * unit : 2 * 4 * unit;
  }
  const double formula = parameters + gradients + states;
  const auto& kinds = steady.at_peak;
  const auto of = [&](MemoryKind kind) { return steady.by_kind[kind]; };
  std::int64_t named = 0;
  for (const MemoryKind kind :
       {MemoryKind::parameters, MemoryKind::gradients, MemoryKind::optimizer_state})
    named += kinds[kind];
  // Without shards gradients are autograd's and the Reducer's, who name nothing; what else is there
  // are the activations of a few tokens.
  if (!model.strategy().owns_leaves()) named += kinds[MemoryKind::other];
  const Json line{{"strategy", argv[1]},
                  {"precision", argv[2]},
                  {"ranks", accelerator.num_processes()},
                  {"rank", accelerator.process_index()},
                  {"elements", elements},
                  {"parameters", of(MemoryKind::parameters)},
                  {"gradients", of(MemoryKind::gradients)},
                  {"optimizer_state", of(MemoryKind::optimizer_state)},
                  {"other", kinds[MemoryKind::other]},
                  {"peak", steady.total},
                  {"named_at_peak", named},
                  {"formula", formula},
                  {"formula_parameters", parameters},
                  {"formula_gradients", gradients},
                  {"formula_states", states},
                  {"ratio", static_cast<double>(named) / formula}};
  std::cout << line.dump() + "\n" << std::flush;
  accelerator.end_training();
  return 0;
} catch (const std::exception& error) {
  std::cerr << accelerate::describe(error) << '\n';
  return 1;
}
