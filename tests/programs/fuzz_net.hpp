#pragma once

#include <programs/fuzz.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

// Random modules: blocks that each do one of the things that people write, in a random order.
namespace fuzz {

namespace nn = torch::nn;
using torch::Tensor;

/// What the programs throw themselves.
struct Thrown : std::runtime_error {
  using runtime_error::runtime_error;
};

/// Recomputes in backward, by a backward inside of backward: checkpointing as users wrote it before
/// libraries did.
struct Again : torch::autograd::Function<Again> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        nn::LinearImpl* layer) {
    context->save_for_backward({x});
    context->saved_data["layer"] = reinterpret_cast<std::int64_t>(layer);
    return layer->forward(x).tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* layer = reinterpret_cast<nn::LinearImpl*>(context->saved_data["layer"].toInt());
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    {
      const at::AutoGradMode on(true);
      layer->forward(x).tanh().backward(gradients[0]);
    }
    return {x.grad(), Tensor()};
  }
};

/// Its backward throws.
struct Breaks : torch::autograd::Function<Breaks> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw Thrown("backward was told to throw");
  }
};

constexpr std::int64_t kWidth = 6;

struct BlockImpl : nn::Module {
  enum Kind {
    linear,
    residual,
    views,
    transposed,
    again,
    layer_norm,
    batch_norm,
    in_place,
    running,
    branch,
    complex,
    caught,
    threaded,
    recomputed,
    dropout,
    recurrent,
    convolution,
    normed,
    looked_up,
    unbound,
    detached,
    sequential,
    kinds
  };
  static constexpr const char* kNames[] = {
      "linear",     "residual",   "views",    "transposed", "again",       "layer_norm",
      "batch_norm", "in_place",   "running",  "branch",     "complex",     "caught",
      "threaded",   "recomputed", "dropout",  "recurrent",  "convolution", "normed",
      "looked_up",  "unbound",    "detached", "sequential"};

  /// `shared`: the layer of another block, which is this one's too; or none.
  explicit BlockImpl(Kind kind, nn::Linear shared = nullptr) : kind(kind) {
    const auto layer = [&](const char* name) {
      return register_module(name, nn::Linear(kWidth, kWidth));
    };
    a = shared.is_empty() ? layer("a") : register_module("a", shared);
    switch (kind) {
      case residual:
        scale = register_parameter("scale", torch::full({}, 0.7));
        break;
      case views:
        weight = register_parameter("weight", torch::randn({kWidth, 2 * kWidth}) * 0.3);
        break;
      case layer_norm:
        norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
        break;
      case batch_norm:
        batch = register_module("batch", nn::BatchNorm1d(kWidth));
        break;
      case in_place:
        weight = register_parameter("offset", torch::randn({kWidth}) * 0.1);
        break;
      case running:
        mean = register_buffer("mean", torch::zeros({kWidth}));
        break;
      case normed:
      case branch:
      case caught:
        b = layer("b");
        break;
      case complex:
        weight = register_parameter("weight", torch::randn({kWidth}, torch::kComplexDouble));
        break;
      case recurrent:
        gru = register_module("gru", nn::GRU(kWidth, kWidth));
        break;
      case convolution:
        conv = register_module("conv", nn::Conv1d(nn::Conv1dOptions(1, 1, 3).padding(1)));
        break;
      case looked_up:
        table = register_module("table", nn::Embedding(5, kWidth));
        break;
      case unbound:
        weight = register_parameter("weight", torch::randn({3, kWidth}) * 0.3);
        break;
      case detached:
        weight = register_parameter("weight", torch::randn({kWidth}));
        break;
      case sequential:
        layers = register_module(
            "layers", nn::Sequential(nn::Linear(kWidth, 9), nn::Tanh(), nn::Linear(9, kWidth)));
        break;
      default:
        break;
    }
  }

  /// Uses a parameter of another block, too.
  std::shared_ptr<BlockImpl> other() const { return other_.lock(); }
  void set_other(const std::shared_ptr<BlockImpl>& block) { other_ = block; }

