#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace accelerate::data::detail {

/// Worker threads that fill numbered slots. The caller submits a slot, waits for it, takes what is
/// in it, and submits it again; it does so in the order of its batches, so order is kept however
/// long each slot takes.
class Prefetcher {
 public:
  /// `work(slot)` runs on one of `threads` threads; what it throws comes out of `wait(slot)`.
  Prefetcher(std::size_t threads, std::size_t slots, std::function<void(std::size_t)> work);
  /// Forgets what was not begun, waits for what was, and joins the threads.
  ~Prefetcher();
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  void submit(std::size_t slot);
  /// Returns when the slot is done; false when `timeout` passed before.
  bool wait(std::size_t slot, std::optional<std::chrono::milliseconds> timeout);
  /// Forgets what was not begun and waits for what was.
  void drain();

 private:
  struct Slot {
    bool done = true;
    std::exception_ptr error;
  };
  void run();

  std::function<void(std::size_t)> work_;
  std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable done_;
  std::deque<std::size_t> queue_;
  std::vector<Slot> slots_;
  std::size_t running_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace accelerate::data::detail
