#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/data/detail/indexed_loader.hpp>
#include <accelerate/data/detail/stream_loader.hpp>
#include <accelerate/data/detail/unit_window.hpp>

#include <algorithm>
#include <utility>

namespace accelerate::data::detail {

using text::concat;

void note_unordered() {
  log::warning_once(
      "enforce_ordering(false) has no effect: a prepared loader hands batches out in the order of "
      "its sampler, because resuming and "
      "counting samples over processes need it. Slow samples still do not stop the other workers.");
}

// A sampler that makes batches of indices: they are the units.
struct IndexPlanner::Batches {
  ErasedSampler sampler;
  UnitWindow<std::vector<std::size_t>> window;
  std::string at_begin;
  std::string loaded;

  std::string save() const { return sampler.save ? archive_bytes(sampler.save) : std::string(); }
  std::int64_t ensure(std::int64_t end) {
    return window.ensure(end, [this]() -> std::optional<std::vector<std::size_t>> {
      auto batch = sampler.next(0);
      if (batch && batch->empty()) throw DataError("The sampler made a batch without indices.");
      return batch;
    });
  }
};

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
    if (sampler->makes_batches) {
      if (context.configuration.split_batches() && context.group.size() > 1) {
        throw ConfigError(
            concat("split_batches needs a batch size, and the sampler of the loader '",
                   settings.name, "' makes the batches itself. Switch split_batches off."));
      }
      if (settings.shard_by) {
        throw ConfigError(concat("The loader '", settings.name,
                                 "' has a shard_by, which needs a batch size, and a sampler that "
                                 "makes the batches itself."));
      }
      batches_ = std::make_unique<Batches>();
      batches_->sampler = *sampler;
      return;
    }
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

std::optional<std::int64_t> IndexPlanner::size() const {
  return order_ ? order_->size() : std::nullopt;
}

std::string IndexPlanner::save_state(bool in_pass) const {
  if (order_) return order_->save_state(in_pass);
  return in_pass ? batches_->at_begin : batches_->save();
}

void IndexPlanner::load_state(const std::string& bytes) {
  if (order_) return order_->load_state(bytes);
  batches_->loaded = bytes;
}

void IndexPlanner::begin(const LoaderCore::Pass& pass, const ShardFunction& shard_by,
                         bool all_ranks) {
  const ShardRule& rule = pass.rule;
  const std::int64_t keep = rule.even && !rule.drop_last ? rule.block() : 0;
  if (order_) {
    order_->keep(keep);
    if (pass.dataset_size) order_->limit(*pass.dataset_size);
    order_->begin(pass.seed, pass.epoch, pass.resumed);
    planner_.begin(rule, shard_by, order_->size(), all_ranks);
    if (order_->size() == 0) throw DataError("The sampler gave no samples.");
    return;
  }
  begin_sampler(batches_->sampler, std::exchange(batches_->loaded, {}), pass.seed, pass.epoch,
                pass.resumed);
  batches_->at_begin = batches_->save();
  batches_->window.begin(keep);
  planner_.begin(rule, nullptr, std::nullopt, all_ranks);
}

bool IndexPlanner::next(Step& step) {
  const bool found = planner_.next(step, [this](std::int64_t end) {
    return order_ ? order_->ensure(end) : batches_->ensure(end);
  });
  if (!found) {
    if (step.length == 0) throw DataError("The sampler gave no samples.");
    return false;
  }
  if (batches_) {
    take_batches(step);
    return true;
  }
  const ShardRule& rule = planner_.rule();
  std::size_t total = 0;
  for (const StepShare& share : step.shares) total += static_cast<std::size_t>(share.count);
  step.indices.resize(total);
  std::size_t* out = step.indices.data();
  for (const StepShare& share : step.shares) {
    if (!share.exists) continue;
    const std::int64_t inside = std::clamp<std::int64_t>(step.length - share.first, 0, share.count);
    if (inside > 0) order_->read(share.first, inside, out);
    for (std::int64_t i = inside; i < share.count; ++i) {
      order_->read(fill_position(rule, share.first + i, step.length), 1, out + i);
    }
    out += share.count;
  }
  return true;
}

// Writes the indices of the step's batches and turns its counts from batches into samples.
void IndexPlanner::take_batches(Step& step) {
  const ShardRule& rule = planner_.rule();
  const auto batch = [&](std::int64_t position) -> const std::vector<std::size_t>& {
    return position < step.length
               ? batches_->window.peek(position)
               : batches_->window.kept(fill_position(rule, position, step.length));
  };
  const std::int64_t begin = rule.origin + step.number * rule.block();
  batches_->window.forget_before(begin);
  std::int64_t all = 0, real = 0;
  for (std::int64_t position = begin; position < begin + step.shares.front().global_count;
       ++position) {
    const auto samples = static_cast<std::int64_t>(batch(position).size());
    all += samples;
    if (position < step.length) real += samples;
  }
  step.indices.clear();
  bool last = false;
  for (StepShare& share : step.shares) {
    share.global_count = all;
    share.global_real = real;
    last = last || share.last;
    if (!share.exists) continue;
    const auto& indices = batch(share.first);
    step.indices.insert(step.indices.end(), indices.begin(), indices.end());
    share.count = static_cast<std::int64_t>(indices.size());
    share.real = share.real > 0 ? share.count : 0;
  }
  step.remainder = rule.drop_last ? 0 : last ? real : -1;
}

void check_stream(const LoaderSettings& settings, const LoaderContext& context, bool batches,
                  bool ready_made, bool dispatch) {
  const auto refuse = [&](const char* what) {
    throw ConfigError(concat("The loader '", settings.name, "' reads a stream, and ", what,
                             " needs a dataset with random access. Switch it off for this program, "
                             "or give the dataset get_batch(indices) and size()."));
  };
  if (context.configuration.by_node()) refuse("by_node");
  if (settings.shard_by) refuse("shard_by");
  if (batches && context.configuration.split_batches() && context.group.size() > 1) {
    throw ConfigError(concat("split_batches is on, and the loader '", settings.name,
                             "' reads batches that are made already and are not cut. Switch "
                             "split_batches off: then each process gets whole batches."));
  }
  if (!ready_made || context.group.size() == 1) return;
  log::warning_once(concat(
      "The loader '", settings.name,
      "' was made by torch::data::make_data_loader, whose sampler cannot be reached: ",
      dispatch ? "process 0 reads every batch and sends the others theirs"
               : concat("each of the ", context.group.size(),
                        " processes reads every batch and keeps one in ", context.group.size()),
      ". accelerate::data::loader(dataset, sampler, options) reads each sample once."));
}

}  // namespace accelerate::data::detail
