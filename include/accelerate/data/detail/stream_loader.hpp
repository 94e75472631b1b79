#pragma once

#include <accelerate/data/detail/loader_impl.hpp>
#include <accelerate/data/detail/sample_random.hpp>
#include <accelerate/data/detail/stream_source.hpp>
#include <accelerate/data/detail/unit_window.hpp>
#include <accelerate/data/plan.hpp>
#include <accelerate/data/sampler.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace accelerate::data::detail {

/// Throws ConfigError for what needs random access, and warns of what a ready-made loader costs.
void check_stream(const LoaderSettings& settings, const LoaderContext& context, bool batches,
                  bool ready_made, bool dispatch);

/// Samples of a batch: entries of a vector, or the first dimension of the first tensor that has
/// one.
template <class Batch>
std::int64_t rows_of(const Batch& batch) {
  if constexpr (kIsVector<Batch>) {
    return static_cast<std::int64_t>(batch.size());
  } else {
    std::int64_t rows = -1;
    tree::for_each_tensor(batch, [&](const at::Tensor& tensor) {
      if (rows < 0 && tensor.defined() && tensor.dim() > 0) rows = tensor.size(0);
    });
    return rows < 0 ? 1 : rows;
  }
}

/// A loader over a stream: examples or ready batches that come one after another. Every process
/// reads the whole stream and keeps its part, unless process 0 dispatches.
template <class Dataset, class Collation>
class StreamLoader final : public LoaderImpl<typename LoaderPlan<Dataset, Collation>::BatchType> {
 public:
  using Batch = typename LoaderPlan<Dataset, Collation>::BatchType;
  using Base = LoaderImpl<Batch>;
  using Source = StreamSource<Dataset>;
  using Unit = typename Source::Unit;

  StreamLoader(const LoaderPlan<Dataset, Collation>& plan, const LoaderContext& context)
      : Base(plan.settings(), context),
        source_(plan.dataset(), plan.settings().batch_size),
        collation_(plan.collation()) {}
  ~StreamLoader() override { this->close(); }

  void open() {
    const LoaderContext& context = this->context_;
    constexpr bool kSendable = std::is_default_constructible_v<Batch>;
    const bool dispatch =
        context.group.size() > 1 && context.configuration.dispatch_batches().value_or(
                                        Source::kIterable && context.device_placement && kSendable);
    check_stream(this->settings_, context, Source::kBatches, IsReadyMade<Dataset>::value, dispatch);
    Base::open(false, dispatch);
  }

 private:
  LoaderCore::Unit unit() const noexcept override {
    return Source::kBatches ? LoaderCore::Unit::batches : LoaderCore::Unit::samples;
  }
  std::optional<std::int64_t> stream_length() const override {
    return Source::kBatches ? std::nullopt : source_.size();
  }
  std::optional<std::int64_t> dataset_size() const override { return source_.size(); }

  void begin_stream(const LoaderCore::Pass& pass) override {
    rule_ = pass.rule;
    seed_ = pass.seed;
    planner_.begin(rule_, nullptr, std::nullopt, this->dispatches());
    with_seeded_generator(pass.seed, [&] { source_.begin(pass.epoch); });
    const std::int64_t keep = rule_.even && !rule_.drop_last ? rule_.block() : 0;
    window_.begin(keep);
    if (rule_.origin > 0) leave_out(std::min(keep, rule_.origin));
  }

  // Goes to the origin of the pass. The first units are read even so: they fill the last step up.
  void leave_out(std::int64_t kept) {
    ensure(kept);
    if constexpr (Source::kSkips) {
      source_.skip(rule_.origin - kept);
      window_.skipped(rule_.origin - kept);
    } else {
      for (std::int64_t position = kept; position <= rule_.origin; ++position) {
        ensure(position);
        window_.forget_before(position);
      }
    }
  }

  std::int64_t ensure(std::int64_t end) {
    SampleRandom random(seed_);
    return window_.ensure(end, [&] {
      random.at(window_.pulled());
      return source_.next();
    });
  }

  bool plan(Step& step) override {
    step.indices.clear();
    if (!planner_.next(step, [this](std::int64_t end) { return ensure(end); })) {
      if (step.length == 0) throw DataError("the stream is empty");
      return false;
    }
    window_.forget_before(rule_.origin + step.number * rule_.block());
    if constexpr (Source::kBatches) count_rows(step);
    return true;
  }

  // From batches to samples; `first` stays the position of the batch.
  void count_rows(Step& step) {
    const std::int64_t begin = rule_.origin + step.number * rule_.block();
    const std::int64_t end = begin + step.shares.front().global_count;
    std::int64_t all = 0, real = 0;
    for (std::int64_t position = begin; position < end; ++position) {
      const std::int64_t rows = rows_of(peek(position, step.length));
      all += rows;
      if (position < step.length) real += rows;
    }
    bool last = false;
    for (StepShare& share : step.shares) {
      share.global_count = all;
      share.global_real = real;
      last = last || share.last;
      if (!share.exists) continue;
      share.count = rows_of(peek(share.first, step.length));
      if (share.real > 0) share.real = share.count;
    }
    // Whether the last step is whole cannot be told from batches of any size.
    step.remainder = rule_.drop_last ? 0 : last ? real : -1;
  }

  const Unit& peek(std::int64_t position, std::int64_t length) const {
    return position < length ? window_.peek(position)
                             : window_.kept(fill_position(rule_, position, length));
  }
  Unit take(std::int64_t position, std::int64_t length) {
    return position < length ? window_.take(position)
                             : window_.copy_kept(fill_position(rule_, position, length));
  }

  Batch read(Step& step, std::size_t part) override {
    const StepShare& share = step.shares[part];
    SampleRandom random(seed_);
    random.at(share.first, /*part=*/1);
    if constexpr (Source::kBatches) {
      return collation_(take(share.first, step.length));
    } else {
      std::vector<Unit> examples;
      examples.reserve(static_cast<std::size_t>(share.count));
      for (std::int64_t i = 0; i < share.count; ++i)
        examples.push_back(take(share.first + i, step.length));
      return collation_(std::move(examples));
    }
  }

  Source source_;
  Collation collation_;
  ShardRule rule_;
  std::int64_t seed_ = 0;
  StepPlanner planner_;
  UnitWindow<Unit> window_;
};

}  // namespace accelerate::data::detail
