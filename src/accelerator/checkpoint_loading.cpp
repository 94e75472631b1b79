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
#include "comm/user_call.hpp"

#include <ATen/core/grad_mode.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <set>

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

// Whatever a checkpoint makes fail is its error, with the cause nested; only what is used in the
// wrong order is not.
template <class Work>
void as_checkpoint_error(const std::string& path, Work&& work) {
  try {
    work();
  } catch (const CheckpointError&) {
    throw;
  } catch (const StateError&) {
    throw;
  } catch (const std::exception&) {
    std::throw_with_nested(CheckpointError(
        text::concat("The checkpoint ", path, " cannot be loaded. Nothing was changed."), path));
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

// Leaves out names that the module does not have and that share the memory of one that it has:
// Python saves tied weights under every name, and a module here may have the weight once.
void leave_out_tied(std::vector<NamedTensor>& state, const parallel::Strategy& strategy) {
  std::set<std::string> known;
  for (const auto& shard : strategy.shards()) known.insert(shard.name);
  for (const auto& names : strategy.module().tied()) known.insert(names.begin(), names.end());
  const auto same = [](const at::Tensor& a, const at::Tensor& b) {
    return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
           a.strides() == b.strides();
  };
  std::vector<NamedTensor> kept;
  for (const NamedTensor& entry : state) {
    const bool repeats = !known.contains(entry.name) && entry.tensor.numel() > 0 &&
                         std::any_of(state.begin(), state.end(), [&](const NamedTensor& other) {
                           return known.contains(other.name) && same(other.tensor, entry.tensor);
                         });
    if (!repeats) kept.push_back(entry);
  }
  state = std::move(kept);
}

// Throws CheckpointError unless the names and shapes are those of the module.
void check_state(const parallel::Strategy& strategy, const std::vector<NamedTensor>& state,
                 const fs::path& folder, bool strict) {
  std::map<std::string, std::vector<std::int64_t>> given;
  for (const NamedTensor& entry : state) given.emplace(entry.name, entry.tensor.sizes().vec());
  const checkpoints::TensorGroup group = checkpoints::module_group(strategy, "model");
  std::map<std::string, std::vector<std::int64_t>> wanted;
  for (const auto& shard : strategy.shards()) wanted.emplace(shard.name, shard.placement.shape());
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
    as_checkpoint_error(folder.string(), [&] {
      for (std::size_t i = 0; i < prepared.modules.size(); ++i) {
        const fs::path safetensors = folder / (numbered("model", i) + ".safetensors");
        const fs::path pickled = folder / (numbered("pytorch_model", i) + ".bin");
        states.push_back(fs::exists(safetensors)
                             ? checkpoints::load_file(safetensors)
                             : checkpoints::named_tensors(checkpoints::load_pt(pickled)));
        leave_out_tied(states.back(), *prepared.modules[i]);
        check_state(*prepared.modules[i], states.back(), folder, options.strict());
      }
      for (std::size_t i = 0; i < prepared.optimizers.size(); ++i) {
        const fs::path path = folder / (numbered("optimizer", i) + ".bin");
        if (!options.strict() && !fs::exists(path)) continue;
        optimizers.emplace_back(prepared.optimizers[i]->optimizer(), modules,
                                checkpoints::load_pt(path), path.string());
      }
      for (const auto& hook : load_hooks_) {
        if (*hook) (*hook)(folder);
      }
    });
  });
  try {
    together(group_, "loading an optimizer of Python's", folder.string(), [&] {
      for (auto& optimizer : optimizers) optimizer.apply();
    });
  } catch (...) {
    for (auto& optimizer : optimizers) optimizer.undo();
    throw;
  }
  for (std::size_t i = 0; i < prepared.modules.size(); ++i)
    prepared.modules[i]->load_state_dict(states[i], {}, options.strict());
  log::warning(text::concat("Loaded ", states.size(), " models and ", optimizers.size(),
                            " optimizers of ", folder.string(),
                            ", which Python Accelerate saved. Schedulers, samplers, random states "
                            "and custom objects in it "
                            "are Python's own and were left as they are here."));
}

