#include <intercept/layout.hpp>

#include <algorithm>
#include <numeric>

namespace accelerate::intercept {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The first offset from `from` at which a piece can begin, so that the first cut inside it is
// between rows; `from` rounded up when it reaches no cut.
std::int64_t begin_of(const Piece& piece, std::int64_t from, std::int64_t part,
                      std::int64_t alignment) {
  const std::int64_t begin = round_up(from, alignment);
  for (std::int64_t tried = begin; tried < begin + std::lcm(piece.row, alignment);
       tried += alignment) {
    const std::int64_t cut = (tried / part + 1) * part;
    if (cut >= tried + piece.elements || (cut - tried) % piece.row == 0) return tried;
  }
  return begin;
}

}  // namespace

Layout lay_out(const std::vector<Piece>& pieces, int parts, std::int64_t alignment) {
  Layout layout;
  layout.parts = parts;
  std::int64_t least = 0;
  for (const Piece& piece : pieces) {
    layout.elements += piece.elements;
    least += round_up(piece.elements, alignment);
  }
  const std::int64_t even = round_up((least + parts - 1) / parts, alignment);
  // A piece longer than a part is cut more than once: the part itself must then be whole rows of
  // it.
  std::int64_t step = alignment;
  std::vector<Piece> placed = pieces;
  for (Piece& piece : placed) {
    const std::int64_t together = std::lcm(step, piece.row);
    const bool cut_often = piece.elements > even;
    if (std::lcm(piece.row, alignment) * 16 > even || (cut_often && together * 16 > even)) {
      piece.row = 1;
    } else if (cut_often) {
      step = together;
    }
  }
  for (layout.part = round_up(std::max<std::int64_t>(even, 1), step);; layout.part += step) {
    layout.offsets.clear();
    std::int64_t end = 0;
    for (const Piece& piece : placed) {
      layout.offsets.push_back(begin_of(piece, end, layout.part, alignment));
      end = layout.offsets.back() + piece.elements;
    }
    if (end <= layout.total()) break;
    // Grow at once by what is missing, in steps.
    const std::int64_t missing = (end - layout.total()) / parts;
    layout.part += missing / step * step;
  }
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    bool aligned = true;
    const std::int64_t begin = layout.offsets[i];
    const std::int64_t end = begin + pieces[i].elements;
    for (std::int64_t cut = (begin / layout.part + 1) * layout.part; cut < end;
         cut += layout.part) {
      if ((cut - begin) % pieces[i].row != 0) aligned = false;
    }
    layout.row_aligned.push_back(aligned);
  }
  return layout;
}

}  // namespace accelerate::intercept
