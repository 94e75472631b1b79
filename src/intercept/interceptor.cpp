#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <intercept/key.hpp>
#include <intercept/policies.hpp>
#include <intercept/storage_holds.hpp>
#include <intercept/tagged_storage.hpp>

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_convolution_ops.h>
#include <ATen/ops/_has_compatible_shallow_copy_type_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/batch_norm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/conv1d_ops.h>
#include <ATen/ops/conv2d_ops.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/group_norm_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <torch/library.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>

namespace accelerate::intercept {
namespace {

thread_local RegionPolicy* innermost_region = nullptr;

constexpr c10::DispatchKeySet kBelow = c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTag);

// Autocast keeps a cast copy of every weight it meets until its scope ends: for a sharded parameter
// that would be the whole model again.
class NoWeightCache {
 public:
  explicit NoWeightCache(c10::DispatchKeySet keys)
      : was_on_(keys.has_any(c10::autocast_dispatch_keyset) &&
                at::autocast::is_autocast_cache_enabled()) {
    if (was_on_) at::autocast::set_autocast_cache_enabled(false);
  }
  ~NoWeightCache() {
    if (was_on_) at::autocast::set_autocast_cache_enabled(true);
  }

 private:
  bool was_on_;
};

// What an operator writes to, among its arguments: kept for after it has run.
struct Write {
  TaggedStorage* storage;
  at::Tensor view;
};

void refuse_replacement(const c10::OperatorHandle& op, const TaggedStorage& storage) {
  const std::string& name = op.schema().name();
  for (const char* replaces :
       {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::_resize_output_"}) {
    if (name == replaces) {
      throw ShardingError(text::concat(
          "'", name, "' was called on a parameter of '", storage.name(),
          "', whose memory comes and goes, so it cannot be given other memory. Write its values "
          "with copy_(). ",
          storage.owner().advice()));
    }
  }
}

// torch::nn::utils::clip_grad_norm_ and its like, on the parameters of a prepared optimizer.
void refuse_local_norm(const c10::OperatorHandle& op, const at::Tensor& part,
                       const c10::IValue* arguments) {
  const std::string& name = op.schema().name();
  if (name == "aten::mul_" || name == "aten::div_") {
    if (!arguments[1].isTensor()) return;
    const at::Tensor& factor = arguments[1].toTensor();
    if (factor.numel() != 1 || factor.unsafeGetTensorImpl()->is_wrapped_number()) return;
  } else if (name != "aten::abs" || part.numel() > 0) {  // the maximum of nothing is an error
    return;
  }
  throw StateError(
      "The gradient of a sharded parameter was to be scaled by a computed factor, as "
      "torch::nn::utils::clip_grad_norm_ does. The optimizer's parameters have this process's part "
      "of each gradient, whose norm is another on every process. Call "
      "accelerator.clip_grad_norm_(model, max_norm) with the prepared module. To scale by what is "
      "the same on all processes, give a number: factor.item<double>().");
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (policies_exist() && replace_operator(op, *stack)) return;
  StorageHolds holds;
  std::vector<Write> writes;
  std::vector<PolicyRecord*> written_with_policies;
  const auto& declared = op.schema().arguments();
  const c10::IValue* values = stack->data() + (stack->size() - declared.size());
  for (std::size_t i = 0; i < declared.size(); ++i) {
    const c10::IValue& value = values[i];
    const auto meet = [&](const at::Tensor& tensor) {
      TaggedStorage* storage = holds.add(tensor);
      const auto* alias = declared[i].alias_info();
      const bool is_written = alias != nullptr && alias->isWrite();
      if (storage == nullptr) {
        if (is_part_of_gradient(tensor)) refuse_local_norm(op, tensor, values);
        if (is_written && policies_exist()) {
          PolicyRecord* record = record_of(tensor);
          if (record != nullptr && record->parameter.is_same(tensor))
            written_with_policies.push_back(record);
        }
        return;
      }
      if (!is_written) return;
      refuse_replacement(op, *storage);
      storage->owner().will_write(*storage, tensor);
      writes.push_back({storage, tensor});
    };
    if (value.isTensor()) {
      meet(value.toTensor());
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (!element.isTensor()) break;
        meet(element.toTensor());
      }
    } else if (value.isOptionalTensorList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) meet(element.toTensor());
      }
    }
  }
  {
    const Below below;
    const NoWeightCache no_weight_cache(keys);
    if (innermost_region != nullptr) {
      innermost_region->call(op, keys & kBelow, *stack);
    } else {
      op.redispatchBoxed(keys & kBelow, stack);
    }
  }
  for (const Write& write : writes)
    write.storage->owner().written(*write.storage, write.view, op.schema().name());
  // set_() and resize_() put a parameter elsewhere.
  for (PolicyRecord* record : written_with_policies) record->mark(record->parameter);
}

