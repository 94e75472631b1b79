#include <accelerate/accelerator/checkpointing.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/optimizer_state.hpp>
#include <accelerate/checkpoint/together.hpp>
#include <accelerate/core/random.hpp>

#include "accelerator/checkpoint_names.hpp"

#include <ATen/Context.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <set>
#include <thread>

namespace accelerate::detail {

namespace fs = std::filesystem;
using checkpoint::together;

// ------------------------------------------------------------------------------------- what there is

struct Checkpointing::InFlight {
  std::unique_ptr<checkpoint::Save> save;
  std::thread thread;
  std::exception_ptr failure;
  std::atomic<bool> done{false};
};

Checkpointing::Checkpointing(ProjectConfiguration project, Savers savers)
    : project_(std::move(project)), savers_(std::move(savers)), group_(savers_.world) {
  if (project_.total_limit() && *project_.total_limit() < 1) {
    throw ConfigError(text::concat("total_limit is ", *project_.total_limit(),
                                   "; the newest checkpoint is always kept, so the least is 1."));
  }
  if (project_.iteration() < 0 || project_.keep_best() < 0)
    throw ConfigError("ProjectConfiguration has a negative iteration or keep_best.");
  if (project_.logging_dir().empty()) project_.logging_dir(project_.project_dir());
  if (project_.save_on_each_node() && savers_.num_nodes > 1)
    group_ = savers_.world.split(savers_.node_rank, savers_.local_rank, "node");
}

Checkpointing::~Checkpointing() {
  if (in_flight_ == nullptr) return;
  in_flight_->thread.join();
  if (!in_flight_->failure) return;
  try {
    std::rethrow_exception(in_flight_->failure);
  } catch (const std::exception& error) {
    log::error(text::concat("The last checkpoint could not be saved: ", describe(error)));
  }
}

namespace {

template <class List, class T>
bool known(const List& list, const T* identity) {
  return std::any_of(list.begin(), list.end(),
                     [&](const auto& one) { return one.identity == identity; });
}

}  // namespace

void Checkpointing::add_scheduler(Stateful scheduler) {
  if (!known(schedulers_, scheduler.identity)) schedulers_.push_back(std::move(scheduler));
}

void Checkpointing::add_loader(std::shared_ptr<data::LoaderCore> loader) {
  if (std::find(loaders_.begin(), loaders_.end(), loader) == loaders_.end())
    loaders_.push_back(std::move(loader));
}

void Checkpointing::add_object(Stateful object) {
  if (known(objects_, object.identity))
    throw StateError("register_for_checkpointing() was given an object that it has already.");
  objects_.push_back(std::move(object));
}

HookHandle Checkpointing::add_save_hook(StateHook hook) {
  save_hooks_.push_back(std::make_shared<StateHook>(std::move(hook)));
  return HookHandle(save_hooks_.back());
}

HookHandle Checkpointing::add_load_hook(StateHook hook) {
  load_hooks_.push_back(std::make_shared<StateHook>(std::move(hook)));
  return HookHandle(load_hooks_.back());
}

void Checkpointing::forget_prepared() {
  wait();
  schedulers_.clear();
  loaders_.clear();
}

void Checkpointing::wait() {
  if (in_flight_ == nullptr) return;
  in_flight_->thread.join();
  const auto ended = std::move(in_flight_);
  if (ended->failure) std::rethrow_exception(ended->failure);
}

SaveProgress Checkpointing::progress() const {
  if (in_flight_ == nullptr) return {};
  return {!in_flight_->done, in_flight_->save->written_bytes(), in_flight_->save->total_bytes()};
}

// ------------------------------------------------------------------------------------------- folders

fs::path Checkpointing::checkpoints() const {
  if (project_.project_dir().empty()) {
    throw ConfigError(
        "No folder was given for the checkpoint, and the project has none either. Name one, or set "
        "ProjectConfiguration's project_dir and automatic_checkpoint_naming.");
  }
  return project_.project_dir() / "checkpoints";
}

fs::path Checkpointing::next_folder() {
  std::string name;
  together(group_, "naming a checkpoint", project_.project_dir().string(), [&] {
    if (!project_.automatic_checkpoint_naming()) {
      throw ConfigError(
          "save_state() was called without a folder, and automatic_checkpoint_naming is off. Name a "
          "folder, or switch it on in ProjectConfiguration.");
    }
    const fs::path parent = checkpoints();
    if (group_.rank() != 0) return;
    std::int64_t number = project_.iteration();
    for (const auto& [taken, folder] : numbered_folders(parent))
      number = std::max(number, taken + 1);
    name = checkpoint_name(number);
    // What a process that died left.
    if (!fs::is_directory(parent)) return;
    for (const std::string& left : io::names_in(parent)) {
      if (left.starts_with(".checkpoint_") && left.ends_with(".partial"))
        io::delete_path(parent / left);
    }
  });
  return checkpoints() / group_.broadcast_bytes(name);
}

fs::path Checkpointing::newest_folder() const {
  std::string name;
  together(group_, "looking for a checkpoint", project_.project_dir().string(), [&] {
    const fs::path parent = checkpoints();
    if (group_.rank() == 0) name = newest_checkpoint(parent).filename().string();
  });
  return checkpoints() / group_.broadcast_bytes(name);
}

// -------------------------------------------------------------------------------------------- saving

namespace {

std::vector<checkpoint::NamedModule> named(const Prepared& prepared) {
  std::vector<checkpoint::NamedModule> modules;
  for (std::size_t i = 0; i < prepared.modules.size(); ++i)
    modules.push_back({i == 0 ? "" : numbered("model", i) + "/", prepared.modules[i]});
  return modules;
}

std::string dumped(const Json& json) { return json.dump(1) + "\n"; }

}  // namespace

std::unique_ptr<checkpoint::Save> Checkpointing::collect(const fs::path& folder,
                                                         const SaveStateOptions& options,
                                                         const Prepared& prepared,
                                                         std::int64_t number) {
  auto save = std::make_unique<checkpoint::Save>(group_, folder);
  const bool first = group_.rank() == 0;
  const auto modules = named(prepared);
  for (std::size_t i = 0; i < prepared.modules.size(); ++i)
    save->add(checkpoint::module_group(*prepared.modules[i], numbered("model", i)));
  for (std::size_t i = 0; i < prepared.optimizers.size(); ++i) {
    auto state = checkpoint::optimizer_state(prepared.optimizers[i]->optimizer(), modules, group_,
                                             numbered("optimizer", i));
    save->add(std::move(state.tensors));
    save->add_file(numbered("optimizer", i) + ".json", dumped(state.description));
  }
  // Loaders of streams may stand at different places on each process.
  Json loaders = Json::array();
  for (const auto& loader : loaders_) loaders.push_back(loader->state_dict());
  std::vector<Json> by_process;
  for (const std::string& text : group_.all_gather_bytes(loaders.dump()))
    by_process.push_back(Json::parse(text));
  const auto random = Json{
      {"seed", at::globalContext().defaultGenerator(at::kCPU).current_seed()},
      {"states", RngState::capture().to_json()}};
  std::map<int, Json> random_states{{savers_.world.rank(), random}};
  if (group_.size() != savers_.world.size()) {
    const auto all = savers_.world.all_gather_bytes(random.dump());
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      random_states[static_cast<int>(rank)] = Json::parse(all[rank]);
  }
  together(group_, "collecting the state to save", folder.string(), [&] {
    for (const auto& [rank, state] : random_states)
      save->add_file(text::concat("random_states_", rank, ".json"), dumped(state));
    for (std::size_t i = 0; i < objects_.size(); ++i) {
      const std::string name = text::concat("custom_checkpoint_", i);
      if (objects_[i].save) {
        save->add_file(name + ".json", dumped(objects_[i].save()));
      } else {
        checkpoint::TensorGroup tensors;
        tensors.name = name;
        for (const NamedTensor& entry : objects_[i].save_tensors()) {
          tensors.parts.push_back(checkpoint::whole_part(entry.name, entry.tensor));
          tensors.parts.back().of_first_process = true;
        }
        save->add(std::move(tensors));
      }
    }
    if (!first) return;
    for (std::size_t i = 0; i < loaders_.size(); ++i) {
      Json states = Json::array();
      for (const Json& process : by_process) states.push_back(process[i]);
      if (std::all_of(states.begin(), states.end(), [&](const Json& s) { return s == states[0]; }))
        states = Json::array({states[0]});
      save->add_file(numbered("sampler", i) + ".json", dumped(states));
    }
    for (std::size_t i = 0; i < schedulers_.size(); ++i) {
      if (!schedulers_[i].save) {
        throw UnsupportedError(
            text::concat("The scheduler ", i,
                         " that was prepared gives no access to its state, so the run could not go "
                         "on from a checkpoint. Give it state_dict and load_state_dict, or use one "
                         "of <accelerate/optim/schedules.hpp>."));
      }
      save->add_file(numbered("scheduler", i) + ".json", dumped(schedulers_[i].save()));
    }
    if (prepared.scaler) save->add_file("scaler.json", dumped(prepared.scaler->state_dict()));
    save->set_about({{"world_size", savers_.world.size()},
                     {"strategy", prepared.strategy},
                     {"number", number},
                     {"metric", options.metric() ? Json(*options.metric()) : Json()},
                     {"micro_batch", prepared.gradients->step()},
                     {"models", prepared.modules.size()},
                     {"optimizers", prepared.optimizers.size()},
                     {"schedulers", schedulers_.size()},
                     {"loaders", loaders_.size()},
                     {"objects", objects_.size()}});
  });
  return save;
}

fs::path Checkpointing::save(const fs::path& folder, const SaveStateOptions& options,
                             const Prepared& prepared) {
  wait();
  if (!prepared.gradients->sync_gradients()) {
    log::warning(
        "save_state() was called within an accumulation window: the gradients of its micro-batches "
        "so far are not part of a checkpoint. Save after optimizer.step() to resume exactly.");
  }
  const bool numbered = folder.empty();
  const fs::path target = numbered ? next_folder() : folder;
  auto save = collect(target, options, prepared, numbered ? number_of(target) : -1);
  save->plan();
  together(group_, "a hook of save_state", target.string(), [&] {
    for (const auto& hook : save_hooks_) {
      if (*hook) (*hook)(save->partial_folder());
    }
  });
  if (numbered) project_.iteration(number_of(target) + 1);
  if (!options.asynchronous()) {
    write(*save, group_, numbered);
    return save->folder();
  }
  // The thread's collectives must not mix with those of training.
  if (!writing_) writing_ = group_.split(0, group_.rank(), "checkpoint");
  save->take_snapshot();
  in_flight_ = std::make_unique<InFlight>();
  in_flight_->save = std::move(save);
  in_flight_->thread = std::thread([this, numbered, flight = in_flight_.get()] {
    try {
      write(*flight->save, *writing_, numbered);
    } catch (...) {
      flight->failure = std::current_exception();
    }
    flight->done = true;
  });
  return in_flight_->save->folder();
}

void Checkpointing::write(checkpoint::Save& save, const comm::Group& group, bool numbered) {
  const auto start = std::chrono::steady_clock::now();
  save.write(group);
  if (numbered) tidy(group, save.folder());
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  log::info(text::concat("Saved the checkpoint ", save.folder().string(), " in ",
                         text::format_seconds(took.count()), "."));
}

void Checkpointing::tidy(const comm::Group& group, const fs::path& newest) {
  const fs::path parent = newest.parent_path();
  std::string text;
  together(group, "completing a checkpoint", parent.string(), [&] {
    if (group.rank() != 0) return;
    io::write_file(parent / "latest", newest.filename().string() + "\n");
    if (!project_.total_limit()) return;
    Json names = Json::array();
    for (const fs::path& old : superfluous(parent, project_))
      names.push_back(old.filename().string());
    text = names.dump();
  });
  text = group.broadcast_bytes(text);
  if (text.empty() || text == "[]") return;
  checkpoint::Load(group, newest).verify();
  together(group, "deleting old checkpoints", parent.string(), [&] {
    if (group.rank() != 0) return;
    for (const Json& name : Json::parse(text)) {
      // Under another name first: a checkpoint is complete, or none.
      const fs::path old = parent / name.get<std::string>();
      const fs::path gone = parent / ("." + name.get<std::string>() + ".partial");
      io::rename_durably(old, gone);
      io::delete_path(gone);
    }
  });
}

// ------------------------------------------------------------------------------------------- loading

void Checkpointing::load_random(const checkpoint::Load& load) const {
  const int rank = savers_.world.rank();
  const std::string own = text::concat("random_states_", rank, ".json");
  const auto derive = [&](std::uint64_t seed) {
    // Another stream of numbers on each process, and the same in each resumed run.
    set_seed(seed + 0x9E3779B97F4A7C15ULL * static_cast<std::uint64_t>(rank + 1));
  };
  if (!load.has_file(own)) {
    const Json first = Json::parse(load.text("random_states_0.json"));
    derive(first.at("seed").get<std::uint64_t>());
    log::info(text::concat("The checkpoint has no random state of process ", rank,
                           ", which was not there when it was saved: it is derived from the saved "
                           "seed and the rank."),
              log::Ranks::all);
    return;
  }
  const Json saved = Json::parse(load.text(own));
  Json states = saved.at("states");
  const RngState here = RngState::capture();
  std::vector<std::string> left_out, fresh;
  for (const auto& [device, state] : here.states()) {
    if (!states.contains(device)) fresh.push_back(device);
  }
  if (!fresh.empty()) derive(saved.at("seed").get<std::uint64_t>());
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
  checkpoint::Load load(group_, target);
  const auto modules = named(prepared);
  std::vector<checkpoint::IncomingOptimizerState> optimizers;
  std::vector<std::pair<std::size_t, std::vector<NamedTensor>>> tensor_objects;
  std::vector<Json> loaders, schedulers, objects;
  const std::string path = load.folder().string();
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
    compare("loaders", "loaders", loaders_.size());
    compare("objects", "custom objects", objects_.size());
    for (std::size_t i = 0; i < modules.size(); ++i)
      load.want_all(checkpoint::module_group(*prepared.modules[i], numbered("model", i)),
                    options.strict());
    for (std::size_t i = 0; i < prepared.optimizers.size(); ++i) {
      const std::string name = numbered("optimizer", i);
      optimizers.emplace_back(prepared.optimizers[i]->optimizer(), modules,
                              Json::parse(load.text(name + ".json")), name, load);
    }
    for (std::size_t i = 0; i < loaders_.size(); ++i)
      loaders.push_back(
          own_state(Json::parse(load.text(numbered("sampler", i) + ".json")), group_, path));
    for (std::size_t i = 0; i < schedulers_.size(); ++i)
      schedulers.push_back(Json::parse(load.text(numbered("scheduler", i) + ".json")));
    for (std::size_t i = 0; i < objects_.size(); ++i) {
      const std::string name = text::concat("custom_checkpoint_", i);
      if (objects_[i].load) {
        objects.push_back(Json::parse(load.text(name + ".json")));
        continue;
      }
      objects.emplace_back();
      auto& tensors = tensor_objects.emplace_back(i, objects_[i].save_tensors()).second;
      checkpoint::TensorGroup group;
      group.name = name;
      for (NamedTensor& entry : tensors) {
        entry.tensor = entry.tensor.detach().clone();
        group.parts.push_back(checkpoint::whole_part(entry.name, entry.tensor));
      }
      load.want_all(group, /*strict=*/true);
    }
  });
  load.verify();
  together(group_, "loading a checkpoint", path, [&] {
    for (const auto& hook : load_hooks_) {
      if (*hook) (*hook)(load.folder());
    }
    // What may be refused goes first: the data may be other data.
    for (std::size_t i = 0; i < loaders_.size(); ++i) loaders_[i]->load_state_dict(loaders[i]);
    load.read();
    for (auto& optimizer : optimizers) optimizer.apply();
    for (std::size_t i = 0; i < schedulers_.size(); ++i) schedulers_[i].load(schedulers[i]);
    if (prepared.scaler) {
      if (load.has_file("scaler.json")) {
        prepared.scaler->load_state_dict(Json::parse(load.text("scaler.json")));
      } else {
        log::warning("The checkpoint was saved without a gradient scaler; it starts anew.");
      }
    }
    for (std::size_t i = 0; i < objects_.size(); ++i) {
      if (objects_[i].load) objects_[i].load(objects[i]);
    }
    for (const auto& [i, tensors] : tensor_objects) objects_[i].load_tensors(tensors);
    load_random(load);
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
