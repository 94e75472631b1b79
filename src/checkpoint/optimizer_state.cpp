#include <accelerate/checkpoint/optimizer_state.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/checkpoint/together.hpp>

#include "checkpoint/archives.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Type.h>
#include <nlohmann/json.hpp>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <set>
#include <typeinfo>
#include <unordered_map>

namespace accelerate::checkpoint {
namespace {

using torch::optim::Optimizer;

std::string type_of(const Optimizer& optimizer) {
  return c10::demangle(typeid(optimizer).name());
}

// A parameter as an optimizer of this process has it.
struct Slot {
  std::string name;
  parallel::ParameterShard shard;
};

// The slots of an optimizer's groups, in their order. Parameters of no prepared module are called by
// their place, and are whole.
std::vector<std::vector<Slot>> slots_of(Optimizer& optimizer,
                                        const std::vector<NamedModule>& modules) {
  std::unordered_map<const void*, Slot> known;
  for (const NamedModule& module : modules) {
    for (parallel::ParameterShard& shard : module.strategy->shards()) {
      const void* leaf = shard.leaf.unsafeGetTensorImpl();
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
                         {"", parameter.sizes().vec(), 0, parameter.numel(), parameter,
                          parameter.strides().vec()}});
      }
    }
  }
  return groups;
}

bool is_whole(const Slot& slot) {
  std::int64_t elements = 1;
  for (const std::int64_t size : slot.shard.global_shape) elements *= size;
  return slot.shard.elements == elements;
}

// ---------------------------------------------------------------------------- values as JSON

// What an archive holds beside tensors. Nothing for other types.
std::optional<Json> to_json(const c10::IValue& value) {
  if (value.isNone()) return Json();
  if (value.isBool()) return Json(value.toBool());
  if (value.isInt()) return Json(value.toInt());
  if (value.isDouble()) {
    // JSON has no word for these.
    if (!std::isfinite(value.toDouble())) return Json{{"double", std::to_string(value.toDouble())}};
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
  if (json.contains("double")) return std::stod(json.at("double").get<std::string>());
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

// ------------------------------------------------------------------------------------ kinds

// How a tensor of the state lies beside its parameter.
constexpr const char* kLike = "like";      // shaped like it and cut like it
constexpr const char* kWhole = "whole";    // of its own shape, the same on every process
constexpr const char* kPart = "part";      // of its own shape, of one part of the parameter
constexpr const char* kList = "list";      // several of the second kind
constexpr const char* kValue = "value";    // no tensor

bool is_like(const at::Tensor& state, const Slot& slot, const std::string& key) {
  const at::Tensor& leaf = slot.shard.leaf;
  // Of a parameter without dimensions, the count of steps looks like everything else.
  if (leaf.dim() == 0 && key == "step") return false;
  return state.sizes() == leaf.sizes() && slot.shard.elements > 0;
}

std::string part_name(const std::string& name, const Slot& slot) {
  return text::concat(name, "@", slot.shard.offset, "+", slot.shard.elements);
}

// Of one parameter: adds its tensors to `group` and says what there is.
Json describe_state(torch::jit::Module& state, const Slot& slot, TensorGroup& group,
                    const std::string& optimizer) {
  Json entries = Json::object();
  for (const auto& attribute : state.named_attributes(/*recurse=*/false)) {
    const std::string& key = attribute.name;
    const c10::IValue& value = attribute.value;
    if (key == "training" || key == "_is_full_backward_hook") continue;  // of every jit::Module
    const std::string name = slot.name + "/" + key;
    const auto add_whole = [&](const std::string& as, const at::Tensor& tensor) {
      group.parts.push_back(whole_part(as, tensor));
    };
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      Json entry = Json::object();
      if (is_like(tensor, slot, key)) {
        entry["kind"] = kLike;
        TensorPart part = part_of(slot.shard, tensor);
        part.name = name;
        group.parts.push_back(std::move(part));
      } else {
        // A number for each step, say, is the same everywhere; what was computed from one part is
        // of use to the same part only.
        const bool same = tensor.dim() == 0 || is_whole(slot);
        entry["kind"] = same ? kWhole : kPart;
        entry["shape"] = tensor.sizes().vec();
        add_whole(same ? name : part_name(name, slot), tensor);
      }
      if (tensor.is_cpu() && !slot.shard.leaf.is_cpu()) entry["cpu"] = true;
      entries[key] = std::move(entry);
    } else if (value.isTensorList() && is_whole(slot)) {
      Json shapes = Json::array();
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (tensor.defined()) add_whole(text::concat(name, ".", shapes.size()), tensor);
        shapes.push_back(tensor.defined() ? Json(tensor.sizes().vec()) : Json());
      }
      entries[key] = {{"kind", kList}, {"shapes", std::move(shapes)}};
    } else if (auto json = to_json(value)) {
      entries[key] = {{"kind", kValue}, {"value", std::move(*json)}};
    } else {
      throw UnsupportedError(text::concat(
          "The state '", key, "' that ", optimizer, " has of the parameter '", slot.name,
          "' is of the type ", value.tagKind(),
          ", which a checkpoint cannot hold. Use another optimizer, or keep its state yourself."));
    }
  }
  return entries;
}

}  // namespace

