// The loop of accelerated_loop.cpp as one writes it for LibTorch alone: one process, one precision.
// `diff examples/plain_loop.cpp examples/accelerated_loop.cpp` shows what the library asks for.

#include <torch/torch.h>

#include <iostream>

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
  torch::manual_seed(0);
  Net net;
  torch::optim::AdamW adam(net->parameters(), 1e-2);
  auto options = torch::data::DataLoaderOptions().batch_size(64);
  auto loader =
      torch::data::make_data_loader(Products().map(torch::data::transforms::Stack<>()), options);

  for (int epoch = 0; epoch < 10; ++epoch) {
    torch::Tensor loss;
    for (auto& batch : *loader) {
      loss = torch::mse_loss(net(batch.data), batch.target);
      loss.backward();
      adam.step();
      adam.zero_grad();
    }
    std::cout << "epoch " << epoch << " loss " << loss.item<float>() << std::endl;
  }
}
