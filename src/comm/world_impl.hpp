#pragma once

#include "comm/group_watch.hpp"
#include "comm/liveness.hpp"

#include <accelerate/comm/world.hpp>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::comm {

/// What all groups of a run share. Ends, with all groups, at shutdown or when the last group goes.
class World : public std::enable_shared_from_this<World> {
 public:
  World(Topology topology, const WorldOptions& options, Backend backend);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  /// A group of these ranks of the world, this process among them. Collective over them; `id` is
  /// equal on all of them and used once.
  std::shared_ptr<Group::Impl> join(const std::string& id, const std::string& name,
                                    std::vector<int> global_ranks);
  /// Takes the connections of a group whose last handle went.
  void drop(const Group::Impl& group);
  /// The dropped groups that were split from the one with this id, and their ranks.
  std::vector<std::pair<std::string, std::vector<int>>> dropped(const std::string& id);
  /// To be called once all its ranks have dropped it.
  void close_dropped(const std::string& id);
  /// `failure`: why this process fails ("it ended with exit code 1"), for the others; empty when it
  /// leaves because it is done.
  void close(const std::string& failure = {}) noexcept;

 private:
  void finish_works(const std::vector<std::shared_ptr<Group::Impl>>& groups) const;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  BackendPtr make_backend(Backend backend, const c10::intrusive_ptr<c10d::Store>& store,
                          const Group::Impl& group) const;

  Topology topology_;
  Backend backend_;
  std::chrono::milliseconds timeout_;
  bool debug_;
  c10::Device device_;
  /// Where gloo listens; empty leaves the choice to it.
  std::string interface_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Liveness> liveness_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Group::Impl>> groups_;
  struct Dropped {
    std::vector<int> global_ranks;
    c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  };
  std::map<std::string, Dropped> dropped_;  // by id
  bool closed_ = false;
};

/// Has every open world closed and then MPI finalized when the process ends.
void end_run_at_exit();

struct Group::Impl {
  /// Declared first, so that it goes last. Null for a group of one.
  std::shared_ptr<World> world;
  int rank = 0;
  int size = 1;
  std::string name = "self";
  /// Equal on all members, and no other group's.
  std::string id;
  std::string backend = "none";
  std::vector<int> global_ranks{0};
  std::chrono::milliseconds timeout{0};
  std::atomic<int> splits{0};
  Sharing sharing = Sharing::none;
  /// Groups split from this one that others are to use too.
  std::vector<std::shared_ptr<Impl>> parts;
  std::atomic<bool> closed{false};
  std::shared_ptr<GroupWatch> watch;
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  c10::intrusive_ptr<c10d::Backend> cpu_backend;
  c10::intrusive_ptr<c10d::Backend> cuda_backend;

  ~Impl() {
    if (process_group) world->drop(*this);
  }
  /// The groups split from this one that wait for their next user; those that cannot have one go.
  std::vector<std::string> free_groups(const std::string& name);
  /// Equal on all members that may use this group next: its id and the collectives so far.
  std::string offer() const;
};

}  // namespace accelerate::comm
