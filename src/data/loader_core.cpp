#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/data/loader_core.hpp>
#include <accelerate/data/sampler.hpp>

#include "base/parse_json.hpp"
#include "comm/user_call.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace accelerate::data {

using text::concat;

void StepPlanner::begin(ShardRule rule, ShardFunction shard_by, std::optional<std::int64_t> length,
                        bool all_ranks) {
  length_ = length;
  rule_ = rule;
  shard_by_ = std::move(shard_by);
  all_ranks_ = all_ranks;
  next_ = 0;
}

StepShare StepPlanner::own_share(std::int64_t step, std::int64_t length) const {
  const std::int64_t absolute = rule_.origin / rule_.block() + step;
  ShardRequest request{absolute, rule_.rank, rule_.world, 0};
  request.batches =
      rule_.drop_last ? length / rule_.batch : (length + rule_.batch - 1) / rule_.batch;
  const std::int64_t steps = rule_.drop_last ? request.batches / rule_.world
                                             : (request.batches + rule_.world - 1) / rule_.world;
  StepShare share;
  share.global_count = share.global_real = -1;
  if (absolute >= steps) return share;
  auto batch = shard_by_(request);
  const bool given = batch.has_value();
  if (given && (*batch < 0 || *batch >= request.batches)) {
    throw ConfigError(concat("shard_by gave batch ", *batch, " to process ", rule_.rank,
                             " in step ", absolute, ", and the batches are 0 to ",
                             request.batches - 1,
                             ". Return nothing where a process has no batch."));
  }
  if (!given && rule_.even) {
    // A process without a batch of its own takes part with one it had before.
    request.step = 0;
    batch = shard_by_(request);
    if (!batch)
      throw ConfigError(
          concat("shard_by gave process ", rule_.rank,
                 " no batch in step 0. With even_batches every process needs one there."));
  }
  if (!batch) return share;
  share.exists = true;
  share.first = *batch * rule_.batch;
  share.count = std::min(rule_.batch, length - share.first);
  share.real = given ? share.count : 0;
  share.last = absolute == steps - 1;
  if (!rule_.even && !share.last) {
    request.step = absolute + 1;
    share.last = !shard_by_(request);
  }
  return share;
}

bool StepPlanner::next(Step& step, const std::function<std::int64_t(std::int64_t)>& ensure) {
  step.number = next_;
  step.length = ensure(needed_length(rule_, next_));
  step.shares.clear();
  bool any = false;
  for (int rank = all_ranks_ ? 0 : rule_.rank; rank < (all_ranks_ ? rule_.world : rule_.rank + 1);
       ++rank) {
    step.shares.push_back(shard_by_ ? own_share(next_, step.length)
                                    : share_of_step(rule_, next_, rank, step.length));
    any = any || step.shares.back().exists;
  }
  if (!any) return false;
  step.remainder = -1;
  const bool end_known = length_ || step.length < needed_length(rule_, next_);
  if (!shard_by_ && (rule_.drop_last || end_known)) {
    step.remainder = remainder(rule_, rule_.pace > 0 ? rule_.pace : step.length);
  }
  step.position_after = rule_.origin + (next_ + 1) * rule_.block();
  ++next_;
  return true;
}

LoaderCore::LoaderCore(LoaderSettings settings, LoaderContext context)
    : settings_(std::move(settings)), context_(std::move(context)) {
  const auto& configuration = context_.configuration;
  const int world = context_.group.size();
  seed_ = configuration.data_seed().value_or(context_.seed);
  if (settings_.batch_size < 1) {
    throw ConfigError(concat("The loader '", name(), "' has a batch size of ", settings_.batch_size,
                             "; it must be at least 1."));
  }
  if (configuration.split_batches() && settings_.batch_size % world != 0) {
    throw ConfigError(concat("With split_batches the batch size of the loader '", name(), "' (",
                             settings_.batch_size,
                             ") must be a multiple of the number of processes (", world,
                             "). Choose another batch size, or switch split_batches off: then it "
                             "is that of one process."));
  }
  if (configuration.by_node()) {
    if (context_.local_world_size * context_.num_nodes != world) {
      throw ConfigError(concat("by_node needs the same number of processes on every node. Found ",
                               world, " processes on ", context_.num_nodes, " nodes, ",
                               context_.local_world_size, " of them on this one."));
    }
    if (settings_.shard_by)
      throw ConfigError(concat("The loader '", name(),
                               "' has a shard_by of its own and by_node is on. Use one of them."));
  }
  if (settings_.drop_last_global && settings_.shard_by) {
    throw ConfigError(
        concat("The loader '", name(),
               "' has drop_last_global and shard_by, which cannot be combined. Use drop_last."));
  }
}

