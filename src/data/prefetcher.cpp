#include <accelerate/data/detail/prefetcher.hpp>

#include <utility>

namespace accelerate::data::detail {

Prefetcher::Prefetcher(std::size_t threads, std::size_t slots,
                       std::function<void(std::size_t)> work)
    : work_(std::move(work)), slots_(slots) {
  threads_.reserve(threads);
  try {
    for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
  } catch (...) {
    {
      const std::scoped_lock lock(mutex_);
      stopping_ = true;
    }
    submitted_.notify_all();
    for (auto& thread : threads_) thread.join();
    throw;
  }
}

Prefetcher::~Prefetcher() {
  drain();
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  submitted_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Prefetcher::submit(std::size_t slot) {
  {
    const std::scoped_lock lock(mutex_);
    slots_[slot] = Slot{false, nullptr};
    queue_.push_back(slot);
  }
  submitted_.notify_one();
}

bool Prefetcher::wait(std::size_t slot, std::optional<std::chrono::milliseconds> timeout) {
  std::unique_lock lock(mutex_);
  const auto ready = [&] { return slots_[slot].done; };
  if (!timeout) {
    done_.wait(lock, ready);
  } else if (!done_.wait_for(lock, *timeout, ready)) {
    return false;
  }
  if (auto error = std::exchange(slots_[slot].error, nullptr)) std::rethrow_exception(error);
  return true;
}

void Prefetcher::drain() {
  std::unique_lock lock(mutex_);
  for (const std::size_t slot : queue_) slots_[slot].done = true;
  queue_.clear();
  done_.wait(lock, [&] { return running_ == 0; });
}

void Prefetcher::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    submitted_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const std::size_t slot = queue_.front();
    queue_.pop_front();
    ++running_;
    lock.unlock();
    std::exception_ptr error;
    try {
      work_(slot);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    --running_;
    slots_[slot].done = true;
    slots_[slot].error = std::move(error);
    done_.notify_all();
  }
}

}  // namespace accelerate::data::detail
