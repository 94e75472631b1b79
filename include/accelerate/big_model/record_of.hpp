#pragma once

#include <accelerate/core/module.hpp>

#include <concepts>
#include <memory>
#include <type_traits>

namespace accelerate::big_model {

/// What a user has a module in: a LibTorch module or a shared_ptr to one, a module holder (`Net` of
/// TORCH_MODULE(Net)), or a torch::jit::Module.
template <class M>
concept ModuleLike = std::derived_from<std::remove_cvref_t<M>, torch::nn::Module> ||
    std::same_as<std::remove_cvref_t<M>, torch::jit::Module> ||
    requires(const std::remove_cvref_t<M>& module) {
  { module.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
} || std::convertible_to<std::remove_cvref_t<M>, std::shared_ptr<torch::nn::Module>>;

/// The record of a module. A module that is given itself, in no pointer, must outlive the record.
template <ModuleLike M>
ModuleRecord record_of(M& module) {
  using Module = std::remove_cvref_t<M>;
  if constexpr (std::same_as<Module, torch::jit::Module>) {
    return ModuleRecord(module);
  } else if constexpr (std::derived_from<Module, torch::nn::Module>) {
    return ModuleRecord(std::shared_ptr<torch::nn::Module>(
        std::shared_ptr<void>(), const_cast<std::remove_const_t<Module>*>(&module)));
  } else if constexpr (requires { module.ptr(); }) {
    return ModuleRecord(std::shared_ptr<torch::nn::Module>(module.ptr()));
  } else {
    return ModuleRecord(std::shared_ptr<torch::nn::Module>(module));
  }
}

}  // namespace accelerate::big_model
