#include <support/zoo.hpp>

#include <torch/nn.h>
#include <torch/script.h>
#include <torch/utils.h>

#include <cstdlib>
#include <map>
#include <stdexcept>

namespace zoo {
namespace {

namespace nn = torch::nn;
using at::Tensor;

struct LstmNet : nn::Module {
  nn::LSTM rnn{nn::LSTMOptions(6, 8).num_layers(2).bidirectional(true).batch_first(true)};
  nn::Linear head{16, 3};
  LstmNet() {
    register_module("rnn", rnn);
    register_module("head", head);
  }
  Tensor forward(const Tensor& x) { return head(std::get<0>(rnn(x))); }
};

struct GruNet : nn::Module {
  nn::GRU rnn{nn::GRUOptions(6, 8).num_layers(2).batch_first(true)};
  nn::Linear head{8, 3};
  GruNet() {
    register_module("rnn", rnn);
    register_module("head", head);
  }
  Tensor forward(const Tensor& x) { return head(std::get<0>(rnn(x))); }
};

struct ConvNet : nn::Module {
  nn::Sequential body{nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1).bias(false)),
                      nn::BatchNorm2d(8),
                      nn::Functional(torch::relu),
                      nn::Conv2d(nn::Conv2dOptions(8, 8, 3).stride(2).groups(2)),
                      nn::BatchNorm2d(8),
                      nn::AdaptiveAvgPool2d(nn::AdaptiveAvgPool2dOptions({2, 2}))};
  nn::Linear head{32, 4};
  ConvNet() {
    register_module("body", body);
    register_module("head", head);
    // As a user who trains in this memory format has it.
    torch::NoGradGuard no_grad;
    for (Tensor& p : parameters()) {
      if (p.dim() == 4) p.set_data(p.contiguous(at::MemoryFormat::ChannelsLast));
    }
  }
  Tensor forward(const Tensor& x) { return head(body->forward(x).flatten(1)); }
};

struct AttentionNet : nn::Module {
  nn::MultiheadAttention attention{nn::MultiheadAttentionOptions(16, 4)};
  nn::LayerNorm norm{nn::LayerNormOptions({16})};
  AttentionNet() {
    register_module("attention", attention);
    register_module("norm", norm);
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = norm(x).transpose(0, 1);
    return x + std::get<0>(attention(y, y, y)).transpose(0, 1);
  }
};

struct TransformerNet : nn::Module {
  nn::Transformer transformer{nn::TransformerOptions(16, 2, 2, 2).dim_feedforward(32).dropout(0.1)};
  TransformerNet() { register_module("transformer", transformer); }
  Tensor forward(const Tensor& x) {
    const Tensor y = x.transpose(0, 1);
    return transformer(y, y.slice(0, 0, 3)).transpose(0, 1);
  }
};

// A GPT-like net: a bare positional parameter, blocks in a list, the head tied to the embedding.
struct BlockImpl : nn::Module {
  nn::LayerNorm norm{nn::LayerNormOptions({16})};
  nn::Linear up{16, 40}, down{40, 16};
  nn::Dropout dropout{0.2};
  BlockImpl() {
    register_module("norm", norm);
    register_module("up", up);
    register_module("down", down);
    register_module("dropout", dropout);
  }
  Tensor forward(const Tensor& x) { return x + dropout(down(torch::gelu(up(norm(x))))); }
};
TORCH_MODULE(Block);
struct HeadImpl : nn::Module {
  Tensor weight;
  explicit HeadImpl(const Tensor& shared) { weight = register_parameter("weight", shared); }
  Tensor forward(const Tensor& x) { return torch::nn::functional::linear(x, weight); }
};
TORCH_MODULE(Head);
struct TiedNet : nn::Module {
  nn::Embedding embedding{23, 16};
  Tensor position;
  nn::ModuleList blocks;
  Head head{nullptr};
  TiedNet() {
    register_module("embedding", embedding);
    position = register_parameter("position", torch::randn({9, 16}));
    for (int i = 0; i < 4; ++i) blocks->push_back(Block());
    register_module("blocks", blocks);
    head = register_module("head", Head(embedding->weight));
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens) + position.slice(0, 0, tokens.size(1));
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(x);
  }
};

