#pragma once

#include <accelerate/big_model/record_of.hpp>

#include <c10/core/Device.h>

#include <memory>
#include <utility>

namespace accelerate {

/// While one lives, tensors that this thread makes without naming a device are made on `device`.
/// With the meta device they have shapes and no memory, so a module of any size can be constructed;
/// initialising them does nothing.
///
/// Tensors whose device the program names keep it, also torch::tensor({1, 2}), which LibTorch fills
/// on the CPU. To name the meta device, by the options of another tensor for example, is to name
/// none.
///
/// On the meta device, operators that need values, such as item(), or have no kernel for tensors
/// without memory, run on the CPU: what their arguments come from is repeated for them, and given
/// back. Throws UnsupportedError where those were not made inside the scope. Tensors with memory
/// that are computed with are copied, and the copies kept until the scope ends. A pointer to the
/// data of a tensor without memory is refused.
class InitOnDevice {
 public:
  /// `include_buffers`: buffers stay on `device` too. Otherwise `finish` makes them what they would
  /// have been without the scope.
  explicit InitOnDevice(at::Device device, bool include_buffers = true);
  ~InitOnDevice();
  InitOnDevice(const InitOnDevice&) = delete;
  InitOnDevice& operator=(const InitOnDevice&) = delete;

  /// Ends the scope. Unless buffers are included, the module's are computed now, on the device they
  /// would have been on, by repeating the operators of which they are the result. On the meta
  /// device so are the tensors made inside that the program still has and that are neither
  /// parameters of the module, nor views of one, nor leaves that require a gradient: members that
  /// are not registered. What is random in them is drawn now, from where the generator stood when
  /// it was asked for; parameters draw nothing. Throws StateError when the scope has ended already,
  /// UnsupportedError when a buffer's values cannot be known.
  void finish(const ModuleRecord& module);

  /// To be called where an exception is caught that was thrown inside the scope: throws a clearer
  /// one in its place, in which it is nested, where there is one; else returns.
  void explain_failure() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Calls `make`, which constructs and returns a module, with its parameters on `device`:
/// `auto net = init_on_device(torch::kCUDA, [] { return Net(); });`
template <class Make>
auto init_on_device(at::Device device, Make&& make, bool include_buffers = true) {
  InitOnDevice scope(device, include_buffers);
  auto module = [&] {
    try {
      return std::forward<Make>(make)();
    } catch (...) {
      scope.explain_failure();
      throw;
    }
  }();
  scope.finish(big_model::record_of(module));
  return module;
}

/// Calls `make`, which constructs and returns a module, with parameters that have shapes and no
/// memory (the meta device), to be loaded by `load_checkpoint_and_dispatch`. Buffers, and members
/// that are not registered, are real unless buffers are included. A TorchScript module without
/// constants in its graph is loaded so by torch::jit::load(path, torch::kMeta).
template <class Make>
auto init_empty_weights(Make&& make, bool include_buffers = false) {
  return init_on_device(at::Device(at::kMeta), std::forward<Make>(make), include_buffers);
}

}  // namespace accelerate
