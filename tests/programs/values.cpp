#include <programs/values.hpp>

#include <accelerate/base/text.hpp>

#include <torch/optim.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

namespace programs {
namespace {

using accelerate::text::concat;
using accelerate::text::join;

// In memory order, as shards are cut.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor.as_strided({tensor.numel()}, {1})
                                               : tensor.reshape({-1});
}

using Tensors = std::vector<std::pair<std::string, at::Tensor>>;

Tensors tensors_of(const torch::optim::OptimizerParamState& state) {
  namespace optim = torch::optim;
  const auto number = [](double value) { return at::scalar_tensor(value, at::kDouble); };
  if (const auto* adam = dynamic_cast<const optim::AdamParamState*>(&state))
    return {{"step", number(static_cast<double>(adam->step()))},
            {"exp_avg", adam->exp_avg()},
            {"exp_avg_sq", adam->exp_avg_sq()},
            {"max_exp_avg_sq", adam->max_exp_avg_sq()}};
  if (const auto* adam = dynamic_cast<const optim::AdamWParamState*>(&state))
    return {{"step", number(static_cast<double>(adam->step()))},
            {"exp_avg", adam->exp_avg()},
            {"exp_avg_sq", adam->exp_avg_sq()},
            {"max_exp_avg_sq", adam->max_exp_avg_sq()}};
  if (const auto* sgd = dynamic_cast<const optim::SGDParamState*>(&state))
    return {{"momentum_buffer", sgd->momentum_buffer()}};
  if (const auto* adagrad = dynamic_cast<const optim::AdagradParamState*>(&state))
    return {{"step", number(static_cast<double>(adagrad->step()))}, {"sum", adagrad->sum()}};
  if (const auto* rmsprop = dynamic_cast<const optim::RMSpropParamState*>(&state))
    return {{"step", number(static_cast<double>(rmsprop->step()))},
            {"square_avg", rmsprop->square_avg()},
            {"momentum_buffer", rmsprop->momentum_buffer()},
            {"grad_avg", rmsprop->grad_avg()}};
  return {};
}

std::string difference(const std::string& name, const at::Tensor& one, const at::Tensor& other,
                       double tolerance) {
  if (one.sizes() != other.sizes()) {
    return concat(name, " has the shape [", join(one.sizes()), "], and should have [",
                  join(other.sizes()), "]");
  }
  const at::Tensor a = one.is_complex() ? at::view_as_real(one) : one;
  const at::Tensor b = other.is_complex() ? at::view_as_real(other) : other;
  const at::Tensor x = a.to(at::kDouble).flatten(), y = b.to(at::kDouble).flatten();
  if (at::allclose(x, y, tolerance, tolerance, /*equal_nan=*/true)) return {};
  const at::Tensor far = (x - y).abs().nan_to_num(INFINITY, INFINITY);
  const auto at = far.argmax().item<std::int64_t>();
  return concat(name, "[", at, "] of ", far.numel(), " is ", x[at].item<double>(),
                ", and should be ", y[at].item<double>());
}

}  // namespace

void Values::note(std::string name, const at::Tensor& value) {
  torch::NoGradGuard no_grad;
  all_.push_back({std::move(name), value.detach().clone(), -1});
}

void Values::note(std::string name, double value) {
  note(std::move(name), at::scalar_tensor(value, at::kDouble));
}

void Values::note_part(std::string name, const at::Tensor& part, std::int64_t offset) {
  torch::NoGradGuard no_grad;
  all_.push_back({std::move(name), flat(part.detach()).clone(), offset});
}

void Values::note_state(const std::string& name, torch::optim::Optimizer& optimizer,
                        const at::Tensor& parameter, std::int64_t offset) {
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return;
  for (const auto& [part, tensor] : tensors_of(*found->second)) {
    if (!tensor.defined()) continue;
    if (tensor.sizes() == parameter.sizes() && parameter.dim() > 0)
      note_part(name + "." + part, tensor, offset);
    else
      note(name + "." + part, tensor);
  }
}

std::vector<std::string> Values::differences(const Values& right, double tolerance) const {
  constexpr std::size_t kEnough = 6;
  torch::NoGradGuard no_grad;
  std::vector<std::string> found;
  std::map<std::string, const Value*> expected;
  for (const Value& value : right.all_) {
    if (!expected.emplace(value.name, &value).second)
      found.push_back(concat("the right run noted ", value.name, " twice"));
  }
  std::set<std::string> met;
  for (const Value& value : all_) {
    if (found.size() == kEnough) return found;
    const auto other = expected.find(value.name);
    if (other == expected.end()) {
      found.push_back(concat(value.name, " is there, and should not be"));
      continue;
    }
    met.insert(value.name);
    at::Tensor want = other->second->tensor;
    if (value.offset >= 0) {
      want = flat(want);
      if (value.offset + value.tensor.numel() > want.numel()) {
        found.push_back(concat(value.name, " goes beyond the whole: ", value.offset, " + ",
                               value.tensor.numel(), " of ", want.numel()));
        continue;
      }
      want = want.narrow(0, value.offset, value.tensor.numel());
    } else if (other->second->offset >= 0) {
      want = want.reshape(value.tensor.sizes());
    }
    if (auto text = difference(value.name, value.tensor, want, tolerance); !text.empty())
      found.push_back(std::move(text));
  }
  for (const auto& [name, value] : expected) {
    if (found.size() == kEnough) return found;
    const bool absent =
        std::any_of(absent_.begin(), absent_.end(),
                    [&name = name](const auto& prefix) { return name.starts_with(prefix); });
    if (!absent && !met.contains(name)) found.push_back(concat(name, " is missing"));
  }
  return found;
}

}  // namespace programs
