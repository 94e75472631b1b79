#include <accelerate/accelerator/checkpointing.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/optimizer_state.hpp>
#include <accelerate/checkpoint/together.hpp>
#include <accelerate/core/random.hpp>

#include "accelerator/checkpoint_names.hpp"
#include "accelerator/exact_json.hpp"
#include "base/parse_json.hpp"
#include "comm/user_call.hpp"

#include <ATen/Context.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <set>
#include <thread>

namespace accelerate::detail {

namespace fs = std::filesystem;
using checkpoints::together;

// ------------------------------------------------------------------------------------- what there
// is

struct Checkpointing::InFlight {
  std::unique_ptr<checkpoints::Save> save;
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

void Checkpointing::add_scheduler(Stateful scheduler) {
  const auto place = std::find_if(schedulers_.begin(), schedulers_.end(), [&](const auto& known) {
    return known.identity == scheduler.identity;
  });
  if (place != schedulers_.end()) {
    *place = std::move(scheduler);
  } else {
    schedulers_.push_back(std::move(scheduler));
  }
}

void Checkpointing::add_loader(const std::shared_ptr<data::LoaderCore>& loader) {
  const auto present = live_loaders();
  if (std::find(present.begin(), present.end(), loader) == present.end())
    loaders_.push_back(loader);
}

std::vector<std::shared_ptr<data::LoaderCore>> Checkpointing::live_loaders() {
  std::erase_if(schedulers_, [](const Stateful& each) { return each.scheduler.expired(); });
  std::erase_if(loaders_, [](const auto& each) { return each.expired(); });
  std::vector<std::shared_ptr<data::LoaderCore>> loaders;
  for (const auto& each : loaders_) loaders.push_back(each.lock());
  return loaders;
}

void Checkpointing::add_object(Stateful object) {
  for (const Stateful& known : objects_) {
    if (known.identity == object.identity)
      throw StateError("register_for_checkpointing() was given an object that it has already.");
  }
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

// -------------------------------------------------------------------------------------------
// folders

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
          "save_state() was called without a folder, and automatic_checkpoint_naming is off. Name "
          "a "
          "folder, or switch it on in ProjectConfiguration.");
    }
    const fs::path parent = checkpoints();
    if (group_.rank() != 0) return;
    if (project_lock_ == nullptr) project_lock_ = lock_of_project(parent);
    std::int64_t number = project_.iteration();
    for (const auto& [taken, folder] : numbered_folders(parent))
      number = std::max(number, taken + 1);
    name = checkpoint_name(number);
    // What a process that died left.
    if (!fs::is_directory(parent)) return;
    for (const std::string& left : io::names_in(parent)) {
      const fs::path path = left;
      if (!left.starts_with(".checkpoint_") ||
          (path.extension() != ".partial" && path.extension() != ".lock"))
        continue;
      const auto lock = checkpoints::lock_of(parent / path.stem().string().substr(1));
      if (path.extension() == ".partial") io::delete_path(parent / left);
    }
    for (const auto& [taken, folder] : numbered_folders(parent)) finish_deleting(folder);
  });
  return checkpoints() / group_.broadcast_bytes(name);
}

fs::path Checkpointing::newest_folder() const {
  std::string name;
  together(savers_.world, "looking for a checkpoint", project_.project_dir().string(), [&] {
    if (group_.rank() == 0) name = newest_checkpoint(checkpoints()).filename().string();
  });
  // With a folder on each node, the newest that all have: a kill can fall between two nodes.
  std::int64_t newest = std::numeric_limits<std::int64_t>::max();
  for (const std::string& one : savers_.world.all_gather_bytes(name)) {
    if (!one.empty()) newest = std::min(newest, number_of(one));
  }
  return checkpoints() / checkpoint_name(newest);
}

std::optional<fs::path> Checkpointing::best() const {
  const comm::UserCall call("best_checkpoint()");
  std::string name;
  together(savers_.world, "looking for the best checkpoint", project_.project_dir().string(), [&] {
    if (group_.rank() != 0) return;
    if (const auto found = best_checkpoint(checkpoints(), project_))
      name = found->filename().string();
  });
  name = group_.broadcast_bytes(name);
  if (name.empty()) return std::nullopt;
  return checkpoints() / name;
}

// --------------------------------------------------------------------------------------------
// saving

