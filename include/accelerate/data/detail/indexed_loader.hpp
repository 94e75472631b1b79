#pragma once

#include <accelerate/data/detail/loader_impl.hpp>
#include <accelerate/data/detail/sample_random.hpp>
#include <accelerate/data/detail/sample_reader.hpp>
#include <accelerate/data/plan.hpp>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::data::detail {

/// The order of a dataset with random access, cut into steps. Knows nothing of the dataset but its
/// size. Units are samples, or batches of indices where the sampler makes them.
class IndexPlanner {
 public:
  /// Throws for an empty dataset, and for settings that leave a process without samples.
  IndexPlanner(std::optional<std::int64_t> dataset_size,
               const std::optional<ErasedSampler>& sampler, const LoaderSettings& settings,
               const LoaderContext& context);
  ~IndexPlanner();

  /// Indices in a pass, on this node.
  std::optional<std::int64_t> size() const;
  void begin(const LoaderCore::Pass& pass, const ShardFunction& shard_by, bool all_ranks);
  /// Plans the next step with its indices.
  bool next(Step& step);
  std::string save_state(bool in_pass) const;
  void load_state(const std::string& bytes);
  bool makes_batches() const noexcept { return batches_ != nullptr; }

 private:
  struct Batches;
  void take_batches(Step& step);

  std::unique_ptr<IndexOrder> order_;
  std::unique_ptr<Batches> batches_;
  StepPlanner planner_;
};

/// A loader over a dataset with random access.
template <class Dataset, class Collation>
class IndexedLoader final : public LoaderImpl<typename LoaderPlan<Dataset, Collation>::BatchType> {
 public:
  using Batch = typename LoaderPlan<Dataset, Collation>::BatchType;
  using Base = LoaderImpl<Batch>;

  IndexedLoader(const LoaderPlan<Dataset, Collation>& plan, const LoaderContext& context)
      : Base(plan.settings(), context),
        dataset_(plan.dataset()),
        collation_(plan.collation()),
        planner_(size_of(*dataset_), plan.sampler(), plan.settings(), context) {}
  ~IndexedLoader() override { this->close(); }

  void open() {
    Base::open(true, this->context_.configuration.dispatch_batches().value_or(false) &&
                         this->context_.group.size() > 1);
  }

 private:
  LoaderCore::Unit unit() const noexcept override {
    return planner_.makes_batches() ? LoaderCore::Unit::batches : LoaderCore::Unit::samples;
  }
  std::optional<std::int64_t> stream_length() const override { return planner_.size(); }
  std::optional<std::int64_t> dataset_size() const override { return size_of(*dataset_); }
  std::string save_stream(bool in_pass) const override { return planner_.save_state(in_pass); }
  void load_stream(const std::string& bytes) override { planner_.load_state(bytes); }

  void begin_stream(const typename Base::Pass& pass) override {
    seed_ = pass.seed;
    rule_ = pass.rule;
    planner_.begin(pass, this->settings_.shard_by, this->dispatches());
  }
  bool plan(Step& step) override { return planner_.next(step); }

  Batch read(Step& step, std::size_t part) override {
    std::size_t first = 0;
    for (std::size_t i = 0; i < part; ++i) first += static_cast<std::size_t>(step.shares[i].count);
    const StepShare& share = step.shares[part];
    SampleRandom random(seed_);
    const auto begin = [&](std::int64_t i, std::int64_t stage) {
      const bool samples = unit() == LoaderCore::Unit::samples;
      const std::int64_t position = samples ? share.first + i : share.first;
      const std::int64_t place =
          position < step.length ? position : fill_position(rule_, position, step.length);
      // Samples of one batch that is a unit are told apart by their part.
      random.at(place, samples ? stage : (i << 8) + stage);
    };
    std::int64_t stage = 0;
    auto raw = read_samples(*dataset_,
                            c10::ArrayRef<std::size_t>(step.indices.data() + first,
                                                       static_cast<std::size_t>(share.count)),
                            begin, stage);
    begin(0, ++stage);
    if constexpr (kIsOptional<decltype(raw)>) {
      if (!raw) throw DataError("get_batch gave nothing for indices that lie inside the dataset");
      return collation_(std::move(*raw));
    } else {
      return collation_(std::move(raw));
    }
  }

  std::shared_ptr<Dataset> dataset_;
  Collation collation_;
  IndexPlanner planner_;
  // Of the pass.
  std::int64_t seed_ = 0;
  ShardRule rule_;
};

}  // namespace accelerate::data::detail
