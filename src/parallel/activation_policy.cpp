#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/module.hpp>
#include <accelerate/parallel/activation_checkpointing.hpp>

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>

#include <algorithm>
#include <set>

namespace accelerate {
namespace {

using torch::nn::AnyModule;
using torch::nn::AnyModulePlaceholder;
using torch::nn::AnyValue;

// What an AnyModule calls can be exchanged nowhere but in this member, which is private. An
// explicit instantiation may name a private member, and that is how it is reached.
std::unique_ptr<AnyModulePlaceholder>& content(AnyModule& module);
template <auto Member>
struct Reach {
  friend std::unique_ptr<AnyModulePlaceholder>& content(AnyModule& module) {
    return module.*Member;
  }
};
template struct Reach<&AnyModule::content_>;

// In the place of what calls a child of a Sequential: calls it under checkpoint.
class Checkpointed final : public AnyModulePlaceholder {
 public:
  // The type it gives is its own, so that nobody takes it for an AnyModuleHolder of the child's.
  Checkpointed(std::shared_ptr<AnyModulePlaceholder> child,
               const ActivationCheckpointOptions& options)
      : AnyModulePlaceholder(typeid(Checkpointed)), child_(std::move(child)), options_(options) {}

  AnyValue forward(std::vector<AnyValue>&& arguments) override {
    std::vector<at::Tensor> tensors;
    for (AnyValue& argument : arguments) {
      if (auto* tensor = argument.try_get<at::Tensor>())
        tensors.push_back(std::exchange(*tensor, {}));
    }
    // Arguments that are no tensors are carried along; the tensors' places are filled each time.
    return checkpoint(
        options_,
        [child = child_, arguments](const std::vector<at::Tensor>& inputs) {
          std::vector<AnyValue> values = arguments;
          std::size_t next = 0;
          for (AnyValue& value : values) {
            if (auto* tensor = value.try_get<at::Tensor>()) *tensor = inputs[next++];
          }
          return child->forward(std::move(values));
        },
        tensors);
  }

  std::shared_ptr<torch::nn::Module> ptr() override { return child_->ptr(); }
  std::unique_ptr<AnyModulePlaceholder> copy() const override {
    return std::make_unique<Checkpointed>(child_, options_);
  }
  std::unique_ptr<AnyModulePlaceholder> clone_module(
      std::optional<at::Device> device) const override {
    return std::make_unique<Checkpointed>(child_->clone_module(device), options_);
  }

 private:
  std::shared_ptr<AnyModulePlaceholder> child_;
  ActivationCheckpointOptions options_;
};

bool is_type(const std::string& type, const std::string& wanted) {
  return type == wanted || (type.ends_with(wanted) && type[type.size() - wanted.size() - 1] == ':');
}

class Chooser {
 public:
  explicit Chooser(const ActivationCheckpointPolicy& policy) : policy_(policy) {
    if (policy.every_n() <= 0) {
      throw ConfigError(text::concat("ActivationCheckpointPolicy::every_n is ", policy.every_n(),
                                     ". Give 1 for every module, 2 for every second, and so on."));
    }
  }

  std::vector<std::string> apply(torch::nn::Module& module) {
    walk(module, "", /*inside_chosen=*/false);
    for (const auto* wanted : {&policy_.names(), &policy_.types()}) {
      for (const std::string& each : *wanted) {
        if (met_.contains(each)) continue;
        throw ConfigError(text::concat("ActivationCheckpointPolicy names '", each,
                                       "', and the module has nothing of that name. Its modules "
                                       "are: ",
                                       text::join(seen_), "."));
      }
    }
    if (chosen_.empty()) {
      throw ConfigError(
          "The module has no Sequential whose children have parameters, so there is nothing to run "
          "under checkpoint. Call checkpoint() in its forward instead.");
    }
    std::vector<std::string> names;
    for (std::size_t i = 0; i < chosen_.size(); i += static_cast<std::size_t>(policy_.every_n())) {
      auto& [name, boundary] = chosen_[i];
      names.push_back(name);
      auto& held = content(*boundary);
      if (dynamic_cast<Checkpointed*>(held.get()) == nullptr)
        held = std::make_unique<Checkpointed>(std::move(held), policy_.options());
    }
    return names;
  }

 private:
  struct Choice {
    std::string name;
    AnyModule* boundary;
  };

  bool by_default() const { return policy_.names().empty() && policy_.types().empty(); }

  bool wanted(const torch::nn::Module& module, const std::string& name, bool in_sequential) {
    if (by_default()) return in_sequential && !module.parameters().empty();
    bool found = false;
    for (const std::string& each : policy_.names()) {
      if (each == name) met_.insert(each), found = true;
    }
    for (const std::string& each : policy_.types()) {
      if (is_type(module.name(), each)) met_.insert(each), found = true;
    }
    return found;
  }

  void walk(torch::nn::Module& module, const std::string& prefix, bool inside_chosen) {
    auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(&module);
    std::size_t index = 0;
    for (const auto& child : module.named_children()) {
      const std::string name = prefix.empty() ? child.key() : prefix + "." + child.key();
      AnyModule* boundary = nullptr;
      if (sequential != nullptr && index < sequential->size()) {
        AnyModule& held = *(sequential->begin() + static_cast<std::ptrdiff_t>(index++));
        if (held.ptr() == child.value()) boundary = &held;
      }
      seen_.push_back(text::concat(name, " (", child.value()->name(), ")"));
      bool chosen = false;
      if (wanted(*child.value(), name, boundary != nullptr) && !inside_chosen) {
        if (boundary == nullptr) refuse(module, prefix, name);
        chosen_.push_back({name, boundary});
        chosen = true;
      }
      walk(*child.value(), name, inside_chosen || chosen);
    }
  }

  [[noreturn]] static void refuse(const torch::nn::Module& parent, const std::string& parent_name,
                                  const std::string& name) {
    const bool is_list = dynamic_cast<const torch::nn::ModuleListImpl*>(&parent) != nullptr ||
                         dynamic_cast<const torch::nn::ModuleDictImpl*>(&parent) != nullptr;
    throw UnsupportedError(text::concat(
        "The module '", name, "' cannot be run under checkpoint from outside: it is ",
        is_list ? "an entry of " : "a member of ", parent.name(),
        parent_name.empty() ? std::string() : text::concat(" '", parent_name, "'"),
        ", and the program's own forward calls it directly, where nothing can step in and call it "
        "again. Put it into a torch::nn::Sequential, or call accelerate::checkpoint(...) where it "
        "is called."));
  }

  const ActivationCheckpointPolicy& policy_;
  std::vector<Choice> chosen_;
  std::vector<std::string> seen_;
  std::set<std::string> met_;
};

}  // namespace

std::vector<std::string> apply_activation_checkpointing(torch::nn::Module& module,
                                                        const ActivationCheckpointPolicy& policy) {
  return Chooser(policy).apply(module);
}

}  // namespace accelerate
