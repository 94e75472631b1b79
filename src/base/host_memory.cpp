#include <accelerate/base/error.hpp>
#include <accelerate/base/host_memory.hpp>
#include <accelerate/base/text.hpp>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace accelerate {
namespace {

// The number in a file that holds one; nothing when there is no such file, or it says "max".
std::optional<std::int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  return text::to_int(word);
}

// What a limit file and a usage file leave.
std::int64_t left(const std::string& folder, const char* limit, const char* usage) {
  const auto most = number_in(folder + limit);
  const auto used = number_in(folder + usage);
  // Version 1 writes "no limit" as a number near the largest.
  if (!most || !used || *most > (std::int64_t{1} << 60))
    return std::numeric_limits<std::int64_t>::max();
  return std::max<std::int64_t>(0, *most - *used);
}

}  // namespace

std::int64_t available_host_memory() {
  std::int64_t available = -1;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    if (!line.starts_with("MemAvailable:")) continue;
    const auto words = text::split(line, ' ');
    for (const std::string& word : words) {
      if (const auto kilobytes = text::to_int(word)) available = *kilobytes * 1024;
    }
  }
  if (available < 0) {
    throw UnsupportedError(
        "/proc/meminfo has no line MemAvailable, so the memory of this machine is not known.");
  }
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    // "hierarchy:controllers:path"; version 2 has no controllers.
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      available =
          std::min(available, left("/sys/fs/cgroup" + path + "/", "memory.max", "memory.current"));
    } else if (controllers == "memory") {
      available = std::min(available, left("/sys/fs/cgroup/memory" + path + "/",
                                           "memory.limit_in_bytes", "memory.usage_in_bytes"));
    }
  }
  return available;
}

}  // namespace accelerate
