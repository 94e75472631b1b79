#pragma once

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <ctime>
#include <filesystem>
#include <string>
#include <utility>

namespace accelerate::io {

/// While one lives, nobody else takes the lock `path`: on this machine, and on others where the
/// file system has locks that reach them. Where it has none, or the file cannot be made, it does
/// nothing. The file says who has it, and is removed at the end; what a process that died left of
/// it is taken over.
class FileLock {
 public:
  /// Throws CheckpointError when somebody else has it: `what` is being done by whom and since when,
  /// and `advice`.
  FileLock(std::filesystem::path path, const std::string& what, const std::string& advice)
      : path_(std::move(path)) {
    for (bool is_ours = false; !is_ours;) {
      descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
      if (descriptor_ < 0) return;
      if (::flock(descriptor_, LOCK_EX | LOCK_NB) != 0) {
        const bool taken = errno == EWOULDBLOCK;
        const std::string holder = taken ? contents() : std::string();
        ::close(std::exchange(descriptor_, -1));
        if (!taken) return;
        throw CheckpointError(
            text::concat(what, " by ", holder.empty() ? "another run" : holder, ". ", advice),
            path_.string());
      }
      // Its holder may have removed the file between the opening and the lock.
      struct ::stat own = {}, there = {};
      is_ours = ::fstat(descriptor_, &own) == 0 && ::stat(path_.c_str(), &there) == 0 &&
                own.st_ino == there.st_ino && own.st_dev == there.st_dev;
      if (!is_ours) ::close(std::exchange(descriptor_, -1));
    }
    std::array<char, 256> host{};
    ::gethostname(host.data(), host.size() - 1);
    std::array<char, 64> since{};
    const std::time_t now = std::time(nullptr);
    std::tm utc = {};
    ::gmtime_r(&now, &utc);
    std::strftime(since.data(), since.size(), "%Y-%m-%d %H:%M:%S UTC", &utc);
    const std::string who =
        text::concat("process ", ::getpid(), " on ", host.data(), ", since ", since.data());
    // What it says helps whoever is refused; the lock holds without it.
    if (::ftruncate(descriptor_, 0) != 0 || ::pwrite(descriptor_, who.data(), who.size(), 0) < 0)
      return;
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;
  ~FileLock() {
    if (descriptor_ < 0) return;
    ::unlink(path_.c_str());
    ::close(descriptor_);
  }

 private:
  std::string contents() const {
    std::array<char, 512> buffer{};
    const auto count = ::pread(descriptor_, buffer.data(), buffer.size(), 0);
    return {buffer.data(), count > 0 ? static_cast<std::size_t>(count) : 0};
  }

  std::filesystem::path path_;
  int descriptor_ = -1;
};

}  // namespace accelerate::io
