#pragma once

#include <accelerate/io/checksum.hpp>
#include <accelerate/io/file.hpp>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace accelerate::io {

// A file that is written from its start to its end, with the checksums of its blocks. A thread of
// its own checksums and writes what was appended, and has the disk begin while more comes, so that
// little is left to wait for at the end. One thread may use it.
class CheckedWriter {
 public:
  // Makes the file, in place of one that is there. `bytes`, if not zero, is how long it will be:
  // the space is set aside. Throws CheckpointError.
  explicit CheckedWriter(const std::filesystem::path& path, std::uint64_t bytes = 0);
  // Drops what has not been written: call `finish` for a file that is complete.
  ~CheckedWriter();
  CheckedWriter(const CheckedWriter&) = delete;
  CheckedWriter& operator=(const CheckedWriter&) = delete;

  // Has these bytes written behind those before. `keep` holds their memory, which must not change
  // until `finish`; without it they are copied. Waits while much is queued. Throws the error of an
  // earlier write.
  void append(std::span<const std::byte> bytes, std::shared_ptr<const void> keep = nullptr);
  // How many were appended.
  std::uint64_t size() const noexcept { return size_; }
  // Writes what is left, brings the file to the disk and closes it. Returns its blocks' checksums.
  // Throws CheckpointError.
  std::vector<std::uint64_t> finish();

 private:
  struct Piece {
    std::span<const std::byte> bytes;
    std::shared_ptr<const void> keep;
  };
  void work();
  void write(std::span<const std::byte> bytes);
  void stop();

  File file_;
  BlockChecksums sums_;
  std::uint64_t size_ = 0;
  std::uint64_t written_ = 0;  // of the thread
  std::uint64_t begun_ = 0;    // of these the disk was told; of the thread

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Piece> queue_;
  std::size_t queued_ = 0;  // bytes
  bool ended_ = false;
  bool dropped_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace accelerate::io
