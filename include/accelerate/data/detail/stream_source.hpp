#pragma once

#include <accelerate/data/dataset.hpp>
#include <accelerate/data/ready_made.hpp>

#include <concepts>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace accelerate::data::detail {

/// A dataset that is read from start to end, as units: examples, or batches that are ready.
template <class Dataset>
class StreamSource {
  static constexpr bool kExamples = ExampleStream<Dataset>;
  static constexpr bool kChunks = !kExamples && kIsExampleVector<RawBatch<Dataset>>;

 public:
  /// Units are whole batches.
  static constexpr bool kBatches = !kExamples && !kChunks;
  static constexpr bool kIterable = true;
  static constexpr bool kSkips = kExamples && requires(Dataset & dataset) {
    dataset.skip(std::size_t(1));
  };

  static auto unit() {
    if constexpr (kBatches) {
      return std::type_identity<RawBatch<Dataset>>();
    } else {
      return std::type_identity<typename RawBatch<Dataset>::value_type>();
    }
  }
  using Unit = typename decltype(unit())::type;

  StreamSource(std::shared_ptr<Dataset> dataset, std::int64_t batch_size)
      : dataset_(std::move(dataset)), batch_size_(static_cast<std::size_t>(batch_size)) {}

  void begin(std::int64_t epoch) {
    chunk_.clear();
    given_ = 0;
    Dataset& dataset = *dataset_;
    if constexpr (requires { dataset.set_epoch(epoch); }) dataset.set_epoch(epoch);
    if constexpr (requires { dataset.reset(epoch); }) {
      dataset.reset(epoch);
    } else if constexpr (requires { dataset.reset(); }) {
      dataset.reset();
    }
  }

  std::optional<Unit> next() {
    if constexpr (kExamples) {
      return dataset_->next();
    } else {
      if constexpr (kChunks) {
        if (given_ < chunk_.size()) return std::move(chunk_[given_++]);
      }
      const std::optional<RawBatch<Dataset>> batch = dataset_->get_batch(batch_size_);
      if constexpr (kBatches) {
        return batch;
      } else {
        if (!batch || batch->empty()) return std::nullopt;
        chunk_ = std::move(*batch);
        given_ = 1;
        return std::move(chunk_.front());
      }
    }
  }

  void skip(std::int64_t count) { dataset_->skip(static_cast<std::size_t>(count)); }
  std::optional<std::int64_t> size() const { return size_of(*dataset_); }

 private:
  std::shared_ptr<Dataset> dataset_;
  std::size_t batch_size_;
  std::conditional_t<kChunks, RawBatch<Dataset>, std::vector<int>> chunk_;
  std::size_t given_ = 0;
};

template <class L>
class StreamSource<ReadyMade<L>> {
 public:
  static constexpr bool kBatches = true;
  static constexpr bool kIterable = ReadyMade<L>::kIterable;
  static constexpr bool kSkips = false;
  using Unit = typename ReadyMade<L>::Unit;

  StreamSource(std::shared_ptr<ReadyMade<L>> loader, std::int64_t) : loader_(std::move(loader)) {}
  void begin(std::int64_t) { loader_->reset(); }
  std::optional<Unit> next() { return loader_->next(); }
  void skip(std::int64_t) {}
  std::optional<std::int64_t> size() const { return std::nullopt; }

 private:
  std::shared_ptr<ReadyMade<L>> loader_;
};

}  // namespace accelerate::data::detail
