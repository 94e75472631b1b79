#pragma once

#include <string_view>

/// Rank-aware logging to stderr. spdlog does the writing and stays out of the headers: its copy of
/// fmt and the one inside LibTorch's headers cannot meet in one file.
namespace accelerate::log {

enum class Level { debug, info, warning, error, off };

/// Who writes a message when several processes run.
enum class Ranks {
  main,        ///< rank 0 only
  local_main,  ///< the first process of each machine
  all          ///< every process, each line with its rank
};

/// Says which process this is; until then everything is written, without a rank.
void set_process(int rank, int world_size, int local_rank);
/// The rank that was said; 0 until then.
int rank();
/// The lowest level that is written. At start: ACCELERATE_LOG_LEVEL (debug, info, warning, error,
/// critical, off, in any case), else info.
void set_level(Level level);
Level level();
bool enabled(Level level);

void write(Level level, std::string_view message, Ranks ranks = Ranks::main);
inline void debug(std::string_view message, Ranks ranks = Ranks::main) {
  write(Level::debug, message, ranks);
}
inline void info(std::string_view message, Ranks ranks = Ranks::main) {
  write(Level::info, message, ranks);
}
inline void warning(std::string_view message, Ranks ranks = Ranks::main) {
  write(Level::warning, message, ranks);
}
inline void error(std::string_view message, Ranks ranks = Ranks::all) {
  write(Level::error, message, ranks);
}
/// Written the first time this very message comes, then never again in this process.
void warning_once(std::string_view message, Ranks ranks = Ranks::main);

}  // namespace accelerate::log
