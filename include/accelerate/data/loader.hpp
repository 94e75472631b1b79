#pragma once

#include <accelerate/core/tree.hpp>
#include <accelerate/data/collate.hpp>
#include <accelerate/data/detail/indexed_loader.hpp>
#include <accelerate/data/detail/loader_impl.hpp>
#include <accelerate/data/detail/stream_loader.hpp>
#include <accelerate/data/plan.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

namespace accelerate::data {

/// A loader that gives this process its part of the data, on its device:
/// `for (auto& batch : loader) ...`. A cheap handle: copies are the same loader.
///
/// One pass at a time. Leaving the loop early (break, return, an exception) ends the pass: workers
/// are waited for, what they read ahead is dropped, and the next loop starts the same epoch anew.
/// What a dataset, its transforms or the collation draw with LibTorch's functions on the CPU,
/// without a generator of their own, is decided by the seed of the pass and the sample's place in
/// it: it is the same with any number of workers, and after a resume. The default generator is left
/// alone.
template <class Batch>
class PreparedLoader {
 public:
  using BatchType = Batch;
  using value_type = Batch;

  explicit PreparedLoader(std::shared_ptr<detail::LoaderImpl<Batch>> impl)
      : impl_(std::move(impl)) {}

  /// Ends the pass when it is destroyed.
  class Iterator {
   public:
    using iterator_concept = std::input_iterator_tag;
    using difference_type = std::ptrdiff_t;
    using value_type = Batch;

    Iterator() = default;
    explicit Iterator(std::shared_ptr<detail::LoaderImpl<Batch>> impl) : pass_(std::move(impl)) {
      // From here on the destructor ends the pass, also when this throws.
      pass_.impl->start();
      pass_.begun = true;
      ++*this;
    }
    Iterator(Iterator&&) noexcept = default;
    Iterator& operator=(Iterator&&) noexcept = default;

    Batch& operator*() const { return pass_.impl->current(); }
    Batch* operator->() const { return &pass_.impl->current(); }
    Iterator& operator++() {
      if (!pass_.impl->advance()) pass_.end();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const noexcept { return pass_.impl == nullptr; }

   private:
    struct Pass {
      explicit Pass(std::shared_ptr<detail::LoaderImpl<Batch>> loader = nullptr)
          : impl(std::move(loader)) {}
      Pass(Pass&& other) noexcept
          : impl(std::move(other.impl)), begun(std::exchange(other.begun, false)) {}
      Pass& operator=(Pass&& other) noexcept {
        end();
        impl = std::move(other.impl);
        begun = std::exchange(other.begun, false);
        return *this;
      }
      ~Pass() { end(); }
      void end() noexcept {
        if (impl && begun) impl->finish();
        impl.reset();
        begun = false;
      }
      std::shared_ptr<detail::LoaderImpl<Batch>> impl;
      bool begun = false;
    };
    Pass pass_;
  };

  /// Begins a pass and reads its first batch.
  Iterator begin() const { return Iterator(impl_); }
  std::default_sentinel_t end() const noexcept { return {}; }

  /// Batches of a whole pass on this process; nothing when only the end of the data will tell.
  std::optional<std::int64_t> size() const { return impl_->size(); }
  /// Samples of a whole step on all processes together.
  std::int64_t total_batch_size() const { return impl_->total_batch_size(); }
  /// Samples of the dataset on all processes together; nothing when it does not know.
  std::optional<std::int64_t> total_dataset_length() const { return impl_->total_dataset_length(); }

  /// See LoaderCore.
  std::int64_t epoch() const { return impl_->epoch(); }
  void set_epoch(std::int64_t epoch) { impl_->set_epoch(epoch); }
  const LoaderProgress& progress() const { return impl_->progress(); }
  const std::string& name() const { return impl_->name(); }
  auto state_dict() const { return impl_->state_dict(); }
  void load_state_dict(const Json& state) { impl_->load_state_dict(state); }
  PreparedLoader& skip_first_batches(std::int64_t batches) {
    return impl_->skip_first_batches(batches), *this;
  }

  /// The loader apart from its batch type, for those that keep hold of loaders of any type.
  std::shared_ptr<LoaderCore> core() const { return impl_; }

 private:
  std::shared_ptr<detail::LoaderImpl<Batch>> impl_;
};

/// Leaves out the first `batches` of the *next* pass over `loader`, and of that one only, without
/// reading them where the dataset has random access. Counts and remainder stay those of the whole
/// pass.
template <class Batch>
PreparedLoader<Batch>& skip_first_batches(PreparedLoader<Batch>& loader, std::int64_t batches) {
  return loader.skip_first_batches(batches);
}

/// The loader of a plan for this process. With several processes every process must call it.
template <class Dataset, class Collation>
auto prepare_loader(const LoaderPlan<Dataset, Collation>& plan, const LoaderContext& context) {
  using Loader =
      std::conditional_t<IndexedDataset<Dataset>, detail::IndexedLoader<Dataset, Collation>,
                         detail::StreamLoader<Dataset, Collation>>;
  auto impl = std::make_shared<Loader>(plan, context);
  impl->open();
  return PreparedLoader<typename Loader::Batch>(std::move(impl));
}

/// A loader that torch::data::make_data_loader made; see `data::loader`. An lvalue must outlive the
/// result.
template <detail::TorchLoader L>
auto prepare_loader(std::unique_ptr<L>&& ready, const LoaderContext& context) {
  return prepare_loader(loader(std::move(ready)), context);
}
template <detail::TorchLoader L>
auto prepare_loader(std::unique_ptr<L>& ready, const LoaderContext& context) {
  return prepare_loader(detail::ready_plan(std::shared_ptr<L>(ready.get(), [](L*) {})), context);
}

/// A loader that is prepared already stays as it is.
template <class Batch>
PreparedLoader<Batch> prepare_loader(const PreparedLoader<Batch>& loader, const LoaderContext&) {
  return loader;
}

/// What `prepare_loader` takes.
template <class T>
concept Loadable = requires(T&& object, const LoaderContext& context) {
  data::prepare_loader(std::forward<T>(object), context);
};

}  // namespace accelerate::data