// Of this process; of the first, without states, where this one was not there.
struct Checkpointing::IncomingRandom {
  std::uint64_t seed = 0;
  bool own = false;
  RngState states;
  std::vector<std::string> not_used, fresh;
};

struct Checkpointing::Incoming {
  std::vector<std::shared_ptr<data::LoaderCore>> present;  // the loaders here
  std::vector<checkpoints::IncomingOptimizerState> optimizers;
  // By their places here.
  std::map<std::size_t, Json> loaders, schedulers, paces, objects;
  std::map<std::size_t, std::vector<NamedTensor>> tensor_objects;
  std::optional<Json> scaler;
  IncomingRandom random;
  // The same processes go on adding gradients in the same order.
  std::vector<std::vector<std::vector<std::int64_t>>> layouts;
  std::int64_t micro_batch = 0;
  // Without strict: what stays as it is here, and what of the checkpoint is not used.
  std::vector<std::string> left, unused;
};

Checkpointing::IncomingRandom Checkpointing::read_random(const checkpoints::Load& load) const {
  const std::string own = text::concat("random_states_", savers_.world.rank(), ".json");
  IncomingRandom random;
  random.own = load.has_file(own);
  const std::string name = random.own ? own : "random_states_0.json";
  const Json saved = parse_exact(load.text(name), name);
  random.seed = saved.at("seed").get<std::uint64_t>();
  if (!random.own) return random;
  Json states = saved.at("states");
  const RngState here = RngState::capture();
  for (const auto& [device, state] : here.states()) {
    if (!states.contains(device)) random.fresh.push_back(device);
  }
  for (auto entry = states.begin(); entry != states.end();) {
    if (here.states().contains(entry.key())) {
      ++entry;
    } else {
      random.not_used.push_back(entry.key());
      entry = states.erase(entry);
    }
  }
  random.states = RngState::from_json(states);
  random.states.check();
  return random;
}

void Checkpointing::set_random(const IncomingRandom& random) const {
  const int rank = savers_.world.rank();
  if (!random.own || !random.fresh.empty()) {
    // Another stream of numbers on each process, and the same in each resumed run.
    set_seed(random.seed + 0x9E3779B97F4A7C15ULL * static_cast<std::uint64_t>(rank + 1));
  }
  if (!random.own) {
    log::info(text::concat("The checkpoint has no random state of process ", rank,
                           ", which was not there when it was saved: it is derived from the saved "
                           "seed and the rank."),
              log::Ranks::all);
    return;
  }
  random.states.restore();
  if (random.not_used.empty() && random.fresh.empty()) return;
  const auto listed = [](const std::vector<std::string>& devices) {
    return devices.empty() ? std::string("none") : text::join(devices);
  };
  log::warning(text::concat(
      "The checkpoint was saved with other devices. Random states that are not used: ",
      listed(random.not_used), "; derived from the saved seed: ", listed(random.fresh), "."));
}

