#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/module.hpp>

#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/runtime/graph_iterator.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <unordered_map>

namespace accelerate {
namespace {

std::string join_name(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

using NamesByTensor = std::unordered_map<const void*, std::string>;

// What forward of one of these modules uses as `key`; undefined for others.
template <class... Known>
at::Tensor used_as(const std::string& key, const torch::nn::Module& module) {
  at::Tensor used;
  const auto ask = [&]<class Type>(const Type* known) {
    if (known == nullptr) return;
    if (key == "weight") used = known->weight;
    if constexpr (requires { known->bias; }) {
      if (key == "bias") used = known->bias;
    }
  };
  (ask(dynamic_cast<const Known*>(&module)), ...);
  return used;
}

// `lm_head->weight = embed->weight`, LibTorch's way of tying, changes what forward uses and leaves
// the tensor of before in the registry. What is trained, saved and loaded is what forward uses.
at::Tensor followed(const at::Tensor& registered, const std::string& key, const std::string& name,
                    const torch::nn::Module& module, const NamesByTensor& names) {
  using namespace torch::nn;
  const at::Tensor used =
      used_as<LinearImpl, BilinearImpl, EmbeddingImpl, EmbeddingBagImpl, Conv1dImpl, Conv2dImpl,
              Conv3dImpl, ConvTranspose1dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl>(key,
                                                                                         module);
  if (!used.defined() || used.is_same(registered)) return registered;
  const auto tied = names.find(used.unsafeGetTensorImpl());
  if (tied == names.end()) return registered;
  log::warning_once(text::concat(
      "The module's '", name, "' was assigned after the module was made: forward uses '",
      tied->second,
      "', and the module's registry still has the tensor of before. Both names are "
      "taken for one tied parameter here; parameters() and torch::save() of the module give the "
      "tensor of before as well, which is not trained."));
  return used;
}

ModuleNode describe(const torch::nn::Module& module, const std::string& name,
                    const NamesByTensor& names) {
  ModuleNode node;
  node.name = name;
  node.type = module.name();
  node.is_container = dynamic_cast<const torch::nn::ModuleListImpl*>(&module) != nullptr ||
                      dynamic_cast<const torch::nn::SequentialImpl*>(&module) != nullptr ||
                      dynamic_cast<const torch::nn::ModuleDictImpl*>(&module) != nullptr;
  for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
    std::string full_name = join_name(name, entry.key());
    at::Tensor parameter = followed(entry.value(), entry.key(), full_name, module, names);
    node.parameters.push_back({std::move(full_name), std::move(parameter)});
  }
  for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
    node.buffers.push_back({join_name(name, entry.key()), entry.value()});
  }
  for (const auto& child : module.named_children()) {
    node.children.push_back(describe(*child.value(), join_name(name, child.key()), names));
  }
  return node;
}

ModuleNode describe(const torch::nn::Module& module) {
  NamesByTensor names;
  for (const auto& entry : module.named_parameters())
    names.try_emplace(entry.value().unsafeGetTensorImpl(), entry.key());
  return describe(module, "", names);
}

ModuleNode describe(const torch::jit::Module& module, const std::string& name) {
  ModuleNode node;
  node.name = name;
  node.type = module.type()->name() ? module.type()->name()->qualifiedName() : "TorchScript module";
  for (const char* container : {"ModuleList", "Sequential", "ModuleDict"}) {
    // TorchScript mangles names of repeated types ("...container.___torch_mangle_3.ModuleList").
    if (node.type.ends_with(std::string(".") + container)) node.is_container = true;
  }
  for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
    node.parameters.push_back({join_name(name, entry.name), entry.value});
  }
  for (const auto& entry : module.named_buffers(/*recurse=*/false)) {
    node.buffers.push_back({join_name(name, entry.name), entry.value});
  }
  for (const auto& child : module.named_children()) {
    node.children.push_back(describe(child.value, join_name(name, child.name)));
  }
  return node;
}

std::string forking_method(const torch::jit::Module& module) {
  for (const auto& method : module.get_methods()) {
    std::shared_ptr<torch::jit::Graph> graph = method.graph()->copy();
    torch::jit::Inline(*graph);  // what it calls, too
    torch::jit::DepthFirstGraphNodeIterator nodes(graph);
    while (const torch::jit::Node* node = nodes.next()) {
      if (node->kind() == c10::prim::fork || node->kind() == c10::prim::forkClosure)
        return method.name();
    }
  }
  return {};
}

using Visitor = std::function<bool(const at::Tensor&)>;

