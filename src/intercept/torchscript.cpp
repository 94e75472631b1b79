#include <accelerate/intercept/operator_policy.hpp>
#include <intercept/torchscript.hpp>

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>

#include <array>
#include <optional>

namespace accelerate::intercept {
namespace {

using torch::jit::GraphExecutor;
using torch::jit::GraphFunction;

// What a method has compiled of itself, which it would go on running. It has no way to drop that;
// an explicit instantiation may name a private member, and that is how it is reached.
using Executors = std::array<std::optional<GraphExecutor>, 4>;
Executors& executors_of(GraphFunction& function);
template <auto Member>
struct Reach {
  friend Executors& executors_of(GraphFunction& function) { return function.*Member; }
};
template struct Reach<&GraphFunction::executors_>;

}  // namespace

void switch_off_fusers() {
  torch::jit::setTensorExprFuserEnabled(false);
  torch::jit::overrideCanFuseOnCPU(false);
  torch::jit::overrideCanFuseOnGPU(false);
}

void run_without_optimization(const torch::jit::Module& module) {
  for (const torch::jit::Module& each : module.modules()) {
    for (const torch::jit::Method& method : each.get_methods()) {
      GraphFunction* function = torch::jit::tryToGraphFunction(method.function());
      if (function == nullptr) continue;
      function->_set_initial_executor_execution_mode(torch::jit::ExecutorExecutionMode::SIMPLE);
      executors_of(*function).fill(std::nullopt);
    }
  }
}

}  // namespace accelerate::intercept