// Schedulers, loaders and custom objects: of each kind in their order. Without strict, those that
// fit.
void Checkpointing::read_parts(checkpoints::Load& load, bool strict, Incoming& incoming) const {
  const Json& about = load.manifest().about;
  const std::string path = load.folder().string();
  const auto json = [&](const std::string& name) {
    return parse_exact(load.text(name + ".json"), name + ".json");
  };
  const auto saved_count = [&](const char* key) { return about.value(key, std::size_t{0}); };
  const auto types_of = [&](const char* key) {
    return about.value(key, std::vector<std::string>());
  };

  const auto scheduler_types = types_of("scheduler_types");
  const auto paces = about.value("scheduler_paces", std::vector<Json>());
  for (std::size_t i = 0; i < schedulers_.size(); ++i) {
    const bool there = i < saved_count("schedulers");
    const bool known = there && i < scheduler_types.size();
    if (known && scheduler_types[i] != schedulers_[i].type && strict) {
      throw CheckpointError(
          text::concat("The scheduler ", i, " of the checkpoint ", path, " is a ",
                       scheduler_types[i], ", and this program prepared a ", schedulers_[i].type,
                       ". Prepare the same, in the same order."),
          path);
    }
    if (!there || (known && scheduler_types[i] != schedulers_[i].type)) {
      incoming.left.push_back(text::concat("scheduler ", i, " (", schedulers_[i].type, ")"));
    } else {
      incoming.schedulers.emplace(i, json(numbered("scheduler", i)));
      if (i < paces.size()) incoming.paces.emplace(i, paces[i]);
    }
  }
  for (std::size_t i = incoming.schedulers.size(); i < saved_count("schedulers"); ++i)
    incoming.unused.push_back(numbered("scheduler", i));

  // Without strict a loader may be another one's neighbour now: its name tells.
  std::vector<Json> saved_loaders;
  for (std::size_t i = 0; i < saved_count("loaders"); ++i)
    saved_loaders.push_back(own_state(json(numbered("sampler", i)), group_, path));
  std::vector<bool> taken(saved_loaders.size());
  for (std::size_t i = 0; i < incoming.present.size(); ++i) {
    std::size_t at = i;
    if (!strict) {
      const auto fits = [&](std::size_t j) {
        return j < saved_loaders.size() && !taken[j] &&
               saved_loaders[j].at("loader") == incoming.present[i]->name();
      };
      for (std::size_t j = 0; j < saved_loaders.size() && !fits(at); ++j) at = j;
      if (!fits(at)) at = saved_loaders.size();
    }
    if (at >= saved_loaders.size()) {
      incoming.left.push_back(text::concat("loader ", i, " ('", incoming.present[i]->name(), "')"));
      continue;
    }
    try {
      incoming.present[i]->check_state_dict(saved_loaders[at]);
    } catch (const DataError& error) {
      if (strict) throw;
      incoming.left.push_back(
          text::concat("loader ", i, " ('", incoming.present[i]->name(), "': ", error.what(), ")"));
      continue;
    }
    taken[at] = true;
    incoming.loaders.emplace(i, saved_loaders[at]);
  }
  for (std::size_t i = 0; i < taken.size(); ++i) {
    if (!taken[i]) incoming.unused.push_back(numbered("sampler", i));
  }

  const auto object_types = types_of("object_types");
  for (std::size_t i = 0; i < objects_.size(); ++i) {
    const bool same_type = i < saved_count("objects") &&
                           (i >= object_types.size() || object_types[i] == objects_[i].type);
    if (!strict && !same_type) {
      incoming.left.push_back(text::concat("custom object ", i, " (", objects_[i].type, ")"));
      continue;
    }
    const std::string name = text::concat("custom_checkpoint_", i);
    if (objects_[i].load) {
      incoming.objects.emplace(i, json(name));
      continue;
    }
    auto& tensors = incoming.tensor_objects[i] = objects_[i].save_tensors();
    checkpoints::TensorGroup group;
    group.name = name;
    for (NamedTensor& entry : tensors) {
      entry.tensor = entry.tensor.detach().clone();
      group.parts.push_back(whole_tensor(entry.name, entry.tensor));
    }
    load.want_all(group, /*strict=*/true, /*fresh=*/true);
  }
  for (std::size_t i = objects_.size(); i < saved_count("objects"); ++i)
    incoming.unused.push_back(text::concat("custom_checkpoint_", i));
}

