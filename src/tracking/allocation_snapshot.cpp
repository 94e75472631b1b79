#include <accelerate/base/error.hpp>
#include <accelerate/tracking/memory_tracker.hpp>
#include <tracking/sample.hpp>

#include <nlohmann/json.hpp>
#ifdef ACCELERATE_HAS_CUDA
#include <torch/csrc/cuda/memory_snapshot.h>
#endif

#include <algorithm>

namespace accelerate::tracking {
namespace {

// CUDA's allocator answers from its first use on; before, there is nothing to see.
void require_cuda() {
#ifdef ACCELERATE_HAS_CUDA
  if (read_device(at::Device(at::kCUDA, 0))) return;
  throw UnsupportedError(
      "There is no CUDA allocator in use in this process, so it has no snapshot. Use "
      "cpu_allocation_snapshot for tensors in host memory.");
#else
  throw UnsupportedError(
      "This library was built with a LibTorch that has no CUDA, so there is no snapshot of its "
      "allocator. Use cpu_allocation_snapshot for tensors in host memory.");
#endif
}

}  // namespace

Json cpu_allocation_snapshot() {
  if (!counts_cpu_tensors()) {
    throw StateError(
        "CPU tensors are not counted, so there is no list of them. Call "
        "tracking::count_cpu_tensors() before the first tensor.");
  }
  std::vector<LiveBlock> blocks = live_blocks();
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const LiveBlock& a, const LiveBlock& b) { return a.bytes > b.bytes; });
  BytesByKind by_kind;
  std::int64_t total = 0;
  Json list = Json::array();
  for (const LiveBlock& block : blocks) {
    total += block.bytes;
    by_kind[block.kind] += block.bytes;
    list.push_back(
        {{"serial", block.serial}, {"bytes", block.bytes}, {"kind", to_string(block.kind)}});
  }
  Json kinds = Json::object();
  for (const MemoryKind kind : kMemoryKinds) kinds[std::string(to_string(kind))] = by_kind[kind];
  return {{"units", "bytes"}, {"total", total}, {"by_kind", kinds}, {"blocks", list}};
}

void record_cuda_allocations(bool on) {
  require_cuda();
#ifdef ACCELERATE_HAS_CUDA
  torch::cuda::_record_memory_history(on ? std::optional<std::string>("all") : std::nullopt);
#else
  static_cast<void>(on);
#endif
}

std::string cuda_allocation_snapshot() {
  require_cuda();
#ifdef ACCELERATE_HAS_CUDA
  return torch::cuda::_memory_snapshot_pickled();
#else
  return {};
#endif
}

void write_allocation_snapshot(const std::string& path, at::Device device) {
  if (device.is_cpu()) {
    write_file(path, cpu_allocation_snapshot().dump() + '\n');
  } else if (device.is_cuda()) {
    write_file(path, cuda_allocation_snapshot());
  } else {
    throw UnsupportedError("Allocation snapshots exist for the CPU and for CUDA, and " +
                           device.str() + " was asked for.");
  }
}

}  // namespace accelerate::tracking
