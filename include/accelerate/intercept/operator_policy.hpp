#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10 {
class OperatorHandle;
struct IValue;
}  // namespace c10
namespace torch::autograd {
struct Node;
}
namespace torch::jit {
struct Module;
}

namespace accelerate::intercept {

struct PolicyRecord;
struct PolicyLayer;

/// One call of an operator that a parameter, or a view of it, enters.
class OperatorCall {
 public:
  /// The operator's name without its overload, such as "aten::addmm".
  const std::string& name() const noexcept;
  /// The whole parameter that carries the policy. An operator that the policy calls with it, or
  /// with a view of it, goes to the policy that was attached before this one, or to LibTorch.
  const at::Tensor& parameter() const noexcept;
  /// The operator's arguments in the order of its schema. What is changed here is what `proceed`
  /// calls with.
  std::vector<c10::IValue>& arguments() noexcept { return arguments_; }
  const std::vector<c10::IValue>& arguments() const noexcept { return arguments_; }
  /// The places in `arguments` where the parameter or a view of it stands, alone or in a list.
  const std::vector<std::size_t>& positions() const noexcept { return positions_; }
  /// Calls the operator with `arguments`, for the policy that was attached before this one, or for
  /// LibTorch. May be called any number of times, and on a copy of the call later, as where
  /// activations are computed again.
  at::Tensor proceed() const;
  /// What the argument at `position` is of the parameter (all of it, its transpose, a slice, ...),
  /// taken of `other`, which has the parameter's shape. Gradients flow through it.
  /// Throws ConfigError when that cannot be: another shape, no tensor, a view of another dtype.
  at::Tensor same_view(const at::Tensor& other, std::size_t position) const;

 private:
  friend struct PolicyRecord;
  OperatorCall(const c10::OperatorHandle& op, std::shared_ptr<const PolicyRecord> record,
               std::shared_ptr<const PolicyLayer> layer, std::vector<c10::IValue> arguments,
               std::vector<std::size_t> positions);
  const c10::OperatorHandle* op_;  // lies in the layer
  std::shared_ptr<const PolicyRecord> record_;
  std::shared_ptr<const PolicyLayer> layer_;
  std::vector<c10::IValue> arguments_;
  std::vector<std::size_t> positions_;
};

/// What a parameter does in the operators that it enters, in place of what LibTorch does: computes
/// in another precision, say, or adds to the result. The module is not changed and does not know.
///
/// A policy stands above autograd and autocast. Gradients are those of the operators that it calls,
/// and these are autocast as the replaced operator would have been. It replaces what forwards call,
/// not the operators by which backward computes gradients. It sees neither views and shape queries
/// nor operators that write to the parameter, so that optimizers and `copy_` pass it by.
///
/// Its memory is brought as for any operator: where a parameter is sharded or offloaded, it comes
/// when an operator that the policy calls uses it. What such an operator saves for backward, a cast
/// copy for example, stays in memory until then, as everywhere.
class OperatorPolicy {
 public:
  virtual ~OperatorPolicy() = default;
  /// The operators that it replaces, such as "aten::embedding" (with all its overloads) or
  /// "aten::add.Tensor". Asked once, by `attach`.
  virtual std::vector<std::string> operators() const = 0;
  /// Computes the operator's result. Several threads may call at the same time.
  virtual at::Tensor apply(OperatorCall& call) = 0;
};

/// The operators as which a linear layer arrives: TorchScript calls `linear`; a C++ module calls
/// `addmm` for a matrix and a bias, and else `matmul` with the bias added in place afterwards.
std::vector<std::string> linear_operators();

/// A call of one of these, as a linear layer.
struct LinearCall {
  at::Tensor input;
  /// Outputs × inputs: the parameter or a view of it.
  at::Tensor weight;
  /// Undefined where the operator adds none. (After `matmul` the module may add one itself.)
  at::Tensor bias;
  /// `weight` is the whole parameter as it is stored, neither transposed nor a slice.
  bool whole = false;
};
/// Nothing when the call is something else: the parameter is no matrix, stands on the left, enters
/// twice, or `addmm` scales.
std::optional<LinearCall> as_linear(const OperatorCall& call);

/// Takes a policy from its parameter at the end of its life.
class [[nodiscard]] PolicyAttachment {
 public:
  PolicyAttachment() = default;
  PolicyAttachment(PolicyAttachment&&) noexcept = default;
  PolicyAttachment& operator=(PolicyAttachment&& other) noexcept;
  ~PolicyAttachment() { detach(); }

  /// Takes the policy away; no thread may be using the parameter.
  void detach() noexcept;

 private:
  friend PolicyAttachment attach(const at::Tensor& parameter,
                                 std::shared_ptr<OperatorPolicy> policy);
  std::shared_ptr<PolicyRecord> record_;
  std::shared_ptr<const PolicyLayer> layer_;
};

/// Has `policy` replace its operators where this parameter enters them, from now on, also when the
/// module is sharded, offloaded, moved or given other values later. The parameter is a dense leaf
/// with elements. Of several policies the last attached is asked first, and what it calls goes to
/// the one before. Where several parameters with policies enter one operator, the first argument's
/// is asked first.
///
/// Call it before the parameter is used: views and graphs made before do not know of the policy. Of
/// a TorchScript module, call `run_without_optimization` too.
/// Throws ConfigError for a parameter that cannot have one, for a name that is no operator, and for
/// an operator that makes a view, writes, or does not give exactly one tensor.
PolicyAttachment attach(const at::Tensor& parameter, std::shared_ptr<OperatorPolicy> policy);

/// While one lives, no policy is asked on this thread. For what is not a forward: an optimizer's
/// step (a prepared optimizer's opens one), or the backward of a torch::autograd::Function that a
/// policy uses, when gradients of gradients go through it.
class WithoutPolicies {
 public:
  WithoutPolicies();
  ~WithoutPolicies();
  WithoutPolicies(const WithoutPolicies&) = delete;
  WithoutPolicies& operator=(const WithoutPolicies&) = delete;
};

/// While one lives, what this thread calls is a forward, although a backward pass is running or
/// `WithoutPolicies` lives around it: for code that computes activations again in a hook. Prepared
/// forwards and `checkpoint` open one.
class ForwardScope {
 public:
  ForwardScope();
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

 private:
  const torch::autograd::Node* outer_;
  int without_policies_;
};

/// Has TorchScript run the methods of this module as they are written, one operator after the
/// other. Otherwise, from its second or third run on, it computes gradients by formulas of its own,
/// which know nothing of policies; a policy that is met there throws UnsupportedError. Modules of
/// the same TorchScript class follow. Nobody may be running the module.
void run_without_optimization(const torch::jit::Module& module);

}  // namespace accelerate::intercept
