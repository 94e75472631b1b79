#pragma once

#include <accelerate/core/tree.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

namespace accelerate::data::detail {

/// The part of a stream of units that is looked at: from the step in hand to the look-ahead, and
/// the first units of the pass, which fill the last step up.
template <class Unit>
class UnitWindow {
 public:
  void begin(std::int64_t keep) {
    keep_ = keep;
    start_.clear();
    window_.clear();
    base_ = pulled_ = 0;
    ended_ = false;
  }

  /// Pulls units until `end` of them are there or the stream ends; returns how many there are.
  template <class Pull>
  std::int64_t ensure(std::int64_t end, Pull&& pull) {
    while (!ended_ && pulled_ < end) {
      std::optional<Unit> unit = pull();
      if (!unit) {
        ended_ = true;
        break;
      }
      if (pulled_ < keep_) start_.push_back(copy(*unit));
      window_.push_back(std::move(*unit));
      ++pulled_;
    }
    return pulled_;
  }

  /// Units that were pulled or left out since the begin of the pass.
  std::int64_t pulled() const noexcept { return pulled_; }

  /// Units before `position` are not wanted any more.
  void forget_before(std::int64_t position) {
    while (base_ < position && !window_.empty()) {
      window_.pop_front();
      ++base_;
    }
  }
  /// `count` units were left out of the stream.
  void skipped(std::int64_t count) {
    pulled_ += count;
    base_ = pulled_;
    window_.clear();
  }

  const Unit& peek(std::int64_t position) const {
    return window_[static_cast<std::size_t>(position - base_)];
  }
  Unit take(std::int64_t position) {
    return std::move(window_[static_cast<std::size_t>(position - base_)]);
  }
  /// Of the first units of the pass.
  const Unit& kept(std::int64_t position) const {
    return start_[static_cast<std::size_t>(position)];
  }
  Unit copy_kept(std::int64_t position) const { return copy(kept(position)); }

 private:
  // Memory of its own: what is handed out may be changed in place by the user.
  static Unit copy(const Unit& unit) {
    if constexpr (TensorTree<Unit>) {
      return tree::map(unit, [](const at::Tensor& tensor) { return tensor.clone(); });
    } else {
      return unit;
    }
  }

  std::int64_t keep_ = 0;
  std::vector<Unit> start_;
  std::deque<Unit> window_;
  std::int64_t base_ = 0;
  std::int64_t pulled_ = 0;
  bool ended_ = false;
};

}  // namespace accelerate::data::detail
