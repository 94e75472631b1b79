#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

/// Files, read and written in full: no call here returns after a part of the bytes, and every error
/// is a CheckpointError whose message names the file, with the system's own error nested.
namespace accelerate::io {

/// Tells a file from any other, and from itself after it was written to.
struct FileStamp {
  std::uint64_t device = 0, inode = 0, bytes = 0;
  std::int64_t written_ns = 0;
  bool operator==(const FileStamp&) const = default;
};

/// An open file with positions given by the caller, so that several threads can read and write it
/// at once.
class File {
 public:
  /// Opens for reading. Throws CheckpointError when it is missing, a folder, or may not be read.
  static File open(const std::filesystem::path& path);
  /// Opens for reading and writing, and leaves what is there.
  static File open_writable(const std::filesystem::path& path);
  /// Makes an empty file, in place of one that is there.
  static File create(const std::filesystem::path& path);

  File(File&& other) noexcept;
  File& operator=(File&& other) noexcept;
  /// Closes it. What the system had to say then is lost: call `close` after writing.
  ~File();

  /// `bytes` bytes from `offset` on. Throws when the file ends before.
  void read(void* data, std::size_t bytes, std::uint64_t offset) const;
  /// Writes them all. On a full disk the message says how much was free.
  void write(const void* data, std::size_t bytes, std::uint64_t offset);
  /// Makes it `bytes` long and has the file system set the space aside where it can, so that a full
  /// disk shows now.
  void preallocate(std::uint64_t bytes);
  /// Asks the system to begin to bring these bytes to the disk, so that `sync` has less to wait
  /// for.
  void start_sync(std::uint64_t offset, std::uint64_t bytes) noexcept;
  /// Returns when the contents are on the disk.
  void sync();
  /// Closes it and throws if the system reports a lost write then, as network file systems do.
  void close();

  std::uint64_t size() const { return stamp().bytes; }
  FileStamp stamp() const;
  const std::filesystem::path& path() const noexcept { return path_; }
  int descriptor() const noexcept { return descriptor_; }

 private:
  File(std::filesystem::path path, int flags);

  std::filesystem::path path_;
  int descriptor_ = -1;
};

/// While it lives and `holds`, nobody can write to a file or cut it short: who tries waits, as long
/// as the system makes him (45 s, where it is not set otherwise). Asking changes nothing where it
/// is refused: to others than the owner, of a file that somebody has open for writing, on file
/// systems that know no leases.
class ReadLease {
 public:
  explicit ReadLease(const File& file);
  ReadLease(const ReadLease&) = delete;
  ReadLease& operator=(const ReadLease&) = delete;
  ~ReadLease();
  /// False, too, once somebody waits.
  bool holds() const noexcept;

 private:
  int descriptor_;
};

/// The whole file. Throws CheckpointError when it is larger than `most` bytes.
std::string read_file(const std::filesystem::path& path,
                      std::uint64_t most = std::uint64_t{1} << 30);

/// Where this process writes the file `path` until it is complete: beside it. Removes what
/// processes that died left there of this file.
std::filesystem::path partial_of(const std::filesystem::path& path);

/// Removes what processes of this machine that died were writing in `folder` under a name of
/// `partial_of`, where `is_one(name)` of the file that it was to become.
void remove_abandoned(const std::filesystem::path& folder,
                      const std::function<bool(std::string_view name)>& is_one);

/// Has `write` make the file under another name in its folder, and gives it the name `path` when it
/// is complete. After an error nothing of it is left.
void replace_file(const std::filesystem::path& path,
                  const std::function<void(const std::filesystem::path& partial)>& write);

/// Writes a file that is there in full or not at all: under another name in the same folder,
/// synced, renamed, and the folder synced. A file of that name is replaced.
void write_file(const std::filesystem::path& path, std::string_view contents);

/// Returns when the names in `folder` are on the disk.
void sync_folder(const std::filesystem::path& folder);

/// Renames a file or a folder within one file system, atomically, and syncs the folder it is in. A
/// file, or an empty folder, of the name `to` is replaced.
void rename_durably(const std::filesystem::path& from, const std::filesystem::path& to);

/// Puts the folder `from` in the place of `to`, which may be there with contents or not: at every
/// instant one of the two has that name, where the file system can exchange two names (Linux's
/// local ones can). Elsewhere the old one is called `.NAME.previous` for an instant; a folder of
/// that name is taken for what an earlier replacement left. The old one is removed then; when that
/// fails, a warning says so. Throws CheckpointError when `to` was not replaced.
void replace_folder(const std::filesystem::path& from, const std::filesystem::path& to);

/// `folder`, or its `.NAME.previous` where only that is there: a process died while it was
/// replacing it.
std::filesystem::path replaced_folder(const std::filesystem::path& folder);

/// Removes a file, or a folder with everything in it. Nothing happens when it is not there.
void delete_path(const std::filesystem::path& path);

/// The names of the files and folders in a folder, sorted.
std::vector<std::string> names_in(const std::filesystem::path& folder);

/// What is in a folder and in those below it and is no folder itself, as paths from it, sorted.
/// Links are named and not followed.
std::vector<std::string> files_in(const std::filesystem::path& folder);

/// Makes a folder, and those above it.
void make_folders(const std::filesystem::path& folder);

/// What an ordinary user can still write to the disk that `path` is or would be on.
std::uint64_t free_bytes(const std::filesystem::path& path);

/// A folder of a new name, removed with its contents at the end unless it was kept.
class TemporaryFolder {
 public:
  /// Makes `parent`/`prefix`XXXXXX. `parent` must be there.
  explicit TemporaryFolder(
      const std::filesystem::path& parent = std::filesystem::temp_directory_path(),
      const std::string& prefix = "accelerate-");
  TemporaryFolder(TemporaryFolder&& other) noexcept;
  TemporaryFolder& operator=(TemporaryFolder&& other) = delete;
  ~TemporaryFolder();

  const std::filesystem::path& path() const noexcept { return path_; }
  /// Leaves it where it is.
  std::filesystem::path keep() noexcept;

 private:
  std::filesystem::path path_;
};

/// For tests that fail or kill a process in the middle of its writing.
namespace faults {

enum class Operation { kCreate, kWrite, kPreallocate, kSync, kRename, kExchange, kRemove };

/// Called before each operation that changes a disk, with the number of bytes that are about to be
/// written; it may lower them. Zero lets the operation go on; another value is the errno it fails
/// with. May be called from several threads.
using Hook = int (*)(Operation operation, const std::filesystem::path& path, std::size_t& bytes);

/// Nothing is called while the hook is null, as it is at the start.
void set_hook(Hook hook) noexcept;

}  // namespace faults
}  // namespace accelerate::io
