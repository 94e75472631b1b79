#include <accelerate/base/error.hpp>
#include <accelerate/base/placement.hpp>
#include <accelerate/base/text.hpp>

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

namespace accelerate {

namespace {

using Sizes = std::vector<std::int64_t>;

constexpr std::int64_t kMostElements = std::int64_t{1} << 58;

std::int64_t product(const Sizes& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

std::size_t at(std::int64_t dimension) { return static_cast<std::size_t>(dimension); }

// Of a tensor that lies without gaps, its dimensions in this order.
Sizes strides_of(const Sizes& shape, const Sizes& order) {
  Sizes strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    const std::size_t d = order.empty() ? i : at(order[i]);
    strides[d] = stride;
    stride *= shape[d];
  }
  return strides;
}

// From the run's dimensions, the slowest first, back to the tensor's.
Sizes in_own_order(Sizes sizes, const Sizes& order) {
  if (order.empty()) return sizes;
  Sizes own(sizes.size());
  for (std::size_t i = 0; i < order.size(); ++i) own[at(order[i])] = sizes[i];
  return own;
}

Sizes in_memory_order(const Sizes& sizes, const Sizes& order) {
  Sizes sorted = sizes;
  for (std::size_t i = 0; i < order.size(); ++i) sorted[i] = sizes[at(order[i])];
  return sorted;
}

bool is_inside(const Box& box, const Sizes& shape) {
  if (box.offsets.size() != shape.size() || box.sizes.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (box.offsets[d] < 0 || box.sizes[d] < 0 || box.sizes[d] > shape[d] ||
        box.offsets[d] > shape[d] - box.sizes[d])
      return false;
  }
  return true;
}

using Boxes = std::vector<const Box*>;

// Two boxes that share an element. Space is halved, again and again, where few boxes lie on both
// sides, so that not every box has to be compared with every other.
std::optional<std::pair<const Box*, const Box*>> find_overlap(Boxes boxes) {
  constexpr std::size_t kFew = 8;
  const std::size_t most = boxes.size() - boxes.size() / 4;
  std::size_t best = most;
  std::size_t dimension = 0;
  std::int64_t middle = 0;
  if (boxes.size() > kFew) {
    Sizes begins(boxes.size());
    for (std::size_t d = 0; d < boxes[0]->sizes.size(); ++d) {
      for (std::size_t i = 0; i < boxes.size(); ++i) begins[i] = boxes[i]->offsets[d];
      const auto half = begins.begin() + static_cast<std::ptrdiff_t>(begins.size() / 2);
      std::nth_element(begins.begin(), half, begins.end());
      std::size_t below = 0, above = 0;
      for (const Box* box : boxes) {
        below += box->offsets[d] < *half ? 1 : 0;
        above += box->offsets[d] + box->sizes[d] > *half ? 1 : 0;
      }
      if (std::max(below, above) >= best) continue;
      best = std::max(below, above);
      dimension = d;
      middle = *half;
    }
  }
  if (best >= most) {
    for (std::size_t i = 0; i < boxes.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (intersect(*boxes[i], *boxes[j])) return std::pair(boxes[j], boxes[i]);
      }
    }
    return std::nullopt;
  }
  Boxes below, above;
  for (const Box* box : boxes) {
    if (box->offsets[dimension] < middle) below.push_back(box);
    if (box->offsets[dimension] + box->sizes[dimension] > middle) above.push_back(box);
  }
  Boxes().swap(boxes);
  if (const auto found = find_overlap(std::move(below))) return found;
  return find_overlap(std::move(above));
}

}  // namespace

Box Box::whole(std::vector<std::int64_t> shape) {
  return {Sizes(shape.size(), 0), std::move(shape)};
}

std::int64_t Box::elements() const noexcept { return product(sizes); }

std::string Box::text() const {
  std::vector<std::string> slices;
  for (std::size_t d = 0; d < sizes.size(); ++d)
    slices.push_back(text::concat(offsets[d], ":", offsets[d] + sizes[d]));
  return "[" + text::join(slices, ", ", slices.size()) + "]";
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  Box common;
  for (std::size_t d = 0; d < a.sizes.size(); ++d) {
    const std::int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const std::int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    common.offsets.push_back(begin);
    common.sizes.push_back(end - begin);
  }
  return common;
}

