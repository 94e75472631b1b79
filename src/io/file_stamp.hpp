#pragma once

#include <accelerate/io/file.hpp>

#include <sys/stat.h>

namespace accelerate::io {

inline FileStamp stamp_of(const struct stat& status) {
  return {status.st_dev, status.st_ino, static_cast<std::uint64_t>(status.st_size),
          std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec};
}

}  // namespace accelerate::io
