#pragma once

#include "comm/errors.hpp"
#include "comm/liveness.hpp"

#include <accelerate/comm/group.hpp>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace accelerate::comm {

class ObservedWork;

/// What is known about one group: what went through it, what is under way, and whether its ranks
/// are alive. Shared by the group's backends and their works.
class GroupWatch : public LivenessListener, public std::enable_shared_from_this<GroupWatch> {
 public:
  GroupWatch(std::string name, int rank, std::vector<int> global_ranks,
             std::chrono::milliseconds timeout, std::shared_ptr<Liveness> liveness, bool is_world,
             bool debug);

  OperationName operation(const char* kind) const;
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }

  /// This rank has come to one more operation: what liveness tells the others of it.
  void note_operation();
  /// Notes one, and counts it for the groups that this one was split from, too.
  void count(const char* kind, std::int64_t bytes);
  /// To be called before the first collective.
  void count_for(std::shared_ptr<GroupWatch> parent) { parent_ = std::move(parent); }
  Traffic traffic() const;
  void reset_traffic();

  /// Backends whose abort() sets free what waits for a lost rank; their owner takes them out again
  /// before they go.
  void abort_on_loss(c10d::Backend* backend);
  void forget(c10d::Backend* backend);

  /// Throws PeerLostError when a rank was lost a while ago, and what `is_broken` tells.
  void check_alive(const char* kind) const;
  /// As check_alive, and when a rank of the group left a while ago.
  void check_present(const char* kind) const;
  /// Throws PeerLostError when a rank is known to be lost, or within `patience` becomes known.
  void check_cause(const char* kind, std::chrono::milliseconds patience) const;
  /// The library's error for what an operation failed with. Blocks for as long as it takes to learn
  /// who died when a connection broke.
  std::exception_ptr explain(const std::exception_ptr& failure, const OperationName& name) const;

  /// The error for a broken connection when nobody was lost.
  std::exception_ptr broken_connection(const std::exception_ptr& failure,
                                       const OperationName& name) const;
  /// Errors say which call of the program they are about.
  bool debug() const noexcept { return debug_; }
  bool knows_loss() const { return liveness_->loss().has_value(); }
  std::chrono::milliseconds patience() const { return liveness_->patience(); }

  /// An error ended a backward pass on this rank, which had operations of this group in it. Where
  /// the others wait for the rest of them, they give the group up after a while.
  void say_failed_pass();
  /// Returns when the pass failed on every rank of the group. Throws when the others gave up.
  void wait_until_all_failed() const;
  /// A rank's backward pass failed and this rank waited for its part in an operation. The ranks
  /// have not started the same number of operations since.
  bool is_broken() const { return broken_by_ >= 0; }

  void add(const c10::intrusive_ptr<ObservedWork>& work);
  void remove(ObservedWork* work);
  /// Whether anything is under way that ends without being waited for.
  bool has_works() const;

  void peer_lost(const Loss& loss) override;
  void tick() override;

 private:
  std::exception_ptr lost_error(const Loss& loss, const OperationName& name,
                                const std::exception_ptr& cause) const;
  std::exception_ptr left_error(int world_rank, const OperationName& name) const;
  std::exception_ptr failed_alone_error(int world_rank, const OperationName& name) const;
  std::vector<c10::intrusive_ptr<ObservedWork>> under_way() const;

  const std::string name_;
  const int rank_;
  const std::vector<int> global_ranks_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Liveness> liveness_;
  const bool is_world_;
  const bool debug_;
  std::shared_ptr<GroupWatch> parent_;
  std::atomic<int> broken_by_{-1};

  mutable std::mutex mutex_;
  std::map<std::string, Traffic::Count> traffic_;
  std::map<ObservedWork*, c10::weak_intrusive_ptr<ObservedWork>> works_;

  // Held while backends are aborted, so that none goes meanwhile.
  std::mutex abort_mutex_;
  std::vector<c10d::Backend*> abortable_;
};

/// A work of a backend on host memory, watched: it fails at once when a rank is lost, with the
/// library's errors, and its future with it.
class ObservedWork final : public c10d::Work {
 public:
  /// `finish` runs once when `inner` has succeeded, before the future is marked.
  ObservedWork(std::shared_ptr<GroupWatch> watch, const char* kind, c10d::OpType type, int peer,
               c10::intrusive_ptr<c10d::Work> inner, std::vector<at::Tensor> outputs,
               std::function<void()> finish);
  /// Called once after construction: follows `inner` to its end.
  void start();

  bool isCompleted() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  int sourceRank() const override;
  void release_resources() override { watch_->remove(this); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  const OperationName& name() const noexcept { return name_; }
  int peer() const noexcept { return peer_; }
  bool ends_by_itself() const noexcept { return !waits_for_inner_; }
  /// Ends it with an error unless it has ended.
  void fail(const std::exception_ptr& error);
  /// The failure that waits for an explanation, if its time has come.
  void explain_by(std::chrono::steady_clock::time_point now);

 private:
  void complete();
  void inner_failed(const std::exception_ptr& failure);
  bool claim();

  const std::shared_ptr<GroupWatch> watch_;
  const OperationName name_;
  const int peer_;
  const c10::intrusive_ptr<c10d::Work> inner_;
  const std::vector<at::Tensor> outputs_;
  std::function<void()> finish_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool waits_for_inner_ = false;

  std::mutex settle_mutex_;
  bool settled_ = false;
  std::exception_ptr suspected_;
  std::chrono::steady_clock::time_point suspected_until_;
  c10::intrusive_ptr<ObservedWork> kept_;
};

}  // namespace accelerate::comm
