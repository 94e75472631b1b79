#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

namespace measure {

inline double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

/// How long `work` took.
inline std::chrono::duration<double> time(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::steady_clock::now() - start;
}

}  // namespace measure
