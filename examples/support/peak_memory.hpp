#pragma once

#include <cstdint>

namespace trainer {

/// Starts to count the bytes of CPU tensors: from now on LibTorch's CPU allocator is a counting
/// one. Call it once, before the first tensor.
void count_tensor_bytes();
/// The most bytes that CPU tensors have held at one time since `count_tensor_bytes`.
std::int64_t peak_tensor_bytes();
/// The largest resident set of this process so far, in bytes.
std::int64_t peak_resident_bytes();
/// Seconds since this process was started.
double seconds_since_process_start();

}  // namespace trainer
