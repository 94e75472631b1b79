// Ordinary programs, and unusual ones that are right: what people do in training loops.

#include <programs/program.hpp>

#include <torch/torch.h>

#include <stdexcept>

namespace programs {
namespace {

namespace nn = torch::nn;
using accelerate::AcceleratorOptions;
using accelerate::DdpOptions;
using torch::Tensor;

// Three layers of different sizes, called by name.
struct NetImpl : nn::Module {
  nn::Linear first{register_module("first", nn::Linear(6, 10))};
  nn::Linear middle{register_module("middle", nn::Linear(10, 10))};
  nn::Linear head{register_module("head", nn::Linear(10, 3))};
  NetImpl() { to(torch::kDouble); }
  Tensor features(const Tensor& x) { return middle(first(x).tanh()).tanh(); }
  Tensor forward(const Tensor& x) { return head(features(x)); }
};
TORCH_MODULE(Net);

// With Adam's own eps, a gradient that is nothing but rounding would move its parameter.
torch::optim::AdamWOptions adam() { return torch::optim::AdamWOptions(1e-2).eps(1e-4); }

Tensor loss_of(const Tensor& output) { return output.sub(0.3).square().mean(); }

ProgramOptions unused_parameters() {
  return {.options = AcceleratorOptions().ddp(DdpOptions().find_unused_parameters(true))};
}

const Program plain_loop("plain_loop", [](auto& accelerator) {
  Net net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 4; ++step) {
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    accelerator.note("norm", accelerator.clip_grad_norm_(model, 0.05));
    optimizer.step();
    optimizer.zero_grad();
    accelerator.check();
  }
});

const Program train_then_freeze("train_then_freeze", unused_parameters(), [](auto& accelerator) {
  Net net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      for (auto& p : net->middle->parameters()) p.set_requires_grad(false);
    }
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

const Program two_optimizers("two_optimizers_in_turns", [](auto& accelerator) {
  Net net;
  torch::optim::AdamW of_body(std::vector<Tensor>{net->first->weight, net->first->bias,
                                                  net->middle->weight, net->middle->bias},
                              adam());
  torch::optim::SGD of_head(net->head->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto [model, body, head] = accelerator.prepare(net, of_body, of_head);
  for (int step = 0; step < 6; ++step) {
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    if (step % 3 != 2) {
      head.step();
      head.zero_grad();
    }
    if (step % 3 != 0) {
      body.step();
      body.zero_grad();
    }
  }
  accelerator.check();
});

struct ReusedImpl : nn::Module {
  nn::Linear in{register_module("in", nn::Linear(6, 8))};
  nn::Linear shared{register_module("shared", nn::Linear(8, 8))};
  Tensor scale = register_parameter("scale", torch::ones({}));
  ReusedImpl() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) {
    Tensor y = in(x);
    for (int i = 0; i < 3; ++i) y = y + scale * shared(y).tanh();
    return torch::nn::functional::linear(y, shared->weight.t());
  }
};
TORCH_MODULE(Reused);

const Program reuse("one_layer_many_times", [](auto& accelerator) {
  Reused net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 3; ++step) {
    const auto x = batch(accelerator, step, {4, 6});
    // Two forwards, one backward: as for pairs of sentences.
    accelerator.backward(loss_of(model(x)) + loss_of(model(-x)));
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

const Program in_place("weights_written_in_place", [](auto& accelerator) {
  Net net;
  torch::optim::SGD optim(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 4; ++step) {
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    optimizer.step();
    optimizer.zero_grad();
    torch::NoGradGuard no_grad;
    net->head->weight.clamp_(-0.2, 0.2);
    net->middle->weight.mul_(0.9);
    net->first->weight[1].zero_();
  }
  accelerator.check();
});

struct TiedImpl : nn::Module {
  nn::Embedding embedding{register_module("embedding", nn::Embedding(11, 8))};
  nn::Linear body{register_module("body", nn::Linear(8, 8))};
  Tensor bias = register_parameter("bias", torch::zeros({11}));
  TiedImpl() { to(torch::kDouble); }
  Tensor forward(const Tensor& tokens) {
    return nn::functional::linear(body(embedding(tokens)).tanh(), embedding->weight, bias);
  }
};
TORCH_MODULE(Tied);

const Program tied("weights_tied", [](auto& accelerator) {
  Tied net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 4; ++step) {
    batch(accelerator, step, {1});
    const auto tokens = torch::randint(0, 11, {3, 5});
    const auto logits = model(tokens).flatten(0, 1);
    accelerator.backward(torch::cross_entropy_loss(logits, tokens.roll(-1, 1).flatten()));
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

struct BranchingImpl : nn::Module {
  nn::Linear in{register_module("in", nn::Linear(6, 8))};
  nn::Linear left{register_module("left", nn::Linear(8, 3))};
  nn::Linear right{register_module("right", nn::Linear(8, 3))};
  BranchingImpl() { to(torch::kDouble); }
  Tensor forward(const Tensor& x, bool to_left) {
    const Tensor y = in(x).tanh();
    return to_left ? left(y) : right(y);
  }
};
TORCH_MODULE(Branching);

const Program branches("branches_by_step", unused_parameters(), [](auto& accelerator) {
  Branching net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 5; ++step) {
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}), step < 3)));
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

const Program clears_first(
    "accumulation_in_windows", {.options = AcceleratorOptions().gradient_accumulation_steps(2)},
    [](auto& accelerator) {
      Net net;
      torch::optim::AdamW optim(net->parameters(), adam());
      auto [model, optimizer] = accelerator.prepare(net, optim);
      for (int micro = 0; micro < 6; ++micro) {
        const auto window = accelerator.accumulate(model);
        accelerator.backward(loss_of(model(batch(accelerator, micro, {4, 6}))));
        if (accelerator.sync_gradients())
          accelerator.note("norm", accelerator.clip_grad_norm_(model, 0.05));
        optimizer.step();
        optimizer.zero_grad();
      }
      accelerator.check();
    });

const Program by_hand("accumulation_by_hand", [](auto& accelerator) {
  Net net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < 3; ++micro) {
      const auto x = batch(accelerator, step, {4, 6}, micro);
      if (micro < 2) {
        const auto local = accelerator.no_sync(model);
        accelerator.backward(loss_of(model(x)) / 3);
      } else {
        accelerator.backward(loss_of(model(x)) / 3);
      }
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

const Program by_count("normalised_by_counts",
                       {.options = AcceleratorOptions().gradient_accumulation_steps(2)},
                       [](auto& accelerator) {
                         Net net;
                         torch::optim::SGD optim(net->parameters(), 0.1);
                         auto [model, optimizer] = accelerator.prepare(net, optim);
                         for (int micro = 0; micro < 6; ++micro) {
                           const auto window = accelerator.accumulate(model);
                           const int samples = 2 + micro + accelerator.process_index();
                           const auto x = batch(accelerator, micro, {samples, 6});
                           accelerator.backward(model(x).sub(0.3).square().sum(), samples);
                           optimizer.step();
                           optimizer.zero_grad();
                         }
                         accelerator.check();
                       });

const Program twice("backward_of_two_losses_in_turn", [](auto& accelerator) {
  Net net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 3; ++step) {
    const auto x = batch(accelerator, step, {4, 6});
    accelerator.backward(loss_of(model(x)));
    accelerator.backward(model(x + 1).abs().mean());
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

const Program ema("average_of_weights", [](auto& accelerator) {
  Net net, average;
  {
    torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < net->parameters().size(); ++i)
      average->parameters()[i].copy_(net->parameters()[i]);
  }
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 4; ++step) {
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    optimizer.step();
    optimizer.zero_grad();
    torch::NoGradGuard no_grad;
    const auto whole = model.summon_full_params();
    const auto now = net->parameters();
    auto then = average->parameters();
    for (std::size_t i = 0; i < now.size(); ++i) then[i].lerp_(now[i], 0.3);
  }
  for (const auto& parameter : average->parameters()) accelerator.note("average", parameter);
  accelerator.check();
});

struct ThrowingImpl : nn::Module {
  Net net{register_module("net", Net())};
  Tensor forward(const Tensor& x, bool fail) {
    const Tensor y = net->features(x);
    if (fail) throw std::runtime_error("no such sample");
    return net->head(y);
  }
};
TORCH_MODULE(Throwing);

const Program thrown("forward_throws_and_the_batch_is_left_out", [](auto& accelerator) {
  Throwing net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 5; ++step) {
    try {
      accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}), step % 2 == 1)));
    } catch (const std::runtime_error& error) {
      if (std::string(error.what()) != "no such sample") throw;
      continue;
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

const Program detached("features_detached_for_some_steps", unused_parameters(),
                       [](auto& accelerator) {
                         struct TwoStageImpl : NetImpl {
                           Tensor forward(const Tensor& x, bool detach) {
                             const Tensor y = this->features(x);
                             return this->head(detach ? y.detach() : y);
                           }
                         };
                         auto net = std::make_shared<TwoStageImpl>();
                         torch::optim::AdamW optim(net->parameters(), adam());
                         auto [model, optimizer] = accelerator.prepare(net, optim);
                         for (int step = 0; step < 6; ++step) {
                           const auto x = batch(accelerator, step, {4, 6});
                           accelerator.backward(loss_of(model(x, step % 3 == 0)));
                           optimizer.step();
                           optimizer.zero_grad();
                         }
                         accelerator.check();
                       });

const Program penalty("gradient_penalty", [](auto& accelerator) {
  Net net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 3; ++step) {
    const auto x = batch(accelerator, step, {4, 6}).requires_grad_();
    const Tensor y = model(x);
    const Tensor gradient =
        torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    accelerator.backward(loss_of(y) + gradient.square().sum(1).sub(1).square().mean());
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

const Program evaluation("evaluation_in_the_middle", [](auto& accelerator) {
  nn::Sequential net(nn::Linear(6, 10), nn::BatchNorm1d(10), nn::Tanh(), nn::Dropout(0.3),
                     nn::Linear(10, 3));
  net->to(torch::kDouble);
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 4; ++step) {
    // Alike on all ranks: under ddp, running statistics are those of rank 0.
    const auto x = batch_of(0, step, {4, 6}, 0);
    accelerator.backward(loss_of(model(x)));
    optimizer.step();
    optimizer.zero_grad();
    torch::NoGradGuard no_grad;
    model.eval();
    accelerator.note("validation", loss_of(model(batch_of(0, 100, {4, 6}, 0))));
    model.train();
  }
  accelerator.check();
});

const Program rates("learning_rates_change", [](auto& accelerator) {
  Net net;
  torch::optim::SGD optim(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  auto [model, optimizer] = accelerator.prepare(net, optim);
  for (int step = 0; step < 4; ++step) {
    optimizer.set_learning_rates({0.1 / (1 + step)});
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    accelerator.clip_grad_value_(model, 0.01);
    optimizer.step();
    optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
  }
  accelerator.check();
});

const Program adversarial("two_modules_against_each_other", [](auto& accelerator) {
  Net generator;
  nn::Sequential critic(nn::Linear(3, 8), nn::LeakyReLU(), nn::Linear(8, 1));
  critic->to(torch::kDouble);
  torch::optim::AdamW of_generator(generator->parameters(), adam());
  torch::optim::AdamW of_critic(critic->parameters(), adam());
  auto [make, judge, maker, judges] =
      accelerator.prepare(generator, critic, of_generator, of_critic);
  for (int step = 0; step < 4; ++step) {
    const auto noise = batch(accelerator, step, {4, 6});
    const auto real = torch::randn({4, 3}, torch::kDouble);
    const Tensor fake = make(noise);
    accelerator.backward(judge(fake.detach()).mean() - judge(real).mean());
    judges.step();
    judges.zero_grad();
    accelerator.backward(-judge(fake).mean());
    maker.step();
    maker.zero_grad();
    judges.zero_grad();
  }
  accelerator.check();
});

const Program saved("saved_and_loaded_in_the_middle", [](auto& accelerator) {
  Net net;
  torch::optim::AdamW optim(net->parameters(), adam());
  auto [model, optimizer] = accelerator.prepare(net, optim);
  const auto folder = temporary_folder("programs_saved");
  for (int step = 0; step < 6; ++step) {
    if (step == 2) accelerator.save_state(folder);
    if (step == 4) accelerator.load_state(folder);
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

}  // namespace
}  // namespace programs
