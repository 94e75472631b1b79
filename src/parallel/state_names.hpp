#pragma once

#include <accelerate/core/module.hpp>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace accelerate::parallel {

// `tensors` of the module, each under all of its names: a tied one comes several times.
std::vector<NamedTensor> all_names(const ModuleRecord& module,
                                   const std::vector<NamedTensor>& tensors);

// The values of a state dict, each matched by name with the tensor it is for.
class StateMatch {
 public:
  // Throws CheckpointError for a wrong shape, and with `strict` for names that are missing or
  // unknown. A tied tensor needs only one of its names.
  StateMatch(const std::vector<NamedTensor>& state, const std::vector<NamedTensor>& parameters,
             const std::vector<NamedTensor>& buffers, bool strict);
  // The value for `target`, which the caller takes care of; undefined when there is none.
  at::Tensor take(const at::Tensor& target);
  // Copies all values that were not taken into their targets.
  void copy_rest() const;

 private:
  struct Pair {
    at::Tensor target, value;
  };
  std::map<const void*, Pair> pairs_;
};

}  // namespace accelerate::parallel