// The operators that models call most, without the cost of boxing their arguments.
template <class Op, class Schema = typename Op::schema>
struct Typed;
template <class Op, class Result, class... Arguments>
struct Typed<Op, Result(Arguments...)> {
  static Result call(c10::DispatchKeySet keys, Arguments... arguments) {
    if (innermost_region != nullptr || (is_written(std::forward<Arguments>(arguments)) || ...) ||
        (policies_exist() && (is_replaced(arguments) || ...))) {
      return c10::impl::BoxedKernelWrapper<Result(Arguments...)>::call(
          c10::BoxedKernel::makeFromFunction<&fallback>(), op(), keys,
          std::forward<Arguments>(arguments)...);
    }
    StorageHolds holds;
    (hold(holds, arguments), ...);
    const Below below;
    const NoWeightCache no_weight_cache(keys);
    return Op::redispatch(keys & kBelow, std::forward<Arguments>(arguments)...);
  }

 private:
  static const c10::OperatorHandle& op() {
    static const c10::OperatorHandle op =
        c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    return op;
  }
  static bool is_replaced(const at::Tensor& tensor) {
    const PolicyRecord* record = record_of(tensor);
    return record != nullptr && record->layer_for(op()) != nullptr;
  }
  static bool is_replaced(const std::optional<at::Tensor>& tensor) {
    return tensor && is_replaced(*tensor);
  }
  template <class Other>
  static bool is_replaced(const Other&) {
    return false;
  }
  static bool is_written(at::Tensor& written) { return is_tagged(written); }
  template <class Other>
  static bool is_written(Other&&) {
    return false;
  }
  static void hold(StorageHolds& holds, const at::Tensor& tensor) { holds.add(tensor); }
  static void hold(StorageHolds& holds, const std::optional<at::Tensor>& tensor) {
    if (tensor) holds.add(*tensor);
  }
  template <class Other>
  static void hold(StorageHolds&, const Other&) {}
};

template <class... Ops>
void override_typed(torch::Library& library) {
  const auto one = [&]<class Op>() {
    const std::string overload = Op::overload_name;
    const std::string name = overload.empty() ? Op::name : text::concat(Op::name, ".", overload);
    library.impl(name.c_str(), TORCH_FN((&Typed<Op>::call)));
  };
  (one.template operator()<Ops>(), ...);
}

// Operators that only make a view or ask about metadata never read the memory: they pass the key
// by, at no cost.
constexpr const char* kNeedNoMemory[] = {"alias",
                                         "as_strided",
                                         "data",
                                         "detach",
                                         "expand",
                                         "expand_as",
                                         "narrow",
                                         "permute",
                                         "select.int",
                                         "slice.Tensor",
                                         "split.Tensor",
                                         "split_with_sizes",
                                         "chunk",
                                         "squeeze",
                                         "squeeze.dim",
                                         "t",
                                         "transpose.int",
                                         "unbind.int",
                                         "unflatten.int",
                                         "unsqueeze",
                                         "view",
                                         "view_as",
                                         "numpy_T",
                                         "mT",
                                         "requires_grad_",
                                         "retain_grad",
                                         "is_leaf",
                                         "_version",
                                         "size.int",
                                         "sym_size.int",
                                         "stride.int",
                                         "sym_stride.int",
                                         "sym_numel",
                                         "sym_storage_offset",
                                         "is_same_size",
                                         "is_contiguous",
                                         "is_floating_point",
                                         "is_complex",
                                         "numel",
                                         "dim"};

// These take no more of a tensor than its shape either, but make new memory, which a region may
// want to know.
constexpr const char* kMakeTheLike[] = {"empty_like", "zeros_like", "ones_like", "full_like",
                                        "rand_like",  "randn_like", "new_empty", "new_zeros",
                                        "new_ones",   "new_full"};

