#include "comm/world_impl.hpp"

#include "comm/errors.hpp"
#include "comm/gloo_backend.hpp"
#include "comm/mpi_backend.hpp"
#include "comm/nccl_backend.hpp"
#include "comm/observed_backend.hpp"
#include "comm/rendezvous.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/signals.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/comm/native.hpp>

#include <ATen/DeviceAccelerator.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <thread>

namespace accelerate::comm {
namespace {

using std::chrono::milliseconds;
using text::concat;

constexpr const char* kWorldId = "world";
constexpr milliseconds kGlooTimeout{30 * 60 * 1000};
constexpr milliseconds kNcclTimeout{10 * 60 * 1000};
/// How long a rank that is done waits for the others to be done.
constexpr milliseconds kDepartureTimeout{10 * 1000};
/// How long it waits before for operations that nobody waited for, such as a batch scattered ahead
/// of use: the other ranks take part in them and end with this one.
constexpr milliseconds kUnwaitedTimeout{3 * 1000};

Backend choose_backend(const Topology& topology, const WorldOptions& options) {
  if (options.backend() != Backend::automatic) return options.backend();
  // NCCL wants a device for each process.
  if (options.device().is_cuda() && topology.local_world_size <= at::accelerator::deviceCount()) {
    const std::string missing = nccl_missing();
    if (missing.empty()) return Backend::nccl;
    if (topology.world_size > 1) {
      log::warning(
          concat("This build of accelerate-cpp has no NCCL, so tensors travel between GPUs "
                 "through host memory, which is slow: ",
                 missing, "."));
    }
  }
  return topology.kind == LaunchKind::openmpi && have_mpi() ? Backend::mpi : Backend::gloo;
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

namespace {

/// Refuses what cannot work before anybody is waited for.
void check_backend(Backend backend, const Topology& topology, const WorldOptions& options) {
  if (backend == Backend::nccl && !options.device().is_cuda()) {
    throw ConfigError(concat("The nccl backend communicates CUDA tensors, and the device is ",
                             options.device().str(),
                             ". Use a CUDA device, or the gloo or mpi backend."));
  }
  if (backend == Backend::mpi && topology.world_size > 1) {
    const auto place = mpi_place();
    if (place.rank != topology.rank || place.size != topology.world_size) {
      throw ConfigError(concat("The mpi backend was asked for, and to MPI this process is rank ",
                               place.rank, " of ", place.size, " while its environment (",
                               to_string(topology.kind), ") says rank ", topology.rank, " of ",
                               topology.world_size,
                               ". Start the program with mpirun, or use the gloo backend."));
    }
  }
}

/// Worlds that a program leaves open are closed when it ends, before the static objects go that
/// closing needs, and before MPI is finalized, which would wait for ranks that wait for this one.
struct OpenWorlds {
  std::mutex mutex;
  std::vector<std::weak_ptr<World>> worlds;
};
OpenWorlds& open_worlds() {
  static auto* const instance = new OpenWorlds;
  return *instance;
}
/// A process that ends with an error code is not done, whoever caught the exception.
void end_run(int status, void*) {
  const bool failed = status != 0 && status != kStoppedExitCode;
  std::vector<std::weak_ptr<World>> worlds;
  {
    const std::lock_guard lock(open_worlds().mutex);
    worlds.swap(open_worlds().worlds);
  }
  for (const auto& weak : worlds) {
    if (const auto world = weak.lock())
      world->close(failed ? concat("its process ended with exit code ", status) : "");
  }
  finish_mpi(failed);
}
void close_at_exit(const std::shared_ptr<World>& world) {
  end_run_at_exit();
  const std::lock_guard lock(open_worlds().mutex);
  std::erase_if(open_worlds().worlds, [](const auto& weak) { return weak.expired(); });
  open_worlds().worlds.push_back(world);
}

}  // namespace

void end_run_at_exit() {
  static std::once_flag once;
  // Of the two that the C library has, the one that is told the exit code.
  std::call_once(once, [] { ::on_exit(end_run, nullptr); });
}

World::World(Topology topology, const WorldOptions& options, Backend backend)
    : topology_(std::move(topology)),
      backend_(backend),
      timeout_(options.timeout().value_or(backend == Backend::nccl ? kNcclTimeout : kGlooTimeout)),
      debug_(options.debug()),
      device_(options.device()) {
  const Rendezvous met = meet(topology_, timeout_);
  store_ = met.store;
  interface_ = met.interface;
  liveness_ = std::make_shared<Liveness>(met, topology_.rank, topology_.world_size,
                                         options.heartbeat_timeout(), timeout_,
                                         LauncherWatch(Environment::process()));
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
  impl->watch = std::make_shared<GroupWatch>(name, impl->rank, impl->global_ranks, timeout_,
                                             liveness_, id == kWorldId, debug_);
  try {
    using Type = c10d::ProcessGroup::BackendType;
    const auto store = c10::make_intrusive<c10d::PrefixStore>(id, store_);
    impl->process_group = c10::make_intrusive<c10d::ProcessGroup>(store, impl->rank, impl->size);
    const Backend host = backend_ == Backend::nccl ? Backend::gloo : backend_;
    const Type host_type = host == Backend::mpi ? Type::MPI : Type::GLOO;
    impl->cpu_backend = make_backend(host, store, *impl);
    impl->process_group->setBackend(c10::kCPU, host_type, impl->cpu_backend);
    if (backend_ == Backend::nccl) {
      impl->cuda_backend = make_backend(Backend::nccl, store, *impl);
      impl->process_group->setBackend(c10::kCUDA, Type::NCCL, impl->cuda_backend);
    } else {
      impl->cuda_backend = impl->cpu_backend;
      impl->process_group->setBackend(c10::kCUDA, host_type, impl->cuda_backend);
    }
    impl->process_group->setDefaultBackend(backend_ == Backend::nccl ? Type::NCCL : host_type);
  } catch (...) {
    std::rethrow_exception(
        impl->watch->explain(std::current_exception(), impl->watch->operation("create_group")));
  }
  liveness_->subscribe(impl->watch);
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& weak) { return weak.expired(); });
  groups_.push_back(impl);
  connections_.push_back(impl->process_group);
  return impl;
}

World::BackendPtr World::make_backend(Backend backend, const c10::intrusive_ptr<c10d::Store>& store,
                                      const Group::Impl& group) const {
  std::vector<BackendPtr> aborted;
  const auto gloo = [&](const char* prefix) {
    const auto own = c10::make_intrusive<c10d::PrefixStore>(prefix, store);
    return aborted.emplace_back(
        make_gloo_backend(own, group.rank, group.size, timeout_, interface_));
  };
  BackendPtr made;
  switch (backend) {
    case Backend::nccl:
      made = aborted.emplace_back(make_nccl_backend(store, group.rank, group.size, timeout_));
      break;
    case Backend::mpi:
      made =
          aborted.emplace_back(make_mpi_backend(store, group.global_ranks, group.rank, timeout_));
      break;
    case Backend::gloo:
    case Backend::automatic:
      made = gloo("gloo");
      break;
  }
  BackendPtr notes;
  if (debug_) notes = gloo(backend == Backend::nccl ? "nccl/debug" : "debug");
  return observe(std::move(made), std::move(notes), group.watch,
                 backend == Backend::nccl ? Memory::device : Memory::host, std::move(aborted));
}

void World::close(const std::string& failure) noexcept {
  std::vector<std::shared_ptr<Group::Impl>> groups;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (const auto& weak : groups_) {
      if (auto impl = weak.lock()) groups.push_back(std::move(impl));
    }
    groups_.clear();
  }
  if (liveness_) {
    // An exception on its way out means that this rank fails; the others must not take it for done.
    const bool unwinds = std::uncaught_exceptions() > 0;
    if (unwinds || !failure.empty()) {
      liveness_->say_failure(unwinds ? "an exception ended its part in the run" : failure);
      // The others will not come to MPI's end, and it would wait for them.
      give_mpi_up();
    } else if (!liveness_->loss()) {
      finish_works(groups);
      // Until the others go too, for what they have yet to receive from this rank may be in buffers
      // that closing the connections would throw away, and rank 0 keeps the store.
      liveness_->say_goodbye(kDepartureTimeout);
    }
    liveness_->leave();
  }
  for (const auto& impl : groups) {
    impl->closed = true;
    impl->process_group.reset();
    impl->cpu_backend.reset();
    impl->cuda_backend.reset();
  }
  connections_.clear();
  store_.reset();
}

