#pragma once

#include <accelerate/accelerator/prepared_module.hpp>

#include <torch/csrc/jit/api/module.h>

#include <string>
#include <vector>

namespace accelerate {

/// A TorchScript module, prepared. Its forward takes IValues and gives one, as torch::jit::Module's
/// does.
template <>
class PreparedModule<torch::jit::Module> : public PreparedModuleBase {
 public:
  PreparedModule(std::shared_ptr<torch::jit::Module> module,
                 std::shared_ptr<detail::PreparedModuleCore> core)
      : PreparedModuleBase(std::move(core)), module_(std::move(module)) {}

  /// fp16 and bf16 tensors anywhere in the output come back as fp32 under mixed precision.
  c10::IValue forward(std::vector<c10::IValue> inputs) {
    return call("forward", std::move(inputs));
  }
  /// The usual case: tensors in.
  template <class... Tensors>
  requires(std::is_convertible_v<Tensors, at::Tensor>&&...) c10::IValue operator()(
      Tensors&&... tensors) {
    return forward({c10::IValue(at::Tensor(std::forward<Tensors>(tensors)))...});
  }
  c10::IValue operator()(std::vector<c10::IValue> inputs) { return forward(std::move(inputs)); }
  /// Another method as the forward.
  c10::IValue call(const std::string& method, std::vector<c10::IValue> inputs);

  PreparedModule* operator->() noexcept { return this; }
  torch::jit::Module& module() const noexcept { return *module_; }
  const std::shared_ptr<torch::jit::Module>& unwrap() const noexcept { return module_; }

 private:
  std::shared_ptr<torch::jit::Module> module_;
};

}  // namespace accelerate
