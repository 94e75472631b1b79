#pragma once

#include <sys/stat.h>

#include <filesystem>

namespace accelerate::io {

// What is under a name if it is no file: "a folder", "a named pipe"; null for a file, or nothing.
// To open a pipe waits until somebody opens its other end, and devices have no end.
inline const char* other_than_file(const std::filesystem::path& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return nullptr;
  if (S_ISDIR(status.st_mode)) return "a folder";
  if (S_ISFIFO(status.st_mode)) return "a named pipe";
  if (S_ISSOCK(status.st_mode)) return "a socket";
  return "a device";
}

}  // namespace accelerate::io
