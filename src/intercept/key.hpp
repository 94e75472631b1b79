#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <vector>

namespace c10 {
class OperatorHandle;
struct OperatorName;
struct IValue;
}  // namespace c10

/// What Python does by hooking and replacing modules, done at the dispatcher: one dispatch key of
/// its own, above autograd and autocast, which LibTorch names and leaves free. It has three
/// entrances. Every operator that touches a *tagged* tensor or a view of one comes here, forward
/// and backward, to have its memory brought; where the tensor carries an `OperatorPolicy`, that may
/// replace what a forward calls; and every operator that a thread calls inside a `Region` comes
/// too. Nothing is asked of the user's modules.
namespace accelerate::intercept {

/// The dispatch key. A constant, so that a program in which another library uses the same one can
/// be given another by changing this line.
inline constexpr c10::DispatchKey kTag = c10::DispatchKey::DeferredInit;

/// True for a tagged tensor and for every view of one.
inline bool is_tagged(const at::TensorBase& tensor) {
  return tensor.defined() && tensor.key_set().has(kTag);
}

/// Registers the interceptor with LibTorch's dispatcher; later calls do nothing. Called by whatever
/// tags a tensor or opens a region, so that a program that does neither has nothing registered.
/// Throws UnsupportedError when another library already uses the key.
void install();

/// Whether the operator only makes a view, or takes no more of a tensor than its shape.
bool needs_no_memory(const c10::OperatorName& name);

/// What a region does with the operators called inside it.
class RegionPolicy {
 public:
  virtual ~RegionPolicy() = default;
  /// Runs `op` on the arguments on `stack`, leaving its results there, for example by
  /// `op.redispatchBoxed(below, &stack)`. Operators called from here are not intercepted.
  virtual void call(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                    std::vector<c10::IValue>& stack) = 0;
};

/// While one lives, the operators that this thread calls go to `policy`. Regions nest: the
/// innermost policy is asked. Operators that only make a view or ask for a shape are not shown to
/// it.
class Region {
 public:
  explicit Region(RegionPolicy& policy);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  RegionPolicy* outer_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

/// While one lives, this thread's operators pass the interceptor by: for the library's own work on
/// tagged memory.
class Below {
 public:
  Below() : exclude_(kTag) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard exclude_;
};

}  // namespace accelerate::intercept