Checkpointing::Incoming Checkpointing::read(checkpoints::Load& load,
                                            const LoadStateOptions& options,
                                            const Prepared& prepared) {
  Incoming incoming;
  incoming.present = live_loaders();
  const auto modules = named_modules(prepared);
  const Json& about = load.manifest().about;
  const std::string path = load.folder().string();
  const auto saved_count = [&](const char* key) { return about.value(key, std::size_t{0}); };
  const auto compare = [&](const char* key, const char* what, std::size_t here) {
    const auto there = saved_count(key);
    if (there == here || !options.strict()) return;
    throw CheckpointError(
        text::concat("The checkpoint ", path, " has ", there, " ", what,
                     ", and this program prepared or registered ", here,
                     ". Prepare and register the same, in the same order; or load with strict off "
                     "what both have."),
        path);
  };
  compare("models", "models", modules.size());
  compare("optimizers", "optimizers", prepared.optimizers.size());
  compare("schedulers", "schedulers", schedulers_.size());
  compare("loaders", "loaders", incoming.present.size());
  compare("objects", "custom objects", objects_.size());
  for (std::size_t i = 0; i < modules.size(); ++i) {
    const std::string name = numbered("model", i);
    if (i < saved_count("models")) {
      load.want_all(checkpoints::module_group(*prepared.modules[i], name), options.strict());
    } else {
      incoming.left.push_back(name);
    }
  }
  for (std::size_t i = modules.size(); i < saved_count("models"); ++i)
    incoming.unused.push_back(numbered("model", i));
  for (std::size_t i = 0; i < prepared.optimizers.size(); ++i) {
    const std::string name = numbered("optimizer", i);
    auto& optimizer = prepared.optimizers[i]->optimizer();
    if (i >= saved_count("optimizers")) {
      incoming.left.push_back(name);
      continue;
    }
    const Json description = parse_exact(load.text(name + ".json"), name + ".json");
    if (!options.strict()) {
      if (const auto why = checkpoints::optimizer_difference(optimizer, modules, description);
          !why.empty()) {
        incoming.left.push_back(text::concat(name, " (", why, ")"));
        continue;
      }
    }
    incoming.optimizers.emplace_back(optimizer, modules, description, name, load);
  }
  for (std::size_t i = prepared.optimizers.size(); i < saved_count("optimizers"); ++i)
    incoming.unused.push_back(numbered("optimizer", i));
  read_parts(load, options.strict(), incoming);
  if (prepared.scaler && load.has_file("scaler.json")) {
    incoming.scaler = parse_exact(load.text("scaler.json"), "scaler.json");
    prepared.scaler->check_state_dict(*incoming.scaler);
  }
  incoming.random = read_random(load);
  incoming.micro_batch = about.value("micro_batch", std::int64_t{0});
  if (incoming.micro_batch < 0) {
    throw CheckpointError(text::concat("The checkpoint ", path, " was saved after ",
                                       incoming.micro_batch, " micro-batches, which cannot be."),
                          path);
  }
  if (about.value("world_size", 0) == savers_.world.size() &&
      about.value("strategy", "") == prepared.strategy) {
    incoming.layouts = about.value("reduction_layouts", decltype(incoming.layouts)());
    incoming.layouts.resize(std::min(incoming.layouts.size(), prepared.modules.size()));
    for (std::size_t i = 0; i < incoming.layouts.size(); ++i)
      prepared.modules[i]->check_reduction_layout(incoming.layouts[i]);
  }
  return incoming;
}

namespace {

// What has been given its new state, and how to give it its old one back.
class Undo {
 public:
  void add(std::function<void()> step) { steps_.push_back(std::move(step)); }
  void run() noexcept {
    for (; !steps_.empty(); steps_.pop_back()) {
      try {
        steps_.back()();
      } catch (const std::exception& error) {
        log::error(
            text::concat("After a load that was refused, something did not take its own "
                         "state back: ",
                         describe(error)));
      }
    }
  }

 private:
  std::vector<std::function<void()>> steps_;
};

std::vector<NamedTensor> on_host(const std::vector<NamedTensor>& tensors) {
  std::vector<NamedTensor> copies;
  for (const NamedTensor& entry : tensors)
    copies.push_back({entry.name, entry.tensor.detach().to(at::kCPU, /*non_blocking=*/false,
                                                           /*copy=*/true)});
  return copies;
}

}  // namespace

