#include <accelerate/io/checksum.hpp>

// Compiled in whole, so that programs which link this library need no libxxhash.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>

#include "io/checksum_avx2.hpp"

namespace accelerate::io {

std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
#ifdef ACCELERATE_CHECKSUM_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) return checksum_avx2(bytes.data(), bytes.size());
#endif
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::string checksum_text(std::uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(value));
  return text;
}

std::optional<std::uint64_t> parse_checksum(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
  const bool upper =
      std::any_of(text.begin(), text.end(), [](char c) { return c >= 'A' && c <= 'F'; });
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size() || upper) {
    return std::nullopt;
  }
  return value;
}

std::vector<std::uint64_t> block_checksums(std::span<const std::byte> bytes, std::size_t block) {
  std::vector<std::uint64_t> sums;
  sums.reserve((bytes.size() + block - 1) / block);
  for (std::size_t at = 0; at < bytes.size(); at += block) {
    sums.push_back(checksum(bytes.subspan(at, std::min(block, bytes.size() - at))));
  }
  return sums;
}

struct BlockChecksums::State {
  // XXH3's state wants 64-byte alignment.
  alignas(64) XXH3_state_t xxh;
};

BlockChecksums::BlockChecksums(std::size_t block)
    : state_(std::make_unique<State>()), block_(block) {
  XXH3_64bits_reset(&state_->xxh);
}
BlockChecksums::BlockChecksums(BlockChecksums&&) noexcept = default;
BlockChecksums& BlockChecksums::operator=(BlockChecksums&&) noexcept = default;
BlockChecksums::~BlockChecksums() = default;

void BlockChecksums::update(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t begun = bytes_ % block_;
    const std::size_t take = std::min(bytes.size(), block_ - begun);
    if (begun == 0 && take == block_) {
      done_.push_back(checksum(bytes.first(take)));
    } else {
      XXH3_64bits_update(&state_->xxh, bytes.data(), take);
      if (begun + take == block_) {
        done_.push_back(XXH3_64bits_digest(&state_->xxh));
        XXH3_64bits_reset(&state_->xxh);
      }
    }
    bytes_ += take;
    bytes = bytes.subspan(take);
  }
}

std::vector<std::uint64_t> BlockChecksums::finish() {
  if (bytes_ % block_ != 0) {
    done_.push_back(XXH3_64bits_digest(&state_->xxh));
    XXH3_64bits_reset(&state_->xxh);
  }
  bytes_ = 0;
  return std::exchange(done_, {});
}

}  // namespace accelerate::io
