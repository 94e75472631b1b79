#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}
namespace torch::jit {
struct Module;
}

namespace accelerate {

/// A tensor and its dotted name inside a module ("blocks.0.attention.weight").
struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// One module of a module tree: its own parameters and buffers, and its children.
struct ModuleNode {
  /// Dotted path from the root; empty for the root itself.
  std::string name;
  /// The C++ class, or TorchScript's qualified name ("torch::nn::LinearImpl",
  /// "__torch__.net.Block").
  std::string type;
  /// True for ModuleList, Sequential and ModuleDict, whose children are a model's repeated blocks.
  bool is_container = false;
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
  std::vector<ModuleNode> children;
};

/// What the library knows of a user's module, LibTorch's or TorchScript's alike: the tree, every
/// parameter and buffer once, and how to switch it between training and evaluation. The tensors are
/// handles of the module's own.
class ModuleRecord {
 public:
  explicit ModuleRecord(std::shared_ptr<torch::nn::Module> module);
  explicit ModuleRecord(torch::jit::Module module);

  const ModuleNode& root() const& noexcept { return root_; }
  /// Each parameter once, under the first of its names, in registration order.
  const std::vector<NamedTensor>& parameters() const& noexcept { return parameters_; }
  /// Each buffer once, likewise.
  const std::vector<NamedTensor>& buffers() const& noexcept { return buffers_; }
  /// Names of one and the same parameter or buffer, for each that has more than one.
  const std::vector<std::vector<std::string>>& tied() const& noexcept { return tied_; }
  /// Of a record that is about to go, the lists themselves:
  /// `for (const auto& entry : ModuleRecord(net.ptr()).parameters())`.
  ModuleNode root() && { return std::move(root_); }
  std::vector<NamedTensor> parameters() && { return std::move(parameters_); }
  std::vector<NamedTensor> buffers() && { return std::move(buffers_); }
  std::vector<std::vector<std::string>> tied() && { return std::move(tied_); }
  bool is_torchscript() const noexcept { return is_torchscript_; }
  /// The first method of a TorchScript module that runs a part of it on another thread
  /// (torch.jit.fork); empty when there is none.
  std::string forking_method() const { return forking_method_ ? forking_method_() : std::string(); }
  bool is_training() const { return is_training_(); }
  void train(bool on) const { train_(on); }
  /// Moves parameters and buffers in place, so that every handle a user holds follows.
  void to(at::Device device) const { to_(device); }

  /// False when a parameter or buffer was registered, replaced or taken away since this record was
  /// made. Some nanoseconds for each.
  bool is_current() const;
  /// Makes the record anew from the module as it is now.
  void refresh();
  /// How many own the module; this record and its copies count as one.
  std::size_t owners() const { return owners_(); }

 private:
  void collect();

  ModuleNode root_;
  std::vector<NamedTensor> parameters_;
  std::vector<NamedTensor> buffers_;
  std::vector<std::vector<std::string>> tied_;
  // Of the tensors in the order of a walk through the module, those of more than one name each
  // time. The record has the tensors, so an address stays one tensor's.
  std::vector<const void*> walk_;
  bool is_torchscript_ = false;
  std::function<ModuleNode()> describe_;
  std::function<bool(const std::function<bool(const at::Tensor&)>&)> visit_;
  std::function<std::size_t()> owners_;
  std::function<std::string()> forking_method_;
  std::function<bool()> is_training_;
  std::function<void(bool)> train_;
  std::function<void(at::Device)> to_;
};

}  // namespace accelerate