std::unique_ptr<checkpoints::Save> Checkpointing::collect(const fs::path& folder,
                                                          const SaveStateOptions& options,
                                                          const Prepared& prepared,
                                                          std::int64_t number) {
  auto save = std::make_unique<checkpoints::Save>(group_, folder);
  const auto add_json = [&](const std::string& name, const Json& state) {
    save->add_file(name + ".json", exact_text(state, name));
  };
  const bool first = group_.rank() == 0;
  const auto present = live_loaders();
  const auto modules = named_modules(prepared);
  for (std::size_t i = 0; i < prepared.modules.size(); ++i)
    save->add(checkpoints::module_group(*prepared.modules[i], numbered("model", i)));
  for (std::size_t i = 0; i < prepared.optimizers.size(); ++i) {
    auto state = checkpoints::optimizer_state(prepared.optimizers[i]->optimizer(), modules, group_,
                                              numbered("optimizer", i));
    save->add(std::move(state.tensors));
    add_json(numbered("optimizer", i), state.description);
  }
  Json layouts = Json::array();
  for (const auto& module : prepared.modules) layouts.push_back(module->reduction_layout());
  // Loaders of streams may stand at different places on each process.
  Json loaders = Json::array();
  for (const auto& loader : present) loaders.push_back(loader->state_dict());
  std::vector<Json> by_process;
  for (const std::string& text : group_.all_gather_bytes(loaders.dump()))
    by_process.push_back(parse_json(text));
  const auto random = Json{{"seed", at::globalContext().defaultGenerator(at::kCPU).current_seed()},
                           {"states", RngState::capture().to_json()}};
  std::map<int, Json> random_states{{savers_.world.rank(), random}};
  if (group_.size() != savers_.world.size()) {
    const auto all = savers_.world.all_gather_bytes(random.dump());
    for (std::size_t rank = 0; rank < all.size(); ++rank)
      random_states[static_cast<int>(rank)] = parse_json(all[rank]);
  }
  together(group_, "collecting the state to save", folder.string(), [&] {
    for (const auto& [rank, state] : random_states)
      add_json(text::concat("random_states_", rank), state);
    for (std::size_t i = 0; i < objects_.size(); ++i) {
      const std::string name = text::concat("custom_checkpoint_", i);
      if (objects_[i].save) {
        add_json(name, objects_[i].save());
      } else {
        checkpoints::TensorGroup tensors;
        tensors.name = name;
        for (const NamedTensor& entry : objects_[i].save_tensors()) {
          tensors.parts.push_back(whole_tensor(entry.name, entry.tensor));
          tensors.of_first_process.insert(entry.name);
        }
        save->add(std::move(tensors));
      }
    }
    if (!first) return;
    for (std::size_t i = 0; i < present.size(); ++i) {
      Json states = Json::array();
      for (const Json& process : by_process) states.push_back(process[i]);
      if (std::all_of(states.begin(), states.end(), [&](const Json& s) { return s == states[0]; }))
        states = Json::array({states[0]});
      add_json(numbered("sampler", i), states);
    }
    for (std::size_t i = 0; i < schedulers_.size(); ++i)
      add_json(numbered("scheduler", i), schedulers_[i].save());
    if (prepared.scaler) add_json("scaler", prepared.scaler->state_dict());
    Json types = Json::array(), paces = Json::array();
    for (const Stateful& scheduler : schedulers_) {
      types.push_back(scheduler.type);
      paces.push_back(scheduler.scheduler.lock()->pace(batch_size(present)));
    }
    Json object_types = Json::array();
    for (const Stateful& object : objects_) object_types.push_back(object.type);
    save->set_about({{"world_size", savers_.world.size()},
                     {"strategy", prepared.strategy},
                     {"reduction_layouts", layouts},
                     {"number", number},
                     {"metric", options.metric() ? Json(*options.metric()) : Json()},
                     {"micro_batch", prepared.gradients->step()},
                     {"models", prepared.modules.size()},
                     {"optimizers", prepared.optimizers.size()},
                     {"schedulers", schedulers_.size()},
                     {"scheduler_types", types},
                     {"scheduler_paces", paces},
                     {"loaders", present.size()},
                     {"objects", objects_.size()},
                     {"object_types", object_types}});
  });
  return save;
}

fs::path Checkpointing::save(const fs::path& folder, const SaveStateOptions& options,
                             const Prepared& prepared) {
  const comm::UserCall call("save_state()");
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
    write(*save, {group_, savers_.world}, numbered);
    return save->folder();
  }
  // The thread's collectives must not mix with those of training.
  if (!writing_) {
    const comm::Group world = savers_.world.split(0, savers_.world.rank(), "checkpoint");
    const bool one_folder = group_.size() == world.size();
    writing_ = {one_folder ? world : group_.split(0, group_.rank(), "checkpoint_node"), world};
  }
  together(savers_.world, "copying the state to save", target.string(),
           [&] { save->take_snapshot(); });
  auto started = std::make_unique<InFlight>();
  started->save = std::move(save);
  started->thread = std::thread([this, numbered, flight = started.get()] {
    try {
      write(*flight->save, *writing_, numbered);
    } catch (...) {
      flight->failure = std::current_exception();
    }
    flight->done = true;
  });
  in_flight_ = std::move(started);
  return in_flight_->save->folder();
}

void Checkpointing::write(checkpoints::Save& save, const Writers& writers, bool numbered) {
  const auto start = std::chrono::steady_clock::now();
  if (writers.folder.size() == writers.world.size()) {
    save.write(writers.folder);
  } else {
    std::exception_ptr failure;
    try {
      save.write(writers.folder);
    } catch (...) {
      failure = std::current_exception();
    }
    // No node deletes what another still needs.
    together(writers.world, "saving a checkpoint on each node", save.folder().string(), [&] {
      if (failure) std::rethrow_exception(failure);
    });
  }
  if (numbered) tidy(writers.folder, save.folder());
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
  checkpoints::Load(group, newest).verify();
  together(group, "deleting old checkpoints", parent.string(), [&] {
    if (group.rank() != 0) return;
    for (const Json& name : parse_json(text)) delete_checkpoint(parent / name.get<std::string>());
  });
}

}  // namespace accelerate::detail
