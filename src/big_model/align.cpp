#include <big_model/align.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace accelerate::big_model {

thread_local at::Device AlignDevices::last_{at::kCPU};

AlignDevices::AlignDevices(const std::vector<NamedTensor>& weights) {
  for (const auto& [name, tensor] : weights) {
    if (tensor.has_storage()) storages_[tensor.storage().unsafeGetStorageImpl()] = true;
  }
}

bool AlignDevices::is_weight(const at::Tensor& tensor) const {
  return tensor.has_storage() && storages_.contains(tensor.storage().unsafeGetStorageImpl());
}

void AlignDevices::call(const c10::OperatorHandle& op, c10::DispatchKeySet below,
                        std::vector<c10::IValue>& stack) {
  const auto& declared = op.schema().arguments();
  const std::size_t first = stack.size() - declared.size();
  std::optional<at::Device> weight, written, any;
  bool several = false;
  const auto look = [&](const at::Tensor& tensor, bool writes) {
    // A number on the CPU goes with tensors of every device.
    if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0 && !writes)) return;
    if (any && *any != tensor.device()) several = true;
    any = tensor.device();
    if (writes && !written) written = tensor.device();
    if (!weight && is_weight(tensor)) weight = tensor.device();
  };
  const auto writes = [&](std::size_t i) {
    const c10::AliasInfo* alias = declared[i].alias_info();
    return alias != nullptr && alias->isWrite();
  };
  for (std::size_t i = 0; i < declared.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    if (value.isTensor()) {
      look(value.toTensor(), writes(i));
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (element.isTensor()) look(element.toTensor(), writes(i));
      }
    }
  }
  if (weight) last_ = *weight;
  if (several) {
    const at::Device target = written ? *written : weight ? *weight : last_;
    const auto send = [&](const c10::IValue& value) -> c10::IValue {
      if (!value.isTensor() || !value.toTensor().defined()) return value;
      const at::Tensor& tensor = value.toTensor();
      if (tensor.is_cpu() && tensor.dim() == 0) return value;
      return tensor.to(target, /*non_blocking=*/false);
    };
    for (std::size_t i = 0; i < declared.size(); ++i) {
      c10::IValue& value = stack[first + i];
      if (writes(i)) continue;
      if (value.isTensor()) {
        value = send(value);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector())
          list.push_back(send(tensor).toTensor());
        value = std::move(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const c10::IValue& element : value.toListRef())
          list.push_back(send(element).toOptional<at::Tensor>());
        value = std::move(list);
      }
    }
  }
  op.redispatchBoxed(below, &stack);
}

}  // namespace accelerate::big_model
