// What a step through the Accelerator costs beside the same loop written for LibTorch alone, in one
// process. Both loops run in turn, block by block, so that a machine that changes its speed changes
// both; the ratio is the median over the pairs. Prints one line of JSON for each model.

#include "measure.hpp"
#include "support/decoder.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/optim/fused.hpp>

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <functional>
#include <iostream>

namespace {

using measure::median;

double microseconds(const std::function<void()>& block, int64_t steps) {
  return measure::time(block).count() * 1e6 / static_cast<double>(steps);
}

void compare(const std::string& name, int64_t steps, int64_t pairs,
             const std::function<void()>& plain, const std::function<void()>& accelerated) {
  plain();
  accelerated();
  std::vector<double> plain_us, accelerated_us, ratios;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    // The order within a pair alternates, so that neither always comes second.
    const bool plain_first = pair % 2 == 0;
    const double first = microseconds(plain_first ? plain : accelerated, steps);
    const double second = microseconds(plain_first ? accelerated : plain, steps);
    plain_us.push_back(plain_first ? first : second);
    accelerated_us.push_back(plain_first ? second : first);
    ratios.push_back(accelerated_us.back() / plain_us.back());
  }
  std::cout << accelerate::Json{{"benchmark", name},
                                {"plain_us", median(plain_us)},
                                {"accelerated_us", median(accelerated_us)},
                                {"ratio", median(ratios)},
                                {"pairs", pairs}}
                   .dump()
            << std::endl;
}

torch::nn::Sequential mlp() {
  torch::manual_seed(0);
  return torch::nn::Sequential(torch::nn::Linear(64, 64), torch::nn::ReLU(),
                               torch::nn::Linear(64, 10));
}

struct Rows : torch::data::datasets::Dataset<Rows> {
  torch::Tensor images = torch::randn({32 * 200, 64});
  torch::Tensor digits = torch::randint(10, {32 * 200});
  torch::data::Example<> get(size_t i) override { return {images[i], digits[i]}; }
  torch::optional<size_t> size() const override { return images.size(0); }
};

/// One batch again and again: forward, loss, backward, step, zero_grad and nothing else.
void fixed_batch() {
  constexpr int64_t kSteps = 500;
  const auto images = torch::randn({32, 64});
  const auto digits = torch::randint(10, {32});
  auto net = mlp();
  torch::optim::AdamW adam(net->parameters(), 1e-3);
  auto other = mlp();
  torch::optim::AdamW other_adam(other->parameters(), 1e-3);
  accelerate::Accelerator accelerator;
  auto [model, optimizer] = accelerator.prepare(other, other_adam);
  compare(
      "mlp 64-64-10, batch 32, one fixed batch", kSteps, 41,
      [&] {
        for (int64_t i = 0; i < kSteps; ++i) {
          auto loss = torch::cross_entropy_loss(net->forward(images), digits);
          loss.backward();
          adam.step();
          adam.zero_grad();
        }
      },
      [&, &model = model, &optimizer = optimizer] {
        for (int64_t i = 0; i < kSteps; ++i) {
          auto scope = accelerator.accumulate(model);
          auto loss = torch::cross_entropy_loss(model(images), digits);
          accelerator.backward(loss);
          optimizer.step();
          optimizer.zero_grad();
        }
      });
}

/// The whole loop, each with its own loader: LibTorch's, and ours.
void with_loader() {
  auto net = mlp();
  torch::optim::AdamW adam(net->parameters(), 1e-3);
  auto other = mlp();
  torch::optim::AdamW other_adam(other->parameters(), 1e-3);
  const auto options = torch::data::DataLoaderOptions().batch_size(32);
  auto dataset = Rows().map(torch::data::transforms::Stack<>());
  auto loader = torch::data::make_data_loader(dataset, options);
  accelerate::Accelerator accelerator;
  auto [model, optimizer, prepared] =
      accelerator.prepare(other, other_adam, accelerate::data::loader(dataset, options));
  compare(
      "mlp 64-64-10, batch 32, with data loader", 200, 41,
      [&] {
        for (auto& batch : *loader) {
          auto loss = torch::cross_entropy_loss(net->forward(batch.data), batch.target);
          loss.backward();
          adam.step();
          adam.zero_grad();
        }
      },
      [&, &model = model, &optimizer = optimizer, &prepared = prepared] {
        for (auto& batch : prepared) {
          auto scope = accelerator.accumulate(model);
          auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
          accelerator.backward(loss);
          optimizer.step();
          optimizer.zero_grad();
        }
      });
}

void language_model() {
  constexpr int64_t kSteps = 3;
  const auto tokens = torch::randint(60, {16, trainer::kContext});
  const auto next = torch::randint(60, {16, trainer::kContext});
  const auto decoder = [] {
    torch::manual_seed(0);
    return trainer::Decoder(60, 2, 64, 0.0);
  };
  auto net = decoder();
  torch::optim::AdamW adam(net->parameters(), 1e-3);
  auto other = decoder();
  torch::optim::AdamW other_adam(other->parameters(), 1e-3);
  accelerate::Accelerator accelerator;
  auto [model, optimizer] = accelerator.prepare(other, other_adam);
  compare(
      "language_model, 2 layers of 64, batch 16", kSteps, 41,
      [&] {
        for (int64_t i = 0; i < kSteps; ++i) {
          auto loss = torch::nn::functional::cross_entropy(net(tokens).transpose(1, 2), next);
          loss.backward();
          adam.step();
          adam.zero_grad();
        }
      },
      [&, &model = model, &optimizer = optimizer] {
        for (int64_t i = 0; i < kSteps; ++i) {
          auto scope = accelerator.accumulate(model);
          auto loss = torch::nn::functional::cross_entropy(model(tokens).transpose(1, 2), next);
          accelerator.backward(loss);
          optimizer.step();
          optimizer.zero_grad();
        }
      });
}

}  // namespace

int main() {
  torch::set_num_threads(1);
  fixed_batch();
  with_loader();
  language_model();
}
