#include "io/async_engine.hpp"

#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace accelerate::io {
namespace {

// Enough to read and write at once and keep a disk's queue from running dry.
constexpr int kThreads = 4;

class ThreadEngine final : public Engine {
 public:
  explicit ThreadEngine(int descriptor) : descriptor_(descriptor) {
    for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this] { work(); });
  }

  ~ThreadEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wanted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void start(const Piece& piece) override {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(piece);
    }
    wanted_.notify_one();
  }

  PieceResult wait_one() override {
    std::unique_lock lock(mutex_);
    ended_some_.wait(lock, [this] { return !ended_.empty(); });
    const PieceResult result = ended_.front();
    ended_.pop_front();
    return result;
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      wanted_.wait(lock, [this] { return stop_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const Piece piece = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const auto offset = static_cast<off_t>(piece.offset);
      const ssize_t moved = piece.is_write
                                ? ::pwrite(descriptor_, piece.memory, piece.length, offset)
                                : ::pread(descriptor_, piece.memory, piece.length, offset);
      const std::int64_t result = moved < 0 ? -errno : moved;
      lock.lock();
      ended_.push_back({piece, result});
      ended_some_.notify_one();
    }
  }

  int descriptor_;
  std::mutex mutex_;
  std::condition_variable wanted_, ended_some_;
  std::deque<Piece> waiting_;
  std::deque<PieceResult> ended_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<Engine> make_thread_engine(int descriptor) {
  return std::make_unique<ThreadEngine>(descriptor);
}

}  // namespace accelerate::io
