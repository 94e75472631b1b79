#pragma once

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

namespace accelerate::big_model {

/// While one lives, the weights of an offload folder are in use, or being written: by one alone,
/// among all processes of this machine. Where the file system has no locks it does nothing; that a
/// file is another is then found out when it is read.
class FolderLock {
 public:
  enum class Kind { use, write };
  FolderLock(const std::filesystem::path& folder, Kind kind)
      : descriptor_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    const int how = kind == Kind::use ? LOCK_SH : LOCK_EX;
    if (descriptor_ < 0 || ::flock(descriptor_, how | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
    ::close(descriptor_);
    throw CheckpointError(
        text::concat("The offload folder ", folder,
                     kind == Kind::use
                         ? " is being written to. Wait until that is done."
                         : " has weights that a dispatched module is using, in this process or "
                           "another, so it cannot be written to. Name another folder, or call "
                           "remove_offload() on that module first."),
        folder.string());
  }
  FolderLock(FolderLock&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  FolderLock& operator=(FolderLock&&) = delete;
  ~FolderLock() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

 private:
  int descriptor_;
};

}  // namespace accelerate::big_model