OptimizerState optimizer_state(Optimizer& optimizer, const std::vector<NamedModule>& modules,
                               const comm::Group& group, std::string name) {
  OptimizerState result;
  result.tensors.name = std::move(name);
  const std::string type = type_of(optimizer);
  Json states = Json::object();
  together(group, "saving an optimizer", "", [&] {
    torch::serialize::OutputArchive archive;
    try {
      optimizer.save(archive);
    } catch (const c10::Error&) {
      std::throw_with_nested(UnsupportedError(text::concat(
          type, " cannot give out its state: it does not implement save() as LibTorch's own "
                "optimizers do.")));
    }
    torch::jit::Module& all = contents(archive);
    const auto slots = slots_of(optimizer, modules);
    torch::jit::Module kept = all.attr("state").toModule();
    torch::jit::Module groups = all.attr("param_groups").toModule();
    Json group_list = Json::array();
    for (std::size_t g = 0; g < slots.size(); ++g) {
      torch::jit::Module saved = groups.attr("param_groups/" + std::to_string(g)).toModule();
      Json options = Json::object();
      for (const auto& attribute :
           saved.attr("options").toModule().named_attributes(/*recurse=*/false)) {
        if (attribute.name == "training" || attribute.name == "_is_full_backward_hook") continue;
        auto json = to_json(attribute.value);
        if (!json) {
          throw UnsupportedError(text::concat("The option '", attribute.name, "' of ", type,
                                              " is of the type ", attribute.value.tagKind(),
                                              ", which a checkpoint cannot hold."));
        }
        options[attribute.name] = std::move(*json);
      }
      Json names = Json::array();
      for (std::size_t p = 0; p < slots[g].size(); ++p) {
        const Slot& slot = slots[g][p];
        names.push_back(slot.name);
        const std::string key = std::to_string(reinterpret_cast<std::size_t>(
            optimizer.param_groups()[g].params()[p].unsafeGetTensorImpl()));
        // A process without elements of the parameter has nothing to say of it.
        if (!kept.hasattr(key) || (slot.shard.elements == 0 && !is_whole(slot))) continue;
        torch::jit::Module state = kept.attr(key).toModule();
        states[slot.name] = describe_state(state, slot, result.tensors, type);
      }
      group_list.push_back({{"options", std::move(options)}, {"params", std::move(names)}});
    }
    result.description = {{"type", type}, {"param_groups", std::move(group_list)}};
  });
  if (group.size() > 1) {
    // Each process knows the parameters that it has elements of.
    const auto others = group.all_gather_bytes(states.dump());
    for (const std::string& text : others) {
      const Json other = Json::parse(text);
      for (const auto& [parameter, entries] : other.items()) {
        if (!states.contains(parameter)) states[parameter] = entries;
      }
    }
  }
  result.description["state"] = std::move(states);
  return result;
}

