#include <accelerate/state/state.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include "base/log_level.hpp"

#include <ATen/DeviceAccelerator.h>

#include <algorithm>
#include <mutex>
#include <utility>

namespace accelerate {
namespace {

std::mutex& state_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::shared_ptr<State>& slot() {
  static std::shared_ptr<State> state;
  return state;
}

std::string describe(const StateOptions& options) {
  return text::concat("cpu ", options.cpu() ? "on" : "off", ", backend ",
                      comm::to_string(options.backend()), ", timeout ",
                      options.timeout() ? text::format_seconds(
                                              static_cast<double>(options.timeout()->count()) / 1e3)
                                        : std::string("default"),
                      ", debug ", options.debug() ? "on" : "off", ", device ",
                      options.device() ? options.device()->str() : std::string("by local rank"),
                      ", ", options.parallelism_config() ? "a" : "no", " ParallelismConfig");
}

}  // namespace

bool StateOptions::operator==(const StateOptions& other) const {
  return cpu() == other.cpu() && backend() == other.backend() && timeout() == other.timeout() &&
         heartbeat_timeout() == other.heartbeat_timeout() && debug() == other.debug() &&
         device() == other.device() && parallelism_config() == other.parallelism_config();
}

at::Device choose_device(const StateOptions& options, int local_rank) {
  const auto accelerator = at::getAccelerator(/*checked=*/false);
  const int count = accelerator ? at::accelerator::deviceCount() : 0;
  if (options.device()) {
    const at::Device device = *options.device();
    if (options.cpu() && !device.is_cpu()) {
      throw ConfigError(text::concat("StateOptions asks for the CPU and for device ", device.str(),
                                     ". Drop one of the two."));
    }
    if (!device.is_cpu() &&
        (!accelerator || device.type() != *accelerator || device.index() >= count)) {
      throw ConfigError(text::concat(
          "Device ", device.str(), " was asked for, and this machine has ", count, " ",
          accelerator ? at::DeviceTypeName(*accelerator, /*lower_case=*/true) : "accelerator",
          " device(s). Choose another, or none for the choice by local rank."));
    }
    return device;
  }
  if (options.cpu() || count == 0) return at::kCPU;
  if (local_rank >= count) {
    log::warning_once(text::concat("There are more processes on this machine than ",
                                   at::DeviceTypeName(*accelerator, true), " devices (", count,
                                   "); several processes share one."),
                      log::Ranks::local_main);
  }
  return {*accelerator, static_cast<at::DeviceIndex>(local_rank % count)};
}

State::State(const StateOptions& options, const Environment& environment)
    : options_(options),
      topology_(detect_topology(environment)),
      device_(choose_device(options, topology_.local_rank)),
      axes_(accelerate::mesh_axes(options.parallelism_config().value_or(ParallelismConfig()),
                                  topology_.world_size)) {
  // Read far from here and perhaps late: what cannot be is said now.
  log::level_from_environment();
  environment.get_bool("ACCELERATE_IO_URING");
  log::set_process(topology_.rank, topology_.world_size, topology_.local_rank);
  if (!device_.is_cpu()) at::accelerator::setDeviceIndex(device_.index());
  // One process has a world too, if only to learn that the backend it asks for cannot be.
  if (topology_.world_size > 1 || options.backend() != comm::Backend::automatic) {
    auto world =
        comm::WorldOptions().backend(options.backend()).debug(options.debug()).device(device_);
    if (options.timeout()) world.timeout(*options.timeout());
    if (options.heartbeat_timeout()) world.heartbeat_timeout(*options.heartbeat_timeout());
    world_ = comm::create_world(topology_, world);
  }
  const auto dp_shard = std::find_if(axes_.axes.begin(), axes_.axes.end(),
                                     [](const auto& axis) { return axis.first == "dp_shard"; });
  mesh(dp_shard->second);
  if (options.debug()) {
    log::info(
        text::concat("rank ", topology_.rank, " of ", topology_.world_size, " (local ",
                     topology_.local_rank, " of ", topology_.local_world_size, ", node ",
                     topology_.node_rank, ") on ", device_.str(), ", backend ", world_.backend(),
                     ", timeout ",
                     text::format_seconds(static_cast<double>(world_.timeout().count()) / 1e3)),
        log::Ranks::all);
  }
}

const comm::Mesh& State::mesh(int dp_shard) {
  if (const auto made = meshes_.find(dp_shard); made != meshes_.end()) return made->second;
  if (dp_shard < 1 || axes_.data_parallel % dp_shard != 0 || (axes_.divided && !meshes_.empty())) {
    throw ConfigError(
        text::concat("A module is to be cut over ", dp_shard, " processes, and ",
                     axes_.divided ? text::concat("dp_shard has ", meshes_.begin()->first)
                                   : text::concat(axes_.data_parallel, " are data-parallel"),
                     ". Choose a number that ", axes_.divided ? "equals" : "divides", " that."));
  }
  comm::Mesh::Axes axes = axes_.axes;
  std::vector<std::string> other;
  for (auto& [name, size] : axes) {
    if (name == "dp_replicate") {
      size = axes_.data_parallel / dp_shard;
    } else if (name == "dp_shard") {
      size = dp_shard;
    } else {
      other.push_back(name);
    }
  }
  const std::vector<std::vector<std::string>> flattened{{"dp_replicate", "dp_shard"},
                                                        {"dp_replicate", "dp_shard", "cp"},
                                                        {"dp_shard", "cp"},
                                                        std::move(other)};
  return meshes_.try_emplace(dp_shard, world_, std::move(axes), flattened).first->second;
}

State::~State() { comm::shutdown(world_); }

std::shared_ptr<State> State::initialize(const StateOptions& options,
                                         const Environment& environment) {
  const std::lock_guard lock(state_mutex());
  if (!slot()) {
    slot().reset(new State(options, environment));
  } else if (!(slot()->options() == options)) {
    throw StateError(text::concat(
        "The process is already set up with ", describe(slot()->options()),
        ", and now another set-up was asked for: ", describe(options),
        ". A process has one State: use the same options, or call State::shutdown() first, on "
        "every rank."));
  }
  return slot();
}

State& State::instance() {
  const std::lock_guard lock(state_mutex());
  if (!slot())
    throw StateError("The State was used before it exists. Create an Accelerator first.");
  return *slot();
}

bool State::is_initialized() noexcept {
  const std::lock_guard lock(state_mutex());
  return slot() != nullptr;
}

void State::shutdown() {
  std::shared_ptr<State> state;
  {
    const std::lock_guard lock(state_mutex());
    state = std::move(slot());
  }
  if (state) comm::shutdown(state->world());
}

}  // namespace accelerate