fs::path Checkpointing::load(const fs::path& folder, const LoadStateOptions& options,
                             const Prepared& prepared) {
  const comm::UserCall call("load_state()");
  wait();
  const fs::path target = folder.empty() ? newest_folder() : folder;
  // The first process decides, so that all do the same.
  if (group_.broadcast_bytes(is_of_python(target) ? "1" : "0") == "1") {
    load_of_python(target, options, prepared);
    return target;
  }
  checkpoints::Load load(group_, target);
  const std::string path = load.folder().string();
  Incoming incoming;
  together(group_, "preparing to load a checkpoint", path,
           [&] { as_checkpoint_error(path, [&] { incoming = read(load, options, prepared); }); });
  load.verify();
  // What may refuse goes first, before a parameter changes on any process, and takes back what it
  // had when another does.
  Undo undo;
  try {
    together(group_, "loading a checkpoint", path, [&] {
      as_checkpoint_error(path, [&] {
        load.read_fresh();
        for (const auto& hook : load_hooks_) {
          if (*hook) (*hook)(load.folder());
        }
        for (auto& optimizer : incoming.optimizers) {
          optimizer.apply();
          undo.add([&optimizer] { optimizer.undo(); });
        }
        const auto give = [&](const Stateful& to, const Json& state) {
          undo.add([&to, before = to.save()] { to.load(before); });
          to.load(state);
        };
        for (const auto& [i, state] : incoming.schedulers) give(schedulers_[i], state);
        const std::int64_t batch = batch_size(incoming.present);
        for (const auto& [i, pace] : incoming.paces) {
          const auto scheduler = schedulers_[i].scheduler.lock();
          undo.add([scheduler, batch, before = scheduler->pace(batch)] {
            scheduler->continue_pace(before, batch);
          });
          scheduler->continue_pace(pace, batch);
        }
        for (const auto& [i, state] : incoming.objects) give(objects_[i], state);
        for (const auto& [i, tensors] : incoming.tensor_objects) {
          const Stateful& object = objects_[i];
          undo.add(
              [&object, before = on_host(object.save_tensors())] { object.load_tensors(before); });
          object.load_tensors(tensors);
        }
      });
    });
  } catch (...) {
    undo.run();
    throw;
  }
  together(group_, "loading the tensors of a checkpoint", path, [&] {
    load.read();
    for (const auto& [i, state] : incoming.loaders) incoming.present[i]->load_state_dict(state);
    if (incoming.scaler) {
      prepared.scaler->load_state_dict(*incoming.scaler);
    } else if (prepared.scaler) {
      log::warning("The checkpoint was saved without a gradient scaler; it starts anew.");
    }
    set_random(incoming.random);
    for (std::size_t i = 0; i < incoming.layouts.size(); ++i)
      prepared.modules[i]->set_reduction_layout(incoming.layouts[i]);
    prepared.gradients->set_step(incoming.micro_batch);
  });
  for (const auto& module : prepared.modules) {
    // Nothing more to take; what was gathered before is out of date.
    module->load_state_dict({}, parallel::StateDictOptions().type(parallel::StateDictType::sharded),
                            /*strict=*/false);
  }
  if (const auto number = number_of(load.folder()); number >= 0)
    project_.iteration(std::max(project_.iteration(), number + 1));
  if (!incoming.left.empty() || !incoming.unused.empty()) {
    log::warning(text::concat("What this program and the checkpoint ", path,
                              " both have was loaded. Left as it is here: ",
                              incoming.left.empty() ? "nothing" : text::join(incoming.left),
                              "; not used of the checkpoint: ",
                              incoming.unused.empty() ? "nothing" : text::join(incoming.unused),
                              "."));
  }
  log::info(text::concat("Loaded the checkpoint ", path, "."));
  return load.folder();
}

}  // namespace accelerate::detail
