#pragma once

#include <accelerate/accelerator/project.hpp>
#include <accelerate/base/json.hpp>
#include <accelerate/checkpoint/sharded.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/data/loader_core.hpp>
#include <accelerate/optim/gradient_state.hpp>
#include <accelerate/optim/optimizer.hpp>
#include <accelerate/optim/scheduler.hpp>
#include <accelerate/parallel/strategy.hpp>
#include <accelerate/precision/grad_scaler.hpp>

#include <c10/util/Type.h>
#include <torch/arg.h>

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace accelerate {

/// How one checkpoint is saved.
class SaveStateOptions {
  /// Return once the state was copied to host memory, and write it while training goes on. Default:
  /// false.
  TORCH_ARG(bool, asynchronous) = false;
  /// What ProjectConfiguration::keep_best goes by. Default: none.
  TORCH_ARG(std::optional<double>, metric) = std::nullopt;
};

/// How one checkpoint is loaded.
class LoadStateOptions {
  /// The program must have prepared and registered what the checkpoint has, and the modules the
  /// same parameters and buffers. Off: what both have is loaded, and a warning names the rest.
  /// Default: true.
  TORCH_ARG(bool, strict) = true;
};

/// Bytes of the checkpoint under way, of this process.
struct SaveProgress {
  bool running = false;
  std::uint64_t written = 0;
  std::uint64_t total = 0;
};

/// What `register_for_checkpointing` takes: an object whose `state_dict()` gives JSON, or named
/// tensors, and whose `load_state_dict` takes it back. It is saved as the first process has it.
template <class T>
concept Checkpointable = requires(T& object, const Json& json) {
  { object.state_dict() } -> std::convertible_to<Json>;
  object.load_state_dict(json);
}
|| requires(T& object, const std::vector<NamedTensor>& tensors) {
  { object.state_dict() } -> std::convertible_to<std::vector<NamedTensor>>;
  object.load_state_dict(tensors);
};

/// What a checkpoint's hook is told: the folder. When saving, files put there become part of the
/// checkpoint.
using StateHook = std::function<void(const std::filesystem::path& folder)>;

/// Takes a hook away again.
class HookHandle {
 public:
  explicit HookHandle(std::shared_ptr<StateHook> hook) : hook_(std::move(hook)) {}
  void remove() { *hook_ = nullptr; }

 private:
  std::shared_ptr<StateHook> hook_;
};

namespace detail {

/// An object with a state, of any type.
struct Stateful {
  const void* identity = nullptr;
  std::string type;
  std::function<Json()> save;
  std::function<void(const Json&)> load;
  /// In place of these, for objects whose state is tensors.
  std::function<std::vector<NamedTensor>()> save_tensors;
  std::function<void(const std::vector<NamedTensor>&)> load_tensors;
  /// Of a prepared scheduler, which lives as long as this.
  std::weak_ptr<SchedulerCore> scheduler;
};

template <Checkpointable T>
Stateful stateful(std::shared_ptr<T> object) {
  Stateful state;
  state.identity = object.get();
  state.type = c10::demangle(typeid(T).name());
  if constexpr (requires(const std::vector<NamedTensor>& tensors) {
                  { object->state_dict() } -> std::convertible_to<std::vector<NamedTensor>>;
                  object->load_state_dict(tensors);
                }) {
    state.save_tensors = [object] { return object->state_dict(); };
    state.load_tensors = [object](const std::vector<NamedTensor>& s) {
      object->load_state_dict(s);
    };
  } else {
    state.save = [object] { return Json(object->state_dict()); };
    state.load = [object](const Json& s) { object->load_state_dict(s); };
  }
  return state;
}

/// A prepared scheduler's state. It does not keep the scheduler alive.
template <SchedulerWithState S>
Stateful stateful_scheduler(const PreparedScheduler<S>& prepared) {
  Stateful state;
  S* scheduler = &prepared.scheduler();
  state.identity = scheduler;
  state.type = c10::demangle(typeid(*scheduler).name());
  state.scheduler = prepared.core();
  state.save = [scheduler] { return Json(state_of(*scheduler)); };
  state.load = [scheduler](const Json& json) { load_state_of(*scheduler, json); };
  return state;
}

/// What the program has prepared, as far as checkpoints go.
struct Prepared {
  std::vector<std::shared_ptr<parallel::Strategy>> modules;
  std::vector<std::shared_ptr<OptimizerCore>> optimizers;
  std::shared_ptr<GradScaler> scaler;
  GradientState* gradients = nullptr;
  std::string strategy;
};

/// The processes that save, and their place.
struct Savers {
  comm::Group world;
  int node_rank = 0;
  int num_nodes = 1;
  int local_rank = 0;
};

/// `save_state` and `load_state`: what an Accelerator keeps for them.
class Checkpointing {
 public:
  Checkpointing(ProjectConfiguration project, Savers savers);
  ~Checkpointing();

  /// Schedulers and loaders are held weakly: what the program has let go of is not saved. A
  /// scheduler takes the place of another at the same address, which must be gone.
  void add_scheduler(Stateful scheduler);
  void add_loader(const std::shared_ptr<data::LoaderCore>& loader);
  void add_object(Stateful object);
  HookHandle add_save_hook(StateHook hook);
  HookHandle add_load_hook(StateHook hook);

  std::filesystem::path save(const std::filesystem::path& folder, const SaveStateOptions& options,
                             const Prepared& prepared);
  std::filesystem::path load(const std::filesystem::path& folder, const LoadStateOptions& options,
                             const Prepared& prepared);
  std::optional<std::filesystem::path> best() const;
  void wait();
  SaveProgress progress() const;
  const ProjectConfiguration& project() const noexcept { return project_; }
  void forget_prepared();

 private:
  struct InFlight;
  // Drops what is gone, and returns the loaders that are left.
  std::vector<std::shared_ptr<data::LoaderCore>> live_loaders();
  std::filesystem::path checkpoints() const;
  std::filesystem::path next_folder();
  std::filesystem::path newest_folder() const;
  std::unique_ptr<checkpoints::Save> collect(const std::filesystem::path& folder,
                                             const SaveStateOptions& options,
                                             const Prepared& prepared, std::int64_t number);
  // Those who save into one folder, and all processes: the same unless each node has a folder.
  struct Writers {
    comm::Group folder;
    comm::Group world;
  };
  void write(checkpoints::Save& save, const Writers& writers, bool numbered);
  void tidy(const comm::Group& group, const std::filesystem::path& newest);
  void load_of_python(const std::filesystem::path& folder, const LoadStateOptions& options,
                      const Prepared& prepared);
  // What a checkpoint has for this program, read and checked.
  struct Incoming;
  struct IncomingRandom;
  Incoming read(checkpoints::Load& load, const LoadStateOptions& options, const Prepared& prepared);
  IncomingRandom read_random(const checkpoints::Load& load) const;
  void read_parts(checkpoints::Load& load, bool strict, Incoming& incoming) const;
  void set_random(const IncomingRandom& random) const;

  ProjectConfiguration project_;
  Savers savers_;
  comm::Group group_;
  std::optional<Writers> writing_;
  std::vector<Stateful> schedulers_;
  std::vector<std::weak_ptr<data::LoaderCore>> loaders_;
  std::vector<Stateful> objects_;
  std::vector<std::shared_ptr<StateHook>> save_hooks_;
  std::vector<std::shared_ptr<StateHook>> load_hooks_;
  std::unique_ptr<InFlight> in_flight_;
  // Of the first process of a folder, from the first numbered save on.
  std::shared_ptr<io::FileLock> project_lock_;
};

}  // namespace detail
}  // namespace accelerate
