#pragma once

#include <accelerate/checkpoint/optimizer_state.hpp>

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

// What saving and loading optimizers, for ourselves and from Python, have in common.
namespace accelerate::checkpoints {

// A parameter as an optimizer of this process has it.
struct Slot {
  std::string name;
  LocalTensor shard;  ///< the parameter

  bool is_whole() const { return shard.placement.is_whole(); }
  /// This process has none of it, and another has.
  bool is_elsewhere() const { return shard.placement.count() == 0 && !is_whole(); }
  /// What it has of a state that is shaped like the parameter and cut like it.
  LocalTensor like(std::string as, const at::Tensor& state) const {
    return {std::move(as), shard.placement, state};
  }
};

std::string type_of(const torch::optim::Optimizer& optimizer);

// The slots of an optimizer's groups, in their order. Parameters of no prepared module are called
// by their place, and are whole.
std::vector<std::vector<Slot>> slots_of(torch::optim::Optimizer& optimizer,
                                        const std::vector<NamedModule>& modules);

// What an archive holds beside tensors, as JSON and back. Nothing for other types.
std::optional<Json> to_json(const c10::IValue& value);
c10::IValue from_json(const Json& json);

// What an optimizer's `save` gives. Throws UnsupportedError when it has none.
torch::jit::Module saved_archive(const torch::optim::Optimizer& optimizer);
// The options of a parameter group of such an archive.
Json options_of(const torch::jit::Module& group, const std::string& type);

// How a tensor of the state lies beside its parameter.
inline constexpr const char* kLike = "like";    // shaped like it and cut like it
inline constexpr const char* kWhole = "whole";  // of its own shape, the same on every process
inline constexpr const char* kPart = "part";    // of its own shape, of one part of the parameter
inline constexpr const char* kList = "list";    // several of the second kind
inline constexpr const char* kValue = "value";  // no tensor

// Calls `refuse` where what the optimizer keeps for a parameter is not what it can compute with.
void check_entries(const torch::optim::Optimizer& optimizer, const Slot& slot,
                   const std::map<std::string, c10::IValue>& state,
                   const std::function<void(const std::string&)>& refuse);

// As Python's Optimizer.state_dict() gives it.
PyValue python_state(const Json& description, const std::vector<NamedTensor>& whole);

struct IncomingOptimizerState::Impl {
  torch::optim::Optimizer& optimizer;
  /// By group and parameter; null where there is no state.
  std::vector<std::vector<std::optional<std::map<std::string, c10::IValue>>>> states;
  std::vector<std::map<std::string, c10::IValue>> options;
  /// What the optimizer had.
  std::optional<torch::jit::Module> before = std::nullopt;
};

}  // namespace accelerate::checkpoints
