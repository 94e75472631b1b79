#include <accelerate/base/environment.hpp>
#include <accelerate/base/error.hpp>
#include <accelerate/base/host_memory.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/launch/launcher.hpp>

#include <CLI/CLI.hpp>

#include "base/plain_text.hpp"
#include "cli/commands.hpp"

#include <sys/utsname.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>

namespace accelerate::cli {
namespace {

namespace fs = std::filesystem;

#ifdef __clang__
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

/// What follows `key` and a colon or equals sign in a text file, or nothing.
std::optional<std::string> value_in(const fs::path& file, std::string_view key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with(key)) continue;
    const auto at = line.find_first_of(":=", key.size());
    if (at == std::string::npos) continue;
    std::string_view value = text::trim(std::string_view(line).substr(at + 1));
    if (value.size() > 1 && value.front() == '"' && value.back() == '"')
      value = value.substr(1, value.size() - 2);
    return std::string(value);
  }
  return std::nullopt;
}

std::string total_memory() {
  const auto value = value_in("/proc/meminfo", "MemTotal");  // "24567890 kB"
  const auto kib = value ? text::to_int(text::split(*value, ' ').front()) : std::nullopt;
  return kib ? text::format_bytes(*kib * 1024) : "unknown";
}

std::string available_memory() {
  try {
    return text::format_bytes(available_host_memory());
  } catch (const UnsupportedError&) {
    return "unknown";
  }
}

std::string on_path(const Environment& environment, const std::string& name) {
  for (const std::string& folder : text::split(environment.get("PATH").value_or(""), ':')) {
    const fs::path candidate = fs::path(folder) / name;
    if (!folder.empty() && access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "not on PATH";
}

void print_gpus() {
  // NVIDIA's kernel driver lists its devices here; asking it costs no CUDA start-up.
  std::error_code error;
  std::vector<std::string> models;
  for (const auto& entry : fs::directory_iterator("/proc/driver/nvidia/gpus", error)) {
    models.push_back(value_in(entry.path() / "information", "Model").value_or("unknown model"));
  }
  std::cout << "NVIDIA GPUs:         " << (models.empty() ? "none" : text::join(models)) << "\n";
  std::ifstream driver("/proc/driver/nvidia/version");
  if (std::string line; std::getline(driver, line))
    std::cout << "NVIDIA driver:       " << line << "\n";
}

void run() {
  const Environment environment = Environment::process();
  utsname system{};
  uname(&system);
  std::cout << "accelerate-cpp:      " << ACCELERATE_VERSION << "\n"
            << "built for LibTorch:  " << ACCELERATE_TORCH_VERSION << "\n"
            << "built with:          " << kCompiler << "\n"
            << "MPI backend:         " << (ACCELERATE_HAS_MPI ? "yes" : "no") << ", mpirun "
            << on_path(environment, "mpirun") << "\n"
            << "NCCL backend:        " << (ACCELERATE_HAS_NCCL ? "yes" : "no") << "\n"
            << "system:              "
            << value_in("/etc/os-release", "PRETTY_NAME").value_or("unknown") << ", "
            << system.sysname << " " << system.release << " " << system.machine << "\n"
            << "cores:               " << available_cores() << "\n"
            << "memory:              " << total_memory() << ", available " << available_memory()
            << "\n";
  print_gpus();
  for (const auto& [name, value] : environment.variables()) {
    for (const char* prefix : {"ACCELERATE_", "CUDA_", "NCCL_", "GLOO_", "OMP_", "RANK",
                               "WORLD_SIZE", "LOCAL_", "MASTER_"}) {
      if (name.starts_with(prefix))
        std::cout << "variable:            "
                  << text::printable(name + "=" +
                                     (name == "ACCELERATE_SECRET" ? "(not shown)" : value))
                  << "\n";
    }
  }
}

}  // namespace

void add_env(CLI::App& app, int& exit_code) {
  app.add_subcommand("env", "Print versions and what this machine has, for a bug report")
      ->callback([&exit_code] {
        run();
        exit_code = 0;
      });
}

}  // namespace accelerate::cli