LoaderCore::~LoaderCore() = default;

void LoaderCore::set_dispatch(bool dispatch) {
  dispatch_ = dispatch;
  if (dispatch && settings_.shard_by) {
    throw ConfigError(concat(
        "The loader '", name(),
        "' has a shard_by, and dispatch_batches has process 0 read everything. Use one of them."));
  }
  if (dispatch && context_.configuration.by_node()) {
    throw ConfigError(
        "by_node and dispatch_batches are both on: with dispatch_batches process 0 reads "
        "everything. Use one of them.");
  }
}

ShardRule LoaderCore::rule() const {
  const auto& configuration = context_.configuration;
  const bool by_node = configuration.by_node();
  ShardRule rule;
  rule.world = by_node ? context_.local_world_size : context_.group.size();
  rule.rank = by_node ? context_.local_rank : context_.group.rank();
  if (unit() == Unit::samples) {
    rule.batch = configuration.split_batches() ? settings_.batch_size / context_.group.size()
                                               : settings_.batch_size;
  }
  rule.even = configuration.even_batches() && context_.group.size() > 1;
  rule.drop_last = settings_.drop_last || settings_.drop_last_global;
  rule.group = settings_.drop_last_global ? context_.gradient_accumulation_steps : 1;
  rule.spread_last = dispatch_ && unit() == Unit::samples;
  if (by_node && (rule.even || rule.drop_last)) {
    if (const auto all = dataset_size()) {
      const std::int64_t shortest = *all / context_.num_nodes;
      rule.pace = rule.drop_last || *all % context_.num_nodes == 0 ? shortest : shortest + 1;
    }
  }
  return rule;
}

std::optional<std::int64_t> LoaderCore::size() const {
  const auto length = stream_length();
  if (!length) return std::nullopt;
  const ShardRule rule = this->rule();
  if (!settings_.shard_by) return count_steps(rule, rule.rank, *length);
  StepPlanner planner;
  planner.begin(rule, settings_.shard_by, length, false);
  Step step;
  std::int64_t steps = 0;
  while (planner.next(step, [&](std::int64_t) { return *length; })) ++steps;
  return steps;
}

std::int64_t LoaderCore::total_batch_size() const noexcept {
  return context_.configuration.split_batches() ? settings_.batch_size
                                                : settings_.batch_size * context_.group.size();
}

std::optional<std::int64_t> LoaderCore::total_dataset_length() const { return dataset_size(); }

void LoaderCore::set_epoch(std::int64_t epoch) {
  if (epoch < 0) throw ConfigError(concat("set_epoch was given ", epoch, "; epochs count from 0."));
  if (epoch != next_epoch_ && !in_pass_) {
    // What was resumed belongs to the epoch it was saved in.
    origin_ = 0;
    order_seed_.reset();
    order_size_.reset();
    loaded_in_pass_ = false;
  }
  next_epoch_ = epoch;
  next_epoch_was_set_ = true;
}

void LoaderCore::skip_first_batches(std::int64_t batches) {
  if (batches < 0)
    throw ConfigError(
        concat("skip_first_batches was given ", batches, "; it must not be negative."));
  if (in_pass_) {
    throw StateError(concat("skip_first_batches was called while the loader '", name(),
                            "' is iterated. It acts on the next pass: call it before the loop."));
  }
  if (origin_ == 0) {
    skip_ = batches;
    return;
  }
  const std::int64_t block = rule().block();
  if (origin_ % block == 0 && batches == origin_ / block) return;
  log::warning(concat(
      "skip_first_batches(", batches, ") was called for the loader '", name(),
      "', whose next pass stays where it was resumed, after ", origin_, " of its ",
      unit() == Unit::samples ? "samples" : "batches",
      ": loading a state leaves out by itself what was seen, so this call is not needed. To leave "
      "out something else, change \"position\" in its state_dict() and load that."));
}

