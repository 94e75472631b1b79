#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/core/loader_progress.hpp>
#include <accelerate/data/configuration.hpp>
#include <accelerate/data/shard.hpp>

#include <c10/core/Device.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::data {

/// What `prepare_loader` is told about the program around it.
struct LoaderContext {
  /// The processes the data is shared between: the data-parallel ones.
  comm::Group group;
  /// The processes that read the same part as this one.
  comm::Group copies = {};
  /// Where this process is among the nodes; used by `by_node`.
  int node_rank = 0;
  int num_nodes = 1;
  int local_rank = 0;
  int local_world_size = 1;
  /// Where batches go.
  c10::Device device = c10::kCPU;
  /// False: batches stay where the dataset put them.
  bool device_placement = true;
  DataLoaderConfiguration configuration;
  /// Seed of the order of samples unless `configuration` has one; equal on all processes.
  std::int64_t seed = 0;
  /// Told of every pass; may be null.
  std::shared_ptr<LoaderObserver> observer;
  /// Steps of a loader for one step of the optimizer; used by `drop_last_global`.
  std::int64_t gradient_accumulation_steps = 1;
};

/// The part of a plan that has nothing to do with types.
struct LoaderSettings {
  std::string name = "loader";
  std::int64_t batch_size = 1;
  std::int64_t workers = 0;
  std::int64_t max_jobs = 0;
  std::optional<std::chrono::milliseconds> timeout;
  bool drop_last = false;
  bool drop_last_global = false;
  bool shuffle = true;
  bool varying_shapes = false;
  ShardFunction shard_by;
};

/// One step of a pass, as one process sees it.
struct Step {
  std::int64_t number = 0;
  /// This process' part; under dispatch one part per process.
  std::vector<StepShare> shares;
  /// Units in the pass as far as known (all of them once the last step is planned).
  std::int64_t length = 0;
  /// As in LoaderProgress.
  std::int64_t remainder = -1;
  /// Position after this step: what a resume starts from.
  std::int64_t position_after = 0;
  /// Indices of the samples, part after part; unused by streams.
  std::vector<std::size_t> indices;
};

/// Turns positions into steps.
class StepPlanner {
 public:
  /// `length` where the number of units is known beforehand. `all_ranks`: plan every rank's part.
  void begin(ShardRule rule, ShardFunction shard_by, std::optional<std::int64_t> length,
             bool all_ranks);
  /// Plans the next step into `step`, indices excepted; false at the end. `ensure(end)` returns how
  /// many units are known to exist, having looked for `end`.
  bool next(Step& step, const std::function<std::int64_t(std::int64_t)>& ensure);
  const ShardRule& rule() const noexcept { return rule_; }

 private:
  StepShare own_share(std::int64_t step, std::int64_t length) const;

  ShardRule rule_;
  ShardFunction shard_by_;
  std::optional<std::int64_t> length_;
  bool all_ranks_ = false;
  std::int64_t next_ = 0;
};

/// What a loader is, apart from its batch type. Made by `prepare_loader`; reached through
/// `PreparedLoader::core()`, by which checkpoints keep hold of loaders of any type.
class LoaderCore {
 public:
  LoaderCore(LoaderSettings settings, LoaderContext context);
  virtual ~LoaderCore();
  LoaderCore(const LoaderCore&) = delete;
  LoaderCore& operator=(const LoaderCore&) = delete;

  const std::string& name() const noexcept { return settings_.name; }
  const LoaderProgress& progress() const noexcept { return progress_; }
  const LoaderSettings& settings() const noexcept { return settings_; }
  const LoaderContext& context() const noexcept { return context_; }

  /// Batches this process gets in a whole pass; nothing when only the end of the data will tell.
  std::optional<std::int64_t> size() const;
  /// Samples of a whole step on all processes together.
  std::int64_t total_batch_size() const noexcept;
  /// Samples of the dataset, all processes together; nothing when it does not know.
  std::optional<std::int64_t> total_dataset_length() const;

