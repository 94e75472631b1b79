#pragma once

#include <accelerate/data/ready_made.hpp>

#include <c10/util/ArrayRef.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

/// What counts as a dataset. Nothing has to be derived from; torch::data's datasets fit as they
/// are.
namespace accelerate::data {

namespace detail {
template <class T>
struct WithoutOptional {
  using type = T;
};
template <class T>
struct WithoutOptional<std::optional<T>> {
  using type = T;
};
template <class T>
inline constexpr bool kIsOptional = !std::is_same_v<T, typename WithoutOptional<T>::type>;

template <class D>
concept Sized = requires(D& dataset) {
  requires std::convertible_to<decltype(dataset.size()), std::optional<std::size_t>>;
};
template <class D>
concept BatchIndexed = requires(D& dataset, c10::ArrayRef<std::size_t> indices) {
  dataset.get_batch(indices);
};
template <class D>
concept ItemIndexed = requires(D& dataset) {
  dataset.get(std::size_t(0));
};
template <class D>
concept Requested = requires(D& dataset) {
  dataset.get_batch(std::size_t(1));
};
}  // namespace detail

/// Random access: `get_batch(c10::ArrayRef<size_t>)` or `get(size_t)`, and `size()`. All workers
/// share one dataset, so with workers these must be safe to call from several threads.
template <class D>
concept IndexedDataset = detail::Sized<D> &&
    (detail::BatchIndexed<D> || (detail::ItemIndexed<D> && !detail::Requested<D>));

/// A stream of examples: `std::optional<Example> next()`, and `reset()` or `reset(epoch)`, which
/// starts the next pass. Optional: `skip(n)` to leave out n examples without reading them,
/// `set_epoch(epoch)`, `size()`. Used from one thread at a time.
template <class D>
concept ExampleStream = requires(D& dataset) {
  requires detail::kIsOptional<std::remove_cvref_t<decltype(dataset.next())>>;
};

/// LibTorch's streams (StreamDataset, StatefulDataset, ChunkDataset): `get_batch(size_t)` gives
/// that many examples as a vector, or one batch that is ready; an empty vector or optional ends the
/// pass.
template <class D>
concept BatchStream = !IndexedDataset<D> && !ExampleStream<D> && detail::Requested<D>;

template <class D>
concept AnyDataset = IndexedDataset<D> || ExampleStream<D> || BatchStream<D>;

namespace detail {

template <class T>
inline constexpr bool kIsExampleVector = false;
template <class T, class A>
inline constexpr bool kIsExampleVector<std::vector<T, A>> = true;

// What a dataset gives for a batch, before collation.
template <class D>
auto raw_batch() {
  if constexpr (IsReadyMade<D>::value) {
    return std::type_identity<typename D::Unit>();
  } else if constexpr (IndexedDataset<D>) {
    if constexpr (BatchIndexed<D>) {
      using Found =
          std::remove_cvref_t<decltype(std::declval<D&>().get_batch(c10::ArrayRef<std::size_t>()))>;
      return std::type_identity<typename WithoutOptional<Found>::type>();
    } else {
      return std::type_identity<
          std::vector<std::remove_cvref_t<decltype(std::declval<D&>().get(std::size_t(0)))>>>();
    }
  } else if constexpr (ExampleStream<D>) {
    return std::type_identity<std::vector<
        typename std::remove_cvref_t<decltype(std::declval<D&>().next())>::value_type>>();
  } else {
    using Found = std::remove_cvref_t<decltype(std::declval<D&>().get_batch(std::size_t(1)))>;
    return std::type_identity<typename WithoutOptional<Found>::type>();
  }
}
template <class D>
using RawBatch = typename decltype(raw_batch<D>())::type;

template <class D>
std::optional<std::int64_t> size_of(const D& dataset) {
  if constexpr (requires {
                  requires std::convertible_to<decltype(dataset.size()),
                                               std::optional<std::size_t>>;
                }) {
    const std::optional<std::size_t> size = dataset.size();
    if (!size) return std::nullopt;
    return static_cast<std::int64_t>(*size);
  } else {
    return std::nullopt;
  }
}

}  // namespace detail
}  // namespace accelerate::data
