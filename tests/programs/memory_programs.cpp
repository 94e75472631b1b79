// Programs that do something unusual with the memory of parameters and gradients.

#include <programs/program.hpp>

#include <torch/torch.h>

namespace programs {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct NetImpl : nn::Module {
  nn::Linear first{register_module("first", nn::Linear(6, 10))};
  nn::Linear head{register_module("head", nn::Linear(10, 3))};
  NetImpl() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) { return head(first(x).tanh()); }
};
TORCH_MODULE(Net);

Tensor loss_of(const Tensor& output) { return output.sub(0.3).square().mean(); }

struct WaveImpl : nn::Module {
  Tensor scale = register_parameter("scale", torch::randn({5}, torch::kDouble));
  Tensor wave = register_parameter("wave", torch::randn({6, 7}, torch::kComplexDouble));
  Tensor other = register_parameter("other", torch::randn({6, 7}, torch::kComplexDouble));
  Tensor forward(const Tensor& x) {
    const Tensor y = torch::matmul(torch::complex(x, 0.5 * x), wave * other);
    return torch::view_as_real(y).mean({1, 2}) * scale.sum();
  }
};
TORCH_MODULE(Wave);

const Program view_as_real("writes_through_views_of_another_dtype", [](auto& accelerator) {
  Wave net;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (int step = 0; step < 4; ++step) {
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    optimizer.step();
    optimizer.zero_grad();
    const torch::NoGradGuard no_grad;
    torch::view_as_real(net->other).select(-1, 1).clamp_(-0.5, 0.5);
    torch::real(net->other).select(0, step).mul_(2);
    torch::view_as_real(net->wave).mul_(0.9);
    net->scale.view(torch::kLong).narrow(0, 1, 2).zero_();
  }
  accelerator.check();
});

const Program complex_reduced(
    "complex_gradients_under_a_reduce_dtype",
    {.fsdp = accelerate::FsdpOptions().min_num_params(20).mixed_precision(
         {.param_dtype = {},
          .reduce_dtype = torch::kFloat,
          .output_dtype = {},
          .buffer_dtype = {}}),
     .tolerance = 1e-6},
    [](auto& accelerator) {
      Wave net;
      torch::optim::SGD sgd(net->parameters(), 0.1);
      auto [model, optimizer] = accelerator.prepare(net, sgd);
      for (int step = 0; step < 3; ++step) {
        accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
        optimizer.step();
        optimizer.zero_grad();
      }
      accelerator.check();
    });

const Program module_zero_grad("zero_grad_of_the_module", [](auto& accelerator) {
  Net net;
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (int step = 0; step < 6; ++step) {
    const Tensor loss = loss_of(model(batch(accelerator, step, {4, 6})));
    if (step % 3 != 1) net->zero_grad();
    accelerator.backward(loss);
    if (step % 2 == 1) net->first->zero_grad();
    accelerator.note("norm", accelerator.clip_grad_norm_(model, 0.1));
    optimizer.step();
  }
  accelerator.check();
});

const Program adagrad("adagrad", [](auto& accelerator) {
  Net net;
  torch::optim::Adagrad optim(net->parameters(),
                              torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.1));
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 4; ++step) {
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

const Program listed_twice("a_parameter_listed_twice", [](auto& accelerator) {
  Net net;
  auto parameters = net->parameters();
  if (!is_plain(accelerator)) parameters.push_back(parameters[1]);
  torch::optim::SGD sgd(parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (int step = 0; step < 3; ++step) {
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

struct OverOneStorageImpl : nn::Module {
  Tensor a = register_parameter("a", torch::randn({6, 6}, torch::kDouble));
  Tensor b = register_parameter("b", a.detach());
  Tensor value = register_buffer("value", a.detach());
  Tensor forward(const Tensor& x) { return x.matmul(a).tanh().matmul(b).matmul(value); }
};
TORCH_MODULE(OverOneStorage);

const Program shared_memory(
    "memory_shared_before_prepare",
    {.raises = error<accelerate::ShardingError>("lies in the memory of the parameter 'a'"),
     .raises_when = [](const Where& where) { return where.cuts(); }},
    [](auto& accelerator) {
      OverOneStorage net;
      torch::optim::SGD sgd(net->parameters(), 0.01);
      auto [model, optimizer] = accelerator.prepare(net, sgd);
      for (int step = 0; step < 3; ++step) {
        accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
        optimizer.step();
        optimizer.zero_grad();
      }
      accelerator.check();
    });

}  // namespace
}  // namespace programs
