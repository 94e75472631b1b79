#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace accelerate::big_model {

/// Fills buffers on a thread of its own, in the order they were asked for, while others compute.
/// Who has to wait for a buffer helps to fill it. On an accelerator the copies run on a stream of
/// their own too.
class Bringer {
 public:
  explicit Bringer(at::Device device);
  /// Ends the thread; what was asked for and not begun is dropped.
  ~Bringer();
  Bringer(const Bringer&) = delete;
  Bringer& operator=(const Bringer&) = delete;

  class Job;
  /// Has `fill` called for each piece once, by any thread. It throws what `finish` is to throw. For
  /// an accelerator there must be one piece.
  std::shared_ptr<Job> start(std::size_t pieces, std::function<void(std::size_t)> fill);
  /// Returns when the job is done, and the current stream is ordered after it. Pieces that nobody
  /// has begun yet are filled here, at once, whatever waits before them.
  void finish(Job& job);

 private:
  struct Streams;
  void run(Job& job, std::size_t piece);
  void run_all(Job& job);
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
