#pragma once

#include <cstdint>

namespace accelerate {

/// Bytes of host memory that a process can still take: what the kernel says can be had without
/// swapping (MemAvailable), and no more than the limits of its control group leave (cgroup v2 or
/// v1). Throws UnsupportedError where /proc/meminfo cannot be read.
std::int64_t available_host_memory();

}  // namespace accelerate
