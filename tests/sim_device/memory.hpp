#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstddef>

namespace sim {

// A device's memory has addresses that host code cannot touch. Kernels see the same bytes through
// an alias elsewhere.
int device_of_address(const void* address);  // -1: of none
char* host_alias(const void* address);

/// A caching allocator with the rules of CUDA's: what is freed belongs at once to the stream that
/// it was allocated on. Stricter in one thing: any later allocation on that stream counts as reuse
/// of all that was freed on it. New memory is 0xff, its first 16 MiB at least: no number, or -1.
class DeviceMemory final : public c10::DeviceAllocator {
 public:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;
  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  Stats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override;
};
DeviceMemory& device_memory();

c10::Allocator& pinned_memory();
bool is_pinned(const void* address);

}  // namespace sim
