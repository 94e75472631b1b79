#pragma once

#include <accelerate/base/topology.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/comm/mesh.hpp>
#include <accelerate/comm/world.hpp>
#include <accelerate/state/parallelism.hpp>

#include <c10/core/Device.h>
#include <torch/arg.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>

namespace accelerate {

/// What the process-wide state is made from.
struct StateOptions {
  /// Use the CPU even where there is a GPU.
  TORCH_ARG(bool, cpu) = false;
  TORCH_ARG(comm::Backend, backend) = comm::Backend::automatic;
  /// How long an operation waits for the other ranks. Nothing: the backend's usual limit (30
  /// minutes, NCCL 10).
  TORCH_ARG(std::optional<std::chrono::milliseconds>, timeout) = std::nullopt;
  /// A rank that was silent for so long is taken for dead; zero switches the watch off. Nothing: 8
  /// s.
  TORCH_ARG(std::optional<std::chrono::milliseconds>, heartbeat_timeout) = std::nullopt;
  /// Before each collective, check that all ranks call the same one with the same shapes.
  TORCH_ARG(bool, debug) = false;
  /// The device, instead of the choice by local rank (the original's ACCELERATE_TORCH_DEVICE).
  TORCH_ARG(std::optional<at::Device>, device) = std::nullopt;
  /// How the processes are laid out. Nothing: all of them are data-parallel.
  TORCH_ARG(std::optional<ParallelismConfig>, parallelism_config) = std::nullopt;

 public:
  bool operator==(const StateOptions& other) const;
};

/// Which process this is, which device it uses, and the groups of processes: the one singleton of
/// the library. The Accelerator creates it; nothing below the Accelerator reads it.
class State {
 public:
  /// Creates the state, or returns the existing one. Collective on first use. Throws StateError
  /// when one exists that was made with other options, ConfigError for a broken environment and
  /// DistributedError when the ranks do not find each other.
  static std::shared_ptr<State> initialize(const StateOptions& options,
                                           const Environment& environment);
  /// Throws StateError when nothing was initialised.
  static State& instance();
  static bool is_initialized() noexcept;
  /// Leaves the process group in good order. A later `initialize` may use other options. Does
  /// nothing without a state. Who holds the old one still can ask it who this process was; its
  /// groups do not communicate any more.
  static void shutdown();

  const Topology& topology() const noexcept { return topology_; }
  at::Device device() const noexcept { return device_; }
  const comm::Group& world() const noexcept { return world_; }
  /// The processes along the axes of `StateOptions::parallelism_config`. Where it does not divide
  /// the data-parallel ones, all of them are along dp_replicate.
  const comm::Mesh& mesh() const { return meshes_.begin()->second; }
  /// Collective when called with another number than before. The processes along the axes of
  /// `StateOptions::parallelism_config`, with `dp_shard` data-parallel processes along that axis
  /// and the rest of them along dp_replicate. It has groups over {dp_replicate, dp_shard},
  /// {dp_replicate, dp_shard, cp}, {dp_shard, cp}, and over all axes but dp_replicate and dp_shard.
  /// Kept with its groups until the state goes. Throws ConfigError when the configuration says
  /// otherwise, or the number does not divide the data-parallel processes.
  const comm::Mesh& mesh(int dp_shard);
  /// What the configuration says of the axes.
  const MeshAxes& mesh_axes() const noexcept { return axes_; }
  const StateOptions& options() const noexcept { return options_; }

  int process_index() const noexcept { return topology_.rank; }
  int num_processes() const noexcept { return topology_.world_size; }
  int local_process_index() const noexcept { return topology_.local_rank; }
  bool is_main_process() const noexcept { return topology_.rank == 0; }
  bool is_local_main_process() const noexcept { return topology_.local_rank == 0; }
  bool is_last_process() const noexcept { return topology_.rank == topology_.world_size - 1; }

  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

 private:
  State(const StateOptions& options, const Environment& environment);

  StateOptions options_;
  Topology topology_;
  at::Device device_;
  comm::Group world_;
  MeshAxes axes_;
  std::map<int, comm::Mesh> meshes_;  // by the size of dp_shard, so that the first is the smallest
};

/// The device of a local rank: `options.device`, the CPU if asked for or if there is no
/// accelerator, else the accelerator with the number of the local rank, wrapping around when there
/// are more ranks than accelerators.
at::Device choose_device(const StateOptions& options, int local_rank);

}  // namespace accelerate
