#pragma once

// Random tensors on random meshes, for tests that hold for all of them.

#include <accelerate/base/placement.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace accelerate::testing {

class RandomPlacements {
 public:
  explicit RandomPlacements(std::uint64_t seed) : random_(seed) {}

  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(count));
  }

  /// Up to four dimensions; blocks of two and three are possible, empty tensors as well.
  std::vector<std::int64_t> shape() {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(below(5)));
    for (std::int64_t& size : sizes) {
      size = below(30) == 0 ? 0 : 1 + below(7);
      if (below(3) == 0) size *= 2 + below(2);
    }
    return sizes;
  }

  /// What each rank of a mesh of up to four axes has of a tensor, copies left out: some axes cut
  /// it, all the others together take runs of what is left.
  std::vector<Placement> layout(const std::vector<std::int64_t>& shape) {
    std::vector<std::int64_t> order;
    if (shape.size() > 1 && below(2) == 0) {
      order.resize(shape.size());
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random_);
    }
    std::vector<Placement> ranks{Placement(shape, order)};
    const std::int64_t axes = 1 + below(4);
    for (std::int64_t axis = 0; axis < axes; ++axis) {
      const std::int64_t size = 1 + below(3);
      if (shape.empty() || below(3) == 0) continue;  // it has copies
      const std::int64_t dimension = below(static_cast<std::int64_t>(shape.size()));
      const std::int64_t wanted = 1 + below(3);
      // Ranks that have less than others may not have blocks of equal size.
      bool fits = true;
      for (const Placement& rank : ranks)
        fits = fits && rank.local_shape()[static_cast<std::size_t>(dimension)] % wanted == 0;
      std::vector<Placement> next;
      for (const Placement& rank : ranks) {
        for (std::int64_t part = 0; part < size; ++part) {
          next.push_back(
              rank.cut({"axis" + std::to_string(axis), dimension, size, part, fits ? wanted : 1}));
        }
      }
      ranks = std::move(next);
    }
    if (below(3) == 0) return ranks;
    std::vector<Placement> runs;
    const std::int64_t parts = 1 + below(4);
    for (const Placement& rank : ranks) {
      std::vector<std::int64_t> ends{rank.count()};
      for (std::int64_t i = 1; i < parts; ++i) ends.push_back(below(rank.count() + 1));
      std::sort(ends.begin(), ends.end());
      std::int64_t begin = 0;
      for (const std::int64_t end : ends) {
        runs.push_back(rank.run(begin, end - begin));
        begin = end;
      }
    }
    return runs;
  }

 private:
  std::mt19937_64 random_;
};

/// Calls `visit(element, place)` with the row-major number of each element of the box in the whole
/// tensor, and its place in the rank's memory.
template <class Visitor>
void for_each_element(const std::vector<std::int64_t>& shape, const PlacedBox& placed,
                      Visitor&& visit) {
  const std::int64_t count = placed.box.elements();
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t rest = i, element = 0, stride = 1, place = placed.offset;
    for (std::size_t d = shape.size(); d-- > 0;) {
      const std::int64_t index = rest % placed.box.sizes[d];
      rest /= placed.box.sizes[d];
      element += (placed.box.offsets[d] + index) * stride;
      stride *= shape[d];
      place += index * placed.strides[d];
    }
    visit(element, place);
  }
}

}  // namespace accelerate::testing
