#pragma once

#include <accelerate/parallel/strategy.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace programs {

/// What a run of a program came to, in the order in which it was noted.
class Values {
 public:
  void note(std::string name, const at::Tensor& value);
  void note(std::string name, double value);
  /// A part of a value: `elements` from `offset` on, in memory order.
  void note_part(std::string name, const at::Tensor& part, std::int64_t offset);
  /// The tensors of the optimizer's state for `parameter`, of which `offset` is where it begins in
  /// the whole one. LibTorch's optimizers are known.
  void note_state(const std::string& name, torch::optim::Optimizer& optimizer,
                  const at::Tensor& parameter, std::int64_t offset = 0);

  /// This rank has nothing of what begins with this name.
  void note_absent(std::string prefix) { absent_.push_back(std::move(prefix)); }

  /// What differs by more than `tolerance` (of 1 and of the value) from the run that is right; one
  /// sentence a difference, the first ones only. Empty: nothing.
  std::vector<std::string> differences(const Values& right, double tolerance) const;

 private:
  struct Value {
    std::string name;
    at::Tensor tensor;
    std::int64_t offset = -1;  ///< -1: it is whole
  };
  std::vector<Value> all_;
  std::vector<std::string> absent_;
};

}  // namespace programs
