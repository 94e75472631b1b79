#include <accelerate/parallel/strategy.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
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

at::Tensor Strategy::optimizer_leaf(const at::Tensor& parameter) const {
  for (const auto& [name, own] : module_.parameters()) {
    if (own.is_same(parameter)) return own;
  }
  return {};
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

}  // namespace accelerate::parallel
