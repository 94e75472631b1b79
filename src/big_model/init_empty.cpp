#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/big_model/init_empty.hpp>
#include <accelerate/intercept/key.hpp>
#include <intercept/quiet.hpp>
#include <intercept/replace.hpp>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace accelerate {
namespace {

using Stack = std::vector<c10::IValue>;

// Where an operator that makes a tensor of nothing is told the device, or nothing for other
// operators.
std::optional<std::size_t> device_argument(const c10::FunctionSchema& schema) {
  std::optional<std::size_t> found;
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    const c10::TypePtr& type = argument.type();
    const bool has_tensor = type->isSubtypeOf(*c10::TensorType::get()) ||
                            type->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
                            type->isSubtypeOf(*c10::ListType::ofTensors());
    if (has_tensor) return std::nullopt;
    if (argument.name() == "device" && type->kind() == c10::TypeKind::OptionalType) found = i;
  }
  return found;
}

template <class Each>
void for_each_tensor(const c10::IValue& value, Each&& each) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) each(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, each);
  }
}

// Tensors that stay as they are now when the program points its own elsewhere, by module->to() for
// example.
c10::IValue as_it_is(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? value.toTensor().detach() : value;
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.detach());
  return list;
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// An operator that was called inside the scope, to be repeated where its result is wanted.
struct Call {
  c10::OperatorHandle op;
  Stack arguments;
  Stack results;
  std::vector<std::uint32_t> versions;  // of the arguments that have memory
};

}  // namespace

struct InitOnDevice::Impl final : intercept::RegionPolicy {
  Impl(at::Device wanted, bool with_buffers) : device(wanted), include_buffers(with_buffers) {
    region.emplace(*this);
  }

  void call(const c10::OperatorHandle& op, c10::DispatchKeySet below, Stack& stack) override {
    const std::size_t count = op.schema().arguments().size();
    const std::size_t first = stack.size() - count;
    const auto at = device_argument(op.schema());
    const bool redirected = at && stack[first + *at].isNone();
    const bool record = device.is_meta() && !include_buffers;
    Call call{op, {}, {}, {}};
    if (record) {
      for (std::size_t i = first; i < stack.size(); ++i)
        call.arguments.push_back(as_it_is(stack[i]));
    }
    const bool concerned = redirected || align(op.schema(), stack, first);
    if (record && concerned) {
      for (const c10::IValue& argument : call.arguments) {
        for_each_tensor(argument, [&](const at::Tensor& tensor) {
          if (!tensor.is_meta()) call.versions.push_back(tensor._version());
        });
      }
    }
    if (redirected) stack[first + *at] = device;
    op.redispatchBoxed(below, &stack);
    if (!record || !concerned) return;
    const std::size_t results = op.schema().returns().size();
    call.results.assign(stack.end() - static_cast<std::ptrdiff_t>(results), stack.end());
    for (c10::IValue& result : call.results) result = as_it_is(result);
    calls.push_back(std::move(call));
  }

  // Brings tensors on a named device, such as literals, to what they are computed with. True when
  // an argument is on the scope's device.
  bool align(const c10::FunctionSchema& schema, Stack& stack, std::size_t first) const {
    bool here = false, elsewhere = false;
    for (std::size_t i = first; i < stack.size(); ++i) {
      for_each_tensor(stack[i], [&](const at::Tensor& tensor) {
        (tensor.device() == device ? here : elsewhere) = true;
      });
    }
    if (!here || !elsewhere) return here;
    for (std::size_t i = first; i < stack.size(); ++i) {
      const c10::AliasInfo* alias = schema.arguments()[i - first].alias_info();
      if (alias != nullptr && alias->isWrite()) continue;
      if (stack[i].isTensor() && stack[i].toTensor().defined()) {
        stack[i] = stack[i].toTensor().to(device);
      } else if (stack[i].isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : stack[i].toTensorVector())
          list.push_back(tensor.to(device));
        stack[i] = std::move(list);
      }
    }
    return true;
  }

  void make_real(const std::vector<NamedTensor>& buffers);
  at::Tensor real(const at::Tensor& tensor) const;

  at::Device device;
  bool include_buffers;
  std::optional<intercept::Region> region;
  std::vector<Call> calls;
  std::unordered_map<const void*, c10::Storage> real_storages;  // by that on the meta device
};

