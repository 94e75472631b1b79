#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/big_model/sizes.hpp>
#include <accelerate/core/memory.hpp>
#include <core/cuda_devices.hpp>

#include <unordered_map>

namespace accelerate {

ElementType element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ElementType::of("float32");
    case at::kDouble:
      return ElementType::of("float64");
    case at::kHalf:
      return ElementType::of("float16");
    case at::kBFloat16:
      return ElementType::of("bfloat16");
    default:
      break;
  }
  const bool integral = c10::isIntegralType(dtype, /*includeBool=*/true);
  return {text::to_lower(c10::toString(dtype)), static_cast<int>(8 * c10::elementSize(dtype)),
          integral};
}

ModelTree model_tree(const ModuleRecord& module) {
  ModelTree tree(module.root().type);
  std::unordered_map<const void*, std::string> first_name;
  // Modules first: a module without tensors is one too.
  const auto modules = [&](const auto& self, const ModuleNode& node) -> void {
    for (const ModuleNode& child : node.children) {
      tree.add_module(child.name, child.type);
      self(self, child);
    }
  };
  modules(modules, module.root());
  const auto tensors = [&](const auto& self, const ModuleNode& node) -> void {
    const auto add = [&](const NamedTensor& entry, bool is_buffer) {
      if (!entry.tensor.defined()) return;
      const auto [at, fresh] =
          first_name.try_emplace(entry.tensor.unsafeGetTensorImpl(), entry.name);
      const std::string same_as = fresh ? std::string() : at->second;
      const ElementType type = element_type(entry.tensor.scalar_type());
      if (is_buffer) {
        tree.add_buffer(entry.name, entry.tensor.sizes().vec(), type, same_as);
      } else {
        tree.add_parameter(entry.name, entry.tensor.sizes().vec(), type, same_as);
      }
    };
    for (const NamedTensor& parameter : node.parameters) add(parameter, false);
    for (const NamedTensor& buffer : node.buffers) add(buffer, true);
    for (const ModuleNode& child : node.children) self(self, child);
  };
  tensors(tensors, module.root());
  return tree;
}

MaxMemory get_max_memory() {
  MaxMemory limits;
  for (int index = 0; index < cuda_device_count(); ++index) {
    limits.emplace_back(Place::accelerator(index),
                        available_memory({at::kCUDA, static_cast<c10::DeviceIndex>(index)}));
  }
  limits.emplace_back(Place::cpu(), available_memory(at::kCPU));
  return limits;
}

}  // namespace accelerate
