#include <accelerate/checkpoint/optimizer_state.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/checkpoint/together.hpp>
#include <accelerate/optim/adafactor.hpp>

#include "base/parse_json.hpp"
#include "checkpoint/archives.hpp"
#include "checkpoint/optimizer_slots.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <set>

namespace accelerate::checkpoints {
namespace {

using torch::optim::Optimizer;

bool is_like(const at::Tensor& state, const Slot& slot, const std::string& key) {
  const at::Tensor& leaf = slot.shard.tensor;
  // Of a parameter without dimensions, the count of steps looks like everything else.
  if (leaf.dim() == 0 && key == "step") return false;
  return state.sizes() == leaf.sizes() && slot.shard.placement.count() > 0;
}

std::string part_name(const std::string& name, const Slot& slot) {
  return text::concat(name, "@", slot.shard.placement.text());
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
      group.parts.push_back(whole_tensor(as, tensor));
    };
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      Json entry = Json::object();
      if (is_like(tensor, slot, key)) {
        entry["kind"] = kLike;
        group.parts.push_back(slot.like(name, tensor));
      } else {
        // A number for each step, say, is the same everywhere; what was computed from one part is
        // of use to the same part only.
        const bool same = tensor.dim() == 0 || slot.is_whole();
        entry["kind"] = same ? kWhole : kPart;
        entry["shape"] = tensor.sizes().vec();
        add_whole(same ? name : part_name(name, slot), tensor);
      }
      if (tensor.is_cpu() && !slot.shard.tensor.is_cpu()) entry["cpu"] = true;
      entries[key] = std::move(entry);
    } else if (value.isTensorList() && slot.is_whole()) {
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
    torch::jit::Module all = saved_archive(optimizer);
    const auto slots = slots_of(optimizer, modules);
    torch::jit::Module kept = all.attr("state").toModule();
    torch::jit::Module groups = all.attr("param_groups").toModule();
    Json group_list = Json::array();
    for (std::size_t g = 0; g < slots.size(); ++g) {
      torch::jit::Module saved = groups.attr("param_groups/" + std::to_string(g)).toModule();
      Json options = options_of(saved, type);
      Json names = Json::array();
      for (std::size_t p = 0; p < slots[g].size(); ++p) {
        const Slot& slot = slots[g][p];
        names.push_back(slot.name);
        const std::string key = std::to_string(reinterpret_cast<std::size_t>(
            optimizer.param_groups()[g].params()[p].unsafeGetTensorImpl()));
        // A process without elements of the parameter has nothing to say of it.
        if (!kept.hasattr(key) || slot.is_elsewhere()) continue;
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
      const Json other = parse_json(text);
      for (const auto& [parameter, entries] : other.items()) {
        if (!states.contains(parameter)) states[parameter] = entries;
      }
    }
  }
  // Said by name, so that a state that got lost is noticed.
  Json without_state = Json::array();
  for (const Json& parameters : result.description["param_groups"]) {
    for (const Json& parameter : parameters.at("params")) {
      if (!states.contains(parameter.get_ref<const std::string&>()))
        without_state.push_back(parameter);
    }
  }
  result.description["without_state"] = std::move(without_state);
  result.description["state"] = std::move(states);
  result.tensors.python = [description =
                               result.description](const std::vector<NamedTensor>& whole) {
    return python_state(description, whole);
  };
  return result;
}

// -------------------------------------------------------------------------------------- loading

IncomingOptimizerState::~IncomingOptimizerState() = default;
IncomingOptimizerState::IncomingOptimizerState(IncomingOptimizerState&&) noexcept = default;

namespace {

at::TensorOptions place_of(const io::Manifest& manifest, const std::string& group,
                           const std::string& name, const at::Tensor& leaf, bool on_cpu,
                           const std::string& path) {
  const io::SavedTensor* saved = manifest.find(group, name);
  if (saved == nullptr) {
    throw CheckpointError(
        text::concat("The checkpoint ", path, " lacks the optimizer's state '", name, "'."), path);
  }
  if (io::safetensors::bits(saved->dtype) % 8 != 0) {
    throw CheckpointError(
        text::concat("The optimizer's state '", name, "' in the checkpoint ", path, " has dtype ",
                     io::safetensors::name(saved->dtype), ", which no optimizer computes in."),
        path);
  }
  return at::TensorOptions()
      .dtype(tensor_dtype(saved->dtype))
      .device(on_cpu ? at::Device(at::kCPU) : leaf.device());
}

bool has_tensors_of(const io::Manifest& manifest, const std::string& group,
                    const std::string& parameter) {
  const auto tensors = manifest.groups.find(group);
  if (tensors == manifest.groups.end()) return false;
  const std::string prefix = parameter + "/";
  const auto first = tensors->second.lower_bound(prefix);
  return first != tensors->second.end() && first->first.starts_with(prefix);
}

void load_archive(Optimizer& optimizer, const torch::jit::Module& all) {
  torch::serialize::InputArchive archive;
  contents(archive) = all;
  // What the optimizer has of parameters that the archive has nothing of would stay.
  optimizer.state().clear();
  optimizer.load(archive);
}

}  // namespace

void check_entries(const Optimizer& optimizer, const Slot& slot,
                   const std::map<std::string, c10::IValue>& state,
                   const std::function<void(const std::string&)>& refuse) {
  const std::string type = type_of(optimizer);
  if (!type.starts_with("torch::optim::") && !type.starts_with("accelerate::optim::")) return;
  const at::Tensor& leaf = slot.shard.tensor;
  for (const auto& [key, value] : state) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const at::Tensor& tensor = value.toTensor();
    // These compute in real numbers, or in the parameter's complex ones, alone.
    if (!tensor.is_floating_point() && tensor.scalar_type() != leaf.scalar_type()) {
      refuse(text::concat("its state '", key, "' of '", slot.name, "' has dtype ",
                          c10::toString(tensor.scalar_type()), ", and numbers like ",
                          c10::toString(leaf.scalar_type()), " were expected."));
    }
  }
  const auto needs = [&](std::initializer_list<const char*> keys) {
    for (const char* key : keys) {
      const auto found = state.find(key);
      if (found != state.end() && found->second.isTensor() &&
          found->second.toTensor().sizes() == leaf.sizes())
        continue;
      refuse(text::concat("its state of '", slot.name, "' lacks '", key,
                          "', or has it in another shape."));
    }
  };
  if (type.find("Adam") != std::string::npos) needs({"exp_avg", "exp_avg_sq"});
  if (type.ends_with("::Adagrad")) needs({"sum"});
  if (type.ends_with("::RMSprop")) needs({"square_avg"});
}

