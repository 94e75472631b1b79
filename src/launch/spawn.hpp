#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

namespace accelerate::launch_detail {

/// What one process is started with.
struct Spawn {
  std::string program;                 // a path
  std::vector<std::string> arguments;  // argv, argument 0 included
  std::map<std::string, std::string> environment;
  bool keeps_stdin = false;
  std::string stdout_path;  // empty: this process' own
  std::string stderr_path;
};

/// The path of `name`, which is looked up on `search_path` unless it holds a slash. Throws
/// LaunchError when there is no such file, or it cannot be executed.
std::string find_program(const std::string& name, const std::string& search_path);

/// Starts a process in a session of its own that dies with this one. Throws LaunchError when
/// the program could not be executed.
pid_t spawn(const Spawn& what);

/// A port nobody listens at: `wanted`, or any when `wanted` is 0. Throws LaunchError when `wanted`
/// is taken.
int free_port(int wanted);

}  // namespace accelerate::launch_detail
