#pragma once

#include <accelerate/intercept/operator_policy.hpp>
#include <intercept/policy_marks.hpp>

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <vector>

namespace accelerate::intercept {

/// A policy with the operators that it replaces.
struct PolicyLayer {
  std::shared_ptr<OperatorPolicy> policy;
  std::vector<c10::OperatorHandle> operators;

  const c10::OperatorHandle* find(const c10::OperatorHandle& op) const noexcept;
};

/// A parameter with its policies. Lives as long as one of its attachments.
struct PolicyRecord : std::enable_shared_from_this<PolicyRecord> {
  using Layer = std::shared_ptr<const PolicyLayer>;

  explicit PolicyRecord(at::Tensor of) : parameter(std::move(of)) {}
  ~PolicyRecord();
  PolicyRecord(const PolicyRecord&) = delete;
  PolicyRecord& operator=(const PolicyRecord&) = delete;

  /// The policy that replaces `op` now, on this thread; null for none.
  const Layer* layer_for(const c10::OperatorHandle& op) const;
  /// Runs it: takes the operator's arguments from the stack and leaves the result.
  void run(Layer layer, const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) const;
  /// Tells the storage in which `tensor` lies, the parameter or what it will be pointed at, where
  /// the parameter is in it, and gives `tensor` the tag.
  void mark(const at::Tensor& tensor);
  bool is_marked() const noexcept { return marks_ != nullptr; }

  at::Tensor parameter;
  std::vector<Layer> layers;  // the last attached is the last
  /// The parameter has the tag for another reason too; see `guard`.
  bool guarded = false;

 private:
  friend class PolicyMarks;
  void unmark() noexcept;
  PolicyMarks* marks_ = nullptr;             // where it is marked
  std::shared_ptr<MarkedStorage> ordinary_;  // when that is ordinary memory
};

/// Has the parameter's policies follow it to where it lies now, after its data was replaced.
void follow_with_policies(const at::Tensor& parameter);

/// Whether `tensor` has the tag for another reason than a policy: its memory comes and goes, or it
/// is guarded.
bool is_claimed(const at::TensorBase& tensor);

/// Lets a policy replace the operator, if one does: true, with the result on the stack.
bool replace_operator(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack);

}  // namespace accelerate::intercept
