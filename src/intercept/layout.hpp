#pragma once

#include <cstdint>
#include <vector>

namespace accelerate::intercept {

/// One parameter to be placed in a unit's flat buffer.
struct Piece {
  std::int64_t elements = 0;
  /// Elements of one row (of everything but the first dimension); 1 when rows do not matter.
  std::int64_t row = 1;
};

/// Where each piece begins in a flat buffer that is cut into equal parts, one for each rank.
struct Layout {
  std::vector<std::int64_t> offsets;
  /// Whether every cut through the piece lies between two of its rows.
  std::vector<bool> row_aligned;
  int parts = 1;
  /// Elements of one part.
  std::int64_t part = 0;
  /// Elements of all pieces; the rest of `total()` is padding.
  std::int64_t elements = 0;

  std::int64_t total() const noexcept { return part * parts; }
};

/// Places the pieces one after another, each at a multiple of `alignment` elements, in parts as
/// small as can be with cuts only between rows, so that optimizers and quantizers that look at rows
/// find whole ones. Rows so long that this would cost more than a sixteenth of a part are cut
/// anyway.
Layout lay_out(const std::vector<Piece>& pieces, int parts, std::int64_t alignment);

}  // namespace accelerate::intercept