void make_the_like(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  const Below below;
  if (innermost_region != nullptr) {
    innermost_region->call(op, keys & kBelow, *stack);
  } else {
    op.redispatchBoxed(keys & kBelow, stack);
  }
}

c10::OperatorName operator_name(const std::string& name) {
  const auto dot = name.find('.');
  return {"aten::" + name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
}

// What `set_data` asks before it points a tensor elsewhere.
bool may_be_repointed(c10::DispatchKeySet keys, const at::Tensor& tensor, const at::Tensor& with) {
  if (is_tagged(tensor)) {
    TaggedStorage* storage = TaggedStorage::of(tensor);
    PolicyRecord* record = policies_exist() ? record_of(tensor) : nullptr;
    if (record != nullptr && !record->parameter.is_same(tensor)) record = nullptr;
    if (storage == nullptr && (record == nullptr || record->guarded) && !tensor.is_alias_of(with) &&
        !is_part_of_gradient(tensor)) {
      throw StateError(
          "The module is dispatched: its weights lie where its device map says, so it cannot be "
          "moved or cast, nor a weight be given other data. Call remove_offload() first, or "
          "dispatch it with another map.");
    }
    if (storage != nullptr && TaggedStorage::of(with) != storage)
      storage->owner().repointed(*storage);
    if (record != nullptr) {
      const Below below;
      record->mark(with);
    }
  }
  return at::_ops::_has_compatible_shallow_copy_type::redispatch(keys & kBelow, tensor, with);
}

std::string other_user() {
  auto& dispatcher = c10::Dispatcher::singleton();
  if (dispatcher.hasBackendFallbackForDispatchKey(kTag)) return "a fallback for every operator";
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (op && op->hasKernelForDispatchKey(kTag)) return text::concat("a kernel for ", name.name);
  }
  return {};
}

struct Registration {
  Registration() {
    if (const std::string found = other_user(); !found.empty()) {
      throw UnsupportedError(
          text::concat("Another library in this process has registered ", found,
                       " for the dispatch key ", c10::toString(kTag),
                       ", which this library needs for itself. Do not load both, or change kTag in "
                       "src/intercept/key.hpp to another "
                       "free key and rebuild."));
    }
    everything.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    for (const char* name : kNeedNoMemory) {
      if (c10::Dispatcher::singleton().findSchema(operator_name(name))) {
        aten.impl(name, torch::CppFunction::makeFallthrough());
      }
    }
    for (const char* name : kMakeTheLike) {
      if (c10::Dispatcher::singleton().findSchema(operator_name(name))) {
        aten.impl(name, torch::CppFunction::makeFromBoxedFunction<&make_the_like>());
      }
    }
    aten.impl("_has_compatible_shallow_copy_type", TORCH_FN(may_be_repointed));
    using namespace at::_ops;
    override_typed<linear, addmm, mm, matmul, bmm, baddbmm, conv1d, conv2d, convolution,
                   convolution_backward, layer_norm, native_layer_norm, native_layer_norm_backward,
                   batch_norm, group_norm, embedding, add_Tensor, add__Tensor, mul_Tensor,
                   mul__Tensor>(aten);
  }

  torch::Library everything{torch::Library::IMPL, "_", kTag, __FILE__, __LINE__};
  torch::Library aten{torch::Library::IMPL, "aten", kTag, __FILE__, __LINE__};
};

}  // namespace

void install() {
  // Left in place at exit: static destructors of other libraries may still run operators. Marked as
  // used so that leak checkers find it reachable.
  [[gnu::used]] static Registration* const registration = new Registration;
}

bool needs_no_memory(const c10::OperatorName& name) {
  const auto is = [&](const char* known) { return operator_name(known) == name; };
  return std::any_of(std::begin(kNeedNoMemory), std::end(kNeedNoMemory), is) ||
         std::any_of(std::begin(kMakeTheLike), std::end(kMakeTheLike), is);
}

Region::Region(RegionPolicy& policy) : outer_(innermost_region), include_((install(), kTag)) {
  innermost_region = &policy;
}

Region::~Region() { innermost_region = outer_; }

}  // namespace accelerate::intercept