LoaderCore::Pass LoaderCore::begin_pass() {
  const comm::UserCall call("the start of a pass over a loader");
  if (in_pass_) {
    throw StateError(concat("The loader '", name(),
                            "' is already being iterated. End that loop first, or prepare a second "
                            "loader for the inner one."));
  }
  if (!context_.configuration.use_seedable_sampler() && !order_seed_) {
    order_seed_ = draw_seed();
    if (context_.group.size() > 1) {
      order_seed_ = text::to_int(context_.group.broadcast_bytes(std::to_string(*order_seed_)));
    }
  }
  pass_.epoch = next_epoch_;
  pass_.seed = order_seed_.value_or(seed_ + next_epoch_);
  pass_.rule = rule();
  pass_.rule.origin = origin_ + skip_ * pass_.rule.block();
  pass_.resumed = loaded_in_pass_;
  pass_.dataset_size = order_size_;
  if (!loaded_stream_.empty()) load_stream(loaded_stream_);
  position_ = pass_.rule.origin;
  origin_ = skip_ = 0;
  order_seed_.reset();
  order_size_.reset();
  loaded_stream_.clear();
  loaded_in_pass_ = next_epoch_was_set_ = left_early_ = false;
  progress_ = LoaderProgress();
  progress_.fill_is_last = context_.configuration.even_batches() &&
                           !context_.configuration.by_node() && !settings_.shard_by;
  in_pass_ = true;
  if (context_.observer) context_.observer->loader_begins(progress_);
  return pass_;
}

void LoaderCore::show_step(const StepShare& share, std::int64_t remainder,
                           std::int64_t position_after) {
  ++progress_.batches;
  progress_.end_of_dataloader = share.last;
  progress_.local_samples = share.count;
  progress_.local_real_samples = share.real;
  progress_.global_samples = share.global_count;
  progress_.real_samples = share.global_real;
  progress_.remainder = remainder;
  if (context_.configuration.by_node()) across_nodes();
  position_ = position_after;
}

// With by_node a step's part of the data lies in as many places as there are nodes.
void LoaderCore::across_nodes() {
  const auto all = dataset_size();
  if (!all) {
    progress_.global_samples = progress_.real_samples = progress_.remainder = -1;
    return;
  }
  const std::int64_t nodes = context_.num_nodes, block = pass_.rule.block();
  const std::int64_t shortest = *all / nodes, longer = *all % nodes;
  const auto real = [&](std::int64_t start) {
    return longer * std::clamp<std::int64_t>(shortest + 1 - start, 0, block) +
           (nodes - longer) * std::clamp<std::int64_t>(shortest - start, 0, block);
  };
  progress_.real_samples = real(position_);
  progress_.global_samples = pass_.rule.even || pass_.rule.drop_last
                                 ? nodes * progress_.global_samples
                                 : progress_.real_samples;
  if (!pass_.rule.drop_last) {
    const std::int64_t longest = shortest + (longer > 0 ? 1 : 0) - pass_.rule.origin;
    const std::int64_t in_last = real(pass_.rule.origin + (longest - 1) / block * block);
    progress_.remainder = in_last == nodes * block ? 0 : in_last;
  }
}

void LoaderCore::end_pass() noexcept {
  if (!in_pass_) return;
  in_pass_ = false;
  const bool finished = progress_.end_of_dataloader || progress_.batches == 0;
  left_early_ = !finished;
  if (!next_epoch_was_set_) next_epoch_ = pass_.epoch + (finished ? 1 : 0);
  if (context_.observer) context_.observer->loader_ends(progress_);
}

std::string LoaderCore::where(std::int64_t step) const {
  return concat("step ", step, " of epoch ", pass_.epoch, " of the loader '", name(), "'");
}

void LoaderCore::rethrow_reading(const Step& step) const {
  std::string what = concat("Reading the batch of ", where(step.number), " failed");
  if (!step.indices.empty()) what += concat(" (samples ", text::join(step.indices), ")");
  try {
    throw;
  } catch (const std::exception& error) {
    std::throw_with_nested(DataError(concat(what, ": ", describe(error))));
  } catch (...) {
    std::throw_with_nested(
        DataError(concat(what, " with something that is not a std::exception.")));
  }
}

