#pragma once

#include <accelerate/base/error.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

namespace torch::data {
template <typename Dataset, typename Sampler>
class StatelessDataLoader;
template <typename Dataset>
class StatefulDataLoader;
}  // namespace torch::data

namespace accelerate::data {

namespace detail {
template <class L>
inline constexpr bool kStateless = false;
template <class D, class S>
inline constexpr bool kStateless<torch::data::StatelessDataLoader<D, S>> = true;
template <class L>
inline constexpr bool kStateful = false;
template <class D>
inline constexpr bool kStateful<torch::data::StatefulDataLoader<D>> = true;
template <class L>
concept TorchLoader = kStateless<L> || kStateful<L>;
}  // namespace detail

/// A loader made by torch::data::make_data_loader, as a stream of batches. Its sampler and dataset
/// cannot be reached, so it can only be read from its start to its end.
template <detail::TorchLoader L>
class ReadyMade {
 public:
  using Unit = typename L::BatchType;
  static constexpr bool kIterable = detail::kStateful<L>;

  explicit ReadyMade(std::shared_ptr<L> loader) : loader_(std::move(loader)) {}

  /// Starts a pass.
  void reset() {
    if (iterator_ && loader_->options().workers > 0) {
      // With workers LibTorch starts a new pass only when the one before it was read to the end.
      while (next()) {
      }
    }
    iterator_.emplace(loader_->begin());
    fetched_ = false;
  }

  std::optional<Unit> next() {
    if (!iterator_) return std::nullopt;
    if (fetched_) ++*iterator_;
    fetched_ = true;
    if (*iterator_ == loader_->end()) {
      iterator_.reset();
      fetched_ = false;
      return std::nullopt;
    }
    return std::move(**iterator_);
  }

  L& loader() const noexcept { return *loader_; }

 private:
  std::shared_ptr<L> loader_;
  std::optional<decltype(std::declval<L&>().begin())> iterator_;
  bool fetched_ = false;
};

namespace detail {
template <class T>
struct IsReadyMade : std::false_type {};
template <class L>
struct IsReadyMade<ReadyMade<L>> : std::true_type {};
}  // namespace detail

}  // namespace accelerate::data