std::vector<Box> boxes_of_run(const std::vector<std::int64_t>& shape, std::int64_t first,
                              std::int64_t count) {
  std::vector<Box> boxes;
  const Sizes strides = strides_of(shape, {});
  while (count > 0) {
    // The slowest dimension of which the run has a whole index from here on.
    std::size_t d = 0;
    while (d < shape.size() && (first % strides[d] != 0 || count < strides[d])) ++d;
    if (d == shape.size()) return {Box::whole(shape)};  // one number
    Box box = Box::whole(shape);
    std::int64_t rest = first;
    for (std::size_t i = 0; i <= d; ++i) {
      box.offsets[i] = rest / strides[i];
      box.sizes[i] = 1;
      rest %= strides[i];
    }
    box.sizes[d] = std::min(shape[d] - box.offsets[d], count / strides[d]);
    first += box.sizes[d] * strides[d];
    count -= box.sizes[d] * strides[d];
    boxes.push_back(std::move(box));
  }
  return boxes;
}

std::string partition_problem(const std::vector<std::int64_t>& shape,
                              const std::vector<Box>& boxes) {
  const auto elements = elements_of(shape);
  if (!elements) return text::concat("its shape [", text::join(shape), "] cannot be");
  std::int64_t sum = 0;
  Boxes filled;
  for (const Box& box : boxes) {
    if (!is_inside(box, shape)) {
      return text::concat("the box at [", text::join(box.offsets), "] of size [",
                          text::join(box.sizes), "] does not lie in a tensor of shape [",
                          text::join(shape), "]");
    }
    const std::int64_t own = box.elements();
    if (own > 0) filled.push_back(&box);
    if (own > *elements - sum)
      return text::concat("its boxes have more than the ", *elements, " elements of the tensor");
    sum += own;
  }
  if (sum != *elements)
    return text::concat("its boxes have ", sum, " of the ", *elements, " elements of the tensor");
  if (const auto two = find_overlap(std::move(filled))) {
    return text::concat("its boxes ", two->first->text(), " and ", two->second->text(),
                        " overlap, and each element belongs in one");
  }
  return {};
}

std::optional<std::int64_t> elements_of(const std::vector<std::int64_t>& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    if (size < 0 || (size > 0 && elements > kMostElements / size)) return std::nullopt;
    elements *= size;
  }
  return elements;
}

std::vector<std::int64_t> memory_order(const std::vector<std::int64_t>& shape,
                                       const std::vector<std::int64_t>& strides) {
  Sizes order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return shape[at(a)] != 1 && shape[at(b)] != 1 && strides[at(a)] > strides[at(b)];
  });
  std::int64_t expected = 1;
  for (auto d = order.rbegin(); d != order.rend(); ++d) {
    if (shape[at(*d)] != 1 && strides[at(*d)] != expected) return {};
    expected *= shape[at(*d)];
  }
  // Dimensions of one element go anywhere.
  Sizes longer;
  for (const std::int64_t d : order) {
    if (shape[at(d)] != 1) longer.push_back(d);
  }
  if (std::is_sorted(longer.begin(), longer.end())) return {};
  return order;
}

Placement::Placement(std::vector<std::int64_t> shape, std::vector<std::int64_t> order)
    : shape_(std::move(shape)), order_(std::move(order)) {
  const auto elements = elements_of(shape_);
  if (!elements) {
    throw ShardingError(
        text::concat("A tensor of shape [", text::join(shape_), "] cannot be placed on ranks."));
  }
  Sizes sorted = order_, all(shape_.size());
  std::sort(sorted.begin(), sorted.end());
  std::iota(all.begin(), all.end(), 0);
  if (!order_.empty() && sorted != all) {
    throw ShardingError(text::concat("[", text::join(order_), "] is no order of the ",
                                     shape_.size(), " dimensions of a tensor."));
  }
  count_ = *elements;
  for (const std::int64_t size : shape_) segments_.push_back({{0, size}});
}

Placement Placement::cut(Cut cut) const {
  const Sizes local = local_shape();
  const auto refuse = [&](const auto&... why) {
    throw ShardingError(text::concat("A tensor of shape [", text::join(local),
                                     "] cannot be cut over the axis '", cut.axis, "': ", why...));
  };
  if (count_ != product(local)) refuse("this rank has only a run of its elements.");
  if (cut.dimension < 0 || at(cut.dimension) >= local.size())
    refuse("it has no dimension ", cut.dimension, ".");
  if (cut.parts < 1 || cut.part < 0 || cut.part >= cut.parts)
    refuse("there is no part ", cut.part, " of ", cut.parts, ".");
  const std::int64_t size = local[at(cut.dimension)];
  if (cut.blocks < 1 || size % cut.blocks != 0) {
    refuse("its dimension ", cut.dimension, " does not consist of ", cut.blocks,
           " blocks of equal size.");
  }
  const std::int64_t block = size / cut.blocks;
  const std::int64_t piece = block / cut.parts + (block % cut.parts == 0 ? 0 : 1);
  // Without products that could be too large.
  const std::int64_t begin = piece == 0 || cut.part > block / piece ? block : cut.part * piece;
  const std::int64_t end = std::min(block, block - begin < piece ? block : begin + piece);

  Placement left = *this;
  std::vector<Segment>& segments = left.segments_[at(cut.dimension)];
  segments.clear();
  for (std::int64_t b = 0; begin < end && b < cut.blocks; ++b) {
    // Of what was left, indices [from, to).
    std::int64_t from = b * block + begin;
    const std::int64_t to = b * block + end;
    std::int64_t segment_begin = 0;
    for (const Segment& segment : segments_[at(cut.dimension)]) {
      const std::int64_t segment_end = segment_begin + segment.size;
      if (from < to && from < segment_end) {
        const std::int64_t length = std::min(to, segment_end) - from;
        const std::int64_t offset = segment.offset + from - segment_begin;
        if (!segments.empty() && segments.back().offset + segments.back().size == offset) {
          segments.back().size += length;
        } else {
          segments.push_back({offset, length});
        }
        from += length;
      }
      segment_begin = segment_end;
    }
  }
  left.cuts_.push_back(std::move(cut));
  left.count_ = product(left.local_shape());
  return left;
}

