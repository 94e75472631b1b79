#pragma once

#include <accelerate/io/file.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace accelerate::io {

/// How a mapped range is about to be read.
enum class Advice {
  kNormal,
  kSequential,  ///< from front to back, once: read far ahead
  kRandom,      ///< here and there: do not read ahead
  kWillNeed,    ///< soon: begin to read it in
  kDontNeed,  ///< not again soon: its memory can be taken back, and with it what was written into a
              ///< copy
};

/// What a stray write into a map does.
enum class Access {
  kReadOnly,     ///< ends the process with SIGSEGV
  kCopyOnWrite,  ///< gives the process a page of its own; the file never changes
};

/// A file in memory, for reading. The pages come from the file when they are touched, so a
/// mapped file occupies memory only where it was read. Holds no file descriptor.
class MappedFile {
 public:
  /// Throws CheckpointError when the file is missing, not a regular file, or cannot be mapped.
  explicit MappedFile(const std::filesystem::path& path, Advice advice = Advice::kNormal,
                      Access access = Access::kReadOnly);
  /// Of a file that is open. The map stays when it is closed.
  explicit MappedFile(const File& file);
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile();

  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  std::size_t size() const noexcept { return size_; }
  /// Absolute.
  const std::filesystem::path& path() const noexcept { return path_; }

  /// Of the file when it was mapped.
  const FileStamp& stamp() const noexcept { return stamp_; }

  /// A part of it. Throws CheckpointError when the file is shorter.
  std::span<const std::byte> slice(std::uint64_t offset, std::uint64_t bytes) const;

  /// Tells the system how a range will be read. `bytes` beyond the end are cut off.
  void advise(Advice advice, std::uint64_t offset = 0,
              std::uint64_t bytes = ~std::uint64_t{0}) const noexcept;

  /// Whether a range lies in the system's cache, as far as it tells, and is mapped now, so that
  /// reading it soon asks no disk. Others than the owner of a file are told of any range that it
  /// does. `bytes` beyond the end are cut off.
  bool map_cached(std::uint64_t offset, std::uint64_t bytes) const;

  /// Throws CheckpointError unless the file of this name is still the one that was mapped and is at
  /// least as long. Reading the map of a file that was cut short ends the process with SIGBUS, so
  /// call this before reading a map that was made long ago. A file that was only removed or
  /// replaced can still be read, but this says so.
  void check() const;

 private:
  void map(int descriptor, Access access);

  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  FileStamp stamp_;
};

}  // namespace accelerate::io
