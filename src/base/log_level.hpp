#pragma once

#include <accelerate/base/log.hpp>

namespace accelerate::log {

// What ACCELERATE_LOG_LEVEL says. Throws ConfigError for a name that is none of its levels; until
// somebody asks, such a name counts as info.
Level level_from_environment();

// As `set_process` said; 1 until then.
int world_size();

}  // namespace accelerate::log