// Lists in lists, a dict, activations in place, one layer used three times, one frozen, one never
// used, sizes that divide by nothing, a parameter without elements.
struct OddNet : nn::Module {
  nn::ModuleList lists;
  nn::ModuleDict heads;
  nn::Linear shared{7, 7}, frozen{7, 7}, unused{7, 5};
  Tensor scale, empty;
  OddNet() {
    for (int i = 0; i < 2; ++i) {
      nn::ModuleList inner;
      inner->push_back(nn::Linear(7, 13));
      inner->push_back(nn::Linear(13, 7));
      lists->push_back(inner);
    }
    heads->update(std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{
        {"a", nn::Linear(7, 3).ptr()}, {"b", nn::Linear(7, 2).ptr()}});
    register_module("lists", lists);
    register_module("heads", heads);
    register_module("shared", shared);
    register_module("frozen", frozen);
    register_module("unused", unused);
    scale = register_parameter("scale", torch::ones({}));
    empty = register_parameter("empty", torch::zeros({0, 3}));
    for (Tensor& p : frozen->parameters()) p.set_requires_grad(false);
  }
  Tensor forward(Tensor x) {
    x = frozen(x);
    for (const auto& list : *lists) {
      auto& inner = *list->as<nn::ModuleList>();
      Tensor y = inner[0]->as<nn::Linear>()->forward(x);
      y.add_(scale);
      torch::relu_(y);
      x = shared(x + inner[1]->as<nn::Linear>()->forward(y)).tanh();
    }
    x = shared(x);
    return torch::cat(
        {heads["a"]->as<nn::Linear>()->forward(x), heads["b"]->as<nn::Linear>()->forward(x)}, -1);
  }
};

template <class Net>
Specimen native(at::ScalarType dtype, std::function<Tensor(std::int64_t)> input) {
  auto net = std::make_shared<Net>();
  net->to(dtype);
  return {accelerate::ModuleRecord(net), [net](const Tensor& x) { return net->forward(x); },
          std::move(input)};
}

std::function<Tensor(std::int64_t)> normal(std::vector<std::int64_t> sizes, at::ScalarType dtype) {
  return [sizes, dtype](std::int64_t samples) {
    std::vector<std::int64_t> shape{samples};
    shape.insert(shape.end(), sizes.begin(), sizes.end());
    return torch::randn(shape, dtype);
  };
}

Specimen script(const std::string& name, std::vector<std::int64_t> sizes, at::ScalarType dtype) {
  const char* folder = std::getenv("ACCELERATE_TEST_MODULES");
  if (folder == nullptr)
    throw std::runtime_error(
        "ACCELERATE_TEST_MODULES does not name the folder that make_modules.py filled");
  torch::jit::Module module = torch::jit::load(std::string(folder) + "/" + name + ".pt");
  module.to(dtype);
  module.train();
  return {accelerate::ModuleRecord(module),
          [module](const Tensor& x) mutable { return module.forward({x}).toTensor(); },
          normal(std::move(sizes), dtype)};
}

const std::map<std::string, std::function<Specimen(at::ScalarType)>>& kinds() {
  static const std::map<std::string, std::function<Specimen(at::ScalarType)>> all = {
      {"attention",
       [](at::ScalarType t) {
         return native<AttentionNet>(t, normal({5, 16}, t));
       }},
      {"conv_batchnorm",
       [](at::ScalarType t) {
         return native<ConvNet>(t, normal({3, 9, 9}, t));
       }},
      {"gru",
       [](at::ScalarType t) {
         return native<GruNet>(t, normal({5, 6}, t));
       }},
      {"lstm",
       [](at::ScalarType t) {
         return native<LstmNet>(t, normal({5, 6}, t));
       }},
      {"odd", [](at::ScalarType t) { return native<OddNet>(t, normal({7}, t)); }},
      {"script_branching", [](at::ScalarType t) { return script("script_branching", {12}, t); }},
      {"script_traced",
       [](at::ScalarType t) {
         return script("script_traced", {7, 16}, t);
       }},
      {"tied",
       [](at::ScalarType t) {
         return native<TiedNet>(t, [](std::int64_t samples) {
           return torch::randint(0, 23, {samples, 8});
         });
       }},
      {"transformer",
       [](at::ScalarType t) {
         return native<TransformerNet>(t, normal({6, 16}, t));
       }},
  };
  return all;
}

}  // namespace

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& [name, make] : kinds()) all.push_back(name);
  return all;
}

Specimen make(const std::string& name, std::uint64_t seed, at::ScalarType dtype) {
  torch::manual_seed(seed);
  return kinds().at(name)(dtype);
}

// Not a plain square: of an output that batch norm centred, its mean would have a gradient of
// nothing but rounding, which Adam's division blows up.
Tensor loss_of(const Tensor& output) {
  return output.to(output.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)
      .sub(0.3)
      .pow(2)
      .mean();
}

}  // namespace zoo
