#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace accelerate::intercept {

/// The order in which one pass (a forward and its backward) demands units: recorded once, followed
/// from then on, and recorded anew as soon as the program does something else. Everything decided
/// from it is a function of the demands alone, so ranks that run the same program decide alike.
///
/// After DeepSpeed ZeRO-3's parameter trace (record, complete, invalid), with operators in place of
/// modules.
class Trace {
 public:
  /// A pass begins.
  void begin();
  /// `unit` is demanded.
  void visit(int unit);
  /// The pass is over: what it did is what the next is expected to do.
  void end();

  /// Whether this pass has so far done what the last one did.
  bool following() const noexcept { return following_; }
  /// Calls `each(unit)` for what will be demanded next, in order, repetitions included, until it
  /// returns false. Nothing is known of the future while recording.
  template <class Each>
  void look_ahead(Each&& each) const {
    if (!following_) return;
    for (std::size_t i = cursor_; i < recorded_.size(); ++i) {
      if (!each(recorded_[i])) return;
    }
  }
  /// The demands of this pass so far.
  std::vector<int> visited() const;
  /// Demands of this pass so far, as one number to compare between ranks.
  std::uint64_t fingerprint() const noexcept { return fingerprint_; }

 private:
  std::vector<int> recorded_;
  std::vector<int> now_;  // while recording
  std::size_t cursor_ = 0;
  bool following_ = false;
  std::uint64_t fingerprint_ = 0;
};

}  // namespace accelerate::intercept
