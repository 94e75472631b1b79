#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

/// Which samples a process gets in which step, as arithmetic on positions.
///
/// A pass over a dataset is a stream of units at positions 0, 1, 2, ...: samples, or whole batches
/// where a sampler or a ready-made loader makes the batches. Step k takes one block of
/// `batch * world` units, and rank r the r-th part of the block. All of Python Accelerate's
/// `BatchSamplerShard` and `IterableDatasetShard` follow from this and from how the last,
/// incomplete block is treated. Nothing is iterated, so step 10^6 costs what step 0 costs.
namespace accelerate::data {

/// What a user's own sharding is asked.
struct ShardRequest {
  /// The step of the pass, from 0.
  std::int64_t step = 0;
  int rank = 0;
  int world_size = 1;
  /// Batches in a pass over the whole dataset; batch b holds positions [b * batch_size, ...).
  std::int64_t batches = 0;
};
/// The batch that `rank` gets in `step`, or nothing when it has none. Must depend on the request
/// alone, and must give no batch to two ranks. A pass has ceil(batches / world_size) steps.
using ShardFunction = std::function<std::optional<std::int64_t>(const ShardRequest&)>;

/// How a stream of units is cut into steps and parts.
struct ShardRule {
  /// Units for one process in a whole step. Under split_batches the batch size divided by `world`.
  std::int64_t batch = 1;
  int rank = 0;
  int world = 1;
  /// Fill the last block up with the units of the first.
  bool even = true;
  /// Leave out an incomplete last block.
  bool drop_last = false;
  /// With drop_last: blocks come in groups of this many, and an incomplete group is left out.
  std::int64_t group = 1;
  /// Spread the last block evenly over the ranks instead of giving whole batches to the first ones.
  /// The dispatcher does so.
  bool spread_last = false;
  /// Position of step 0: what was taken before a resume or was skipped.
  std::int64_t origin = 0;
  /// Take as many steps as a stream of this many units would; 0: this stream decides. Keeps nodes
  /// whose parts differ in length in step.
  std::int64_t pace = 0;

  /// Units of a whole step, all ranks together.
  std::int64_t block() const noexcept { return batch * world; }
};

/// One rank's part of one step: positions first, first + 1, ..., of which those from `length` on
/// stand for `fill_position`.
struct StepShare {
  /// The rank has a batch in this step.
  bool exists = false;
  /// It is the rank's last one.
  bool last = false;
  std::int64_t first = 0;
  std::int64_t count = 0;
  /// How many of the `count` units lie inside the stream.
  std::int64_t real = 0;
  /// Units of the step on all ranks.
  std::int64_t global_count = 0;
  std::int64_t global_real = 0;
};

/// The part of `rank` in `step` of a stream of `length` units. `length` may be a lower bound that
/// reaches to `needed_length(rule, step)`.
StepShare share_of_step(const ShardRule& rule, std::int64_t step, int rank, std::int64_t length);
inline StepShare share_of_step(const ShardRule& rule, std::int64_t step, std::int64_t length) {
  return share_of_step(rule, step, rule.rank, length);
}
/// How far a stream of unknown length has to be looked at to know `step` and whether it is the
/// last.
std::int64_t needed_length(const ShardRule& rule, std::int64_t step);
/// Steps in which `rank` has a batch.
std::int64_t count_steps(const ShardRule& rule, int rank, std::int64_t length);
/// Units of the last block that are real; 0 when it is whole or left out.
std::int64_t remainder(const ShardRule& rule, std::int64_t length);
/// The unit that stands at `position` >= `length`: the units of the first block, over and over.
std::int64_t fill_position(const ShardRule& rule, std::int64_t position, std::int64_t length);
/// The positions of a part, fill included.
std::vector<std::int64_t> positions(const ShardRule& rule, const StepShare& share,
                                    std::int64_t length);

/// [begin, end) of the `part`-th of `parts` contiguous, nearly equal parts of `length` units; the
/// first ones get one more.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
Range contiguous_part(std::int64_t length, int part, int parts);

}  // namespace accelerate::data