  /// The epoch of the pass under way, or else of the next one. A pass in which the last batch was
  /// handed out moves on by one; a loop left before that does not.
  std::int64_t epoch() const noexcept { return in_pass_ ? pass_.epoch : next_epoch_; }
  /// Sets the epoch of the next pass.
  void set_epoch(std::int64_t epoch);
  /// Leaves out the first `batches` of the next pass, without reading them where the dataset has
  /// random access. Only that pass is shortened. They count from the start of the pass: one that
  /// was resumed in its middle (`load_state`, `load_state_dict`) has left them out already and
  /// stays where it was resumed; where that is another place than after `batches`, a warning says
  /// so.
  void skip_first_batches(std::int64_t batches);

  /// Where this loader stands, in terms of samples of the whole dataset and so for any number of
  /// processes: call it inside the loop, after the batch in hand was used, or between passes. After
  /// the last batch of a pass it says "the start of the next epoch".
  Json state_dict() const;
  /// Has the next pass go on where `state` was taken: at an equal global batch with exactly the
  /// batches that were to come, otherwise with exactly the samples not yet seen. A dataset may have
  /// grown since: the pass that was under way goes over the samples it began with, and a warning
  /// says so. Throws DataError when the state is of another dataset or another kind of loader.
  void load_state_dict(const Json& state);
  /// Throws what `load_state_dict` would throw, and changes nothing.
  void check_state_dict(const Json& state) const { static_cast<void>(read_state(state)); }

  /// What is decided when a pass begins.
  struct Pass {
    std::int64_t seed = 0;
    std::int64_t epoch = 0;
    /// The state of the stream that was loaded is that of this very pass.
    bool resumed = false;
    /// Samples of the dataset when the pass began, where it has grown since.
    std::optional<std::int64_t> dataset_size;
    ShardRule rule;
  };

 protected:
  /// Units are samples, or batches where the dataset or sampler makes them.
  enum class Unit { samples, batches };

  /// Units of a whole pass of this process' stream, where known.
  virtual std::optional<std::int64_t> stream_length() const = 0;
  virtual Unit unit() const noexcept { return Unit::samples; }
  virtual std::string save_stream(bool /*in_pass*/) const { return {}; }
  virtual void load_stream(const std::string& /*bytes*/) {}
  virtual std::optional<std::int64_t> dataset_size() const = 0;

  /// begin_pass, then show_step for each batch, then end_pass.
  Pass begin_pass();
  void show_step(const StepShare& share, std::int64_t remainder, std::int64_t position_after);
  void end_pass() noexcept;
  bool in_pass() const noexcept { return in_pass_; }
  bool dispatches() const noexcept { return dispatch_; }
  void set_dispatch(bool dispatch);
  /// Throws the error of all processes when the first batch differs between them.
  void compare_first_batch(const std::string& signature, const std::string& error);
  /// "batch 3 of epoch 0 of the loader 'train'".
  std::string where(std::int64_t step) const;
  /// Throws DataError around the exception in flight.
  [[noreturn]] void rethrow_reading(const Step& step) const;

  LoaderSettings settings_;
  LoaderContext context_;
  LoaderProgress progress_;
  bool compared_ = false;

 private:
  ShardRule rule() const;

  void across_nodes();

  // What a state says of the next pass.
  struct NextPass {
    std::int64_t seed = 0;
    std::int64_t epoch = 0;
    std::int64_t position = 0;
    std::optional<std::int64_t> order_seed;
    std::optional<std::int64_t> fewer_samples;  // than the dataset has now
    std::string stream;
    bool stream_in_pass = false;
  };
  NextPass read_state(const Json& state) const;

  bool dispatch_ = false;
  std::int64_t seed_ = 0;
  // The pass under way, or the one that was left early.
  bool in_pass_ = false;
  bool left_early_ = false;
  Pass pass_;
  std::int64_t position_ = 0;
  // The next pass.
  std::int64_t next_epoch_ = 0;
  bool next_epoch_was_set_ = false;
  std::int64_t origin_ = 0;
  std::int64_t skip_ = 0;
  std::optional<std::int64_t> order_seed_;
  std::optional<std::int64_t> order_size_;
  std::string loaded_stream_;
  bool loaded_in_pass_ = false;
};

}  // namespace accelerate::data
