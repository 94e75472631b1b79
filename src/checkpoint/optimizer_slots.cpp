#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include "checkpoint/archives.hpp"
#include "checkpoint/optimizer_slots.hpp"

#include <c10/util/Type.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <typeinfo>
#include <unordered_map>

namespace accelerate::checkpoints {

using torch::optim::Optimizer;

std::string type_of(const Optimizer& optimizer) { return c10::demangle(typeid(optimizer).name()); }

// The slots of an optimizer's groups, in their order. Parameters of no prepared module are called
// by their place, and are whole.
std::vector<std::vector<Slot>> slots_of(Optimizer& optimizer,
                                        const std::vector<NamedModule>& modules) {
  std::unordered_map<const void*, Slot> known;
  for (const NamedModule& module : modules) {
    for (LocalTensor& shard : module.strategy->shards()) {
      const void* leaf = shard.tensor.unsafeGetTensorImpl();
      Slot slot{module.prefix + shard.name, std::move(shard)};
      known.emplace(leaf, std::move(slot));
    }
  }
  std::vector<std::vector<Slot>> groups;
  for (auto& group : optimizer.param_groups()) {
    auto& slots = groups.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const auto found = known.find(parameter.unsafeGetTensorImpl());
      if (found != known.end()) {
        slots.push_back(found->second);
      } else {
        slots.push_back({text::concat("param_groups.", groups.size() - 1, ".", slots.size()),
                         whole_tensor("", parameter)});
      }
    }
  }
  return groups;
}

// What an archive holds beside tensors. Nothing for other types.
std::optional<Json> to_json(const c10::IValue& value) {
  if (value.isNone()) return Json();
  if (value.isBool()) return Json(value.toBool());
  if (value.isInt()) return Json(value.toInt());
  if (value.isDouble()) {
    // JSON has no word for these.
    if (!std::isfinite(value.toDouble())) return Json{{"double", text::concat(value.toDouble())}};
    return Json(value.toDouble());
  }
  if (value.isString()) return Json{{"string", value.toStringRef()}};
  const bool tuple = value.isTuple();
  if (!tuple && !value.isDoubleList() && !value.isIntList()) return std::nullopt;
  Json items = Json::array();
  if (tuple) {
    for (const c10::IValue& item : value.toTupleRef().elements()) {
      auto json = to_json(item);
      if (!json) return std::nullopt;
      items.push_back(std::move(*json));
    }
    return Json{{"tuple", std::move(items)}};
  }
  if (value.isDoubleList()) {
    for (const double item : value.toDoubleVector()) items.push_back(*to_json(item));
    return Json{{"doubles", std::move(items)}};
  }
  for (const std::int64_t item : value.toIntVector()) items.push_back(item);
  return Json{{"ints", std::move(items)}};
}

c10::IValue from_json(const Json& json) {
  if (json.is_null()) return {};
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_float()) return json.get<double>();
  if (json.is_number_integer()) return json.get<std::int64_t>();
  if (json.contains("double")) {
    const auto& word = json.at("double").get_ref<const std::string&>();
    if (const auto number = text::to_double(word)) return *number;
    throw DataError("A number of the optimizer's state is '" + word + "'.");
  }
  if (json.contains("string")) return json.at("string").get<std::string>();
  if (json.contains("tuple")) {
    std::vector<c10::IValue> items;
    for (const Json& item : json.at("tuple")) items.push_back(from_json(item));
    return c10::ivalue::Tuple::create(std::move(items));
  }
  if (json.contains("doubles")) {
    c10::List<double> items;
    for (const Json& item : json.at("doubles")) items.push_back(from_json(item).toDouble());
    return items;
  }
  c10::List<std::int64_t> items;
  for (const Json& item : json.at("ints")) items.push_back(item.get<std::int64_t>());
  return items;
}

torch::jit::Module saved_archive(const Optimizer& optimizer) {
  torch::serialize::OutputArchive archive;
  try {
    optimizer.save(archive);
  } catch (const c10::Error&) {
    std::throw_with_nested(UnsupportedError(
        text::concat(type_of(optimizer),
                     " cannot give out its state: it does not implement save() as LibTorch's own "
                     "optimizers do.")));
  }
  return contents(archive);
}

// Of a parameter group of such an archive.
Json options_of(const torch::jit::Module& group, const std::string& type) {
  Json options = Json::object();
  for (const auto& attribute :
       group.attr("options").toModule().named_attributes(/*recurse=*/false)) {
    if (attribute.name == "training" || attribute.name == "_is_full_backward_hook") continue;
    auto json = to_json(attribute.value);
    if (!json) {
      throw UnsupportedError(text::concat("The option '", attribute.name, "' of ", type,
                                          " is of the type ", attribute.value.tagKind(),
                                          ", which a checkpoint cannot hold."));
    }
    options[attribute.name] = std::move(*json);
  }
  return options;
}

}  // namespace accelerate::checkpoints
