#pragma once

#include <accelerate/base/arg.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace accelerate::io {

/// Who moves the data of an AsyncFile.
enum class AsyncEngine {
  io_uring,  ///< the kernel, through a ring it shares with this process
  threads    ///< a few threads that read and write at positions
};

/// Whether this process may use io_uring: the build had liburing, the kernel has it, and nothing
/// forbids it (containers often do). Asked once; `why_not` is then a sentence for people.
bool io_uring_works(std::string* why_not = nullptr);

/// How an AsyncFile is opened.
class AsyncFileOptions {
  /// Nothing: io_uring where it works and ACCELERATE_IO_URING is not 0, else threads, which is said
  /// at debug level. Default: nothing.
  ACCELERATE_ARG(std::optional<AsyncEngine>, engine) = std::nullopt;
  /// Past the page cache (O_DIRECT): no copy in the kernel, and no page cache that fills up with
  /// what is read once a step. Offsets, lengths and addresses must then be multiples of
  /// AsyncFile::kAlignment. A filesystem that cannot is used through the cache, which `direct()`
  /// tells and the debug log says. Default: false.
  ACCELERATE_ARG(bool, direct) = false;
};

/// Reads and writes of one file that run while the caller computes. For big blocks: a call takes
/// microseconds, and is cut into pieces of a few MiB that run at the same time. One thread at a
/// time may use it. Throws FileError, with the file's name, for what the system refuses.
class AsyncFile {
 public:
  /// What direct I/O wants offsets, lengths and addresses to be multiples of.
  static constexpr std::size_t kAlignment = 4096;
  /// Names an operation in flight.
  enum class Ticket : std::uint64_t {};

  /// An existing file, for reading and, if it may be, for writing.
  static AsyncFile open(const std::filesystem::path& path, bool writable,
                        const AsyncFileOptions& options = {});
  /// A file of `bytes` zeros in `folder` (which is made if it is not there) that has no name: when
  /// this object and its maps are gone, or the process however it ended, so is the file. Its room
  /// on the disk is taken at once, so writes cannot run out of it. Throws FileError, with both
  /// figures, when there is too little.
  static AsyncFile scratch(const std::filesystem::path& folder, std::uint64_t bytes,
                           const AsyncFileOptions& options = {});

  /// Waits for what is in flight.
  ~AsyncFile();
  AsyncFile(AsyncFile&&) noexcept;
  AsyncFile& operator=(AsyncFile&&) noexcept;

  /// Starts to fill `memory` with what is at `offset`. The memory must live until `wait` returned
  /// or threw. Waits when very much is in flight already.
  Ticket read(std::uint64_t offset, std::span<std::byte> memory);
  /// Starts to write `memory` to `offset`.
  Ticket write(std::uint64_t offset, std::span<const std::byte> memory);
  /// Waits for one operation. Throws FileError if it failed; a read past the end of the file did.
  void wait(Ticket ticket);
  /// Waits for all. Throws the first error, when all have ended.
  void wait_all();

  /// The file's bytes as memory that is shared with the file. It lives as long as the pointer, also
  /// after this object. Operations in flight and uses of it at the same place are the caller's to
  /// order.
  std::shared_ptr<std::byte> map() const;

  std::uint64_t size() const noexcept;
  AsyncEngine engine() const noexcept;
  /// Whether the page cache is gone past.
  bool direct() const noexcept;
  /// How errors name it.
  const std::string& name() const noexcept;

 private:
  struct Impl;
  explicit AsyncFile(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::io
