#pragma once

#include <torch/torch.h>

namespace trainer {

constexpr int64_t kContext = 128;
constexpr int64_t kHeadSize = 16;

/// Pre-norm decoder block: causal self-attention, then a feed-forward network, each added to its
/// input.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t width, double dropout)
      : heads(width / kHeadSize),
        attention_norm(register_module("attention_norm",
                                       torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", torch::nn::Linear(width, 3 * width))),
        mix(register_module("mix", torch::nn::Linear(width, width))),
        feed_norm(register_module("feed_norm",
                                  torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))),
        drop(register_module("drop", torch::nn::Dropout(dropout))) {}

  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts =
        qkv(attention_norm(x)).view({batch, length, 3, heads, kHeadSize}).permute({2, 0, 3, 1, 4});
    const auto attended =
        torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                            /*dropout_p=*/0.0, /*is_causal=*/true);
    x = x + drop(mix(attended.transpose(1, 2).reshape({batch, length, width})));
    return x + drop(down(torch::gelu(up(feed_norm(x)))));
  }

  int64_t heads;
  torch::nn::LayerNorm attention_norm;
  torch::nn::Linear qkv, mix;
  torch::nn::LayerNorm feed_norm;
  torch::nn::Linear up, down;
  torch::nn::Dropout drop;
};
TORCH_MODULE(Block);

struct DecoderImpl : torch::nn::Module {
  DecoderImpl(int64_t vocabulary, int64_t layers, int64_t width, double dropout)
      : tokens(register_module("tokens", torch::nn::Embedding(vocabulary, width))),
        positions(register_module("positions", torch::nn::Embedding(kContext, width))),
        blocks(register_module("blocks", torch::nn::ModuleList())),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        head(register_module(
            "head", torch::nn::Linear(torch::nn::LinearOptions(width, vocabulary).bias(false)))) {
    for (int64_t i = 0; i < layers; ++i) blocks->push_back(Block(width, dropout));
  }

  torch::Tensor forward(torch::Tensor ids) {
    auto x = tokens(ids) + positions(torch::arange(ids.size(1), ids.options()));
    for (auto& block : *blocks) x = block->as<Block>()->forward(x);
    return head(norm(x));
  }

  torch::nn::Embedding tokens, positions;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm;
  torch::nn::Linear head;
};
TORCH_MODULE(Decoder);

}  // namespace trainer
