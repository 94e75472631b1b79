#pragma once

#include <accelerate/base/json.hpp>

#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>

namespace accelerate::testing {

/// True when there is a Python to compare with. A LibTorch that is not in a Python environment has
/// none.
inline bool has_python() { return std::filesystem::exists(ACCELERATE_TEST_PYTHON); }

/// Runs tests/`script` with the Python that LibTorch came with, and gives what it printed as JSON.
/// What it writes to stderr is shown. Throws when it fails.
inline Json run_python(const std::string& script, const std::string& arguments = {}) {
  const std::string command = std::string("'") + ACCELERATE_TEST_PYTHON + "' '" +
                              ACCELERATE_TESTS_DIR + "/" + script + "' " + arguments;
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) throw std::runtime_error("Could not run " + command);
  std::string output;
  char buffer[65536];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) output.append(buffer, n);
  if (const int status = pclose(pipe); status != 0) {
    throw std::runtime_error(command + " ended with status " + std::to_string(status) +
                             " after printing: " + output);
  }
  return Json::parse(output);
}

}  // namespace accelerate::testing
