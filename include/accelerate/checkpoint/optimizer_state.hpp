#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/checkpoint/py_value.hpp>
#include <accelerate/checkpoint/sharded.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/parallel/strategy.hpp>

#include <memory>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

/// Any torch::optim::Optimizer's state, by the names of its parameters: what it keeps for each
/// parameter and is shaped like it is cut like it, so that another number of processes can take it
/// up.
namespace accelerate::checkpoints {

/// A module whose parameters an optimizer may have, and what stands before its parameters' names.
struct NamedModule {
  std::string prefix;
  std::shared_ptr<parallel::Strategy> strategy;
};

struct OptimizerState {
  /// {"type", "param_groups": [{"options", "params": [names]}], "state": {name: {key: ...}},
  /// "without_state": [names]}.
  Json description;
  TensorGroup tensors;
};

/// Collective over `group`. The tensors share memory with the optimizer. Throws UnsupportedError on
/// every process when a state is neither like its parameter, nor a number, nor of a parameter that
/// is whole; and when the optimizer cannot be saved at all.
OptimizerState optimizer_state(torch::optim::Optimizer& optimizer,
                               const std::vector<NamedModule>& modules, const comm::Group& group,
                               std::string name);

/// What keeps the state that `description` tells of from going into this optimizer: another type,
/// other parameter groups or other parameters, as the end of a sentence. Empty when nothing does.
std::string optimizer_difference(torch::optim::Optimizer& optimizer,
                                 const std::vector<NamedModule>& modules, const Json& description);

/// A state on its way into an optimizer.
class IncomingOptimizerState {
 public:
  /// Makes place for the state that `description` tells of, and has `load` read it there. Throws
  /// CheckpointError when it is that of another optimizer or of other parameters. Changes nothing.
  IncomingOptimizerState(torch::optim::Optimizer& optimizer,
                         const std::vector<NamedModule>& modules, const Json& description,
                         const std::string& name, Load& load);
  /// The state of Python's optimizer of the same kind, as its `state_dict()` gives it; parameters
  /// are matched by their place in the groups. Throws CheckpointError, naming `path`, when it does
  /// not fit.
  IncomingOptimizerState(torch::optim::Optimizer& optimizer,
                         const std::vector<NamedModule>& modules, const PyValue& state_dict,
                         const std::string& path);
  ~IncomingOptimizerState();
  IncomingOptimizerState(IncomingOptimizerState&&) noexcept;
  /// Gives it to the optimizer in place of what it had; what `load` has not read yet it reads where
  /// it is now. Throws CheckpointError when the optimizer does not take it, and changes nothing
  /// then.
  void apply();
  /// Gives the optimizer back what it had before `apply`.
  void undo() noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::checkpoints
