// Ranks that use different units of one module.

#include <programs/program.hpp>

#include <torch/torch.h>

namespace programs {
namespace {

namespace nn = torch::nn;
using accelerate::AcceleratorOptions;
using accelerate::DdpOptions;
using accelerate::FsdpOptions;
using torch::Tensor;

struct ExpertsImpl : nn::Module {
  nn::Linear enter{register_module("enter", nn::Linear(6, 8))};
  nn::ModuleList experts{register_module("experts", nn::ModuleList())};
  nn::Linear leave{register_module("leave", nn::Linear(8, 3))};
  ExpertsImpl() {
    for (int i = 0; i < 3; ++i) experts->push_back(nn::Linear(8, 8));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x, const std::vector<int>& chosen) {
    Tensor y = enter(x).tanh();
    for (const int i : chosen)
      y = y + experts[static_cast<std::size_t>(i)]->as<nn::Linear>()->forward(y).tanh();
    return leave(y);
  }
};
TORCH_MODULE(Experts);

torch::optim::AdamWOptions adam() { return torch::optim::AdamWOptions(1e-2).eps(1e-4); }

Tensor loss_of(const Tensor& output) { return output.sub(0.3).square().mean(); }

FsdpOptions a_unit_each() {
  return FsdpOptions().unit_names({"enter", "experts.0", "experts.1", "experts.2", "leave"});
}

using accelerate::StrategyKind;
const std::vector<StrategyKind> kSharded{StrategyKind::fsdp, StrategyKind::zero1,
                                         StrategyKind::zero2, StrategyKind::zero3};

// Each rank's own way, another in each step.
constexpr auto choose = [](auto& accelerator, int step) {
  return std::vector<std::vector<int>>{
      {0, 2},
      {1},
      {2, 1},
      {}}[static_cast<std::size_t>((step + accelerator.data_parallel_rank()) % 4)];
};

constexpr auto train_experts = [](auto& accelerator) {
  Experts net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 4; ++step) {
    accelerator.backward(
        loss_of(model(batch(accelerator, step, {4, 6}), choose(accelerator, step))));
    optimizer.step();
    optimizer.zero_grad();
    accelerator.check();
  }
};

const Program experts_by_rank(
    "experts_by_rank",
    {.fsdp = a_unit_each(),
     .strategies = kSharded,
     .raises = error<accelerate::ShardingError>("The ranks went different ways"),
     .raises_when = [](const Where& where) { return where.sharded(); }},
    train_experts);

const Program experts_by_rank_all_units("experts_by_rank_all_units",
                                        {.fsdp = a_unit_each().all_units_every_pass(true),
                                         .strategies = kSharded},
                                        train_experts);

const Program one_rank_looks(
    "one_rank_looks",
    {.fsdp = a_unit_each(),
     .strategies = {StrategyKind::fsdp, StrategyKind::zero3},
     .raises = error<accelerate::ShardingError>("The ranks went different ways"),
     .raises_when = [](const Where& where) { return where.sharded(); }},
    [](auto& accelerator) {
      Experts net;
      torch::optim::AdamW optim(net->parameters(), adam());
      auto [model, optimizer] = accelerator.prepare(net, optim);
      for (int step = 0; step < 4; ++step) {
        accelerator.backward(
            loss_of(model(batch(accelerator, step, {4, 6}), std::vector<int>{0, 1, 2})));
        optimizer.step();
        optimizer.zero_grad();
        if (step == 1 && accelerator.data_parallel_rank() == 0) net->leave->weight.norm();
        accelerator.check();
      }
    });

const Program a_rank_without_loss(
    "a_rank_without_loss", {.fsdp = a_unit_each(), .strategies = kSharded}, [](auto& accelerator) {
      Experts net;
      torch::optim::AdamW optim(net->parameters(), adam());
      auto [model, optimizer] = accelerator.prepare(net, optim);
      for (int step = 0; step < 6; ++step) {
        const Tensor x = batch(accelerator, step, {4, 6}).requires_grad_();
        const Tensor output = model(x, std::vector<int>{0, 1, 2});
        const bool lost = step > 1 && (step + accelerator.data_parallel_rank()) % 2 == 0;
        accelerator.backward(lost ? x.square().mean() : loss_of(output));
        optimizer.step();
        optimizer.zero_grad();
        accelerator.check();
      }
    });

}  // namespace
}  // namespace programs
