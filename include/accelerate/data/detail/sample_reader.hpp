#pragma once

#include <accelerate/base/error.hpp>
#include <accelerate/data/dataset.hpp>
#include <accelerate/data/detail/sample_random.hpp>

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <typeinfo>
#include <utility>

namespace torch::data::datasets {
template <typename Self, typename SingleExample>
class Dataset;
template <typename SourceDataset, typename AppliedTransform>
class MapDataset;
}  // namespace torch::data::datasets
namespace torch::data::transforms {
template <typename Input, typename Output>
class Transform;
}  // namespace torch::data::transforms

namespace accelerate::data::detail {

template <class Member>
struct DeclaredBy;
template <class Class, class Result, class... Arguments>
struct DeclaredBy<Result (Class::*)(Arguments...)> {
  using type = Class;
};

// LibTorch's own `get_batch` and `apply_batch` are loops over single samples.
template <class T>
inline constexpr bool kLoopsItself = false;
template <class Self, class Example>
inline constexpr bool kLoopsItself<torch::data::datasets::Dataset<Self, Example>> = true;
template <class Input, class Output>
inline constexpr bool kLoopsItself<torch::data::transforms::Transform<Input, Output>> = true;
template <class D>
concept LoopsOverGet = kLoopsItself<typename DeclaredBy<decltype(&D::get_batch)>::type>;
template <class T>
concept LoopsOverApply = kLoopsItself<typename DeclaredBy<decltype(&T::apply_batch)>::type>;
template <class D>
inline constexpr bool kMapped = false;
template <class Source, class Transform>
inline constexpr bool kMapped<torch::data::datasets::MapDataset<Source, Transform>> =
    !torch::data::datasets::MapDataset<Source, Transform>::is_stateful;

/// Reads samples of an indexed dataset as its `get_batch` does. `begin(i, part)` is called before
/// anything is done for the i-th of them; for all of them together, where only the dataset could
/// tell them apart, before the first. `part` goes up with each function that is applied.
template <class D, class Begin>
auto read_samples(D& dataset, c10::ArrayRef<std::size_t> indices, const Begin& begin,
                  std::int64_t& part) {
  if constexpr (std::is_polymorphic_v<D> && (kMapped<D> || LoopsOverGet<D>)) {
    // A subclass may read in a way of its own.
    if (typeid(dataset) != typeid(D)) {
      begin(0, part);
      return dataset.get_batch(indices);
    }
  }
  if constexpr (kMapped<D>) {
    using Transform = typename D::TransformType;
    auto examples =
        read_samples(const_cast<typename D::DatasetType&>(dataset.dataset()), indices, begin, part);
    auto& transform = const_cast<Transform&>(dataset.transform());
    ++part;
    if constexpr (LoopsOverApply<Transform>) {
      typename Transform::OutputBatchType batch;
      batch.reserve(examples.size());
      for (std::size_t i = 0; i < examples.size(); ++i) {
        begin(static_cast<std::int64_t>(i), part);
        batch.push_back(transform.apply(std::move(examples[i])));
      }
      return batch;
    } else {
      begin(0, part);
      return transform.apply_batch(std::move(examples));
    }
  } else if constexpr (BatchIndexed<D> && !LoopsOverGet<D>) {
    begin(0, part);
    return dataset.get_batch(indices);
  } else {
    RawBatch<D> batch;
    batch.reserve(indices.size());
    for (std::size_t i = 0; i < indices.size(); ++i) {
      begin(static_cast<std::int64_t>(i), part);
      batch.push_back(dataset.get(indices[i]));
    }
    return batch;
  }
}

}  // namespace accelerate::data::detail
