#include <intercept/trace.hpp>

namespace accelerate::intercept {

namespace {
constexpr std::size_t kLongest = 1 << 20;
}  // namespace

void Trace::begin() {
  following_ = !recorded_.empty();
  cursor_ = 0;
  now_.clear();
  fingerprint_ = 0xcbf29ce484222325u;
}

void Trace::visit(int unit) {
  fingerprint_ = (fingerprint_ ^ static_cast<std::uint64_t>(unit)) * 0x100000001b3u;  // FNV-1a
  if (following_ && cursor_ < recorded_.size() && recorded_[cursor_] == unit) {
    ++cursor_;
    return;
  }
  if (following_) {
    now_.assign(recorded_.begin(), recorded_.begin() + static_cast<std::ptrdiff_t>(cursor_));
    following_ = false;
  }
  // A pass that never ends (forwards with gradients and no backward) must not eat the memory.
  if (now_.size() >= kLongest) now_.clear();
  now_.push_back(unit);
}

void Trace::end() {
  if (following_ ? cursor_ > 0 : !now_.empty()) recorded_ = visited();
  begin();
}

std::vector<int> Trace::visited() const {
  if (!following_) return now_;
  return {recorded_.begin(), recorded_.begin() + static_cast<std::ptrdiff_t>(cursor_)};
}

}  // namespace accelerate::intercept
