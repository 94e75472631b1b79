#include "sim_device/memory.hpp"

#include "sim_device/checker.hpp"
#include "sim_device/settings.hpp"
#include "sim_device/sim_device.hpp"
#include "sim_device/streams.hpp"

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>

namespace sim {
namespace {

constexpr std::size_t kAddresses = std::size_t{1} << 36;  // of each device
constexpr std::size_t kGrain = 512;
constexpr std::size_t kPage = 4096;
constexpr std::size_t kFilled = std::size_t{16} << 20;

struct Arena {
  char* device = nullptr;                                    // nobody may touch it
  char* host = nullptr;                                      // the same bytes
  std::map<std::size_t, std::size_t> gaps{{0, kAddresses}};  // offset, size
  std::map<int, std::map<std::uintptr_t, Block*>> freed;     // by stream, and kept for it
  std::size_t reserved = 0;
  DeviceMemory::Stats stats;
};

char* map_addresses(int protection) {
  void* at =
      mmap(nullptr, kAddresses, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "The simulated device got no addresses.");
  return static_cast<char*>(at);
}

std::array<Arena, kMostDevices>& arenas() {
  static auto* const made = [] {
    auto* all = new std::array<Arena, kMostDevices>;
    for (int i = 0; i < settings().devices; ++i) {
      Arena& arena = (*all)[static_cast<std::size_t>(i)];
      arena.device = map_addresses(PROT_NONE);
      arena.host = map_addresses(PROT_READ | PROT_WRITE);
    }
    return all;
  }();
  return *made;
}
Arena& arena_of(int device) { return arenas().at(static_cast<std::size_t>(device)); }

std::size_t rounded(std::size_t bytes, std::size_t grain) {
  return (bytes + grain - 1) / grain * grain;
}

void more(c10::CachingAllocator::StatArray& stat, std::size_t amount) { stat[0].increase(amount); }
void less(c10::CachingAllocator::StatArray& stat, std::size_t amount) { stat[0].decrease(amount); }

void free_on_device(void* address) {
  const Lock lock(mutex());
  Block* block = block_at(address);
  if (block == nullptr || !block->live) std::abort();
  block->live = false;
  Arena& arena = arena_of(block->device);
  arena.freed[block->stream].emplace(block->begin, block);
  less(arena.stats.allocation, 1);
  less(arena.stats.active, 1);
  less(arena.stats.allocated_bytes, block->size);
  less(arena.stats.active_bytes, block->size);
  less(arena.stats.requested_bytes, block->requested);
}

void add_gap(Arena& arena, std::size_t offset, std::size_t size) {
  auto gap = arena.gaps.emplace(offset, size).first;
  const auto next = std::next(gap);
  if (next != arena.gaps.end() && gap->first + gap->second == next->first) {
    gap->second += next->second;
    arena.gaps.erase(next);
  }
  if (gap == arena.gaps.begin()) return;
  const auto before = std::prev(gap);
  if (before->first + before->second != gap->first) return;
  before->second += gap->second;
  arena.gaps.erase(gap);
}

// As cudaFree, which waits for the device: nobody uses the memory any more.
void empty_cache(Arena& arena) {
  for (const auto& [stream, blocks] : arena.freed) {
    for (const auto& [begin, block] : blocks) {
      const std::size_t offset = begin - reinterpret_cast<std::uintptr_t>(arena.device);
      const std::size_t size = block->size;
      madvise(arena.host + offset, size, MADV_DONTNEED);
      add_gap(arena, offset, size);
      arena.reserved -= size;
      ++arena.stats.num_device_free;
      less(arena.stats.segment, 1);
      less(arena.stats.reserved_bytes, size);
      remove_block(begin);
    }
  }
  arena.freed.clear();
}

// Memory that was never used, or not since the cache was emptied.
Block& reserve(Arena& arena, int device, std::size_t size, std::size_t requested) {
  if (arena.reserved + size > settings().memory) {
    ++arena.stats.num_alloc_retries;
    empty_cache(arena);
  }
  const auto gap = std::find_if(arena.gaps.begin(), arena.gaps.end(),
                                [&](const auto& each) { return each.second >= size; });
  if (arena.reserved + size > settings().memory || gap == arena.gaps.end()) {
    ++arena.stats.num_ooms;
    throw c10::OutOfMemoryError(
        {__func__, __FILE__, static_cast<std::uint32_t>(__LINE__)},
        c10::str("CUDA out of memory. Tried to allocate ", requested, " bytes on simulated device ",
                 device, ", which has ", settings().memory - arena.reserved, " left."));
  }
  const auto [offset, room] = *gap;
  arena.gaps.erase(gap);
  if (room > size) arena.gaps.emplace(offset + size, room - size);
  arena.reserved += size;
  ++arena.stats.num_device_alloc;
  more(arena.stats.segment, 1);
  more(arena.stats.reserved_bytes, size);
  Block block;
  block.begin = reinterpret_cast<std::uintptr_t>(arena.device + offset);
  block.size = size;
  block.device = device;
  return add_block(std::move(block));
}

template <class Change>
void change_statistics(c10::DeviceIndex device, Change change) {
  auto& stats = arena_of(device).stats;
  for (auto* stat : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes,
                     &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes})
    change((*stat)[0]);
}

// Pages of their own. CUDA's allocator gives freed pinned memory away only after the copies that
// use it; here they have copied already.
struct PinnedMemory final : c10::Allocator {
  static void free(void* address) {
    const Lock lock(mutex());
    const std::size_t size = block_at(address)->size;
    drop_transfers(address, size);
    remove_block(reinterpret_cast<std::uintptr_t>(address));
    munmap(address, size);
  }
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::kCPU)};
    Block block;
    block.size = rounded(bytes, kPage);
    block.requested = bytes;
    void* address =
        mmap(nullptr, block.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "The simulated device got no pinned memory.");
    block.begin = reinterpret_cast<std::uintptr_t>(address);
    const Lock lock(mutex());
    add_block(std::move(block));
    return {address, address, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

int device_of_address(const void* address) {
  for (int i = 0; i < settings().devices; ++i) {
    const char* begin = arena_of(i).device;
    if (address >= begin && address < begin + kAddresses) return i;
  }
  return -1;
}

char* host_alias(const void* address) {
  const int device = device_of_address(address);
  TORCH_CHECK(device >= 0, "A tensor of a simulated device has the address ", address,
              ", which is not one of its memory.");
  const Arena& arena = arena_of(device);
  return arena.host + (static_cast<const char*>(address) - arena.device);
}

c10::DataPtr DeviceMemory::allocate(std::size_t bytes) {
  const int device = current_device();
  const c10::Device c10_device(kDevice, static_cast<c10::DeviceIndex>(device));
  if (bytes == 0) return {nullptr, c10_device};
  Stream& stream = stream_of(current_stream(device));
  const Lock lock(mutex());
  host_joins(stream);
  Arena& arena = arena_of(device);
  const std::size_t size = rounded(bytes, kGrain);
  Block* found = nullptr;
  auto& freed = arena.freed[stream.index];
  for (const auto& [begin, block] : freed) {
    check_reuse(stream, *block);
    if (block->size == size) found = block;
  }
  if (found != nullptr) {
    freed.erase(found->begin);
    Block again;
    again.begin = found->begin;
    again.size = size;
    again.device = device;
    found = &add_block(std::move(again));
  } else {
    found = &reserve(arena, device, size, bytes);
  }
  found->requested = bytes;
  found->stream = stream.index;
  // The stream may still use the memory for what it was before. Another stream has to wait for this
  // one, even to write.
  static const std::string* const former =
      kept_name("the allocation (of memory that may have been in use)");
  wrote(stream, stream.clock.at(stream.index), former,
        {reinterpret_cast<void*>(found->begin), size, true});
  more(arena.stats.allocation, 1);
  more(arena.stats.active, 1);
  more(arena.stats.allocated_bytes, size);
  more(arena.stats.active_bytes, size);
  more(arena.stats.requested_bytes, bytes);
  void* address = reinterpret_cast<void*>(found->begin);
  std::memset(host_alias(address), 0xff, std::min(bytes, kFilled));
  return {address, address, &free_on_device, c10_device};
}

c10::DeleterFnPtr DeviceMemory::raw_deleter() const { return &free_on_device; }

void DeviceMemory::copy_data(void* to, const void* from, std::size_t bytes) const {
  static const std::string* const name = kept_name("Allocator::copy_data");
  start(stream_of(current_stream(current_device())), name,
        {{from, bytes, false}, {to, bytes, true}});
  std::memcpy(host_alias(to), host_alias(from), bytes);
}

void DeviceMemory::emptyCache(c10::MempoolId_t) {
  const Lock lock(mutex());
  for (int i = 0; i < settings().devices; ++i) empty_cache(arena_of(i));
}

void DeviceMemory::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  const Lock lock(mutex());
  Block* block = pointer.get() == nullptr ? nullptr : block_at(pointer.get());
  if (block == nullptr) return;
  if (pointer.get_deleter() != &free_on_device) {
    ++block->ignored_records;
    count_ignored_record_stream();
    return;
  }
  const int index = stream_of(stream).index;
  if (index != block->stream) block->recorded.insert(index);
}

DeviceMemory::Stats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  const Lock lock(mutex());
  return arena_of(device).stats;
}
void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex device) {
  const Lock lock(mutex());
  change_statistics(device, [](auto& stat) { stat.reset_accumulated(); });
}
void DeviceMemory::resetPeakStats(c10::DeviceIndex device) {
  const Lock lock(mutex());
  change_statistics(device, [](auto& stat) { stat.reset_peak(); });
}
std::pair<std::size_t, std::size_t> DeviceMemory::getMemoryInfo(c10::DeviceIndex device) {
  const Lock lock(mutex());
  return {settings().memory - arena_of(device).reserved, settings().memory};
}

DeviceMemory& device_memory() {
  static auto* const only = new DeviceMemory;
  return *only;
}

c10::Allocator& pinned_memory() {
  static auto* const only = new PinnedMemory;
  return *only;
}

bool is_pinned(const void* address) {
  const Lock lock(mutex());
  const Block* block = block_at(address);
  return block != nullptr && block->device < 0;
}

}  // namespace sim
