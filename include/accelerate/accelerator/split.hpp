#pragma once

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace accelerate {

namespace detail {

/// [first, last) of `length` items for one rank, and how often to repeat the input's last item.
struct Part {
  std::int64_t first = 0;
  std::int64_t last = 0;
  std::int64_t padding = 0;
};
Part part_of(std::int64_t length, int rank, int size, bool apply_padding);
at::Tensor rows_of(const at::Tensor& tensor, const Part& part);

template <class T>
struct IsMap : std::false_type {};
template <class... A>
struct IsMap<std::map<A...>> : std::true_type {};
template <class... A>
struct IsMap<std::unordered_map<A...>> : std::true_type {};

template <class T>
std::int64_t length_of(const T& inputs) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (inputs.dim() == 0)
      throw DataError(
          "A tensor without dimensions was to be split between processes; it has no rows.");
    return inputs.size(0);
  } else if constexpr (IsMap<T>::value) {
    if (inputs.empty()) return 0;
    const std::int64_t length = length_of(inputs.begin()->second);
    for (const auto& [key, value] : inputs) {
      if (length_of(value) != length) {
        throw DataError(text::concat(
            "A map was to be split between processes, and its values have unequal lengths: ",
            inputs.begin()->first, " has ", length, ", ", key, " has ", length_of(value),
            ". Give them one length."));
      }
    }
    return length;
  } else {
    return static_cast<std::int64_t>(inputs.size());
  }
}

template <class T>
T take(const T& inputs, const Part& part) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return rows_of(inputs, part);
  } else if constexpr (IsMap<T>::value) {
    T result;
    for (const auto& [key, value] : inputs) result.emplace(key, take(value, part));
    return result;
  } else {
    T result(inputs.begin() + part.first, inputs.begin() + part.last);
    for (std::int64_t i = 0; i < part.padding; ++i) result.push_back(inputs.back());
    return result;
  }
}

}  // namespace detail

/// Rank `rank`'s contiguous part of a vector, a string, a tensor (along dim 0) or a map of them.
/// The first `length % size` ranks get one item more. With `apply_padding` the others repeat the
/// last item of the whole input, as the original does. Throws DataError for maps of unequal
/// lengths.
template <class T>
T split_between(const T& inputs, int rank, int size, bool apply_padding = false) {
  return detail::take(inputs,
                      detail::part_of(detail::length_of(inputs), rank, size, apply_padding));
}

}  // namespace accelerate
