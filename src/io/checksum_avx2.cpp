// XXH3 with AVX2, which checksum.cpp takes where the processor has it: a binary is built for every
// x86-64, and the plain SSE2 is a third slower. Only this header is compiled so, and nothing that
// other files share.
#include "io/checksum_avx2.hpp"

#ifdef ACCELERATE_CHECKSUM_AVX2
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define XXH_VECTOR 2  // XXH_AVX2
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace accelerate::io {
std::uint64_t checksum_avx2(const void* data, std::size_t bytes) noexcept {
  return XXH3_64bits(data, bytes);
}
}  // namespace accelerate::io

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