at::Tensor InitOnDevice::Impl::real(const at::Tensor& tensor) const {
  const auto found = real_storages.find(storage_of(tensor));
  if (found == real_storages.end()) return {};
  const c10::Storage& storage = found->second;
  at::Tensor view = at::empty({0}, at::TensorOptions(storage.device()).dtype(tensor.dtype()));
  view.set_(storage, tensor.storage_offset(), tensor.sizes(), tensor.strides());
  return view;
}

void InitOnDevice::Impl::make_real(const std::vector<NamedTensor>& buffers) {
  std::unordered_set<const void*> wanted;
  for (const NamedTensor& buffer : buffers) {
    if (buffer.tensor.is_meta()) wanted.insert(storage_of(buffer.tensor));
  }
  // Back through what was called: whatever touched a wanted storage, and what that was made from.
  std::vector<const Call*> needed;
  for (auto call = calls.rbegin(); call != calls.rend(); ++call) {
    bool writes = false;
    for (const c10::IValue& result : call->results)
      for_each_tensor(
          result, [&](const at::Tensor& tensor) { writes |= wanted.contains(storage_of(tensor)); });
    if (!writes) continue;
    needed.push_back(&*call);
    for (const c10::IValue& argument : call->arguments) {
      for_each_tensor(argument, [&](const at::Tensor& tensor) {
        if (tensor.is_meta()) wanted.insert(storage_of(tensor));
      });
    }
  }
  for (auto call = needed.rbegin(); call != needed.rend(); ++call) {
    std::size_t version = 0;
    const auto exchange = [&](const at::Tensor& tensor) {
      if (tensor.is_meta()) return real(tensor);
      if (tensor._version() != (*call)->versions.at(version++)) {
        throw UnsupportedError(
            text::concat("A buffer is computed by ", (*call)->op.schema().name(),
                         " from a tensor that was changed afterwards, so init_empty_weights cannot "
                         "repeat it. Pass include_buffers = true and fill the buffers from the "
                         "checkpoint."));
      }
      return tensor;
    };
    Stack stack;
    for (const c10::IValue& argument : (*call)->arguments) {
      if (argument.isTensor() && argument.toTensor().defined()) {
        stack.emplace_back(exchange(argument.toTensor()));
      } else if (argument.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : argument.toTensorVector()) list.push_back(exchange(tensor));
        stack.emplace_back(std::move(list));
      } else {
        stack.push_back(argument);
      }
    }
    (*call)->op.callBoxed(&stack);
    for (std::size_t i = 0; i < stack.size(); ++i) {
      std::vector<at::Tensor> before, now;
      for_each_tensor((*call)->results[i], [&](const at::Tensor& t) { before.push_back(t); });
      for_each_tensor(stack[i], [&](const at::Tensor& t) { now.push_back(t); });
      for (std::size_t t = 0; t < before.size(); ++t)
        real_storages[storage_of(before[t])] = now.at(t).storage();
    }
  }
  for (const NamedTensor& buffer : buffers) {
    if (!buffer.tensor.is_meta()) continue;
    const at::Tensor value = real(buffer.tensor);
    if (!value.defined()) {
      throw UnsupportedError(text::concat("The buffer '", buffer.name,
                                          "' was not made inside init_empty_weights but has no "
                                          "memory, so its values are not known. "
                                          "Construct the whole module inside."));
    }
    intercept::replace_data(buffer.tensor, value);
  }
}

InitOnDevice::InitOnDevice(at::Device device, bool include_buffers)
    : impl_(std::make_unique<Impl>(device, include_buffers)) {}

InitOnDevice::~InitOnDevice() = default;

void InitOnDevice::finish(const ModuleRecord& module) {
  if (!impl_->region) throw StateError("This scope of init_on_device has ended already.");
  impl_->region.reset();
  if (impl_->include_buffers) return;
  const intercept::Quiet quiet;
  if (impl_->device.is_meta()) {
    impl_->make_real(module.buffers());
  } else {
    for (const auto& [name, buffer] : module.buffers()) {
      if (buffer.device() == impl_->device) intercept::replace_data(buffer, buffer.cpu());
    }
  }
  impl_->calls.clear();
  impl_->real_storages.clear();
}

}  // namespace accelerate
