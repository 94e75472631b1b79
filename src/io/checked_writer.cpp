#include "io/checked_writer.hpp"

#include <algorithm>
#include <utility>

namespace accelerate::io {

namespace {

constexpr std::size_t kAtOnce = std::size_t{4}
                                << 20;  // in the cache while it is checksummed and written
constexpr std::size_t kToDisk = std::size_t{32} << 20;  // as much is handed to the disk at a time
constexpr std::size_t kMostQueued = std::size_t{64} << 20;

}  // namespace

CheckedWriter::CheckedWriter(const std::filesystem::path& path, std::uint64_t bytes)
    : file_(File::create(path)) {
  if (bytes > 0) file_.preallocate(bytes);
  thread_ = std::thread([this] { work(); });
}

CheckedWriter::~CheckedWriter() {
  {
    const std::lock_guard lock(mutex_);
    dropped_ = true;
  }
  stop();
}

void CheckedWriter::stop() {
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void CheckedWriter::append(std::span<const std::byte> bytes, std::shared_ptr<const void> keep) {
  if (bytes.empty()) return;
  if (keep == nullptr) {
    const auto copy = std::make_shared<std::vector<std::byte>>(bytes.begin(), bytes.end());
    bytes = *copy;
    keep = copy;
  }
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return failure_ || queued_ < kMostQueued; });
    if (failure_) std::rethrow_exception(failure_);
    queued_ += bytes.size();
    queue_.push_back({bytes, std::move(keep)});
  }
  size_ += bytes.size();
  changed_.notify_all();
}

std::vector<std::uint64_t> CheckedWriter::finish() {
  stop();
  if (failure_) std::rethrow_exception(failure_);
  file_.sync();
  file_.close();
  return sums_.finish();
}

void CheckedWriter::work() {
  for (;;) {
    Piece piece;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ended_ || !queue_.empty(); });
      if (dropped_ || queue_.empty()) return;
      piece = std::move(queue_.front());
      queue_.pop_front();
    }
    std::exception_ptr failure;
    try {
      write(piece.bytes);
    } catch (...) {
      failure = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      queued_ -= piece.bytes.size();
      failure_ = failure;
    }
    changed_.notify_all();
    if (failure) return;
  }
}

void CheckedWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto next = bytes.first(std::min(bytes.size(), kAtOnce));
    sums_.update(next);
    file_.write(next.data(), next.size(), written_);
    written_ += next.size();
    bytes = bytes.subspan(next.size());
    if (written_ - begun_ < kToDisk) continue;
    file_.start_sync(begun_, written_ - begun_);
    begun_ = written_;
  }
}

}  // namespace accelerate::io