void LoaderCore::compare_first_batch(const std::string& signature, const std::string& error) {
  const comm::UserCall call("the first batch of a loader");
  compared_ = true;
  if (context_.group.size() == 1 || !context_.configuration.compare_across_processes()) return;
  const auto size = dataset_size();
  const Json own = {{"error", error},
                    {"batch", signature},
                    {"dataset", size ? std::to_string(*size) : "unknown"},
                    {"batch size", settings_.batch_size},
                    {"epoch", pass_.epoch},
                    {"seed", pass_.seed}};
  const std::vector<std::string> all = context_.group.all_gather_bytes(own.dump());
  if (!error.empty()) return;  // the caller throws its own
  std::vector<Json> read;
  for (const auto& bytes : all) read.push_back(parse_json(bytes));
  for (std::size_t rank = 0; rank < read.size(); ++rank) {
    if (const auto text = read[rank]["error"].get<std::string>(); !text.empty()) {
      throw DataError(concat("Process ", rank, " could not read the first batch of the loader '",
                             name(), "': ", text));
    }
  }
  const auto compare = [&](const char* key, const char* what, const char* advice) {
    std::size_t first = read.size();
    for (std::size_t rank = 0; rank < read.size(); ++rank) {
      if (read[rank][key] == "") continue;  // a process without a batch
      if (first == read.size()) first = rank;
      if (read[rank][key] == read[first][key]) continue;
      throw DataError(concat("The processes disagree on ", what, " of the loader '", name(),
                             "': process ", first, " has ", read[first][key].dump(), ", process ",
                             rank, " has ", read[rank][key].dump(), ". ", advice));
    }
  };
  if (!dispatch_)
    compare("dataset", "the size of the dataset",
            "Give every process the same dataset; the loader does the sharding.");
  compare("batch size", "the batch size", "Give every process the same options.");
  compare("epoch", "the epoch", "Call set_epoch alike on every process.");
  compare("seed", "the seed of the order of samples", "Set the same data_seed on every process.");
  compare("batch", "the structure of a batch",
          "Every process must get the same fields with the same dtypes (and, unless varying_shapes "
          "is set, the same shapes beyond the first dimension).");
}

namespace {
std::string to_hex(const std::string& bytes);
}
Json LoaderCore::state_dict() const {
  const bool begun = in_pass_ || left_early_;
  const bool mid = begun && !progress_.end_of_dataloader;
  auto size = dataset_size();
  if (const auto& fewer = mid ? pass_.dataset_size : order_size_; fewer && (mid || !begun))
    size = fewer;
  Json state = {{"version", 1},
                {"loader", name()},
                {"unit", unit() == Unit::samples ? "samples" : "batches"},
                {"dataset_size", size ? Json(*size) : Json()},
                {"seed", seed_},
                {"epoch", mid                                ? pass_.epoch
                          : in_pass_ && !next_epoch_was_set_ ? pass_.epoch + 1
                                                             : next_epoch_},
                {"position", mid     ? position_
                             : begun ? 0
                                     : origin_ + skip_ * rule().block()},
                {"world_size", context_.group.size()},
                {"global_batch", total_batch_size()}};
  if (context_.configuration.by_node()) state["nodes"] = context_.num_nodes;
  if (settings_.shard_by) state["sharding"] = "user";
  if (mid && !context_.configuration.use_seedable_sampler()) state["order_seed"] = pass_.seed;
  if (!begun && order_seed_) state["order_seed"] = *order_seed_;
  const bool pending = !begun && !loaded_stream_.empty();
  const std::string stream = pending ? loaded_stream_ : save_stream(mid);
  if (!stream.empty()) {
    state["stream"] = to_hex(stream);
    state["stream_in_pass"] = pending ? loaded_in_pass_ : mid;
  }
  return state;
}

namespace {

constexpr char kHex[] = "0123456789abcdef";

std::string to_hex(const std::string& bytes) {
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (const unsigned char byte : bytes) {
    hex.push_back(kHex[byte >> 4]);
    hex.push_back(kHex[byte & 15]);
  }
  return hex;
}

std::string from_hex(const std::string& hex) {
  const auto digit = [](char c) {
    const char* at = std::strchr(kHex, c);
    if (at == nullptr || c == '\0')
      throw DataError("The state of a loader holds a stream that is not hexadecimal text.");
    return static_cast<int>(at - kHex);
  };
  if (hex.size() % 2 != 0)
    throw DataError("The state of a loader holds a stream of an odd number of digits.");
  std::string bytes;
  bytes.reserve(hex.size() / 2);
  for (std::size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(digit(hex[i]) << 4 | digit(hex[i + 1])));
  return bytes;
}

}  // namespace