  Tensor forward(const Tensor& x) {
    switch (kind) {
      case residual:
        return x + scale * a(x).relu();
      case views:
        return a(x.matmul(weight.narrow(1, 0, kWidth)) *
                 x.matmul(weight.t().slice(0, kWidth).t()).sigmoid())
            .tanh();
      case transposed:
        return a(torch::linear(x, (other() ? other()->a : a)->weight.t())).tanh();
      case again:
        return other() ? x + other()->a(a(x).tanh()) : a(a(x).tanh());
      case layer_norm:
        return a(norm(x)).tanh();
      case batch_norm:
        return batch(a(x)).tanh();
      case in_place: {
        Tensor y = a(x);
        y.add_(weight);
        torch::tanh_(y);
        return y + x;
      }
      case running: {
        {
          torch::NoGradGuard no_grad;
          if (is_training()) mean.lerp_(x.detach().mean(0), 0.1);
        }
        return a(x - mean.clone()).tanh();
      }
      case branch:
        return (x.detach().sum().item<double>() > 0 ? a(x) : b(x)).tanh();
      case complex: {
        const Tensor parts = torch::view_as_real(weight);
        return a(x * parts.select(1, 0) + torch::real(weight * weight.conj()) * 0.1 +
                 parts.select(1, 1))
            .tanh();
      }
      case caught: {
        try {
          const Tensor y = b(x);
          if (y.defined()) throw Thrown("not this way");
        } catch (const Thrown&) {
          // The other layer serves.
        }
        return a(x).tanh();
      }
      case threaded: {
        Tensor y;
        const bool grad = torch::GradMode::is_enabled();
        std::exception_ptr failed;
        std::thread([&] {
          try {
            const at::AutoGradMode mode(grad);
            y = a(x).tanh();
          } catch (...) {
            failed = std::current_exception();
          }
        }).join();
        if (failed) std::rethrow_exception(failed);
        return y;
      }
      case recomputed:
        if (!torch::GradMode::is_enabled()) return a(x).tanh();
        return Again::apply(x.requires_grad() ? x : x.detach().requires_grad_(), a.get());
      case dropout:
        return torch::dropout(a(x), 0.3, is_training()) + x;
      case recurrent:
        return a(std::get<0>(gru(x.unsqueeze(0))).squeeze(0));
      case convolution:
        return a(conv(x.unsqueeze(1)).squeeze(1)).tanh();
      case normed: {
        if (is_training() && torch::GradMode::is_enabled()) {
          torch::NoGradGuard no_grad;
          b->weight.div_(b->weight.norm().clamp_min(2.0) / 2);
        }
        return a(b(x)).tanh();
      }
      case looked_up: {
        const Tensor places = (x.detach().sum(1).abs() * 7.3).floor().to(torch::kLong).remainder(5);
        return a(x + table(places)).tanh();
      }
      case unbound: {
        const auto rows = weight.unbind(0);
        return a(x * rows[0] + torch::cat({rows[1], rows[2]}).view({2, kWidth}).sum(0)).tanh();
      }
      case detached:
        return a(x * weight.detach()).tanh();
      case sequential:
        return a(layers->forward(x)).tanh();
      default:
        return a(x).tanh();
    }
  }

  Kind kind;
  nn::Linear a{nullptr}, b{nullptr};
  nn::LayerNorm norm{nullptr};
  nn::BatchNorm1d batch{nullptr};
  nn::GRU gru{nullptr};
  nn::Conv1d conv{nullptr};
  nn::Embedding table{nullptr};
  nn::Sequential layers{nullptr};
  Tensor weight, scale, mean;

 private:
  std::weak_ptr<BlockImpl> other_;
};
TORCH_MODULE(Block);

/// What is different in one forward.
struct Turn {
  bool throws = false;
  bool detaches = false;
  int skips = -1;  ///< this block
};

struct NetImpl : nn::Module {
  explicit NetImpl(const Draws& draws, const std::string& name) {
    const int layers = 1 + draws.pick(name + ".layers", 5);
    for (int i = 0; i < layers; ++i) {
      const std::string layer = name + ".layer" + std::to_string(i);
      auto kind = static_cast<BlockImpl::Kind>(draws.pick(layer, BlockImpl::kinds));
      if (!draws.chance(layer + "=" + BlockImpl::kNames[kind], 100)) kind = BlockImpl::linear;
      nn::Linear shared{nullptr};
      if (i > 0 && draws.chance(layer + ".ties", 8))
        shared = blocks_[static_cast<std::size_t>(draws.pick(layer + ".tie", i))]->a;
      Block block(kind, shared);
      if (i > 0)
        block->set_other(blocks_[static_cast<std::size_t>(draws.pick(layer + ".other", i))].ptr());
      blocks_.push_back(block);
      register_module("block" + std::to_string(i), block);
    }
    head = register_module("head", nn::Linear(kWidth, kWidth));
    // Complex parameters stay what they are.
    for (auto& entry : named_parameters()) {
      if (!entry.value().is_complex()) entry.value().set_data(entry.value().to(torch::kDouble));
    }
    for (auto& entry : named_buffers()) {
      if (entry.value().is_floating_point())
        entry.value().set_data(entry.value().to(torch::kDouble));
    }
  }
  Tensor features(const Tensor& input, const Turn& turn) {
    Tensor x = input;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      if (turn.skips == static_cast<int>(i)) continue;
      x = blocks_[i](x);
    }
    return x;
  }
  Tensor forward(const Tensor& input, const Turn& turn = Turn()) {
    Tensor x = features(input, turn);
    if (turn.detaches) x = x.detach();
    if (turn.throws) throw Thrown("forward was told to throw");
    return head(x);
  }
  bool has(BlockImpl::Kind kind) const {
    return std::any_of(blocks_.begin(), blocks_.end(),
                       [&](const Block& block) { return block->kind == kind; });
  }
  const std::vector<Block>& blocks() const { return blocks_; }

  nn::Linear head{nullptr};

 private:
  std::vector<Block> blocks_;
};
TORCH_MODULE(Net);

}  // namespace fuzz
