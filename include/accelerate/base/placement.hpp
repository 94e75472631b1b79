#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// Where parts of tensors lie. Sharding, optimizers, state dicts and checkpoints all speak of parts
/// in these terms. No LibTorch.
namespace accelerate {

/// A rectangular part of a tensor: in each dimension, some consecutive indices.
struct Box {
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> sizes;

  /// All of a tensor.
  static Box whole(std::vector<std::int64_t> shape);
  std::int64_t elements() const noexcept;
  /// As Python's slices: "[0:3, 16:32]".
  std::string text() const;
  bool operator==(const Box&) const = default;
};

/// The elements that two boxes of one tensor share; nothing when they share none.
std::optional<Box> intersect(const Box& a, const Box& b);

/// Consecutive elements of a row-major tensor as boxes, in the order of the elements: at most
/// 2d - 1 of d dimensions. `first` and `count` lie inside the tensor.
std::vector<Box> boxes_of_run(const std::vector<std::int64_t>& shape, std::int64_t first,
                              std::int64_t count);

/// Empty when each element of a tensor is in exactly one of the boxes. Otherwise what is wrong, as
/// the end of a sentence. Accepts any numbers.
std::string partition_problem(const std::vector<std::int64_t>& shape,
                              const std::vector<Box>& boxes);

/// The number of elements, or nothing when a size is negative or there are more than 2^58.
std::optional<std::int64_t> elements_of(const std::vector<std::int64_t>& shape);

/// The dimensions of a tensor with these strides from the slowest to the fastest in memory. Empty
/// for row-major order, and where the tensor has gaps or overlaps itself.
std::vector<std::int64_t> memory_order(const std::vector<std::int64_t>& shape,
                                       const std::vector<std::int64_t>& strides);

/// One cut of a tensor along a dimension, over the ranks of an axis of the mesh. The dimension is
/// taken as some equal blocks, and each block is cut by itself: the fused weight of queries, keys
/// and values has three. The pieces of a block are of equal size, as far as it goes: of 7 rows, 3
/// ranks have 3, 3 and 1, and 4 ranks of 5 rows have 2, 2, 1 and none.
struct Cut {
  /// Of the mesh.
  std::string axis;
  std::int64_t dimension = 0;
  /// How many ranks are along the axis, and the place of this one.
  std::int64_t parts = 1;
  std::int64_t part = 0;
  std::int64_t blocks = 1;

  bool operator==(const Cut&) const = default;
};

/// A box of a tensor, and where it lies in the memory of the rank that has it.
struct PlacedBox {
  Box box;
  /// Of its first element, counted in elements from the first that the rank has.
  std::int64_t offset = 0;
  /// In elements, of each dimension.
  std::vector<std::int64_t> strides;
};

/// Which part of a tensor a rank has. The cuts, in their order, leave a smaller tensor, the local
/// one. Of its elements, in the order in which they lie in memory, a rank has a run: all, unless
/// sharding divided them further.
class Placement {
 public:
  /// Of a tensor without dimensions, which is one number.
  Placement() : Placement(std::vector<std::int64_t>()) {}
  /// All of a tensor. `order` has its dimensions from the slowest to the fastest in memory, as
  /// `memory_order` gives them. Throws ShardingError when a size is negative, there are more than
  /// 2^58 elements, or `order` is not an order of the dimensions.
  explicit Placement(std::vector<std::int64_t> shape, std::vector<std::int64_t> order = {});

  /// What is left after a cut more. Throws ShardingError when the tensor has no such dimension, the
  /// blocks are not of equal size, a number is out of range, or the rank has a run already.
  Placement cut(Cut cut) const;
  /// `count` of the elements that the rank has, from `first` on. Throws ShardingError when it has
  /// fewer.
  Placement run(std::int64_t first, std::int64_t count) const;

  /// Of the whole tensor.
  const std::vector<std::int64_t>& shape() const noexcept { return shape_; }
  const std::vector<std::int64_t>& order() const noexcept { return order_; }
  const std::vector<Cut>& cuts() const noexcept { return cuts_; }
  /// The shape that the cuts leave.
  std::vector<std::int64_t> local_shape() const;
  /// The run: its first element, counted in the memory of the local tensor, and how many. The rank
  /// has as many elements.
  std::int64_t first() const noexcept { return first_; }
  std::int64_t count() const noexcept { return count_; }
  /// The rank has every element.
  bool is_whole() const noexcept;

  /// The rank's elements as boxes of the whole tensor, none of them empty (except the one of a
  /// whole tensor that is empty). They lie in memory one after another, in the local tensor's
  /// order.
  std::vector<PlacedBox> boxes() const;
  /// The same of a rank that has all of the local tensor, in memory with these strides.
  std::vector<PlacedBox> boxes(const std::vector<std::int64_t>& strides) const;

  /// Different for different parts: "16+64", or "tp 1/2 of 3 in 0: 16+64" after a cut.
  std::string text() const;
  bool operator==(const Placement& other) const;

 private:
  // Consecutive indices of the whole tensor that are consecutive in the local one, too.
  struct Segment {
    std::int64_t offset = 0;
    std::int64_t size = 0;
  };
  std::vector<PlacedBox> place(const std::vector<Box>& local,
                               const std::vector<std::int64_t>& strides) const;

  std::vector<std::int64_t> shape_;
  std::vector<std::int64_t> order_;
  std::vector<Cut> cuts_;
  std::int64_t first_ = 0;
  std::int64_t count_ = 0;
  // Of each dimension, in the local tensor's order; they follow from the cuts.
  std::vector<std::vector<Segment>> segments_;
};

}  // namespace accelerate
