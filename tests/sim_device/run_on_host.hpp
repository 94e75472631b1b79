#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

/// Runs an operator of the device, whose arguments are on the stack: the CPU's kernel does it, at
/// once, and the checker notes what the current stream read and wrote.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
