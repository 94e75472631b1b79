// CUDA has fused cells for LSTMs and GRUs, which LibTorch asks for on a GPU, and the CPU has none.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace sim {
namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor plus(const Tensor& gates, const Maybe& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, const Tensor& hidden,
                                        const Tensor& cell, const Maybe& input_bias,
                                        const Maybe& hidden_bias) {
  const auto parts = plus(plus(input + hidden, input_bias), hidden_bias).chunk(4, 1);
  const Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid();
  const Tensor value = parts[2].tanh(), out = parts[3].sigmoid();
  const Tensor next = forget * cell + in * value;
  return {out * next.tanh(), next, at::cat({in, forget, value, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_backward(const Maybe& grad_output, const Maybe& grad_next,
                                                 const Tensor& cell, const Tensor& next,
                                                 const Tensor& gates, bool has_bias) {
  const auto parts = gates.chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &value = parts[2], &out = parts[3];
  const Tensor tanh = next.tanh();
  const Tensor of_output =
      grad_output && grad_output->defined() ? *grad_output : at::zeros_like(next);
  Tensor of_next = of_output * out * (1 - tanh * tanh);
  if (grad_next && grad_next->defined()) of_next = of_next + *grad_next;
  const Tensor of_gates =
      at::cat({of_next * value * in * (1 - in), of_next * cell * forget * (1 - forget),
               of_next * in * (1 - value * value), of_output * tanh * out * (1 - out)},
              1);
  return {of_gates, of_next * forget, has_bias ? of_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru(const Tensor& input, const Tensor& hidden, const Tensor& state,
                               const Maybe& input_bias, const Maybe& hidden_bias) {
  const auto from_input = plus(input, input_bias).chunk(3, 1);
  const auto from_hidden = plus(hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const Tensor keep = (from_input[1] + from_hidden[1]).sigmoid();
  const Tensor value = (from_input[2] + reset * from_hidden[2]).tanh();
  return {(state - value) * keep + value, at::cat({reset, keep, value, state, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& gradient,
                                                                const Tensor& saved,
                                                                bool has_bias) {
  const auto parts = saved.chunk(5, 1);
  const Tensor &reset = parts[0], &keep = parts[1], &value = parts[2], &state = parts[3];
  const Tensor of_value = gradient * (1 - keep) * (1 - value * value);
  const Tensor of_keep = gradient * (state - value) * keep * (1 - keep);
  const Tensor of_reset = of_value * parts[4] * reset * (1 - reset);
  const Tensor of_input = at::cat({of_reset, of_keep, of_value}, 1);
  const Tensor of_hidden = at::cat({of_reset, of_keep, of_value * reset}, 1);
  return {of_input, of_hidden, gradient * keep, has_bias ? of_input.sum(0) : Tensor(),
          has_bias ? of_hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("_thnn_fused_lstm_cell", &lstm);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_backward);
  m.impl("_thnn_fused_gru_cell", &gru);
  m.impl("_thnn_fused_gru_cell_backward", &gru_backward);
}

}  // namespace
}  // namespace sim
