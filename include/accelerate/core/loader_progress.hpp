#pragma once

#include <cstdint>

namespace accelerate {

/// Where a prepared loader stands; it updates this before it hands out a batch.
struct LoaderProgress {
  /// The batch now handed out is the last of this pass.
  bool end_of_dataloader = false;
  /// Samples of the dataset in the last *global* batch, before it was filled up by repeating
  /// samples; 0 when the last batch is whole, -1 when it cannot be known yet.
  std::int64_t remainder = -1;
  /// Samples of the present *global* batch that are real, that is not repeated to fill it up; -1
  /// when unknown.
  std::int64_t real_samples = -1;
  /// Samples of the present global batch on all ranks together, fill included; -1 when unknown.
  std::int64_t global_samples = -1;
  /// Samples of this process' batch that are real, and all of them.
  std::int64_t local_real_samples = -1;
  std::int64_t local_samples = -1;
  /// True: what fills the global batch up stands at the end of the rank-by-rank concatenation, so
  /// its first `real_samples` are the real ones. False (uneven batches, sharding by node or by the
  /// user's own rule): each rank's first `local_real_samples` are the real ones, and ranks may have
  /// different numbers of samples.
  bool fill_is_last = true;
  /// Batches handed out in this pass, this one included.
  std::int64_t batches = 0;
};

/// Told by prepared loaders when a pass over them begins and ends. Passes nest.
class LoaderObserver {
 public:
  virtual ~LoaderObserver() = default;
  /// `progress` stays valid, and is kept up to date, until `loader_ends`.
  virtual void loader_begins(const LoaderProgress& progress) = 0;
  /// Comes from a destructor when the loop was left early, so it cannot throw.
  virtual void loader_ends(const LoaderProgress& progress) noexcept = 0;
};

}  // namespace accelerate
