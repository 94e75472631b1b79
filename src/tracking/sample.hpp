#pragma once

#include <accelerate/tracking/tensor_bytes.hpp>

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>

namespace accelerate::tracking {

/// What one look at the process found, in bytes. Values that were not looked at are -1.
struct Sample {
  std::int64_t time_ns = 0;  // since the tracker began
  std::int64_t rss = -1;
  std::int64_t pss = -1;
  std::int64_t tensors = -1;
  std::int64_t tensors_peak = -1;  // since the sample before
  BytesByKind by_kind;
  std::int64_t device_allocated = -1;
  std::int64_t device_reserved = -1;
  std::int64_t device_peak = -1;  // since the sample before

  /// Of two neighbours, the larger values.
  void merge(const Sample& next);
};

/// Bytes of this process in physical memory. Throws UnsupportedError where there is no /proc.
std::int64_t resident_bytes();
/// The same, with memory that n processes share counted as one n-th. Slow. -1 where the kernel does
/// not say.
std::int64_t proportional_bytes();

struct DeviceBytes {
  std::int64_t allocated = 0;
  std::int64_t reserved = 0;
  std::int64_t peak = 0;
};
/// What the device's caching allocator says, whose peak begins anew; nothing for the CPU, and
/// before the device was first used.
std::optional<DeviceBytes> read_device(const std::optional<at::Device>& device);

/// Writes a file whole or not at all. Throws ConfigError.
void write_file(const std::string& path, const std::string& contents);

}  // namespace accelerate::tracking