// -------------------------------------------------------------------------------------- loading

struct IncomingOptimizerState::Impl {
  Optimizer& optimizer;
  /// By group and parameter; null where there is no state.
  std::vector<std::vector<std::optional<std::map<std::string, c10::IValue>>>> states;
  std::vector<std::map<std::string, c10::IValue>> options;
};

IncomingOptimizerState::~IncomingOptimizerState() = default;
IncomingOptimizerState::IncomingOptimizerState(IncomingOptimizerState&&) noexcept = default;

namespace {

at::TensorOptions options_of(const io::Manifest& manifest, const std::string& group,
                             const std::string& name, const at::Tensor& leaf, bool on_cpu,
                             const std::string& path) {
  const io::SavedTensor* saved = manifest.find(group, name);
  if (saved == nullptr) {
    throw CheckpointError(
        text::concat("The checkpoint ", path, " lacks the optimizer's state '", name, "'."), path);
  }
  return at::TensorOptions()
      .dtype(tensor_dtype(saved->dtype))
      .device(on_cpu ? at::Device(at::kCPU) : leaf.device());
}

}  // namespace

IncomingOptimizerState::IncomingOptimizerState(Optimizer& optimizer,
                                               const std::vector<NamedModule>& modules,
                                               const Json& description, const std::string& name,
                                               Load& load)
    : impl_(new Impl{optimizer, {}, {}}) {
  const std::string path = load.folder().string();
  const auto refuse = [&](const auto&... what) {
    throw CheckpointError(text::concat("The checkpoint ", path, " does not fit the ", name, ": ",
                                       what...),
                          path);
  };
  try {
    const auto saved_type = description.at("type").get<std::string>();
    if (saved_type != type_of(optimizer)) {
      refuse("it was saved from a ", saved_type, ", and this is a ", type_of(optimizer),
             ". Prepare the same optimizer.");
    }
    const auto slots = slots_of(optimizer, modules);
    const Json& groups = description.at("param_groups");
    if (groups.size() != slots.size()) {
      refuse("it has ", groups.size(), " parameter groups, and this optimizer has ", slots.size(),
             ".");
    }
    const Json& states = description.at("state");
    for (std::size_t g = 0; g < slots.size(); ++g) {
      std::set<std::string> saved_names, names;
      for (const Json& saved : groups[g].at("params")) saved_names.insert(saved.get<std::string>());
      for (const Slot& slot : slots[g]) names.insert(slot.name);
      if (names != saved_names) {
        std::vector<std::string> missing, unexpected;
        std::set_difference(names.begin(), names.end(), saved_names.begin(), saved_names.end(),
                            std::back_inserter(missing));
        std::set_difference(saved_names.begin(), saved_names.end(), names.begin(), names.end(),
                            std::back_inserter(unexpected));
        refuse("its parameter group ", g, " has other parameters. Missing: ",
               missing.empty() ? "none" : text::join(missing),
               ". Unexpected: ", unexpected.empty() ? "none" : text::join(unexpected), ".");
      }
      auto& options = impl_->options.emplace_back();
      for (const auto& [key, value] : groups[g].at("options").items())
        options.emplace(key, from_json(value));
      auto& incoming = impl_->states.emplace_back();
      for (const Slot& slot : slots[g]) {
        auto& state = incoming.emplace_back();
        if (!states.contains(slot.name) || (slot.shard.elements == 0 && !is_whole(slot))) continue;
        state.emplace();
        for (const auto& [key, entry] : states.at(slot.name).items()) {
          const auto kind = entry.at("kind").get<std::string>();
          const std::string full = slot.name + "/" + key;
          const auto whole = [&](const std::string& as, const Json& shape) {
            at::Tensor tensor = at::empty(
                shape.get<std::vector<std::int64_t>>(),
                options_of(load.manifest(), name, as, slot.shard.leaf, entry.contains("cpu"), path));
            load.want(name, whole_part(as, tensor));
            return tensor;
          };
          if (kind == kValue) {
            state->emplace(key, from_json(entry.at("value")));
          } else if (kind == kLike) {
            const auto tensor_options = options_of(load.manifest(), name, full, slot.shard.leaf,
                                                   entry.contains("cpu"), path);
            // Strides too: a step over tensors that lie alike adds in the same order.
            const at::Tensor& leaf = slot.shard.leaf;
            at::Tensor tensor = at::empty_strided(leaf.sizes(), leaf.strides(), tensor_options);
            TensorPart part = part_of(slot.shard, tensor);
            part.name = full;
            load.want(name, std::move(part));
            state->emplace(key, std::move(tensor));
          } else if (kind == kWhole) {
            state->emplace(key, whole(full, entry.at("shape")));
          } else if (kind == kPart) {
            const std::string as = part_name(full, slot);
            if (load.manifest().find(name, as) == nullptr) {
              refuse("the state '", key, "' of '", slot.name,
                     "' was computed from parts of the parameter, and this process has another "
                     "part of it. Load it on as many processes, with the same strategy, as saved "
                     "it.");
            }
            state->emplace(key, whole(as, entry.at("shape")));
          } else if (kind == kList) {
            c10::List<at::Tensor> list;
            std::size_t index = 0;
            for (const Json& shape : entry.at("shapes")) {
              const std::string as = text::concat(full, ".", index++);
              list.push_back(shape.is_null() ? at::Tensor() : whole(as, shape));
            }
            state->emplace(key, std::move(list));
          } else {
            refuse("its description has the unknown kind '", kind, "'.");
          }
        }
      }
    }
  } catch (const Json::exception&) {
    std::throw_with_nested(
        CheckpointError(text::concat("The description of the ", name, " in the checkpoint ", path,
                                     " is not one."),
                        path));
  }
}

