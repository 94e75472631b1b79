// What somebody else's project would hold: a program that trains, built against the package.
#include <accelerate/core/module.hpp>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdio>

int main() {
  torch::manual_seed(0);
  torch::nn::Linear model(8, 1);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto input = torch::randn({256, 8});
  const auto target = input.sum(1, true);

  double first = 0.0;
  double last = 0.0;
  for (int step = 0; step < 50; ++step) {
    const auto loss = torch::mse_loss(model(input), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    last = loss.item<double>();
    if (step == 0) first = last;
  }
  const accelerate::ModuleRecord record(model.ptr());
  std::printf("%zu parameters, loss %.6f -> %.6f\n", record.parameters().size(), first, last);
  return record.parameters().size() == 2 && last < 0.01 * first ? 0 : 1;
}
