#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/file.hpp>
#include <tracking/sample.hpp>

#include <c10/core/CachingDeviceAllocator.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <fstream>

namespace accelerate::tracking {

void Sample::merge(const Sample& next) {
  for (const auto field :
       {&Sample::rss, &Sample::pss, &Sample::tensors, &Sample::tensors_peak,
        &Sample::device_allocated, &Sample::device_reserved, &Sample::device_peak})
    this->*field = std::max(this->*field, next.*field);
  for (const MemoryKind kind : kMemoryKinds)
    by_kind[kind] = std::max(by_kind[kind], next.by_kind[kind]);
}

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  file.imbue(std::locale::classic());
  std::int64_t size = 0;
  std::int64_t resident = 0;
  if (!(file >> size >> resident)) {
    throw UnsupportedError(
        "The memory of this process cannot be read: /proc/self/statm is missing or has another "
        "form. Memory is tracked on Linux.");
  }
  return resident * sysconf(_SC_PAGESIZE);
}

std::int64_t proportional_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  file.imbue(std::locale::classic());
  std::string word;
  while (file >> word) {
    std::int64_t kilobytes = 0;
    if (word == "Pss:" && file >> kilobytes) return kilobytes * 1024;
  }
  return -1;
}

std::optional<DeviceBytes> read_device(const std::optional<at::Device>& device) {
  if (!device || device->is_cpu()) return std::nullopt;
  c10::DeviceAllocator* allocator = c10::getDeviceAllocator(device->type());
  if (!allocator->initialized()) return std::nullopt;
  const auto index = static_cast<c10::DeviceIndex>(std::max<int>(0, device->index()));
  const auto statistics = allocator->getDeviceStats(index);
  allocator->resetPeakStats(index);
  const auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return DeviceBytes{statistics.allocated_bytes[all].current,
                     statistics.reserved_bytes[all].current, statistics.allocated_bytes[all].peak};
}

void write_file(const std::string& path, const std::string& contents) {
  try {
    io::write_file(path, contents);
  } catch (const CheckpointError&) {
    std::throw_with_nested(ConfigError(text::concat(
        "The file ", path, " cannot be written. Check that its folder exists and has space.")));
  }
}

}  // namespace accelerate::tracking
