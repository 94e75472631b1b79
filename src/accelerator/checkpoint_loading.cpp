#include <accelerate/accelerator/checkpointing.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/optimizer_state.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/checkpoint/together.hpp>
#include <accelerate/core/random.hpp>

#include "accelerator/checkpoint_names.hpp"
#include "accelerator/exact_json.hpp"

#include <ATen/core/grad_mode.h>
#include <nlohmann/json.hpp>

#include <algorithm>

namespace accelerate::detail {

namespace fs = std::filesystem;
using checkpoints::together;

std::vector<checkpoints::NamedModule> named_modules(const Prepared& prepared) {
  std::vector<checkpoints::NamedModule> modules;
  for (std::size_t i = 0; i < prepared.modules.size(); ++i)
    modules.push_back({i == 0 ? "" : numbered("model", i) + "/", prepared.modules[i]});
  return modules;
}

namespace {

// The same processes go on adding gradients in the same order.
void set_layouts(const Json& about, const Prepared& prepared, int world_size) {
  if (about.value("world_size", 0) != world_size ||
      about.value("strategy", "") != prepared.strategy)
    return;
  const Json layouts = about.value("reduction_layouts", Json::array());
  for (std::size_t i = 0; i < std::min(layouts.size(), prepared.modules.size()); ++i) {
    prepared.modules[i]->set_reduction_layout(
        layouts[i].get<std::vector<std::vector<std::int64_t>>>());
  }
}

// A folder of Python Accelerate's save_state.
bool is_of_python(const fs::path& folder) {
  std::error_code ignored;
  // Ours has at least one of these; without the manifest it is damaged.
  const fs::path there = io::replaced_folder(folder);
  for (const std::string_view own :
       {io::Manifest::kFileName, std::string_view("random_states_0.json")}) {
    if (fs::exists(there / own, ignored)) return false;
  }
  return fs::exists(folder / "model.safetensors", ignored) ||
         fs::exists(folder / "pytorch_model.bin", ignored);
}

// Throws CheckpointError unless the names and shapes are those of the module.
void check_state(const parallel::Strategy& strategy, const std::vector<NamedTensor>& state,
                 const fs::path& folder, bool strict) {
  std::map<std::string, std::vector<std::int64_t>> given;
  for (const NamedTensor& entry : state) given.emplace(entry.name, entry.tensor.sizes().vec());
  const checkpoints::TensorGroup group = checkpoints::module_group(strategy, "model");
  std::map<std::string, std::vector<std::int64_t>> wanted;
  for (const auto& shard : strategy.shards()) wanted.emplace(shard.name, shard.global_shape);
  for (const NamedTensor& buffer : strategy.module().buffers())
    wanted.emplace(buffer.name, buffer.tensor.sizes().vec());
  std::vector<std::string> wrong;
  for (const auto& [name, shape] : wanted) {
    std::vector<std::string> names{name};
    for (const auto& [other, first] : group.aliases) {
      if (first == name) names.push_back(other);
    }
    const auto found = std::find_if(names.begin(), names.end(),
                                    [&](const std::string& one) { return given.contains(one); });
    if (found == names.end()) {
      if (strict) wrong.push_back("'" + name + "' is missing");
    } else if (given[*found] != shape) {
      wrong.push_back(text::concat("'", name, "' has shape [", text::join(given[*found]),
                                   "] in the checkpoint and [", text::join(shape), "] here"));
    }
  }
  for (const auto& [name, shape] : given) {
    if (strict && !wanted.contains(name) && !group.aliases.contains(name))
      wrong.push_back("'" + name + "' is unexpected");
  }
  if (wrong.empty()) return;
  throw CheckpointError(text::concat("The checkpoint ", folder.string(),
                                     " is not that of this model: ", text::join(wrong, "; "), "."),
                        folder.string());
}

}  // namespace

// Collective. It has no checksums; what the files hold is compared with what there is before
// anything is changed.
void Checkpointing::load_of_python(const fs::path& folder, const LoadStateOptions& options,
                                   const Prepared& prepared) {
  const auto modules = named_modules(prepared);
  std::vector<std::vector<NamedTensor>> states;
  std::vector<checkpoints::IncomingOptimizerState> optimizers;
  together(group_, "preparing to load a checkpoint of Python's", folder.string(), [&] {
    for (std::size_t i = 0; i < prepared.modules.size(); ++i) {
      const fs::path safetensors = folder / (numbered("model", i) + ".safetensors");
      const fs::path pickled = folder / (numbered("pytorch_model", i) + ".bin");
      states.push_back(fs::exists(safetensors)
                           ? checkpoints::load_file(safetensors)
                           : checkpoints::named_tensors(checkpoints::load_pt(pickled)));
      check_state(*prepared.modules[i], states.back(), folder, options.strict());
    }
    for (std::size_t i = 0; i < prepared.optimizers.size(); ++i) {
      const fs::path path = folder / (numbered("optimizer", i) + ".bin");
      optimizers.emplace_back(prepared.optimizers[i]->optimizer(), modules,
                              checkpoints::load_pt(path), path.string());
    }
    for (const auto& hook : load_hooks_) {
      if (*hook) (*hook)(folder);
    }
  });
  for (std::size_t i = 0; i < prepared.modules.size(); ++i)
    prepared.modules[i]->load_state_dict(states[i], {}, options.strict());
  for (auto& optimizer : optimizers) optimizer.apply();
  log::warning(text::concat("Loaded ", states.size(), " models and ", optimizers.size(),
                            " optimizers of ", folder.string(),
                            ", which Python Accelerate saved. Schedulers, samplers, random states "
                            "and custom objects in it "
                            "are Python's own and were left as they are here."));
}

Checkpointing::SavedRandom Checkpointing::read_random(const checkpoints::Load& load) const {
  const std::string own = text::concat("random_states_", savers_.world.rank(), ".json");
  const bool has_own = load.has_file(own);
  const std::string name = has_own ? own : "random_states_0.json";
  const Json saved = parse_exact(load.text(name), name);
  return {saved.at("seed").get<std::uint64_t>(), has_own ? saved.at("states") : Json()};
}

void Checkpointing::load_random(const SavedRandom& saved) const {
  const int rank = savers_.world.rank();
  const auto derive = [&] {
    // Another stream of numbers on each process, and the same in each resumed run.
    set_seed(saved.seed + 0x9E3779B97F4A7C15ULL * static_cast<std::uint64_t>(rank + 1));
  };
  if (saved.states.is_null()) {
    derive();
    log::info(text::concat("The checkpoint has no random state of process ", rank,
                           ", which was not there when it was saved: it is derived from the saved "
                           "seed and the rank."),
              log::Ranks::all);
    return;
  }
  Json states = saved.states;
  const RngState here = RngState::capture();
  std::vector<std::string> left_out, fresh;
  for (const auto& [device, state] : here.states()) {
    if (!states.contains(device)) fresh.push_back(device);
  }
  if (!fresh.empty()) derive();
  for (auto entry = states.begin(); entry != states.end();) {
    if (here.states().contains(entry.key())) {
      ++entry;
    } else {
      left_out.push_back(entry.key());
      entry = states.erase(entry);
    }
  }
  RngState::from_json(states).restore();
  if (!left_out.empty() || !fresh.empty()) {
    log::warning(text::concat(
        "The checkpoint was saved with other devices. Random states that are not used: ",
        left_out.empty() ? "none" : text::join(left_out),
        "; derived from the saved seed: ", fresh.empty() ? "none" : text::join(fresh), "."));
  }
}

fs::path Checkpointing::load(const fs::path& folder, const LoadStateOptions& options,
                             const Prepared& prepared) {
  wait();
  const fs::path target = folder.empty() ? newest_folder() : folder;
  // The first process decides, so that all do the same.
  if (group_.broadcast_bytes(is_of_python(target) ? "1" : "0") == "1") {
    load_of_python(target, options, prepared);
    return target;
  }
  checkpoints::Load load(group_, target);
  const auto present = live_loaders();
  const auto modules = named_modules(prepared);
  std::vector<checkpoints::IncomingOptimizerState> optimizers;
  std::vector<std::pair<std::size_t, std::vector<NamedTensor>>> tensor_objects;
  std::vector<Json> loaders, schedulers, objects;
  std::optional<Json> scaler;
  SavedRandom random;
  const std::string path = load.folder().string();
  const auto json = [&](const std::string& name) {
    return parse_exact(load.text(name + ".json"), name + ".json");
  };
  together(group_, "preparing to load a checkpoint", path, [&] {
    const Json& about = load.manifest().about;
    const auto compare = [&](const char* key, const char* what, std::size_t here) {
      const auto there = about.value(key, std::size_t{0});
      if (there == here) return;
      throw CheckpointError(text::concat("The checkpoint ", path, " has ", there, " ", what,
                                         ", and this program prepared or registered ", here,
                                         ". Prepare and register the same, in the same order."),
                            path);
    };
    compare("models", "models", modules.size());
    compare("optimizers", "optimizers", prepared.optimizers.size());
    compare("schedulers", "schedulers", schedulers_.size());
    const Json types = about.value("scheduler_types", Json::array());
    for (std::size_t i = 0; i < std::min(types.size(), schedulers_.size()); ++i) {
      if (types[i] == schedulers_[i].type) continue;
      throw CheckpointError(
          text::concat("The scheduler ", i, " of the checkpoint ", path, " is a ",
                       types[i].get<std::string>(), ", and this program prepared a ",
                       schedulers_[i].type, ". Prepare the same, in the same order."),
          path);
    }
    compare("loaders", "loaders", present.size());
    compare("objects", "custom objects", objects_.size());
    for (std::size_t i = 0; i < modules.size(); ++i)
      load.want_all(checkpoints::module_group(*prepared.modules[i], numbered("model", i)),
                    options.strict());
    for (std::size_t i = 0; i < prepared.optimizers.size(); ++i) {
      const std::string name = numbered("optimizer", i);
      optimizers.emplace_back(prepared.optimizers[i]->optimizer(), modules, json(name), name, load);
    }
    for (std::size_t i = 0; i < present.size(); ++i)
      loaders.push_back(own_state(json(numbered("sampler", i)), group_, path));
    for (std::size_t i = 0; i < schedulers_.size(); ++i)
      schedulers.push_back(json(numbered("scheduler", i)));
    if (prepared.scaler && load.has_file("scaler.json")) scaler = json("scaler");
    random = read_random(load);
    for (std::size_t i = 0; i < objects_.size(); ++i) {
      const std::string name = text::concat("custom_checkpoint_", i);
      if (objects_[i].load) {
        objects.push_back(json(name));
        continue;
      }
      objects.emplace_back();
      auto& tensors = tensor_objects.emplace_back(i, objects_[i].save_tensors()).second;
      checkpoints::TensorGroup group;
      group.name = name;
      for (NamedTensor& entry : tensors) {
        entry.tensor = entry.tensor.detach().clone();
        group.parts.push_back(checkpoints::whole_part(entry.name, entry.tensor));
        group.parts.back().fresh = true;
      }
      load.want_all(group, /*strict=*/true);
    }
  });
  load.verify();
  // What may refuse goes first, before a parameter changes on any process: hooks, the data, which
  // may be other data, and the program's own objects.
  together(group_, "loading a checkpoint", path, [&] {
    for (const auto& hook : load_hooks_) {
      if (*hook) (*hook)(load.folder());
    }
    for (std::size_t i = 0; i < present.size(); ++i) present[i]->load_state_dict(loaders[i]);
    const Json paces = load.manifest().about.value("scheduler_paces", Json::array());
    for (std::size_t i = 0; i < schedulers_.size(); ++i) {
      schedulers_[i].load(schedulers[i]);
      if (i < paces.size())
        schedulers_[i].scheduler.lock()->continue_pace(paces[i], batch_size(present));
    }
    for (std::size_t i = 0; i < objects_.size(); ++i) {
      if (objects_[i].load) objects_[i].load(objects[i]);
    }
  });
  together(group_, "loading the tensors of a checkpoint", path, [&] {
    load.read();
    for (auto& optimizer : optimizers) optimizer.apply();
    if (scaler) {
      prepared.scaler->load_state_dict(*scaler);
    } else if (prepared.scaler) {
      log::warning("The checkpoint was saved without a gradient scaler; it starts anew.");
    }
    for (const auto& [i, tensors] : tensor_objects) objects_[i].load_tensors(tensors);
    load_random(random);
    set_layouts(load.manifest().about, prepared, savers_.world.size());
    prepared.gradients->set_step(load.manifest().about.value("micro_batch", std::int64_t{0}));
  });
  for (const auto& module : prepared.modules) {
    // Nothing more to take; what was gathered before is out of date.
    module->load_state_dict({}, parallel::StateDictOptions().type(parallel::StateDictType::sharded),
                            /*strict=*/false);
  }
  if (const auto number = number_of(load.folder()); number >= 0)
    project_.iteration(std::max(project_.iteration(), number + 1));
  log::info(text::concat("Loaded the checkpoint ", path, "."));
  return load.folder();
}

}  // namespace accelerate::detail
