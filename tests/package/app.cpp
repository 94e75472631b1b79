// What somebody else's project would hold: a program that trains, built against the package.
#include <accelerate/accelerate.hpp>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdio>

int main() {
  accelerate::Accelerator accelerator;
  accelerate::set_seed(0);
  torch::nn::Linear linear(8, 1);
  torch::optim::SGD sgd(linear->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(linear, sgd);
  const auto input = torch::randn({256, 8});
  const auto target = input.sum(1, true);

  double first = 0.0;
  double last = 0.0;
  for (int step = 0; step < 50; ++step) {
    const auto loss = torch::mse_loss(model(input), target);
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  std::printf("%zu parameters, loss %.6f -> %.6f\n", model.parameters().size(), first, last);
  return model.parameters().size() == 2 && last < 0.01 * first ? 0 : 1;
}
