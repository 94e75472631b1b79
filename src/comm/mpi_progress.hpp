#pragma once

#include "comm/mpi_types.hpp"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace accelerate::comm {

/// The work of one operation over MPI.
class MpiWork final : public c10d::Work {
 public:
  MpiWork(int rank, c10d::OpType type, std::vector<at::Tensor> outputs);
  void succeed(int source);
  void fail(const std::exception_ptr& error);

  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  int sourceRank() const override { return source_; }

 private:
  const std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<int> source_{-1};
};

/// A communicator and what has become of it.
struct MpiChannel {
  MPI_Comm comm = MPI_COMM_NULL;
  std::atomic<int> under_way{0};
  /// Set when it can no longer be used: operations were given up and MPI may still work on them.
  std::atomic<bool> broken{false};
};

struct MpiOperation {
  std::shared_ptr<MpiChannel> channel;
  c10::intrusive_ptr<MpiWork> work;
  /// Starts the operation and returns its requests. Holds every tensor MPI reads or writes.
  std::function<std::vector<MPI_Request>()> start;
  /// Runs when all requests are done; may be empty.
  std::function<void()> finish;
  std::chrono::steady_clock::time_point deadline;
  bool started = false;
  std::vector<MPI_Request> requests;
};

/// The one thread that talks to MPI. It starts operations in the order they come, then asks after
/// them with growing pauses, so that waiting costs no core; callers wait on a condition variable.
class MpiProgress {
 public:
  /// Starts MPI and the thread when needed. The thread ends with the last holder.
  static std::shared_ptr<MpiProgress> get();
  ~MpiProgress();
  /// Ends the thread of the one that there is. What is still under way has a moment to finish, and
  /// is given up then.
  static void end();

  void submit(MpiOperation operation);
  /// Gives up all operations of a channel.
  void abandon(const std::shared_ptr<MpiChannel>& channel);

 private:
  using Clock = std::chrono::steady_clock;
  MpiProgress();
  void stop();
  void run();
  bool advance(MpiOperation& operation);
  void give_up(MpiOperation& operation, const std::exception_ptr& error);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<MpiOperation> queue_;
  std::atomic<bool> abandoned_{false};
  bool stop_ = false;
  std::thread thread_;
};

/// Starts MPI unless it was; see mpi_place().
void ensure_mpi();
/// False once MPI was finalized; no call is allowed then.
bool mpi_is_up();

}  // namespace accelerate::comm
