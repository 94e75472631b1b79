#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <utility>
#include <vector>

namespace accelerate::tree {

/// A TorchScript value with each defined tensor in it, however deep, replaced by
/// `function(tensor)`.
template <class Function>
c10::IValue map_value(const c10::IValue& value, const Function& function) {
  if (value.isTensor())
    return value.toTensor().defined() ? c10::IValue(function(value.toTensor())) : value;
  if (value.isTuple()) {
    std::vector<c10::IValue> parts;
    for (const auto& part : value.toTupleRef().elements())
      parts.push_back(map_value(part, function));
    return value.toTupleRef().type()->schema() != nullptr
               ? c10::IValue(c10::ivalue::Tuple::createNamed(
                     std::move(parts), value.toTupleRef().type()->expect<c10::TupleType>()))
               : c10::IValue(c10::ivalue::Tuple::create(std::move(parts)));
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> parts;
    for (const at::Tensor& part : value.toTensorVector()) parts.push_back(function(part));
    return parts;
  }
  if (value.isList()) {
    auto parts = c10::impl::GenericList(value.toList().elementType());
    for (const c10::IValue& part : value.toListRef()) parts.push_back(map_value(part, function));
    return parts;
  }
  if (value.isGenericDict()) {
    const auto& dictionary = value.toGenericDict();
    c10::impl::GenericDict parts(dictionary.keyType(), dictionary.valueType());
    for (const auto& entry : dictionary)
      parts.insert(entry.key(), map_value(entry.value(), function));
    return parts;
  }
  return value;
}

}  // namespace accelerate::tree