Placement Placement::run(std::int64_t first, std::int64_t count) const {
  if (first < 0 || count < 0 || count > count_ || first > count_ - count) {
    throw ShardingError(text::concat("A rank has ", count_, " elements of a tensor, and ", count,
                                     " of them from ", first, " on cannot be taken."));
  }
  Placement left = *this;
  left.first_ += first;
  left.count_ = count;
  return left;
}

std::vector<std::int64_t> Placement::local_shape() const {
  Sizes local;
  for (const auto& segments : segments_) {
    std::int64_t size = 0;
    for (const Segment& segment : segments) size += segment.size;
    local.push_back(size);
  }
  return local;
}

bool Placement::is_whole() const noexcept { return count_ == product(shape_); }

// Local boxes as boxes of the whole tensor: each index of a dimension is in one of its segments.
std::vector<PlacedBox> Placement::place(const std::vector<Box>& local,
                                        const std::vector<std::int64_t>& strides) const {
  std::vector<PlacedBox> placed;
  for (const Box& box : local) {
    std::vector<PlacedBox> parts{{Box{}, 0, strides}};
    for (std::size_t d = 0; d < shape_.size(); ++d) {
      std::vector<PlacedBox> longer;
      for (const PlacedBox& part : parts) {
        std::int64_t segment_begin = 0;
        for (const Segment& segment : segments_[d]) {
          const std::int64_t begin = std::max(box.offsets[d], segment_begin);
          const std::int64_t end =
              std::min(box.offsets[d] + box.sizes[d], segment_begin + segment.size);
          if (begin < end) {
            PlacedBox next = part;
            next.box.offsets.push_back(segment.offset + begin - segment_begin);
            next.box.sizes.push_back(end - begin);
            next.offset += begin * strides[d];
            longer.push_back(std::move(next));
          }
          segment_begin += segment.size;
        }
      }
      parts = std::move(longer);
    }
    std::move(parts.begin(), parts.end(), std::back_inserter(placed));
  }
  return placed;
}

std::vector<PlacedBox> Placement::boxes() const {
  const Sizes local = local_shape();
  const Sizes strides = strides_of(local, order_);
  if (count_ == 0 && is_whole()) return {{Box::whole(shape_), 0, strides}};
  std::vector<Box> boxes;
  for (const Box& box : boxes_of_run(in_memory_order(local, order_), first_, count_))
    boxes.push_back({in_own_order(box.offsets, order_), in_own_order(box.sizes, order_)});
  std::vector<PlacedBox> placed = place(boxes, strides);
  for (PlacedBox& box : placed) box.offset -= first_;
  return placed;
}

std::vector<PlacedBox> Placement::boxes(const std::vector<std::int64_t>& strides) const {
  const Sizes local = local_shape();
  if (count_ != product(local) || strides.size() != local.size()) {
    throw ShardingError(text::concat("Strides were given for a tensor of shape [",
                                     text::join(local), "] of which a rank has ", count_,
                                     " elements."));
  }
  if (count_ == 0) {
    if (!is_whole()) return {};
    return {{Box::whole(shape_), 0, strides}};
  }
  return place({Box::whole(local)}, strides);
}

std::string Placement::text() const {
  std::string cuts;
  for (const Cut& cut : cuts_) {
    cuts += text::concat(cut.axis, " ", cut.part, "/", cut.parts, " of ", cut.blocks, " in ",
                         cut.dimension, ": ");
  }
  return text::concat(cuts, first_, "+", count_);
}

bool Placement::operator==(const Placement& other) const {
  return shape_ == other.shape_ && order_ == other.order_ && cuts_ == other.cuts_ &&
         first_ == other.first_ && count_ == other.count_;
}

}  // namespace accelerate
