#include "comm/world_impl.hpp"

#include "comm/errors.hpp"
#include "comm/gloo_backend.hpp"
#include "comm/rendezvous.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/comm/native.hpp>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <thread>

namespace accelerate::comm {
namespace {

using std::chrono::milliseconds;
using text::concat;

constexpr milliseconds kGlooTimeout{30 * 60 * 1000};
constexpr milliseconds kNcclTimeout{10 * 60 * 1000};
/// How long rank 0 keeps the store for the others after it is done itself.
constexpr milliseconds kDepartureTimeout{10 * 1000};

Backend choose_backend(const Topology& topology, const WorldOptions& options) {
  if (options.backend() != Backend::automatic) return options.backend();
  if (options.device().is_cuda()) return Backend::nccl;
  return Backend::gloo;
}

}  // namespace

const char* to_string(Backend backend) {
  switch (backend) {
    case Backend::automatic:
      return "auto";
    case Backend::gloo:
      return "gloo";
    case Backend::mpi:
      return "mpi";
    case Backend::nccl:
      return "nccl";
  }
  return "unknown";
}

Backend backend_from_string(std::string_view name) {
  const std::string lower = text::to_lower(text::trim(name));
  if (lower == "auto" || lower == "automatic") return Backend::automatic;
  for (const Backend backend : {Backend::gloo, Backend::mpi, Backend::nccl}) {
    if (lower == to_string(backend)) return backend;
  }
  throw ConfigError(
      concat("\"", name, "\" is no backend. The backends are auto, gloo, mpi and nccl."));
}

WorldOptions& WorldOptions::read(const Environment& environment) {
  const auto seconds = [&](const char* name, bool zero_allowed) -> std::optional<milliseconds> {
    const auto value = environment.get_double(name);
    if (!value) return std::nullopt;
    if (!(*value > 0 || (zero_allowed && *value == 0)) || *value > 1e9) {
      throw ConfigError(concat("The environment variable ", name, " is ", *value,
                               ", and a number of seconds above 0 was expected."));
    }
    return milliseconds(static_cast<std::int64_t>(*value * 1e3 + 0.5));
  };
  if (const auto value = seconds("ACCELERATE_TIMEOUT", false)) timeout(*value);
  if (const auto value = seconds("ACCELERATE_HEARTBEAT_TIMEOUT", true)) heartbeat_timeout(*value);
  if (const auto value = environment.get("ACCELERATE_BACKEND"))
    backend(backend_from_string(*value));
  if (const auto value = environment.get_bool("ACCELERATE_DEBUG_MODE")) debug(*value);
  return *this;
}

World::World(Topology topology, const WorldOptions& options, Backend backend)
    : topology_(std::move(topology)),
      backend_(backend),
      timeout_(options.timeout().value_or(backend == Backend::nccl ? kNcclTimeout : kGlooTimeout)),
      debug_(options.debug()),
      device_(options.device()) {
  auto met = meet(topology_, timeout_);
  store_ = std::move(met.store);
}

World::~World() { close(); }

std::shared_ptr<Group::Impl> World::join(const std::string& id, const std::string& name,
                                         std::vector<int> global_ranks) {
  auto impl = std::make_shared<Group::Impl>();
  impl->name = name;
  impl->id = id;
  impl->size = static_cast<int>(global_ranks.size());
  impl->rank = static_cast<int>(
      std::find(global_ranks.begin(), global_ranks.end(), topology_.rank) - global_ranks.begin());
  impl->global_ranks = std::move(global_ranks);
  impl->timeout = timeout_;
  if (impl->size == 1) return impl;

  impl->world = shared_from_this();
  impl->backend = to_string(backend_);
  const OperationName operation{"create_group", name, impl->rank, impl->size};
  try {
    const auto store = c10::make_intrusive<c10d::PrefixStore>(id, store_);
    impl->process_group = c10::make_intrusive<c10d::ProcessGroup>(store, impl->rank, impl->size);
    impl->cpu_backend = make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("gloo", store),
                                          impl->rank, impl->size, timeout_);
    impl->cuda_backend = impl->cpu_backend;
    impl->process_group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    impl->process_group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO,
                                    impl->cpu_backend);
    impl->process_group->setBackend(c10::kCUDA, c10d::ProcessGroup::BackendType::GLOO,
                                    impl->cuda_backend);
  } catch (const std::exception&) {
    std::rethrow_exception(translate(std::current_exception(), operation, timeout_));
  }
  const std::lock_guard lock(mutex_);
  groups_.push_back(impl);
  return impl;
}

void World::close() noexcept {
  std::vector<std::weak_ptr<Group::Impl>> groups;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    groups.swap(groups_);
  }
  for (const auto& weak : groups) {
    if (const auto impl = weak.lock()) {
      impl->closed = true;
      impl->process_group.reset();
      impl->cpu_backend.reset();
      impl->cuda_backend.reset();
    }
  }
  try {
    if (store_->add("departed", 1) < topology_.world_size && topology_.rank == 0) {
      const auto deadline = std::chrono::steady_clock::now() + kDepartureTimeout;
      while (store_->add("departed", 0) < topology_.world_size &&
             std::chrono::steady_clock::now() < deadline) {
        std::this_thread::sleep_for(milliseconds(2));
      }
    }
  } catch (const std::exception& error) {
    log::debug(concat("The store was gone when this process left: ", describe(error)));
  }
  store_.reset();
}

Group create_world(const Topology& topology, const WorldOptions& options) {
  const Backend backend = choose_backend(topology, options);
  if (topology.world_size == 1) {
    auto impl = std::make_shared<Group::Impl>();
    impl->name = "world";
    return Group(std::move(impl));
  }
  const auto world = std::make_shared<World>(topology, options, backend);
  std::vector<int> everyone(static_cast<std::size_t>(topology.world_size));
  for (int rank = 0; rank < topology.world_size; ++rank)
    everyone[static_cast<std::size_t>(rank)] = rank;
  return Group(world->join("world", "world", std::move(everyone)));
}

void shutdown(const Group& world) noexcept {
  if (const auto& shared = world.impl()->world) shared->close();
}

c10::intrusive_ptr<c10d::ProcessGroup> process_group(const Group& group) {
  return group.impl()->process_group;
}

}  // namespace accelerate::comm