void IncomingOptimizerState::apply() {
  using torch::serialize::InputArchive;
  Optimizer& optimizer = impl_->optimizer;
  const auto unit = std::make_shared<torch::jit::CompilationUnit>();
  const auto module = [&] {
    return torch::jit::Module("__torch__.Module", unit, /*shouldMangle=*/true);
  };
  const auto put = [](torch::jit::Module& into, const std::string& key, const c10::IValue& value) {
    into.register_attribute(key, value.isTensor() ? c10::TensorType::get() : value.type(), value);
  };
  torch::jit::Module all = module();
  put(all, "pytorch_version", "1.5.0");
  torch::jit::Module states = module();
  torch::jit::Module groups = module();
  put(groups, "param_groups/size",
      at::tensor(static_cast<std::int64_t>(impl_->states.size())));
  for (std::size_t g = 0; g < impl_->states.size(); ++g) {
    const auto& parameters = optimizer.param_groups()[g].params();
    torch::jit::Module group = module();
    put(group, "params/size", at::tensor(static_cast<std::int64_t>(parameters.size())));
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const std::string key =
          std::to_string(reinterpret_cast<std::size_t>(parameters[p].unsafeGetTensorImpl()));
      put(group, "params/" + std::to_string(p), key);
      if (!impl_->states[g][p]) continue;
      torch::jit::Module state = module();
      for (const auto& [name, value] : *impl_->states[g][p]) put(state, name, value);
      states.register_module(key, state);
    }
    torch::jit::Module options = module();
    for (const auto& [name, value] : impl_->options[g]) put(options, name, value);
    group.register_module("options", options);
    groups.register_module("param_groups/" + std::to_string(g), group);
  }
  all.register_module("state", states);
  all.register_module("param_groups", groups);
  InputArchive archive;
  contents(archive) = all;
  // What the optimizer has of parameters that the checkpoint has nothing of would stay.
  optimizer.state().clear();
  optimizer.load(archive);
}

}  // namespace accelerate::checkpoint
