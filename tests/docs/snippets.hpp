#pragma once

// What the code pieces of the documentation may take for granted.

#include <accelerate/accelerate.hpp>

#include <torch/torch.h>

struct NetImpl : torch::nn::Module {
  torch::nn::Linear hidden{register_module("hidden", torch::nn::Linear(2, 32))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(32, 1))};
  torch::Tensor forward(torch::Tensor x) { return out(torch::tanh(hidden(x))); }
};
TORCH_MODULE(Net);

struct Products : torch::data::datasets::Dataset<Products> {
  torch::Tensor pairs = torch::rand({4096, 2}) * 2 - 1;
  torch::data::Example<> get(size_t i) override {
    return {pairs[i], pairs[i].prod(0, /*keepdim=*/true)};
  }
  torch::optional<size_t> size() const override { return pairs.size(0); }
};
using Batches = decltype(Products().map(torch::data::transforms::Stack<>()));

#define SNIPPET_NAMES                                                         \
  accelerate::Accelerator accelerator;                                        \
  Net net;                                                                    \
  torch::optim::AdamW adam(net->parameters(), 1e-3);                          \
  torch::optim::StepLR schedule(adam, 10);                                    \
  Batches dataset = Products().map(torch::data::transforms::Stack<>());       \
  auto options = torch::data::DataLoaderOptions().batch_size(64);             \
  auto plan = accelerate::data::loader(dataset, options);                     \
  auto [model, optimizer, scheduler, loader, held_out] = accelerator.prepare( \
      net, adam, schedule, plan, accelerate::data::loader(dataset, options).shuffle(false));
