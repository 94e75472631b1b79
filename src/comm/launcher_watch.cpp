#include "comm/launcher_watch.hpp"

#include <unistd.h>

#include <fstream>
#include <sstream>
#include <string>

namespace accelerate::comm {
namespace {

std::string content(pid_t process, const char* name) {
  std::ifstream in("/proc/" + std::to_string(process) + "/" + name, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return std::move(out).str();
}

/// 0 when it cannot be told.
pid_t parent_of(pid_t process) {
  if (process == ::getpid()) return ::getppid();
  // "4711 (a name) S 4710 ...": the name may hold anything.
  const std::string stat = content(process, "stat");
  const auto end = stat.rfind(')');
  if (end == std::string::npos) return 0;
  std::istringstream fields(stat.substr(end + 1));
  std::string state, parent;
  fields >> state >> parent;
  return static_cast<pid_t>(std::strtol(parent.c_str(), nullptr, 10));
}

}  // namespace

LauncherWatch::LauncherWatch(const Environment& environment) {
  const auto run = environment.get("TORCHELASTIC_RUN_ID");
  if (!run) return;
  // torchrun gives this to what it starts and does not have it itself.
  const std::string given = std::string("\0TORCHELASTIC_RUN_ID=", 21) + *run + '\0';
  pid_t child = ::getpid();
  pid_t parent = ::getppid();
  while (parent > 1 && ('\0' + content(parent, "environ")).find(given) != std::string::npos) {
    child = parent;
    parent = parent_of(child);
  }
  // Without a parent this process is an orphan already, and nothing more can be learnt.
  if (parent <= 0 || content(parent, "environ").empty()) return;
  child_ = child;
  launcher_ = parent;
}

bool LauncherWatch::gone() const { return launcher_ != 0 && parent_of(child_) != launcher_; }

}  // namespace accelerate::comm
