#pragma once

#include <accelerate/base/environment.hpp>

#include <sys/types.h>

namespace accelerate::comm {

/// Knows whether the torchrun that started this process is still there. When one is killed, the
/// system does not end what it started.
class LauncherWatch {
 public:
  explicit LauncherWatch(const Environment& environment);
  /// False as long as it lives, and always when this process has none.
  bool gone() const;

 private:
  // This process, or the script that torchrun started and that started this process.
  pid_t child_ = 0;
  pid_t launcher_ = 0;
};

}  // namespace accelerate::comm
