#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <parallel/state_names.hpp>

#include <ATen/core/grad_mode.h>

#include <algorithm>

namespace accelerate::parallel {

std::vector<NamedTensor> all_names(const ModuleRecord& module,
                                   const std::vector<NamedTensor>& tensors) {
  std::vector<NamedTensor> all;
  for (const NamedTensor& entry : tensors) {
    all.push_back(entry);
    for (const auto& names : module.tied()) {
      if (std::find(names.begin(), names.end(), entry.name) == names.end()) continue;
      for (const std::string& name : names) {
        if (name != entry.name) all.push_back({name, entry.tensor});
      }
    }
  }
  return all;
}

StateMatch::StateMatch(const std::vector<NamedTensor>& state,
                       const std::vector<NamedTensor>& parameters,
                       const std::vector<NamedTensor>& buffers, bool strict) {
  std::map<std::string, at::Tensor> targets;
  for (const auto* entries : {&parameters, &buffers}) {
    for (const NamedTensor& entry : *entries) targets[entry.name] = entry.tensor;
  }
  std::vector<std::string> unexpected;
  for (const NamedTensor& entry : state) {
    const auto found = targets.find(entry.name);
    if (found == targets.end()) {
      unexpected.push_back(entry.name);
      continue;
    }
    const at::Tensor& target = found->second;
    if (!entry.tensor.defined() || entry.tensor.sizes() != target.sizes()) {
      throw CheckpointError(
          text::concat(
              "The state dict has '", entry.name, "' with shape [",
              entry.tensor.defined() ? text::join(entry.tensor.sizes()) : std::string("undefined"),
              "], and the module's has shape [", text::join(target.sizes()),
              "]. It is the state of another model, or of another number of ranks."),
          /*path=*/"");
    }
    pairs_[target.unsafeGetTensorImpl()] = {target, entry.tensor};
  }
  if (!strict) return;
  std::vector<std::string> missing;
  for (const auto* entries : {&parameters, &buffers}) {
    for (const NamedTensor& entry : *entries) {
      if (!pairs_.contains(entry.tensor.unsafeGetTensorImpl())) missing.push_back(entry.name);
    }
  }
  if (missing.empty() && unexpected.empty()) return;
  const auto list = [](const std::vector<std::string>& names) {
    return names.empty() ? std::string("none") : text::join(names, ", ", 20);
  };
  throw CheckpointError(
      text::concat("The state dict is not that of this module. Missing: ", list(missing),
                   ". Unknown: ", list(unexpected), ". Load the right one, or with strict off."),
      /*path=*/"");
}

at::Tensor StateMatch::take(const at::Tensor& target) {
  const auto node = pairs_.extract(target.unsafeGetTensorImpl());
  return node.empty() ? at::Tensor() : node.mapped().value;
}

void StateMatch::copy_rest() const {
  const at::NoGradGuard no_grad;
  for (const auto& [key, pair] : pairs_) {
    at::Tensor target = pair.target;
    target.copy_(pair.value);
  }
}

}  // namespace accelerate::parallel
