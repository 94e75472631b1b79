// What happens between a forward, its backward and the step: parameters read or given other values,
// exceptions, backwards inside backwards, sharding that ends and begins again.

#include <programs/program.hpp>

#include <torch/torch.h>

#include <sstream>
#include <stdexcept>

namespace programs {
namespace {

namespace nn = torch::nn;
using accelerate::StrategyKind;
using torch::Tensor;

const std::vector<StrategyKind> kSharded{StrategyKind::single, StrategyKind::fsdp,
                                         StrategyKind::zero1, StrategyKind::zero2,
                                         StrategyKind::zero3};

// Passes its input on, and throws in backward if it is asked to.
struct Fuse : torch::autograd::Function<Fuse> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, bool blows) {
    ctx->saved_data["blows"] = blows;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    if (ctx->saved_data["blows"].toBool()) throw std::runtime_error("the fuse has blown");
    return {gradients[0], Tensor()};
  }
};

struct NetImpl : nn::Module {
  nn::Linear first{register_module("first", nn::Linear(6, 10))};
  nn::Linear middle{register_module("middle", nn::Linear(10, 10))};
  nn::Linear head{register_module("head", nn::Linear(10, 3))};
  bool blows = false;
  NetImpl() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) {
    return head(Fuse::apply(middle(first(x).tanh()).tanh(), blows));
  }
};
TORCH_MODULE(Net);

torch::optim::AdamWOptions adam() { return torch::optim::AdamWOptions(1e-2).eps(1e-4); }
Tensor loss_of(const Tensor& output) { return output.sub(0.3).square().mean(); }

const Program summoned("summoned_between_forward_and_backward", [](auto& accelerator) {
  Net net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 3; ++step) {
    const Tensor loss = loss_of(model(batch(accelerator, step, {4, 6})));
    {
      const auto whole = model.summon_full_params(/*write_back=*/step == 1);
      accelerator.note("norm", net->head->weight.norm());
      // Raw memory is there, as torch::save needs it.
      std::stringstream file;
      torch::save(net, file);
      Net copy;
      torch::load(copy, file);
      accelerator.note("saved", copy->head->weight);
      accelerator.note("raw", net->head->weight.template data_ptr<double>()[1]);
    }
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

const Program assigned("values_by_vector_to_parameters", {.strategies = kSharded},
                       [](auto& accelerator) {
                         Net net;
                         torch::optim::AdamW optim(net->parameters(), adam());
                         auto [model, optimizer] = accelerator.prepare(net, optim);
                         for (int step = 0; step < 4; ++step) {
                           accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
                           optimizer.step();
                           optimizer.zero_grad();
                           if (step % 2 == 1) continue;
                           const torch::NoGradGuard no_grad;
                           nn::utils::vector_to_parameters(
                               nn::utils::parameters_to_vector(net->parameters()) * 0.9,
                               net->parameters());
                           if (step == 2) accelerator.check();
                         }
                         accelerator.check();
                       });

const Program loaded("torch_load_after_prepare",
                     {.strategies = {StrategyKind::fsdp, StrategyKind::zero1},
                      .raises = error<accelerate::ShardingError>("cannot be given other memory")},
                     [](auto& accelerator) {
                       Net other;
                       std::stringstream file;
                       torch::save(other, file);
                       Net net;
                       torch::optim::AdamW optim(net->parameters(), adam());
                       auto [model, optimizer] = accelerator.prepare(net, optim);
                       for (int step = 0; step < 3; ++step) {
                         accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
                         optimizer.step();
                         optimizer.zero_grad();
                         if (step == 0) torch::load(net, file);
                       }
                       accelerator.check();
                     });

const Program exceptions("exceptions_in_backward", [](auto& accelerator) {
  Net net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 4; ++step) {
    const auto x = batch(accelerator, step, {4, 6});
    if (step % 2 == 0) {
      net->blows = true;
      const Tensor loss = loss_of(model(x));
      net->blows = false;
      try {
        loss.backward();
        throw std::logic_error("the fuse has not blown");
      } catch (const std::runtime_error&) {
        optimizer.zero_grad();
      }
    }
    accelerator.backward(loss_of(model(x)));
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

const Program again("restored_and_prepared_again", [](auto& accelerator) {
  Net net;
  torch::optim::AdamW optim(net->parameters(), adam());
  for (int round = 0; round < 2; ++round) {
    auto [model, optimizer] = accelerator.prepare(net, optim);
    for (int step = 0; step < 2; ++step) {
      accelerator.backward(loss_of(model(batch(accelerator, 2 * round + step, {4, 6}))));
      optimizer.step();
      optimizer.zero_grad();
    }
    for (const auto& [name, tensor] : model.state_dict()) accelerator.note(name, tensor);
    if (round > 0) continue;
    accelerator.check();
    model.restore();
  }
});

const Program before(
    "a_graph_of_before_prepare",
    {.strategies = {StrategyKind::fsdp, StrategyKind::zero1},
     .raises = error<accelerate::StateError>("made before prepare()")},
    [](auto& accelerator) {
      Net net;
      const Tensor view = net->head->weight.t();
      torch::optim::SGD optim(net->parameters(), 0.1);
      auto [model, optimizer] = accelerator.prepare(net, optim);
      accelerator.backward(loss_of(model(batch(accelerator, 0, {4, 6})).matmul(view.t())));
    });

}  // namespace
}  // namespace programs
