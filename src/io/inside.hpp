#pragma once

#include <algorithm>
#include <filesystem>
#include <string>

namespace accelerate::io {

// Whether a name that a file gives for another is that of something in its own folder. `folder /
// name` would be anywhere for "/etc/passwd" and "../other".
inline bool stays_inside(const std::string& name) {
  const std::filesystem::path path(name);
  return !name.empty() && path.is_relative() && name.find('\0') == std::string::npos &&
         std::find(path.begin(), path.end(), "..") == path.end();
}

}  // namespace accelerate::io
