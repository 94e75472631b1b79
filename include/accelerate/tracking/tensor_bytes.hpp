#pragma once

#include <accelerate/core/memory_kind.hpp>

#include <array>
#include <cstdint>
#include <vector>

namespace at {
class Tensor;
}

/// The bytes of CPU tensors, counted where they are allocated, so that no peak is missed. What does
/// not come from LibTorch's CPU allocator is not in it: page-locked memory, memory that a tensor
/// was made over with from_blob, and buffers that kernels allocate for themselves.
namespace accelerate::tracking {

/// Bytes by MemoryKind.
class BytesByKind {
 public:
  std::int64_t& operator[](MemoryKind kind) { return bytes_[static_cast<std::size_t>(kind)]; }
  std::int64_t operator[](MemoryKind kind) const { return bytes_[static_cast<std::size_t>(kind)]; }
  bool operator==(const BytesByKind&) const = default;

 private:
  std::array<std::int64_t, kMemoryKinds.size()> bytes_{};
};

/// The most that tensors held at one time.
struct PeakBytes {
  std::int64_t total = 0;
  /// What made up that total.
  BytesByKind at_peak;
  /// The most of each kind, at whatever time.
  BytesByKind by_kind;
  /// Of two stretches of time, that of both.
  void merge(const PeakBytes& other);
};

struct TensorBytes {
  std::int64_t current = 0;
  BytesByKind by_kind;
  std::int64_t blocks = 0;
  /// Since `count_cpu_tensors` or the last `reset_peak`.
  std::int64_t peak = 0;
  PeakBytes peaks;
};

/// Starts to count: from now on LibTorch's CPU allocator is one that counts, for good. Memory
/// allocated before is never counted, so call it before the first tensor. Later calls do nothing.
/// Costs some 30 ns and 64 bytes a tensor. Throws UnsupportedError when another library has put in
/// an allocator of higher priority.
void count_cpu_tensors();
bool counts_cpu_tensors() noexcept;

/// What is held now. All zero before `count_cpu_tensors`.
TensorBytes tensor_bytes();
/// The peak is what is held now.
void reset_peak();

/// Says of memory that was allocated under another kind what it is for. True when the tensor's
/// memory is counted; all tensors in the same storage are meant.
bool label(const at::Tensor& tensor, MemoryKind kind);

/// Peaks of a stretch of time of its own, beside any number of others.
class PeakWatch {
 public:
  PeakWatch();
  ~PeakWatch();
  PeakWatch(const PeakWatch&) = delete;
  PeakWatch& operator=(const PeakWatch&) = delete;
  /// The peaks since it was made.
  PeakBytes peaks() const;
  /// The same, and begins anew.
  PeakBytes restart();

 private:
  friend class Counter;
  PeakBytes peaks_;
};

/// A piece of memory that is in use.
struct LiveBlock {
  /// Counted up with every allocation: the smaller, the older.
  std::int64_t serial = 0;
  std::int64_t bytes = 0;
  MemoryKind kind = MemoryKind::other;
};
/// All that is in use, oldest first.
std::vector<LiveBlock> live_blocks();

}  // namespace accelerate::tracking