// LibTorch gives out copies of a module's children and buffers, which cost more than a look at them
// in every forward may. An explicit instantiation may name private members.
template <auto kMember, class Tag>
struct Opened {
  friend constexpr typename Tag::Member member(Tag) { return kMember; }
};
struct Parameters {
  using Member = torch::OrderedDict<std::string, at::Tensor> torch::nn::Module::*;
  friend constexpr Member member(Parameters);
};
struct Buffers {
  using Member = torch::OrderedDict<std::string, at::Tensor> torch::nn::Module::*;
  friend constexpr Member member(Buffers);
};
struct Children {
  using Member =
      torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> torch::nn::Module::*;
  friend constexpr Member member(Children);
};
template struct Opened<&torch::nn::Module::parameters_, Parameters>;
template struct Opened<&torch::nn::Module::buffers_, Buffers>;
template struct Opened<&torch::nn::Module::children_, Children>;

// Every parameter and buffer, until `visitor` returns false. Returns whether it never did.
bool visit(const torch::nn::Module& module, const Visitor& visitor) {
  for (const auto& entry : module.*member(Parameters())) {
    if (!visitor(entry.value())) return false;
  }
  for (const auto& entry : module.*member(Buffers())) {
    if (!visitor(entry.value())) return false;
  }
  for (const auto& entry : module.*member(Children())) {
    if (!visit(*entry.value(), visitor)) return false;
  }
  return true;
}

bool visit(const c10::ivalue::Object& module, const Visitor& visitor) {
  const auto& type = *module.type();
  for (std::size_t i = 0; i < module.slots().size(); ++i) {
    const c10::IValue& slot = module.slots()[i];
    if (slot.isTensor() && (type.is_parameter(i) || type.is_buffer(i))) {
      if (!visitor(slot.toTensor())) return false;
    } else if (slot.isObject() && type.getAttribute(i)->is_module()) {
      if (!visit(slot.toObjectRef(), visitor)) return false;
    }
  }
  return true;
}

}  // namespace

ModuleRecord::ModuleRecord(std::shared_ptr<torch::nn::Module> module) {
  // One owner for all copies, so that others can be told from them.
  const auto own = std::make_shared<const std::shared_ptr<torch::nn::Module>>(std::move(module));
  describe_ = [own] { return describe(**own); };
  visit_ = [own](const Visitor& visitor) { return visit(**own, visitor); };
  is_training_ = [own] { return (*own)->is_training(); };
  train_ = [own](bool on) { (*own)->train(on); };
  to_ = [own](at::Device device) { (*own)->to(device); };
  owners_ = [own] { return static_cast<std::size_t>(own->use_count()); };
  refresh();
}

ModuleRecord::ModuleRecord(torch::jit::Module module) : is_torchscript_(true) {
  // A torch::jit::Module is a handle: the copy held here is the user's own object.
  const auto own = std::make_shared<torch::jit::Module>(std::move(module));
  describe_ = [own] { return describe(*own, ""); };
  visit_ = [own](const Visitor& visitor) { return visit(*own->_ivalue(), visitor); };
  forking_method_ = [own] { return accelerate::forking_method(*own); };
  is_training_ = [own] { return own->is_training(); };
  train_ = [own](bool on) { own->train(on); };
  to_ = [own](at::Device device) { own->to(device); };
  // Less the one that is asked.
  owners_ = [own] { return static_cast<std::size_t>(own->_ivalue().use_count() - 1); };
  refresh();
}

bool ModuleRecord::is_current() const {
  std::size_t next = 0;
  const bool same = visit_([&](const at::Tensor& tensor) {
    return next < walk_.size() && walk_[next++] == tensor.unsafeGetTensorImpl();
  });
  return same && next == walk_.size();
}

void ModuleRecord::refresh() {
  root_ = describe_();
  parameters_.clear();
  buffers_.clear();
  tied_.clear();
  walk_.clear();
  collect();
  visit_([&](const at::Tensor& tensor) {
    walk_.push_back(tensor.unsafeGetTensorImpl());
    return true;
  });
}

void ModuleRecord::collect() {
  std::unordered_map<const void*, std::vector<std::string>> names;
  std::vector<const void*> order;
  const auto add = [&](const NamedTensor& entry, std::vector<NamedTensor>& into) {
    if (!entry.tensor.defined()) return;  // a bias switched off
    const void* identity = entry.tensor.unsafeGetTensorImpl();
    auto [at, fresh] = names.try_emplace(identity);
    at->second.push_back(entry.name);
    if (fresh) {
      order.push_back(identity);
      into.push_back(entry);
    }
  };
  const auto walk = [&](const auto& self, const ModuleNode& node) -> void {
    for (const auto& parameter : node.parameters) add(parameter, parameters_);
    for (const auto& buffer : node.buffers) add(buffer, buffers_);
    for (const auto& child : node.children) self(self, child);
  };
  walk(walk, root_);
  for (const void* identity : order) {
    if (names[identity].size() > 1) tied_.push_back(names[identity]);
  }
}

}  // namespace accelerate
