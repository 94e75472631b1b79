#pragma once

#include <cstdint>

namespace trainer {

/// The largest resident set of this process so far, in bytes.
std::int64_t peak_resident_bytes();
/// Seconds since this process was started.
double seconds_since_process_start();

}  // namespace trainer
