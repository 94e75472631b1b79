#pragma once

#include <device_map/sizes.hpp>

#include <vector>

namespace accelerate::device_map {

/// The largest layer among the modules that wait for a place: how much room is kept free. It is
/// looked at again only when the last of the largest layers has been taken up, or after a split, so
/// it may be larger than what still waits. Takes O(log n) for each layer taken up.
class Layers {
 public:
  Layers(const ModelTree& tree, const Sizes& sizes, const std::vector<std::string>& no_split);

  /// Bytes of the largest layer.
  std::int64_t largest() const noexcept { return largest_; }
  /// What waits under this id, a module's index or, beyond these, a tensor's, is taken up: to be
  /// placed, split or put back. The root's own tensors count as layers until the first look.
  void visit(int id);
  /// It is placed.
  void place(int id);
  /// It is placed without having been taken up: it counts until the next look.
  void place_unseen(int id);
  /// Looks again at everything that waits, except what is under `id`; -1 for none.
  void reset(int id);

 private:
  struct Best {
    std::int64_t size = -1;
    int count = 0;
  };
  void set(int position, std::int64_t size);
  bool shows_largest() const { return tree_[1].count > 0 && tree_[1].size == largest_; }

  std::vector<int> begin_, end_;  // by id: its layers
  std::vector<std::int64_t> size_;
  std::vector<bool> waits_, shown_;
  std::vector<int> to_look_at_;    // positions that may be shown wrongly
  std::vector<int> root_tensors_;  // positions of these, until the first look
  std::vector<Best> tree_;         // of maxima, over the layers shown
  std::size_t leaves_ = 1;
  std::int64_t largest_ = 0;
};

}  // namespace accelerate::device_map
