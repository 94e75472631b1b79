#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <c10/core/Device.h>
#include <torch/arg.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::tracking {

/// How a MemoryTracker looks.
class MemoryTrackerOptions {
  /// Time between two samples. Default: 10 ms.
  TORCH_ARG(std::chrono::milliseconds, interval) = std::chrono::milliseconds(10);
  /// The proportional set size is read with every so many samples: the kernel walks all pages of
  /// the process for it, which takes milliseconds for gigabytes. 0: never. Default: 50.
  TORCH_ARG(std::int64_t, pss_every) = 50;
  /// Samples kept, and as many regions and visits, at most; at least 16. Default: 8192.
  TORCH_ARG(std::int64_t, capacity) = 8192;
  /// The device whose allocator is asked besides; none, or the CPU, for the host alone. While it
  /// tracks a device, the tracker resets the peak statistics of that device's allocator. Default:
  /// none.
  TORCH_ARG(std::optional<at::Device>, device) = std::nullopt;
  /// What the file and the pictures call this run. Default: empty.
  TORCH_ARG(std::string, label);
  /// Which process this is among many. Default: 0.
  TORCH_ARG(int, rank) = 0;
};

/// Bytes that came to a place and left it again, as a dispatched module's weights do.
struct Visit {
  std::string name;
  /// Where they came from and to: "disk", "cpu", "cuda:0".
  std::string from, place;
  std::int64_t bytes = 0;
  /// When they were asked for (from then on they take memory), first used, and gone.
  std::chrono::steady_clock::time_point asked, used, gone;
};

/// Records where the memory of this process goes: a thread samples resident set, proportional set,
/// the bytes of CPU tensors by kind (when `count_cpu_tensors` was called) and the device's
/// allocator, until `stop` or destruction. Programs name parts of a step by regions.
///
/// Peaks come from the allocators and not from the samples, so nothing between two samples is
/// missed, for each region too. When the buffer is full, every two neighbouring samples become
/// one that has the larger of each of their values, and from then on half as many are kept: a file
/// has at most `capacity` samples, whatever the length of the run, and says how far apart they are.
class MemoryTracker {
 public:
  /// Throws ConfigError when an option cannot be, UnsupportedError where there is no /proc.
  explicit MemoryTracker(const MemoryTrackerOptions& options = {});
  ~MemoryTracker();
  MemoryTracker(const MemoryTracker&) = delete;
  MemoryTracker& operator=(const MemoryTracker&) = delete;

  /// A named stretch of a thread's time. Ends where it was begun, innermost first. Must not outlive
  /// its tracker.
  class [[nodiscard]] Region {
   public:
    ~Region();
    Region(Region&&) = delete;

   private:
    friend class MemoryTracker;
    struct State;
    Region(MemoryTracker& tracker, std::string name);
    std::unique_ptr<State> state_;
  };
  /// Regions of one thread nest: one begun inside "step" is called "step/forward".
  Region region(std::string name) { return {*this, std::move(name)}; }

  /// Records a visit that is over. May be called by any thread.
  void add(Visit visit);

  /// Ends sampling; regions and visits still count. Later calls do nothing.
  void stop();

  /// What was recorded so far, as docs/memory.md describes it.
  Json to_json() const;
  /// Writes a file of this process alone, for tools/plot_memory.py.
  void write(const std::string& path) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Writes a file of what the trackers of several processes recorded. The file is complete or, when
/// Error is thrown, as it was.
void write_memory_file(const std::string& path, const std::vector<Json>& processes);

/// Every CPU tensor memory in use, largest first: {"units": "bytes", "total": ..., "by_kind":
/// {...}, "blocks": [{"serial", "bytes", "kind"}, ...]}. Throws StateError before
/// `count_cpu_tensors`.
Json cpu_allocation_snapshot();

/// Has the CUDA allocator record where its memory is allocated from now on, for its snapshots.
/// Throws UnsupportedError without CUDA.
void record_cuda_allocations(bool on);
/// The CUDA allocator's own snapshot, a pickle that https://pytorch.org/memory_viz shows. Throws
/// UnsupportedError without CUDA.
std::string cuda_allocation_snapshot();

/// Writes the snapshot of `device`: JSON for the CPU, a pickle for CUDA.
void write_allocation_snapshot(const std::string& path, at::Device device = at::kCPU);

}  // namespace accelerate::tracking
