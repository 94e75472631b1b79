#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// Checksums against damage, not against forgery: XXH3 with 64 bits, of xxHash. It is as fast as
/// memory, so that checking costs little beside reading, and misses a damaged block once in 2^64;
/// CRC32C would once in 2^32.
namespace accelerate::io {

/// Files are checksummed in blocks of this size (the last one is shorter), so that a slice can be
/// verified by reading little more than the slice.
inline constexpr std::size_t kChecksumBlock = std::size_t{1} << 20;

/// The checksum of these bytes.
std::uint64_t checksum(std::span<const std::byte> bytes) noexcept;

/// 16 lower-case hexadecimal digits, and back. Nothing when the text is not that.
std::string checksum_text(std::uint64_t value);
std::optional<std::uint64_t> parse_checksum(std::string_view text);

/// The checksums of each block of a file of these bytes. Of no bytes, none.
std::vector<std::uint64_t> block_checksums(std::span<const std::byte> bytes,
                                           std::size_t block = kChecksumBlock);

/// The same when the bytes come piece by piece.
class BlockChecksums {
 public:
  explicit BlockChecksums(std::size_t block = kChecksumBlock);
  BlockChecksums(BlockChecksums&&) noexcept;
  BlockChecksums& operator=(BlockChecksums&&) noexcept;
  ~BlockChecksums();

  /// The next bytes.
  void update(std::span<const std::byte> bytes);
  /// How many bytes there were.
  std::uint64_t bytes() const noexcept { return bytes_; }
  /// The checksums, once all bytes were given. Begins anew after.
  std::vector<std::uint64_t> finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
  std::size_t block_;
  std::uint64_t bytes_ = 0;
  std::vector<std::uint64_t> done_;
};

}  // namespace accelerate::io
