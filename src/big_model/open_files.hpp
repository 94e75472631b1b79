#pragma once

#include <accelerate/io/file.hpp>

#include <filesystem>
#include <map>
#include <mutex>

namespace accelerate::big_model {

/// Files that are opened once for many reads by any thread: the kernel reads ahead for each opening
/// of a file on its own, and begins small.
class OpenFiles {
 public:
  /// Opens it when it is asked for first. Throws as io::File::open does.
  const io::File& at(const std::filesystem::path& path) {
    const std::lock_guard lock(mutex_);
    const auto found = files_.find(path);
    return found != files_.end() ? found->second
                                 : files_.emplace(path, io::File::open(path)).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::filesystem::path, io::File> files_;
};

}  // namespace accelerate::big_model
