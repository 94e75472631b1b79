#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace accelerate::parallel {

/// What becomes of the tensors that operators save for backward. LibTorch has hooks for that and
/// gives them to Python only; `SavedTensorScope` gives them to C++.
class SavedTensorPolicy {
 public:
  virtual ~SavedTensorPolicy() = default;
  /// Called for each tensor that an operator saves. The hooks are given the tensor once and asked
  /// for it once for each backward. Null: the tensor is saved as always.
  ///
  /// Hooks must not keep the very tensor they are given unless it is a leaf: the result of an
  /// operator, kept so, would keep itself alive for ever.
  virtual std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() = 0;
};

/// While one lives, what this thread's operators save goes to `policy`. Scopes nest: the innermost
/// policy is asked, and nobody else.
///
/// The first scope of a process puts an engine before autograd's that hands every call on to the
/// one that was there, Python's included, and answers only the question which hooks are in force.
class [[nodiscard]] SavedTensorScope {
 public:
  /// Throws UnsupportedError when somebody has replaced that engine since.
  explicit SavedTensorScope(SavedTensorPolicy& policy);
  ~SavedTensorScope();
  SavedTensorScope(const SavedTensorScope&) = delete;
  SavedTensorScope& operator=(const SavedTensorScope&) = delete;

 private:
  SavedTensorPolicy* outer_;
};

}  // namespace accelerate::parallel