std::string optimizer_difference(Optimizer& optimizer, const std::vector<NamedModule>& modules,
                                 const Json& description) {
  const auto saved_type = description.at("type").get<std::string>();
  if (saved_type != type_of(optimizer)) {
    return text::concat("it was saved from a ", saved_type, ", and this is a ", type_of(optimizer),
                        ". Prepare the same optimizer.");
  }
  const auto slots = slots_of(optimizer, modules);
  const Json& groups = description.at("param_groups");
  if (groups.size() != slots.size()) {
    return text::concat("it has ", groups.size(), " parameter groups, and this optimizer has ",
                        slots.size(), ".");
  }
  for (std::size_t g = 0; g < slots.size(); ++g) {
    std::set<std::string> saved_names, names;
    for (const Json& saved : groups.at(g).at("params"))
      saved_names.insert(saved.get<std::string>());
    for (const Slot& slot : slots[g]) names.insert(slot.name);
    if (names == saved_names) continue;
    std::vector<std::string> missing, unexpected;
    std::set_difference(names.begin(), names.end(), saved_names.begin(), saved_names.end(),
                        std::back_inserter(missing));
    std::set_difference(saved_names.begin(), saved_names.end(), names.begin(), names.end(),
                        std::back_inserter(unexpected));
    return text::concat(
        "its parameter group ", g,
        " has other parameters. Missing: ", missing.empty() ? "none" : text::join(missing),
        ". Unexpected: ", unexpected.empty() ? "none" : text::join(unexpected), ".");
  }
  return {};
}

