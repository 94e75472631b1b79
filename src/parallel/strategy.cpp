#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/parallel/strategy.hpp>
#include <parallel/state_names.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <utility>

namespace accelerate::parallel {
namespace {

using Kind = std::pair<at::Device, at::ScalarType>;
struct KindLess {
  bool operator()(const Kind& a, const Kind& b) const {
    return std::tuple(a.first.type(), a.first.index(), a.second) <
           std::tuple(b.first.type(), b.first.index(), b.second);
  }
};

// ATen's foreach kernels want lists of one device and dtype.
std::map<Kind, std::vector<at::Tensor>, KindLess> gradients_by_kind(const ModuleRecord& module) {
  std::map<Kind, std::vector<at::Tensor>, KindLess> groups;
  for (const auto& [name, parameter] : module.parameters()) {
    const at::Tensor& gradient = parameter.grad();
    if (gradient.defined()) groups[{gradient.device(), gradient.scalar_type()}].push_back(gradient);
  }
  return groups;
}

}  // namespace

void Strategy::follow_module() {
  if (!module_.is_current()) module_.refresh();
}

void Strategy::before_forward(const ForwardContext& context) {
  if (context.grad_enabled) follow_module();
  forwarded_ |= context.grad_enabled;
}

at::Tensor Strategy::optimizer_leaf(const at::Tensor& parameter) const {
  for (const auto& [name, own] : module_.parameters()) {
    if (own.is_same(parameter)) return own;
  }
  return {};
}

void Strategy::check_gradients(const std::vector<at::Tensor>& leaves) {
  for (const at::Tensor& leaf : leaves) {
    if (leaf.grad().defined()) return require_forward();
  }
}

void Strategy::require_forward() const {
  if (forwarded_) return;
  throw StateError(text::concat(
      "The optimizer was asked to step on gradients of a module that was prepared (strategy \"",
      name(),
      "\") and whose prepared forward was never called: the module itself was called, past mixed "
      "precision and past what the strategy does. Call what prepare() returned."));
}

at::Tensor Strategy::grad_norm(double p) const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> norms;
  at::Device device = at::kCPU;
  for (const auto& [kind, gradients] : gradients_by_kind(module_)) {
    if (norms.empty()) device = kind.first;
    for (const at::Tensor& norm : at::_foreach_norm(gradients, p)) norms.push_back(norm.to(device));
  }
  if (norms.empty()) return at::zeros({});
  return at::linalg_vector_norm(at::stack(norms), p);
}

void Strategy::scale_gradients_(const at::Tensor& factor) {
  const at::NoGradGuard no_grad;
  for (auto& [kind, gradients] : gradients_by_kind(module_))
    at::_foreach_mul_(gradients, factor.to(kind.first));
}

void Strategy::clip_grad_value_(double limit) {
  const at::NoGradGuard no_grad;
  for (auto& [kind, gradients] : gradients_by_kind(module_)) {
    at::_foreach_clamp_min_(gradients, -limit);
    at::_foreach_clamp_max_(gradients, limit);
  }
}

std::vector<LocalTensor> Strategy::shards() const {
  std::vector<LocalTensor> all;
  for (const auto& [name, parameter] : module_.parameters())
    all.push_back(whole_tensor(name, parameter));
  return all;
}

std::vector<NamedTensor> Strategy::state_dict(const StateDictOptions& options) const {
  if (options.type() == StateDictType::full && options.rank0_only() && rank() != 0) return {};
  const at::NoGradGuard no_grad;
  std::vector<NamedTensor> state;
  for (const auto* tensors : {&module_.parameters(), &module_.buffers()}) {
    for (const auto& [name, tensor] : all_names(module_, *tensors)) {
      state.push_back({name, options.offload_to_cpu()
                                 ? tensor.detach().to(at::kCPU, /*non_blocking=*/false,
                                                      /*copy=*/true)
                                 : tensor.detach()});
    }
  }
  return state;
}

void Strategy::load_state_dict(const std::vector<NamedTensor>& state, const StateDictOptions&,
                               bool strict) {
  StateMatch(state, all_names(module_, module_.parameters()), all_names(module_, module_.buffers()),
             strict)
      .copy_rest();
}

std::shared_ptr<void> Strategy::summon_full_params(bool) { return nullptr; }

at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  return at::clamp(max_norm / (norm + 1e-6), /*min=*/std::nullopt, /*max=*/1.0);
}

}  // namespace accelerate::parallel
