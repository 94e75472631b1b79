#pragma once

#include <accelerate/base/topology.hpp>
#include <accelerate/comm/group.hpp>

#include <c10/core/Device.h>

#include <chrono>
#include <optional>
#include <string_view>

namespace accelerate::comm {

/// What carries the collectives.
enum class Backend {
  automatic,  ///< nccl for CUDA devices; otherwise mpi when mpirun started the program, else gloo
  gloo,
  mpi,
  nccl
};

/// "auto", "gloo", "mpi", "nccl".
const char* to_string(Backend backend);
/// Reads "auto", "automatic", "gloo", "mpi" or "nccl". Throws ConfigError.
Backend backend_from_string(std::string_view text);

/// How the processes of a run are joined.
class WorldOptions {
 public:
  /// Default: automatic.
  WorldOptions& backend(Backend value) { return backend_ = value, *this; }
  Backend backend() const noexcept { return backend_; }

  /// How long the rendezvous and every collective may wait for another rank. Default: 30 minutes
  /// with gloo and mpi, 10 minutes with nccl.
  WorldOptions& timeout(std::chrono::milliseconds value) { return timeout_ = value, *this; }
  std::optional<std::chrono::milliseconds> timeout() const noexcept { return timeout_; }

  /// A rank that was silent for so long is taken for dead. Default: 8 s. Zero switches the watch
  /// off.
  WorldOptions& heartbeat_timeout(std::chrono::milliseconds value) {
    return heartbeat_timeout_ = value, *this;
  }
  std::chrono::milliseconds heartbeat_timeout() const noexcept { return heartbeat_timeout_; }

  /// Checks before each collective that all ranks call the same one with the same shapes, and
  /// raises an error on all of them otherwise. Costs a round of messages for each. Default: false.
  WorldOptions& debug(bool value) { return debug_ = value, *this; }
  bool debug() const noexcept { return debug_; }

  /// The device whose tensors are communicated. CPU tensors are too, whatever it is. Default: cpu.
  WorldOptions& device(c10::Device value) { return device_ = value, *this; }
  c10::Device device() const noexcept { return device_; }

 private:
  Backend backend_ = Backend::automatic;
  std::optional<std::chrono::milliseconds> timeout_;
  std::chrono::milliseconds heartbeat_timeout_{8000};
  bool debug_ = false;
  c10::Device device_{c10::kCPU};
};

/// Joins this process to the others of its run and gives the group of all of them. Returns when all
/// have come; a group of one returns at once, without store, thread or network.
///
/// With several processes SIGPIPE is ignored from here on, unless the program handles it: a write
/// to a process that died is to be an error that names it, not the end of this one.
///
/// Throws ConfigError for what cannot work (NCCL without CUDA, a port that is taken), TimeoutError
/// that names the ranks that did not come, DistributedError otherwise.
Group create_world(const Topology& topology, const WorldOptions& options = {});

/// Leaves the run: the other ranks are told that this one went of its own accord, threads and
/// connections end. Groups split from `world` end with it; later calls on any of them throw
/// StateError. Waits for operations that nobody waited for (at most 3 s) and then until the others
/// have left too (at most 10 s), for they may still receive what this rank sent, and rank 0 keeps
/// the store. Called while an exception unwinds the stack it waits for nobody and tells the others
/// that this rank failed. Safe to call twice, and after a rank was lost; the last copy of a world
/// group does it when it goes.
///
/// A process that ends without it does it then; one that ends with an exit code other than 0 and
/// kStoppedExitCode tells the others that it failed, and the code.
void shutdown(const Group& world) noexcept;

}  // namespace accelerate::comm
