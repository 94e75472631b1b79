#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__)
#define ACCELERATE_CHECKSUM_AVX2
namespace accelerate::io {
/// XXH3 of these bytes. The processor must have AVX2.
std::uint64_t checksum_avx2(const void* data, std::size_t bytes) noexcept;
}  // namespace accelerate::io
#endif
