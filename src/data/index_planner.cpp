#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/data/detail/indexed_loader.hpp>

#include <algorithm>

namespace accelerate::data::detail {

using text::concat;

void note_unordered() {
  log::warning_once(
      "enforce_ordering(false) has no effect: a prepared loader hands batches out in the order of "
      "its sampler, because resuming and "
      "counting samples over processes need it. Slow samples still do not stop the other workers.");
}

IndexPlanner::IndexPlanner(std::optional<std::int64_t> dataset_size,
                           const std::optional<ErasedSampler>& sampler,
                           const LoaderSettings& settings, const LoaderContext& context) {
  const bool by_node = context.configuration.by_node();
  if (dataset_size == 0)
    throw DataError(concat("The dataset of the loader '", settings.name, "' is empty."));
  if (sampler) {
    if (by_node) {
      throw ConfigError(concat("by_node cuts the dataset into parts itself, and the loader '",
                               settings.name,
                               "' has a sampler of the user's. Leave the sampler out; "
                               "shuffle(false) gives the dataset's own order."));
    }
    if (sampler->makes_batches)
      throw UnsupportedError("batch samplers are made into loaders of their own");
    order_ = sampler_order(*sampler, dataset_size);
  } else {
    if (!dataset_size) {
      throw DataError(concat("The dataset of the loader '", settings.name,
                             "' does not know its size, so there is no order to put it in. Give "
                             "its size(), or a sampler."));
    }
    const Range part = by_node
                           ? contiguous_part(*dataset_size, context.node_rank, context.num_nodes)
                           : Range{0, *dataset_size};
    order_ = settings.shuffle ? shuffled_order(part.end - part.begin, part.begin)
                              : sequential_order(part.end - part.begin, part.begin);
  }
  const auto length = order_->size();
  if (!length) {
    if (settings.shard_by)
      throw ConfigError(concat(
          "The loader '", settings.name,
          "' has a shard_by, which needs the number of batches, and a sampler without size()."));
    return;
  }
  const std::int64_t world = context.group.size();
  const std::int64_t batch = context.configuration.split_batches()
                                 ? std::max<std::int64_t>(settings.batch_size / world, 1)
                                 : settings.batch_size;
  const std::int64_t sharers = by_node ? context.local_world_size : world;
  if (*length == 0)
    throw DataError(
        concat("The loader '", settings.name,
               "' has no samples on this process; the sampler or this node's part is empty."));
  const std::int64_t wanted =
      batch * sharers * (settings.drop_last_global ? context.gradient_accumulation_steps : 1);
  if ((settings.drop_last || settings.drop_last_global) && *length < wanted) {
    throw DataError(
        concat("The loader '", settings.name, "' drops incomplete steps, and its ", *length,
               " samples are fewer than the ", wanted, " of one step (", batch, " per process, ",
               sharers, " processes",
               settings.drop_last_global
                   ? concat(", ", context.gradient_accumulation_steps, " accumulation steps")
                   : "",
               "): nothing would be left. Use a smaller batch size, or keep incomplete steps."));
  }
  if (!context.configuration.even_batches() && world > 1 &&
      (*length + batch - 1) / batch < sharers && !settings.shard_by) {
    log::warning(concat("The loader '", settings.name, "' has ", (*length + batch - 1) / batch,
                        " batches for ", sharers,
                        " processes and even_batches is off: some processes get no batch at all."));
  }
  if (*length < batch * sharers && (context.configuration.even_batches() || world == 1)) {
    log::warning(concat("The loader '", settings.name, "' has ", *length,
                        " samples, fewer than one step takes (", batch, " per process, ", sharers,
                        " processes).", world > 1 ? " They are repeated to fill it." : ""));
  }
}

IndexPlanner::~IndexPlanner() = default;

std::optional<std::int64_t> IndexPlanner::size() const { return order_->size(); }

void IndexPlanner::begin(std::int64_t seed, std::int64_t epoch, bool resumed, const ShardRule& rule,
                         const ShardFunction& shard_by, bool all_ranks) {
  order_->keep(rule.even && !rule.drop_last ? rule.block() : 0);
  order_->begin(seed, epoch, resumed);
  planner_.begin(rule, shard_by, order_->size(), all_ranks);
  if (order_->size() == 0) throw DataError("The sampler gave no samples.");
}

bool IndexPlanner::next(Step& step) {
  if (!planner_.next(step, [this](std::int64_t end) { return order_->ensure(end); })) return false;
  const ShardRule& rule = planner_.rule();
  std::size_t total = 0;
  for (const StepShare& share : step.shares) total += static_cast<std::size_t>(share.count);
  step.indices.resize(total);
  std::size_t* out = step.indices.data();
  for (const StepShare& share : step.shares) {
    if (!share.exists) continue;
    const std::int64_t inside = std::clamp<std::int64_t>(step.length - share.first, 0, share.count);
    if (inside > 0) order_->read(share.first, inside, out);
    for (std::int64_t i = inside; i < share.count; ++i)
      order_->read(fill_position(rule, share.first + i, step.length), 1, out + i);
    out += share.count;
  }
  return true;
}

}  // namespace accelerate::data::detail
