#pragma once

#include <accelerate/base/placement.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/io/manifest.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <mutex>
#include <span>
#include <vector>

namespace accelerate::io {

/// The elements that a saved box and a box in memory share: which bytes of a file go where.
class Overlap {
 public:
  /// One for each two boxes that share elements. Those of `saved` are whole bytes.
  static std::vector<Overlap> of(const SavedTensor& saved, std::span<const PlacedBox> wanted);

  /// Index into Manifest::files.
  std::size_t file() const noexcept { return file_; }
  /// All of its bytes are in [begin, end) of the file; there may be others between them.
  std::uint64_t begin() const noexcept { return begin_; }
  std::uint64_t end() const noexcept { return end_; }
  /// Calls `visit(position, bytes, place)` for bytes that are consecutive both in the file, from
  /// `position` on, and in memory, `place` bytes from the first that the rank has. They come in the
  /// file's order, and only those in [from, to) of the file.
  template <class Visitor>
  void for_each_run(std::uint64_t from, std::uint64_t to, Visitor&& visit) const {
    to = std::min(to, end_);
    for (Cursor at = seek(from); at.position < to; step(at)) {
      const std::uint64_t bytes = std::min(at.bytes, to - at.position);
      visit(at.position, bytes, at.place);
    }
  }
  /// Where the first of its bytes from `from` on is; `end()` where there are none.
  std::uint64_t next(std::uint64_t from) const { return seek(from).position; }

 private:
  // How far it is to the next index, in bytes, in the file and in memory.
  struct Dimension {
    std::uint64_t size = 0;
    std::uint64_t from = 0;
    std::int64_t to = 0;
  };
  // The rest of a run, or the end.
  struct Cursor {
    std::vector<std::uint64_t> index;
    std::uint64_t position = 0;
    std::uint64_t bytes = 0;
    std::int64_t place = 0;
  };
  Cursor seek(std::uint64_t from) const;
  void step(Cursor& at) const;

  std::size_t file_ = 0;
  std::uint64_t begin_ = 0, end_ = 0;
  std::int64_t place_ = 0;
  std::uint64_t run_ = 0;              // bytes
  std::vector<Dimension> dimensions_;  // of the runs, the slowest in the file first
};

/// Reads parts of tensors from a checkpoint's files, in any thread. Keeps the files open.
class BoxReader {
 public:
  BoxReader(std::filesystem::path folder, const Manifest& manifest);

  /// Reads what is wanted of a tensor. The first element that the rank has is at `memory`.
  void read(const SavedTensor& saved, std::span<const PlacedBox> wanted, std::byte* memory);
  /// Reads what lies in [from, to) of the file. What is between two runs and shorter than a page of
  /// the system's, which is brought from the disk anyway, is read with them.
  void read(const Overlap& overlap, std::uint64_t from, std::uint64_t to, std::byte* memory);
  /// One of the manifest's files, opened when it is asked for first.
  const File& file(std::size_t index);
  /// So many bytes `read` has read of the files.
  std::uint64_t bytes_read() const noexcept { return bytes_read_; }

 private:
  std::filesystem::path folder_;
  const Manifest& manifest_;
  std::mutex mutex_;
  std::map<std::size_t, File> open_;
  std::atomic<std::uint64_t> bytes_read_{0};
};

}  // namespace accelerate::io
