#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace accelerate::big_model {

/// Fills buffers on a thread of its own, in the order they were asked for, while others compute. On
/// an accelerator the copies run on a stream of their own too.
class Bringer {
 public:
  explicit Bringer(at::Device device);
  /// Ends the thread; what was asked for and not begun is dropped.
  ~Bringer();
  Bringer(const Bringer&) = delete;
  Bringer& operator=(const Bringer&) = delete;

  class Job;
  /// Has `fill` called on the thread. `fill` throws what `finish` is to throw.
  std::shared_ptr<Job> start(std::function<void()> fill);
  /// Returns when the job is done, and the current stream is ordered after it. A job that the
  /// thread has not begun yet is done here, at once, whatever waits before it.
  void finish(Job& job);

 private:
  struct Streams;
  void run(Job& job);
  void work();

  at::Device device_;
  std::unique_ptr<Streams> streams_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> waiting_;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace accelerate::big_model
