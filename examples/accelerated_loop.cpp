// The loop of plain_loop.cpp on one process or many, on CPU or GPU, in any precision:
// `diff examples/plain_loop.cpp examples/accelerated_loop.cpp` shows what the library asks for.

#include <torch/torch.h>

#include <accelerate/accelerate.hpp>

struct NetImpl : torch::nn::Module {
  torch::nn::Linear hidden{register_module("hidden", torch::nn::Linear(2, 32))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(32, 1))};
  torch::Tensor forward(torch::Tensor x) { return out(torch::tanh(hidden(x))); }
};
TORCH_MODULE(Net);

/// Pairs of numbers, and their product.
struct Products : torch::data::datasets::Dataset<Products> {
  torch::Tensor pairs = torch::rand({4096, 2}) * 2 - 1;
  torch::data::Example<> get(size_t i) override {
    return {pairs[i], pairs[i].prod(0, /*keepdim=*/true)};
  }
  torch::optional<size_t> size() const override { return pairs.size(0); }
};

int main() {
  accelerate::Accelerator accelerator;
  torch::manual_seed(0);
  Net net;
  torch::optim::AdamW adam(net->parameters(), 1e-2);
  auto options = torch::data::DataLoaderOptions().batch_size(64);
  auto plan = accelerate::data::loader(Products().map(torch::data::transforms::Stack<>()), options);
  auto [model, optimizer, loader] = accelerator.prepare(net, adam, plan);

  for (int epoch = 0; epoch < 10; ++epoch) {
    torch::Tensor loss;
    for (auto& batch : loader) {
      loss = torch::mse_loss(model(batch.data), batch.target);
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
    }
    accelerator.print("epoch ", epoch, " loss ", loss.item<float>());
  }
}
