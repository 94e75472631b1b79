#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/optim/optimizer.hpp>

#include "checkpoint/optimizer_slots.hpp"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <nlohmann/json.hpp>

#include <map>

namespace accelerate::checkpoints {

using torch::optim::Optimizer;

namespace {

// An option or a state that is no tensor.
PyValue to_python(const c10::IValue& value) {
  if (value.isNone()) return {};
  if (value.isBool()) return value.toBool();
  if (value.isDouble()) return value.toDouble();
  if (value.isInt()) return value.toInt();
  if (value.isString()) return value.toStringRef();
  PyList list;
  list.tuple = value.isTuple();
  if (list.tuple) {
    for (const c10::IValue& item : value.toTupleRef().elements())
      list.items.push_back(to_python(item));
  } else if (value.isDoubleList()) {
    for (const double item : value.toDoubleVector()) list.items.push_back(item);
  } else {
    for (const std::int64_t item : value.toIntVector()) list.items.push_back(item);
  }
  return list;
}

}  // namespace

PyValue python_state(const Json& description, const std::vector<NamedTensor>& whole) {
  std::map<std::string_view, const at::Tensor*> tensors;
  for (const NamedTensor& entry : whole) tensors.emplace(entry.name, &entry.tensor);
  PyDict state;
  PyList groups;
  std::int64_t index = 0;
  for (const Json& group : description.at("param_groups")) {
    PyDict saved;
    for (const auto& [key, value] : group.at("options").items())
      saved.add(key, to_python(from_json(value)));
    PyList indices;
    for (const Json& name : group.at("params")) {
      const auto found = description.at("state").find(name.get<std::string>());
      if (found != description.at("state").end()) {
        PyDict entries;
        for (const auto& [key, entry] : found->items()) {
          const std::string full = name.get<std::string>() + "/" + key;
          if (entry.at("kind") == kValue) {
            entries.add(key, to_python(from_json(entry.at("value"))));
          } else if (entry.at("kind") == kList) {
            PyList list;
            for (std::size_t i = 0; i < entry.at("shapes").size(); ++i) {
              const auto tensor = tensors.find(text::concat(full, ".", i));
              PyValue item;
              if (tensor != tensors.end()) item = *tensor->second;
              list.items.push_back(std::move(item));
            }
            entries.add(key, std::move(list));
          } else {
            entries.add(key, *tensors.at(full));
          }
        }
        state.add(index, std::move(entries));
      }
      indices.items.push_back(index++);
    }
    saved.add("params", std::move(indices));
    groups.items.push_back(std::move(saved));
  }
  PyDict all;
  all.add("state", std::move(state));
  all.add("param_groups", std::move(groups));
  return all;
}

namespace {

// A Python value as what an option of this kind is in C++.
c10::IValue like_option(const PyValue& value, const c10::IValue& own) {
  if (own.isDouble()) return value.as_double();
  if (own.isBool()) return value.as_bool();
  if (own.isInt()) return value.as_int();
  if (own.isTuple()) {
    std::vector<c10::IValue> items;
    for (std::size_t i = 0; i < value.as_list().size(); ++i)
      items.push_back(like_option(value.as_list()[i], own.toTupleRef().elements().at(i)));
    return c10::ivalue::Tuple::create(std::move(items));
  }
  if (own.isNone() && !value.is_none())
    return value.is<std::int64_t>() ? c10::IValue(value.as_int()) : c10::IValue(value.as_double());
  return own;
}

// What a process has of a state that is shaped like its parameter.
at::Tensor cut(const at::Tensor& whole, const Slot& slot) {
  const at::Tensor& leaf = slot.shard.tensor;
  const LocalTensor own =
      slot.like({}, at::empty_strided(leaf.sizes(), leaf.strides(),
                                      at::TensorOptions(leaf.device()).dtype(whole.scalar_type())));
  for (const PlacedBox& placed : own.boxes()) {
    at::Tensor values = whole;
    for (std::size_t d = 0; d < placed.box.sizes.size(); ++d)
      values =
          values.narrow(static_cast<std::int64_t>(d), placed.box.offsets[d], placed.box.sizes[d]);
    own.view(placed).copy_(values);
  }
  return own.tensor;
}

}  // namespace

IncomingOptimizerState::IncomingOptimizerState(Optimizer& optimizer,
                                               const std::vector<NamedModule>& modules,
                                               const PyValue& state_dict, const std::string& path)
    : impl_(new Impl{optimizer, {}, {}, std::nullopt}) {
  const auto refuse = [&](const auto&... what) {
    throw CheckpointError(text::concat("The optimizer's state in ", path, " does not fit a ",
                                       type_of(optimizer), ": ", what...),
                          path);
  };
  // LibTorch's count of steps is a number, that of our fused optimizers a tensor, as Python's.
  const bool step_is_tensor = dynamic_cast<const SkipsOnDevice*>(&optimizer) != nullptr;
  try {
    const torch::jit::Module own = saved_archive(optimizer);
    const auto slots = slots_of(optimizer, modules);
    const auto& groups = state_dict["param_groups"].as_list();
    const PyValue& states = state_dict["state"];
    if (groups.size() != slots.size()) {
      refuse("it has ", groups.size(), " parameter groups, and this optimizer has ", slots.size(),
             ".");
    }
    for (std::size_t g = 0; g < slots.size(); ++g) {
      const auto& indices = groups[g]["params"].as_list();
      if (indices.size() != slots[g].size()) {
        refuse("its parameter group ", g, " has ", indices.size(), " parameters, and here it has ",
               slots[g].size(), ".");
      }
      auto& options = impl_->options.emplace_back();
      const Json present = options_of(
          own.attr("param_groups").toModule().attr("param_groups/" + std::to_string(g)).toModule(),
          type_of(optimizer));
      for (const auto& [key, value] : present.items()) {
        const PyValue* given = groups[g].as_dict().find(key);
        const c10::IValue here = from_json(value);
        options.emplace(key, given == nullptr ? here : like_option(*given, here));
      }
      auto& incoming = impl_->states.emplace_back();
      for (std::size_t p = 0; p < slots[g].size(); ++p) {
        const Slot& slot = slots[g][p];
        auto& state = incoming.emplace_back();
        const PyValue* saved = states.as_dict().find(indices[p].as_int());
        if (saved == nullptr || slot.is_elsewhere()) continue;
        state.emplace();
        for (const auto& [key, value] : saved->as_dict().items) {
          const std::string& name = key.as_string();
          if (value.is_none()) continue;
          if (name == "step") {
            const double step =
                value.is<at::Tensor>() ? value.as_tensor().item<double>() : value.as_double();
            if (step_is_tensor) {
              state->emplace(
                  name, at::full({}, step,
                                 at::TensorOptions(slot.shard.tensor.device()).dtype(at::kFloat)));
            } else {
              state->emplace(name, static_cast<std::int64_t>(step));
            }
          } else if (!value.is<at::Tensor>()) {
            refuse("the state '", name, "' of '", slot.name, "' is a ", value.type_name(),
                   ", and a tensor was expected.");
          } else if (value.as_tensor().sizes() == at::IntArrayRef(slot.shard.placement.shape())) {
            state->emplace(name, cut(value.as_tensor(), slot));
          } else if (slot.is_whole()) {
            state->emplace(name,
                           value.as_tensor().to(slot.shard.tensor.device(), /*non_blocking=*/false,
                                                /*copy=*/true));
          } else {
            refuse("the state '", name, "' of '", slot.name, "' has shape [",
                   text::join(value.as_tensor().sizes()), "], and the parameter has [",
                   text::join(slot.shard.placement.shape()), "].");
          }
        }
        check_entries(optimizer, slot, *state, [&](const std::string& why) { refuse(why); });
      }
    }
  } catch (const DataError&) {
    std::throw_with_nested(
        CheckpointError(text::concat(path, " does not hold an optimizer's state_dict."), path));
  }
}

}  // namespace accelerate::checkpoints