void World::finish_works(const std::vector<std::shared_ptr<Group::Impl>>& groups) const {
  const auto deadline = std::chrono::steady_clock::now() + kUnwaitedTimeout;
  const auto busy = [&] {
    return std::any_of(groups.begin(), groups.end(),
                       [](const auto& group) { return group->watch->has_works(); });
  };
  while (busy() && !liveness_->loss() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(2));
  }
}

namespace {

/// gloo writes to its sockets in a way that raises SIGPIPE when the peer is gone, and the signal's
/// default ends a program without a word; Python programs ignore it. A choice that the program made
/// itself is left alone.
void ignore_broken_pipes() {
  struct sigaction current {};
  if (::sigaction(SIGPIPE, nullptr, &current) != 0) return;
  if ((current.sa_flags & SA_SIGINFO) == 0 && current.sa_handler == SIG_DFL) {
    ::signal(SIGPIPE, SIG_IGN);
  }
}

}  // namespace

Group create_world(const Topology& topology, const WorldOptions& options) {
  const Backend backend = choose_backend(topology, options);
  check_backend(backend, topology, options);
  if (topology.world_size == 1) {
    auto impl = std::make_shared<Group::Impl>();
    impl->name = "world";
    return Group(std::move(impl));
  }
  ignore_broken_pipes();
  const auto world = std::make_shared<World>(topology, options, backend);
  close_at_exit(world);
  std::vector<int> everyone(static_cast<std::size_t>(topology.world_size));
  for (int rank = 0; rank < topology.world_size; ++rank)
    everyone[static_cast<std::size_t>(rank)] = rank;
  return Group(world->join(kWorldId, "world", std::move(everyone)));
}

void shutdown(const Group& world) noexcept {
  if (const auto& shared = world.impl()->world) shared->close();
}

c10::intrusive_ptr<c10d::ProcessGroup> process_group(const Group& group) {
  return group.impl()->process_group;
}

}  // namespace accelerate::comm
