#pragma once

#include <accelerate/data/dataset.hpp>
#include <accelerate/data/loader_core.hpp>
#include <accelerate/data/sampler.hpp>

#include <concepts>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace accelerate::data {

/// Gives batches as the dataset does.
struct NoCollation {
  template <class Batch>
  Batch operator()(Batch batch) const {
    return batch;
  }
};

/// What a loader will be: a dataset, an order and options. `Accelerator::prepare` (or
/// `prepare_loader`) makes the loader of it that knows this process' part. A cheap handle: copies
/// share the dataset and the sampler.
template <class Dataset, class Collation = NoCollation>
class LoaderPlan {
 public:
  using DatasetType = Dataset;
  using BatchType =
      std::remove_cvref_t<std::invoke_result_t<Collation&, detail::RawBatch<Dataset>>>;

  LoaderPlan(std::shared_ptr<Dataset> dataset, LoaderSettings settings, Collation collation = {})
      : dataset_(std::move(dataset)),
        settings_(std::move(settings)),
        collation_(std::move(collation)) {}

  /// Makes batches with `function(what the dataset gives)`: of a vector of examples one batch, as
  /// collate::stack() and collate::pad() do, or of any batch another. Called by the workers, from
  /// several threads at once.
  template <class Function>
  LoaderPlan<Dataset, std::decay_t<Function>> collate(Function&& function) const {
    LoaderPlan<Dataset, std::decay_t<Function>> plan(dataset_, settings_,
                                                     std::forward<Function>(function));
    if (sampler_) plan.sampler(*sampler_);
    if constexpr (requires { std::decay_t<Function>::kVaryingShapes; }) {
      plan.varying_shapes(std::decay_t<Function>::kVaryingShapes);
    }
    return plan;
  }
  /// In errors, logs and checkpoints. Default "loader".
  LoaderPlan& name(std::string name) { return settings_.name = std::move(name), *this; }
  /// True: batches may differ in shape beyond their first dimension. Default false: such a batch is
  /// a DataError.
  LoaderPlan& varying_shapes(bool varying) { return settings_.varying_shapes = varying, *this; }
  /// True: leaves out what does not give every process a whole batch. Default: as in the options.
  LoaderPlan& drop_last(bool drop) { return settings_.drop_last = drop, *this; }
  /// True: leaves out what does not give a whole step of the optimizer: processes x batch x
  /// accumulation steps. Default false.
  LoaderPlan& drop_last_global(bool drop) { return settings_.drop_last_global = drop, *this; }
  /// False: samples come in the order of the dataset. Default true. A sampler given decides itself.
  LoaderPlan& shuffle(bool shuffle) { return settings_.shuffle = shuffle, *this; }
  /// Lets `rule` say which process gets which batch, in place of every P-th; see ShardRequest.
  LoaderPlan& shard_by(ShardFunction rule) { return settings_.shard_by = std::move(rule), *this; }
  LoaderPlan& sampler(ErasedSampler sampler) { return sampler_ = std::move(sampler), *this; }

  const std::shared_ptr<Dataset>& dataset() const noexcept { return dataset_; }
  const LoaderSettings& settings() const noexcept { return settings_; }
  const std::optional<ErasedSampler>& sampler() const noexcept { return sampler_; }
  const Collation& collation() const noexcept { return collation_; }

 private:
  std::shared_ptr<Dataset> dataset_;
  LoaderSettings settings_;
  Collation collation_;
  std::optional<ErasedSampler> sampler_;
};

namespace detail {

/// torch::data::DataLoaderOptions, which is not included here for what it costs to compile.
template <class O>
concept TorchOptions = requires(const O& options) {
  { options.batch_size() } -> std::convertible_to<std::size_t>;
  { options.workers() } -> std::convertible_to<std::size_t>;
  options.max_jobs();
  options.timeout();
  { options.drop_last() } -> std::convertible_to<bool>;
  { options.enforce_ordering() } -> std::convertible_to<bool>;
};
template <class O>
concept Options = TorchOptions<O> || std::integral<O>;

/// Says once that batches come in order all the same.
void note_unordered();

template <Options O>
LoaderSettings settings_of(const O& options) {
  LoaderSettings settings;
  if constexpr (std::integral<O>) {
    settings.batch_size = static_cast<std::int64_t>(options);
  } else {
    settings.batch_size = static_cast<std::int64_t>(options.batch_size());
    settings.workers = static_cast<std::int64_t>(options.workers());
    const std::optional<std::size_t> jobs = options.max_jobs();
    settings.max_jobs = static_cast<std::int64_t>(jobs.value_or(2 * options.workers()));
    settings.timeout = options.timeout();
    settings.drop_last = options.drop_last();
    if (!options.enforce_ordering()) note_unordered();
  }
  return settings;
}

template <class T>
struct Shared {
  using type = T;
};
template <class T>
struct Shared<std::shared_ptr<T>> {
  using type = T;
};
template <class T>
using SharedType = typename Shared<std::decay_t<T>>::type;

template <class T>
std::shared_ptr<SharedType<T>> share(T&& value) {
  if constexpr (std::is_same_v<std::decay_t<T>, SharedType<T>>) {
    return std::make_shared<std::decay_t<T>>(std::forward<T>(value));
  } else {
    return std::forward<T>(value);
  }
}

template <TorchLoader L>
LoaderPlan<ReadyMade<L>> ready_plan(std::shared_ptr<L> ready) {
  LoaderSettings settings;
  settings.batch_size = static_cast<std::int64_t>(ready->options().batch_size);
  settings.drop_last = ready->options().drop_last;
  return {std::make_shared<ReadyMade<L>>(std::move(ready)), std::move(settings)};
}

}  // namespace detail

/// The plan of a loader over `dataset` (a value, or a shared_ptr to one), in random order unless
/// `.shuffle(false)`; a stream comes in its own order. `options` is a
/// torch::data::DataLoaderOptions or just a batch size. Batches always come in the order of the
/// sampler (`enforce_ordering`).
template <class Dataset, detail::Options O>
requires AnyDataset<detail::SharedType<Dataset>> LoaderPlan<detail::SharedType<Dataset>> loader(
    Dataset&& dataset, const O& options) {
  return {detail::share(std::forward<Dataset>(dataset)), detail::settings_of(options)};
}

/// The same in the order of `sampler`: any of torch::data::samplers, or a type with their
/// interface, or one whose `next()` makes whole batches of indices.
template <class Dataset, class Sampler, detail::Options O>
requires IndexedDataset<detail::SharedType<Dataset>> && AnySampler<detail::SharedType<Sampler>>
    LoaderPlan<detail::SharedType<Dataset>> loader(Dataset&& dataset, Sampler&& sampler,
                                                   const O& options) {
  LoaderPlan<detail::SharedType<Dataset>> plan(detail::share(std::forward<Dataset>(dataset)),
                                               detail::settings_of(options));
  plan.sampler(erase_sampler(detail::share(std::forward<Sampler>(sampler))));
  return plan;
}

/// A loader that torch::data::make_data_loader made. Its sampler cannot be reached: every process
/// reads all batches and keeps every P-th (or process 0 reads and dispatches them). Give the
/// dataset, the sampler and the options instead where reading costs anything.
template <detail::TorchLoader L>
LoaderPlan<ReadyMade<L>> loader(std::unique_ptr<L> ready) {
  return detail::ready_plan(std::shared_ptr<L>(std::move(ready)));
}

}  // namespace accelerate::data
