#include <accelerate/base/log.hpp>

#include <accelerate/base/environment.hpp>
#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include "base/log_level.hpp"
#include "base/plain_text.hpp"
#include "base/terminal_line.hpp"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

namespace accelerate::log {
namespace {

spdlog::level::level_enum to_spdlog(Level level) {
  switch (level) {
    case Level::debug:
      return spdlog::level::debug;
    case Level::info:
      return spdlog::level::info;
    case Level::warning:
      return spdlog::level::warn;
    case Level::error:
      return spdlog::level::err;
    case Level::off:
      break;
  }
  return spdlog::level::off;
}

std::optional<Level> level_of(std::string_view name) {
  const std::string lower = text::to_lower(name);
  if (lower == "debug") return Level::debug;
  if (lower == "info") return Level::info;
  if (lower == "warning" || lower == "warn") return Level::warning;
  if (lower == "error" || lower == "critical") return Level::error;
  if (lower == "off") return Level::off;
  return std::nullopt;
}

std::string level_name() {
  return Environment::process().get("ACCELERATE_LOG_LEVEL").value_or("info");
}

struct Logger {
  // Never registered by name, so a program's own spdlog set-up is left alone.
  std::shared_ptr<spdlog::logger> spd = std::make_shared<spdlog::logger>(
      "accelerate", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
  std::atomic<Level> level{level_of(level_name()).value_or(Level::info)};
  std::atomic<int> rank{0};
  std::atomic<int> world_size{1};
  std::atomic<int> local_rank{0};

  Logger() {
    spd->set_pattern("%H:%M:%S %^%l%$ %v");
    spd->set_level(to_spdlog(level));
  }
};

Logger& logger() {
  // Leaked on purpose: threads may log while static objects are being destroyed.
  static Logger* const instance = new Logger;
  return *instance;
}

}  // namespace

Level level_from_environment() {
  const std::string name = level_name();
  if (const auto level = level_of(name)) return *level;
  throw ConfigError(
      text::concat("The environment variable ACCELERATE_LOG_LEVEL is \"", name,
                   "\", and debug, info, warning, error, critical or off was expected."));
}

void set_process(int rank, int world_size, int local_rank) {
  logger().rank = rank;
  logger().world_size = world_size;
  logger().local_rank = local_rank;
}

int rank() { return logger().rank; }
int world_size() { return logger().world_size; }

void set_level(Level level) {
  logger().level = level;
  logger().spd->set_level(to_spdlog(level));
}

Level level() { return logger().level; }

bool enabled(Level level) { return level >= logger().level.load() && level != Level::off; }

void write(Level level, std::string_view message, Ranks ranks) {
  Logger& out = logger();
  if (!enabled(level)) return;
  if (ranks == Ranks::main && out.rank != 0) return;
  if (ranks == Ranks::local_main && out.local_rank != 0) return;
  const std::string line = text::printable(message);
  detail::clear_terminal_line();
  if (out.world_size > 1 && ranks != Ranks::main) {
    out.spd->log(to_spdlog(level), "[rank {}] {}", out.rank.load(), line);
  } else {
    out.spd->log(to_spdlog(level), "{}", line);
  }
}

void warning_once(std::string_view message, Ranks ranks) {
  static std::mutex mutex;
  static std::set<std::string, std::less<>> seen;
  {
    const std::lock_guard lock(mutex);
    if (!seen.emplace(message).second) return;
  }
  warning(message, ranks);
}

}  // namespace accelerate::log
