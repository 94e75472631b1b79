#include "base/in_threads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace accelerate {

std::size_t reading_threads() {
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 4);
}

void in_threads(std::size_t threads, std::size_t count,
                const std::function<std::function<void(std::size_t)>()>& make,
                const std::function<void()>& watch) {
  std::atomic<std::size_t> next{0};
  std::atomic<std::size_t> running{0};
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      const auto each = make();
      for (std::size_t i; (i = next.fetch_add(1)) < count;) each(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
      next.store(count);
    }
    running.fetch_sub(1);
  };
  std::vector<std::thread> others;
  running.store(threads);
  const std::size_t wanted = watch || threads == 0 ? threads : threads - 1;
  try {
    while (others.size() < wanted) others.emplace_back(work);
  } catch (...) {
    // Those there are end, and are joined.
    const std::lock_guard lock(mutex);
    if (!error) error = std::current_exception();
    next.store(count);
    running.fetch_sub(wanted - others.size());
  }
  if (watch) {
    while (running.load() > 0) {
      watch();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  } else {
    work();
  }
  for (std::thread& other : others) other.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace accelerate
