#pragma once

#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>
#include <cstdint>

/// A BERT-like encoder (Devlin et al., 2019), with the names that Hugging Face's checkpoints have.
/// It knows nothing of accelerate-cpp.
namespace bert {

namespace nn = torch::nn;

struct Config {
  std::int64_t vocab_size = 30522;
  std::int64_t hidden_size = 384;
  std::int64_t num_hidden_layers = 6;
  std::int64_t num_attention_heads = 12;
  std::int64_t intermediate_size = 1536;
  std::int64_t max_position_embeddings = 512;
  std::int64_t type_vocab_size = 2;
  double layer_norm_eps = 1e-12;
};

inline nn::LayerNorm layer_norm(const Config& config) {
  return nn::LayerNorm(nn::LayerNormOptions({config.hidden_size}).eps(config.layer_norm_eps));
}

struct EmbeddingsImpl : nn::Module {
  nn::Embedding words, positions, types;
  nn::LayerNorm norm;
  explicit EmbeddingsImpl(const Config& config)
      : words(register_module("word_embeddings",
                              nn::Embedding(config.vocab_size, config.hidden_size))),
        positions(
            register_module("position_embeddings",
                            nn::Embedding(config.max_position_embeddings, config.hidden_size))),
        types(register_module("token_type_embeddings",
                              nn::Embedding(config.type_vocab_size, config.hidden_size))),
        norm(register_module("LayerNorm", layer_norm(config))) {}
  at::Tensor forward(const at::Tensor& ids) {
    const at::Tensor position = torch::arange(ids.size(1), ids.options());
    return norm(words(ids) + types(torch::zeros_like(ids)) + positions(position));
  }
};
TORCH_MODULE(Embeddings);

struct SelfAttentionImpl : nn::Module {
  nn::Linear query, key, value;
  std::int64_t heads;
  explicit SelfAttentionImpl(const Config& config)
      : query(register_module("query", nn::Linear(config.hidden_size, config.hidden_size))),
        key(register_module("key", nn::Linear(config.hidden_size, config.hidden_size))),
        value(register_module("value", nn::Linear(config.hidden_size, config.hidden_size))),
        heads(config.num_attention_heads) {}
  /// `bias` is added to the scores: 0 for what is attended to, -inf for padding.
  at::Tensor forward(const at::Tensor& x, const at::Tensor& bias) {
    const auto split = [&](const at::Tensor& y) {
      return y.view({y.size(0), y.size(1), heads, -1}).transpose(1, 2);
    };
    const at::Tensor q = split(query(x)), k = split(key(x)), v = split(value(x));
    const double scale = 1 / std::sqrt(static_cast<double>(q.size(-1)));
    const at::Tensor scores = torch::matmul(q, k.transpose(-1, -2)) * scale + bias;
    return torch::matmul(scores.softmax(-1), v).transpose(1, 2).flatten(2);
  }
};
TORCH_MODULE(SelfAttention);

/// A linear layer, the residual connection, and the norm after it.
struct OutputImpl : nn::Module {
  nn::Linear dense;
  nn::LayerNorm norm;
  OutputImpl(std::int64_t width, const Config& config)
      : dense(register_module("dense", nn::Linear(width, config.hidden_size))),
        norm(register_module("LayerNorm", layer_norm(config))) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual) {
    return norm(dense(x) + residual);
  }
};
TORCH_MODULE(Output);

struct AttentionImpl : nn::Module {
  SelfAttention self;
  Output output;
  explicit AttentionImpl(const Config& config)
      : self(register_module("self", SelfAttention(config))),
        output(register_module("output", Output(config.hidden_size, config))) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& bias) {
    return output(self(x, bias), x);
  }
};
TORCH_MODULE(Attention);

struct IntermediateImpl : nn::Module {
  nn::Linear dense;
  explicit IntermediateImpl(const Config& config)
      : dense(register_module("dense", nn::Linear(config.hidden_size, config.intermediate_size))) {}
  at::Tensor forward(const at::Tensor& x) { return nn::functional::gelu(dense(x)); }
};
TORCH_MODULE(Intermediate);

struct LayerImpl : nn::Module {
  Attention attention;
  Intermediate intermediate;
  Output output;
  explicit LayerImpl(const Config& config)
      : attention(register_module("attention", Attention(config))),
        intermediate(register_module("intermediate", Intermediate(config))),
        output(register_module("output", Output(config.intermediate_size, config))) {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& bias) {
    const at::Tensor y = attention(x, bias);
    return output(intermediate(y), y);
  }
};
TORCH_MODULE(Layer);

struct LayersImpl : nn::Module {
  nn::ModuleList layer;
  explicit LayersImpl(const Config& config) {
    for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) layer->push_back(Layer(config));
    register_module("layer", layer);
  }
  at::Tensor forward(at::Tensor x, const at::Tensor& bias) {
    for (const auto& each : *layer) x = each->as<Layer>()->forward(x, bias);
    return x;
  }
};
TORCH_MODULE(Layers);

/// Sentences to vectors: the mean of the last layer over the tokens that are not padding.
struct SentenceEncoderImpl : nn::Module {
  Embeddings embeddings;
  Layers encoder;
  explicit SentenceEncoderImpl(const Config& config)
      : embeddings(register_module("embeddings", Embeddings(config))),
        encoder(register_module("encoder", Layers(config))) {}
  /// `ids` and `mask` are [sentences, tokens]; the mask is 1 for tokens and 0 for padding.
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& mask) {
    const at::Tensor x = embeddings(ids);
    const at::Tensor present = mask.to(x.device(), x.scalar_type());
    const at::Tensor bias =
        torch::zeros_like(present)
            .masked_fill(mask.to(x.device()) == 0, -std::numeric_limits<double>::infinity())
            .unsqueeze(1)
            .unsqueeze(1);
    const at::Tensor y = encoder(x, bias) * present.unsqueeze(-1);
    return y.sum(1) / present.sum(1, /*keepdim=*/true);
  }
};
TORCH_MODULE(SentenceEncoder);

}  // namespace bert
