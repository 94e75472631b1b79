#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sim {

/// For each stream, by its index, the number of its last operator that is known to be done.
class Clock {
 public:
  bool has(int stream, std::uint64_t number) const { return number <= at(stream); }
  bool has(const Clock& other) const {
    for (std::size_t i = 0; i < other.done_.size(); ++i) {
      if (!has(static_cast<int>(i), other.done_[i])) return false;
    }
    return true;
  }
  void join(const Clock& other) {
    if (done_.size() < other.done_.size()) done_.resize(other.done_.size());
    for (std::size_t i = 0; i < other.done_.size(); ++i)
      done_[i] = std::max(done_[i], other.done_[i]);
  }
  std::uint64_t at(int stream) const {
    const auto i = static_cast<std::size_t>(stream);
    return i < done_.size() ? done_[i] : 0;
  }
  std::uint64_t next(int stream) {
    const auto i = static_cast<std::size_t>(stream);
    if (done_.size() <= i) done_.resize(i + 1);
    return ++done_[i];
  }

 private:
  std::vector<std::uint64_t> done_;
};

}  // namespace sim