IncomingOptimizerState::IncomingOptimizerState(Optimizer& optimizer,
                                               const std::vector<NamedModule>& modules,
                                               const Json& description, const std::string& name,
                                               Load& load)
    : impl_(new Impl{optimizer, {}, {}, std::nullopt}) {
  const std::string path = load.folder().string();
  const auto refuse = [&](const auto&... what) {
    throw CheckpointError(
        text::concat("The checkpoint ", path, " does not fit the ", name, ": ", what...), path);
  };
  try {
    if (const auto why = optimizer_difference(optimizer, modules, description); !why.empty())
      refuse(why);
    const auto slots = slots_of(optimizer, modules);
    const Json& groups = description.at("param_groups");
    const Json& states = description.at("state");
    std::set<std::string> without_state;
    for (const Json& each : description.value("without_state", Json::array()))
      without_state.insert(each.get<std::string>());
    // What the optimizer has already is filled again, so that there is never a second copy.
    const torch::jit::Module present = saved_archive(optimizer).attr("state").toModule();
    const auto present_states = [&](std::size_t g, std::size_t p) {
      const std::string parameter = std::to_string(reinterpret_cast<std::size_t>(
          optimizer.param_groups()[g].params()[p].unsafeGetTensorImpl()));
      std::optional<torch::jit::Module> state;
      if (present.hasattr(parameter)) state = present.attr(parameter).toModule();
      return state;
    };
    const auto present_state = [&](std::size_t g, std::size_t p, const std::string& key) {
      const auto state = present_states(g, p);
      return state && state->hasattr(key) && state->attr(key).isTensor()
                 ? state->attr(key).toTensor()
                 : at::Tensor();
    };
    for (std::size_t g = 0; g < slots.size(); ++g) {
      auto& options = impl_->options.emplace_back();
      for (const auto& [key, value] : groups.at(g).at("options").items())
        options.emplace(key, from_json(value));
      auto& incoming = impl_->states.emplace_back();
      for (const Slot& slot : slots[g]) {
        auto& state = incoming.emplace_back();
        if (!states.contains(slot.name)) {
          // Checkpoints of before do not say which parameters have none.
          if (description.contains("without_state") && !without_state.contains(slot.name))
            refuse("it lacks the state of '", slot.name, "'.");
          if (has_tensors_of(load.manifest(), name, slot.name))
            refuse("it has tensors of the state of '", slot.name, "', and says there is none.");
          continue;
        }
        if (slot.is_elsewhere()) {
          // Nothing of the parameter is here. Adagrad wants a state all the same.
          if (const auto had = present_states(g, incoming.size() - 1)) {
            state.emplace();
            for (const auto& attribute : had->named_attributes(/*recurse=*/false))
              state->emplace(attribute.name, attribute.value);
          }
          continue;
        }
        state.emplace();
        if (dynamic_cast<const optim::Adafactor*>(&optimizer) != nullptr &&
            states.at(slot.name).contains("variance") == (slot.shard.tensor.dim() > 1)) {
          refuse(
              "its state of '", slot.name,
              "' was computed from parts of the parameter that are cut otherwise: Adafactor keeps "
              "rows and columns of what a process has. Load it on as many processes, with the same "
              "strategy, as saved it.");
        }
        for (const auto& [key, entry] : states.at(slot.name).items()) {
          const auto kind = entry.at("kind").get<std::string>();
          const std::string full = slot.name + "/" + key;
          const auto whole = [&](const std::string& as, const Json& shape) {
            const auto sizes = shape.get<std::vector<std::int64_t>>();
            // Before memory is made for it.
            if (const auto* saved = load.manifest().find(name, as);
                saved != nullptr && saved->shape != sizes)
              refuse("the description of '", as, "' has another shape than the tensor.");
            at::Tensor tensor =
                at::empty(sizes, place_of(load.manifest(), name, as, slot.shard.tensor,
                                          entry.contains("cpu"), path));
            load.want(name, whole_tensor(as, tensor), /*fresh=*/true);
            return tensor;
          };
          if (kind == kValue) {
            state->emplace(key, from_json(entry.at("value")));
          } else if (kind == kLike) {
            const auto tensor_options = place_of(load.manifest(), name, full, slot.shard.tensor,
                                                 entry.contains("cpu"), path);
            // Strides too: a step over tensors that lie alike adds in the same order.
            const at::Tensor& leaf = slot.shard.tensor;
            at::Tensor tensor = present_state(g, incoming.size() - 1, key);
            const bool fresh = !tensor.defined() || tensor.sizes() != leaf.sizes() ||
                               tensor.strides() != leaf.strides() ||
                               tensor.scalar_type() != tensor_options.dtype().toScalarType() ||
                               tensor.device() != tensor_options.device();
            if (fresh) tensor = at::empty_strided(leaf.sizes(), leaf.strides(), tensor_options);
            load.want(name, slot.like(full, tensor), fresh);
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
        check_entries(optimizer, slot, *state, [&](const std::string& why) { refuse(why); });
      }
    }
  } catch (const Json::exception&) {
    std::throw_with_nested(CheckpointError(
        text::concat("The description of the ", name, " in the checkpoint ", path, " is not one."),
        path));
  }
}

void IncomingOptimizerState::apply() {
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
  put(groups, "param_groups/size", at::tensor(static_cast<std::int64_t>(impl_->states.size())));
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
  torch::jit::Module before = saved_archive(optimizer);
  try {
    load_archive(optimizer, all);
  } catch (const std::exception&) {
    load_archive(optimizer, before);
    std::throw_with_nested(CheckpointError(
        text::concat("The ", type_of(optimizer), " did not take the state of the checkpoint."),
        ""));
  }
  impl_->before = std::move(before);
}

void IncomingOptimizerState::undo() noexcept {
  if (!impl_->before) return;
  try {
    load_archive(impl_->optimizer, *impl_->before);
  } catch (const std::exception& error) {
    // It gave this out itself.
    log::error(text::concat("An optimizer did not take its own state back: ", describe(error)));
  }
  impl_->before.reset();
}

}  // namespace accelerate::checkpoints