LoaderCore::NextPass LoaderCore::read_state(const Json& state) const {
  if (in_pass_) {
    throw StateError(concat("load_state_dict was called while the loader '", name(),
                            "' is iterated. It acts on the next pass: call it before the loop."));
  }
  const auto refuse = [&](const std::string& what) {
    throw DataError(concat("The saved state does not fit the loader '", name(), "': ", what));
  };
  // What is counted stays far from where numbers end.
  constexpr std::int64_t kMost = std::int64_t{1} << 53;
  NextPass next;
  try {
    if (const auto version = state.at("version").get<int>(); version != 1)
      refuse(concat("it has version ", version, ", expected 1."));
    const std::string own_unit = unit() == Unit::samples ? "samples" : "batches";
    if (const auto found = state.at("unit").get<std::string>(); found != own_unit) {
      refuse(concat("its position counts ", found, ", and this loader counts ", own_unit,
                    ". It was made from another kind of dataset or sampler."));
    }
    const std::int64_t nodes = context_.configuration.by_node() ? context_.num_nodes : 0;
    if (const auto found = state.value("nodes", std::int64_t{0}); found != nodes) {
      refuse(concat("it was sharded by node over ", found, " nodes (0: not by node), and now over ",
                    nodes, "."));
    }
    if ((state.value("sharding", std::string()) == "user") !=
        static_cast<bool>(settings_.shard_by)) {
      refuse("only one of the two has a shard_by of the user's.");
    }
    if (const auto world = state.at("world_size").get<int>();
        settings_.shard_by && world != context_.group.size()) {
      refuse(concat(
          "with shard_by only the rule itself knows which samples were seen, and it was asked for ",
          world, " processes, not ", context_.group.size(), ". Resume on as many processes."));
    }
    next.position = state.at("position").get<std::int64_t>();
    next.epoch = state.at("epoch").get<std::int64_t>();
    if (next.position < 0 || next.epoch < 0 || next.position > kMost || next.epoch > kMost)
      refuse(concat("position ", next.position, " or epoch ", next.epoch, " cannot be."));
    const auto size = dataset_size();
    if (const Json& found = state.at("dataset_size"); !found.is_null() && size && found != *size) {
      const auto before = found.get<std::int64_t>();
      if (before > *size || before < 0)
        refuse(concat("its dataset had ", before, " samples, and this one has ", *size, "."));
      if (next.position > 0 && (nodes > 0 || settings_.shard_by)) {
        refuse(concat("its dataset had ", before, " samples, and this one has ", *size,
                      ", which moves the parts of by_node or shard_by in the middle of a pass. "
                      "Resume with the old dataset to the end of the epoch."));
      }
      next.fewer_samples = before;
    }
    next.seed = state.at("seed").get<std::int64_t>();
    next.stream = from_hex(state.value("stream", std::string()));
    next.stream_in_pass = state.value("stream_in_pass", false);
    if (state.contains("order_seed")) next.order_seed = state.at("order_seed").get<std::int64_t>();
  } catch (const Json::exception& error) {
    std::throw_with_nested(DataError(
        concat("The saved state of the loader '", name(), "' is damaged: ", error.what())));
  }
  return next;
}

void LoaderCore::load_state_dict(const Json& state) {
  NextPass next = read_state(state);
  seed_ = next.seed;
  next_epoch_ = next.epoch;
  next_epoch_was_set_ = true;
  origin_ = next.position;
  skip_ = 0;
  order_seed_ = next.order_seed;
  order_size_.reset();
  loaded_stream_ = std::move(next.stream);
  loaded_in_pass_ = next.stream_in_pass;
  left_early_ = false;
  if (!next.fewer_samples) return;
  if (next.position > 0) order_size_ = next.fewer_samples;
  log::warning(concat(
      "The dataset of the loader '", name(), "' has grown from ", *next.fewer_samples, " to ",
      *dataset_size(), " samples since its state was saved. ",
      next.position > 0
          ? "The pass that was under way goes on over those it began with; the others take part "
            "from the next one on."
          : "All take part in the next pass."));
}

}  // namespace accelerate::data
