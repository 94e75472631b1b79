#include <accelerate/base/text.hpp>
#include <intercept/internal_ops.hpp>
#include <parallel/shared_memory.hpp>

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace accelerate::parallel {
namespace {

constexpr const char* kAdvice =
    "To tie parameters, register one and the same tensor under both names; otherwise give each "
    "memory of its own before prepare(): tensor.set_data(tensor.detach().clone()).";

struct Resident {
  std::string what;  // "parameter 'a.weight'"
  at::Tensor tensor;
  bool sharded = false;

  std::int64_t begin() const { return tensor.storage_offset(); }
  std::int64_t end() const {
    std::int64_t last = begin();
    for (std::int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    return last + 1;
  }
};

bool overlap(const Resident& one, const Resident& other) {
  const auto size = [](const Resident& each) {
    return static_cast<std::int64_t>(each.tensor.element_size());
  };
  if (one.end() * size(one) <= other.begin() * size(other) ||
      other.end() * size(other) <= one.begin() * size(one))
    return false;
  if (size(one) != size(other)) return true;
  // Columns of one matrix, say, lie between each other and share nothing.
  const intercept::InternalOpsGuard internal;
  const std::int64_t begin = std::min(one.begin(), other.begin());
  const at::Tensor taken = at::zeros({std::max(one.end(), other.end()) - begin}, at::kByte);
  taken.as_strided(one.tensor.sizes(), one.tensor.strides(), one.begin() - begin).fill_(1);
  return taken.as_strided(other.tensor.sizes(), other.tensor.strides(), other.begin() - begin)
      .any()
      .item<bool>();
}

// Counts references, beside those of the residents and of the bases that views keep.
bool somebody_else_has(const c10::Storage& memory, const std::vector<Resident>& residents) {
  std::unordered_map<const void*, std::size_t> views_of;
  for (const Resident& each : residents) {
    if (each.tensor.is_view()) ++views_of[each.tensor._base().unsafeGetTensorImpl()];
  }
  for (const Resident& each : residents) {
    if (!each.tensor.is_view()) continue;
    const at::TensorBase& base = each.tensor._base();
    if (base.use_count() > views_of[base.unsafeGetTensorImpl()]) return true;
  }
  return memory.use_count() > residents.size() + views_of.size();
}

}  // namespace

std::string shared_memory(const ModuleRecord& module,
                          const std::vector<intercept::UnitPlan>& plans) {
  std::unordered_set<const void*> sharded;
  for (const auto& plan : plans) {
    for (const NamedTensor& parameter : plan.parameters)
      sharded.insert(parameter.tensor.unsafeGetTensorImpl());
  }
  std::unordered_map<const void*, std::vector<Resident>> by_storage;
  std::vector<const void*> order;
  const auto add = [&](const char* kind, const std::vector<NamedTensor>& tensors) {
    for (const auto& [name, tensor] : tensors) {
      if (!tensor.has_storage() || tensor.numel() == 0) continue;
      const void* storage = tensor.storage().unsafeGetStorageImpl();
      auto& residents = by_storage[storage];
      if (residents.empty()) order.push_back(storage);
      residents.push_back({text::concat(kind, " '", name, "'"), tensor,
                           sharded.contains(tensor.unsafeGetTensorImpl())});
    }
  };
  add("parameter", module.parameters());
  add("buffer", module.buffers());
  for (const void* storage : order) {
    const auto& residents = by_storage[storage];
    const auto first = std::find_if(residents.begin(), residents.end(),
                                    [](const Resident& each) { return each.sharded; });
    if (first == residents.end()) continue;
    for (std::size_t i = 0; i < residents.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (!(residents[i].sharded || residents[j].sharded) || !overlap(residents[i], residents[j]))
          continue;
        return text::concat("The ", residents[i].what, " lies in the memory of the ",
                            residents[j].what,
                            ": what is written to one is written to the other. Sharding would take "
                            "them apart. ",
                            kAdvice);
      }
    }
    // Parameters beside each other in one buffer share nothing, as after flatten_parameters(),
    // unless somebody has the buffer too.
    const c10::Storage& memory = first->tensor.storage();
    const bool several =
        residents.size() > 1 ||
        static_cast<std::int64_t>(memory.nbytes()) >
            first->tensor.numel() * static_cast<std::int64_t>(first->tensor.element_size());
    if (several && somebody_else_has(memory, residents)) {
      return text::concat(
          "The ", first->what, " lies in a larger piece of memory, with ", residents.size() - 1,
          " more of the module's tensors, that a tensor outside of the module refers to as well: a "
          "flat buffer of all weights, say. Sharding would take them apart. Let go of that tensor, "
          "or give each parameter memory of its own, before prepare(): "
          "tensor.set_data(tensor.detach().clone()).");
    }
  }
  return {};
}

}  // namespace accelerate::parallel
