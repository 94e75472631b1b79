#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/parallel/deepspeed.hpp>

#include "base/parse_json.hpp"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <set>
#include <type_traits>
#include <utility>

namespace accelerate::parallel {
namespace {

/// What reading found beside values.
struct Notes {
  std::vector<std::string> problems;
  std::vector<std::string> without_effect;
};

template <class T>
constexpr const char* kind_of() {
  if constexpr (std::is_same_v<T, bool>) return "true or false";
  if constexpr (std::is_same_v<T, std::int64_t>) return "a whole number";
  if constexpr (std::is_same_v<T, double>) return "a number";
  if constexpr (std::is_same_v<T, std::string>) return "a text";
  return "a list of numbers";
}

template <class T>
std::optional<T> convert(const Json& value) {
  if constexpr (std::is_same_v<T, bool>) {
    if (value.is_boolean()) return value.get<bool>();
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    if (value.is_number_integer()) return value.get<std::int64_t>();
    // Sizes are often written as 5e8.
    if (value.is_number_float() && std::abs(value.get<double>()) < 9e18 &&
        std::floor(value.get<double>()) == value.get<double>())
      return static_cast<std::int64_t>(value.get<double>());
  } else if constexpr (std::is_same_v<T, double>) {
    if (value.is_number() && std::isfinite(value.get<double>())) return value.get<double>();
  } else if constexpr (std::is_same_v<T, std::string>) {
    if (value.is_string()) return value.get<std::string>();
  } else {
    std::vector<double> numbers;
    for (const Json& item : value) {
      const auto number = convert<double>(item);
      if (!number) return std::nullopt;
      numbers.push_back(*number);
    }
    if (value.is_array()) return numbers;
  }
  return std::nullopt;
}

/// One object of the file. Every key is taken once; `finish` complains of those that nobody took.
class Section {
 public:
  Section(const Json* object, std::string path, Notes& notes)
      : object_(object), path_(std::move(path)), notes_(notes) {}

  Notes& notes() const { return notes_; }
  bool there() const { return object_ != nullptr; }
  std::string path(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }
  void problem(const std::string& key, const std::string& what) {
    notes_.problems.push_back(text::concat('"', path(key), "\" ", what));
  }

  /// Null when it is missing or null.
  const Json* take(const std::string& key) {
    taken_.insert(key);
    if (object_ == nullptr) return nullptr;
    const auto found = object_->find(key);
    return found == object_->end() || found->is_null() ? nullptr : &*found;
  }

  Section section(const std::string& key) {
    const Json* found = take(key);
    if (found != nullptr && !found->is_object()) {
      problem(key, text::concat("is ", found->dump(), ", and should be an object."));
      found = nullptr;
    }
    return {found, path(key), notes_};
  }

  /// Nothing when it is missing. `filled` is what "auto" stands for.
  template <class T>
  std::optional<T> value(const std::string& key, const std::optional<T>& filled = std::nullopt) {
    const Json* found = take(key);
    if (found == nullptr) return std::nullopt;
    if (*found == "auto") {
      if (!filled) {
        problem(key,
                "is \"auto\", and nothing that the program passed says what it is. Write a value.");
      }
      return filled;
    }
    const auto converted = convert<T>(*found);
    if (!converted)
      problem(key, text::concat("is ", found->dump(), ", and should be ", kind_of<T>(), "."));
    return converted;
  }

  template <class T>
  std::optional<T> at_least(T least, const std::string& key,
                            const std::optional<T>& filled = std::nullopt) {
    const auto found = value<T>(key, filled);
    if (found && !(*found >= least)) {
      problem(key, text::concat("is ", *found, ", and must be at least ", least, "."));
      return std::nullopt;
    }
    return found;
  }

  /// Known keys that have no effect here.
  void accept(std::initializer_list<const char*> keys) {
    for (const char* key : keys) {
      if (take(key) != nullptr) notes_.without_effect.push_back(path(key));
    }
  }
  /// A key whose `harmless` value asks for nothing, and whose other values are not supported.
  void only(const std::string& key, const Json& harmless, const char* instead) {
    const Json* found = take(key);
    if (found == nullptr || *found == harmless) return;
    problem(key, text::concat("is ", found->dump(), ", which is not supported. ", instead));
  }
  /// Sections of tools that are not supported, which may be there if switched off.
  void only_off(std::initializer_list<const char*> keys) {
    for (const char* key : keys) {
      const Json* found = take(key);
      if (found == nullptr) continue;
      const bool off =
          found->is_object() && found->contains("enabled") && found->at("enabled") == Json(false);
      if (!off) problem(key, "is not supported. Remove it, or set its \"enabled\" to false.");
    }
  }

  void finish() {
    if (object_ == nullptr) return;
    for (const auto& [key, value] : object_->items()) {
      if (taken_.count(key) == 0) problem(key, "is not supported.");
    }
  }

 private:
  const Json* object_;
  std::string path_;
  Notes& notes_;
  std::set<std::string> taken_;
};

DeepSpeedOffload read_offload(Section section, int stage, int least_stage,
                              const std::string& what) {
  DeepSpeedOffload offload;
  using Device = DeepSpeedOffload::Device;
  const std::string device = section.value<std::string>("device").value_or("none");
  if (device == "cpu") {
    offload.device = Device::cpu;
  } else if (device == "nvme") {
    offload.device = Device::nvme;
  } else if (device != "none") {
    section.problem("device", "is \"" + device + "\", and should be none, cpu or nvme.");
  }
  const auto folder = section.value<std::string>("nvme_path");
  if (offload.device == Device::nvme) {
    if (folder && !folder->empty() && *folder != "none") {
      offload.nvme_path = *folder;
    } else {
      section.problem("nvme_path", "is missing: the folder on a fast disk that \"nvme\" needs.");
    }
  }
  if (offload.device != Device::none && stage < least_stage) {
    section.problem("device",
                    text::concat("is \"", device, "\" with ZeRO stage ", stage, ". ", what,
                                 " can leave the device from stage ", least_stage, " on."));
  }
  section.accept({"pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read",
                  "pipeline_write", "pipeline", "fast_init"});
  section.only("ratio", 1.0, "All of it is offloaded, or nothing.");
  section.finish();
  return offload;
}

void read_zero(Section zero, const DeepSpeedContext& context, DeepSpeedConfig& config) {
  const auto stage = zero.value<std::int64_t>("stage").value_or(0);
  if (stage < 0 || stage > 3)
    zero.problem("stage", text::concat("is ", stage, ", and should be 0, 1, 2 or 3."));
  config.stage = static_cast<int>(stage);
  config.optimizer_offload =
      read_offload(zero.section("offload_optimizer"), config.stage, 1, "Optimizer state");
  config.parameter_offload =
      read_offload(zero.section("offload_param"), config.stage, 3, "Parameters");
  if (config.parameter_offload.device == DeepSpeedOffload::Device::nvme) {
    zero.problem("offload_param.device",
                 "is \"nvme\". Parameters can go to \"cpu\"; the optimizer's state, which is two "
                 "thirds of the memory, can go to \"nvme\".");
  }

  std::optional<std::int64_t> squared, prefetch, persistent;
  if (const auto hidden = context.hidden_size) {
    squared = *hidden * *hidden;
    prefetch = *squared * 9 / 10;
    persistent = 10 * *hidden;
  }
  config.reduce_bucket_size = zero.at_least<std::int64_t>(0, "reduce_bucket_size", squared);
  const auto bucket = zero.at_least<std::int64_t>(0, "stage3_prefetch_bucket_size", prefetch);
  config.prefetch = bucket.value_or(1) > 0;
  config.max_live_parameters = zero.at_least<std::int64_t>(0, "stage3_max_live_parameters");
  // Small parameters are gathered with their neighbours, so keeping them whole would save nothing.
  if (zero.at_least<std::int64_t>(0, "stage3_param_persistence_threshold", persistent))
    zero.accept({"stage3_param_persistence_threshold"});
  config.gather_on_save =
      zero.value<bool>("stage3_gather_16bit_weights_on_model_save", false).value_or(false);
  config.gather_on_save |=
      zero.value<bool>("stage3_gather_fp16_weights_on_model_save", false).value_or(false);

  zero.accept({"overlap_comm",
               "contiguous_gradients",
               "reduce_scatter",
               "allgather_partitions",
               "allgather_bucket_size",
               "use_multi_rank_bucket_allreduce",
               "round_robin_gradients",
               "sub_group_size",
               "stage3_max_reuse_distance",
               "stage3_model_persistence_threshold",
               "stage3_module_granularity_threshold",
               "stage3_use_all_reduce_for_fetch_params",
               "stage3_allgather_sequential",
               "load_from_fp32_weights",
               "memory_efficient_linear",
               "override_module_apply",
               "log_trace_cache_warnings",
               "enable_sanity_checks",
               "pipeline_loading_checkpoint",
               "legacy_stage1"});
  zero.only("ignore_unused_parameters", true, "Parameters that have no gradient are passed over.");
  zero.only("elastic_checkpoint", false, "");
  zero.only("cpu_offload", false, "Write offload_optimizer: {\"device\": \"cpu\"}.");
  zero.only("cpu_offload_param", false, "Write offload_param: {\"device\": \"cpu\"}.");
  zero.only("zero_hpz_partition_size", 1, "Use the hybrid sharding strategy.");
  zero.only("mics_shard_size", -1, "Use the hybrid sharding strategy.");
  zero.only("mics_hierarchical_params_gather", false, "Use the hybrid sharding strategy.");
  for (const char* key : {"zero_quantized_weights", "zero_quantized_nontrainable_weights",
                          "zero_quantized_gradients"})
    zero.only(key, false, "Nothing is quantised here.");
  zero.finish();
}

void read_precision(Section fp16, Section bf16, const DeepSpeedContext& context,
                    DeepSpeedConfig& config, Notes& notes) {
  const auto wanted = context.mixed_precision;
  const auto enabled = [&](Section& section, MixedPrecision kind) {
    const bool filled = wanted == kind;
    // A section that is missing leaves it to the program.
    return section.there() ? section.value<bool>("enabled", filled).value_or(false) : filled;
  };
  const bool is_fp16 = enabled(fp16, MixedPrecision::fp16);
  bool is_bf16 = enabled(bf16, MixedPrecision::bf16);
  if (wanted == MixedPrecision::fp8) is_bf16 = false;  // what fp8 computes its other parts in
  if (is_fp16 && is_bf16)
    notes.problems.emplace_back("\"fp16.enabled\" and \"bf16.enabled\" are both true.");
  config.mixed_precision = is_fp16                         ? MixedPrecision::fp16
                           : is_bf16                       ? MixedPrecision::bf16
                           : wanted == MixedPrecision::fp8 ? MixedPrecision::fp8
                                                           : MixedPrecision::no;
  if (wanted && *wanted != config.mixed_precision && !(is_fp16 && is_bf16)) {
    notes.problems.emplace_back(
        "\"fp16.enabled\" and \"bf16.enabled\" contradict the mixed precision that the program "
        "asks for. \"auto\" follows the program.");
  }
  fp16.only("loss_scale", 0, "Write 0: the scale adapts itself.");
  if (const auto power = fp16.at_least<std::int64_t>(0, "initial_scale_power"))
    config.loss_scale.initial =
        std::ldexp(1.0, static_cast<int>(std::min<std::int64_t>(*power, 1000)));
  auto& scale = config.loss_scale;
  scale.window = fp16.at_least<std::int64_t>(1, "loss_scale_window").value_or(scale.window);
  scale.hysteresis = fp16.at_least<std::int64_t>(1, "hysteresis").value_or(scale.hysteresis);
  scale.consecutive_hysteresis = fp16.value<bool>("consecutive_hysteresis").value_or(false);
  scale.minimum = fp16.at_least<double>(0.0, "min_loss_scale").value_or(scale.minimum);
  fp16.accept({"auto_cast"});
  fp16.only("fp16_master_weights_and_grads", false, "Master weights are fp32.");
  fp16.finish();
  bf16.accept({"immediate_grad_update", "check_grad_overflow"});
  bf16.only("bf16_master_weights_and_grads", false, "Master weights are fp32.");
  bf16.only("bf16_optimizer_states", false, "Optimizer state is in the dtype of the shards.");
  bf16.finish();
}

// Whatever of the three sizes is missing follows from the others, as in DeepSpeed.
void read_batches(Section& top, const DeepSpeedContext& context, DeepSpeedConfig& config) {
  const auto steps = top.at_least<std::int64_t>(1, "gradient_accumulation_steps",
                                                context.gradient_accumulation_steps);
  std::optional<std::int64_t> total;  // "auto": the product, whatever it is
  if (const Json* found = top.take("train_batch_size"); found != nullptr && *found != "auto")
    total = top.at_least<std::int64_t>(1, "train_batch_size");
  auto micro =
      top.at_least<std::int64_t>(1, "train_micro_batch_size_per_gpu", context.micro_batch_size);
  const std::int64_t world = context.world_size;
  config.gradient_accumulation_steps = steps.value_or(1);
  if (!steps && micro && total && top.take("gradient_accumulation_steps") == nullptr)
    config.gradient_accumulation_steps = std::max<std::int64_t>(1, *total / (*micro * world));
  const std::int64_t of_micro = config.gradient_accumulation_steps * world;
  if (!micro && total) micro = *total / of_micro;
  if (!micro) micro = context.micro_batch_size;
  if (!micro) {
    top.problem("train_micro_batch_size_per_gpu",
                "is not known: neither the file nor a data loader says it.");
    return;
  }
  config.micro_batch_size = *micro;
  config.train_batch_size = *micro * of_micro;
  if (total && *total != config.train_batch_size) {
    top.problem(
        "train_batch_size",
        text::concat("is ", *total, ", and ", *micro, " samples a process, times ",
                     config.gradient_accumulation_steps, " accumulation steps, times ", world,
                     " processes is ", config.train_batch_size, ". Mend one, or write \"auto\"."));
  }
}

std::optional<DeepSpeedNamed> read_named(Section section, const Json& filled) {
  if (!section.there()) return std::nullopt;
  DeepSpeedNamed named{section.value<std::string>("type").value_or("")};
  if (named.type.empty()) section.problem("type", "is missing.");
  if (const Json* params = section.take("params")) {
    Section inner(params, section.path("params"), section.notes());
    if (!params->is_object()) {
      section.problem("params", text::concat("is ", params->dump(), ", and should be an object."));
    } else {
      for (const auto& [key, value] : params->items()) {
        if (value != "auto") {
          named.params[key] = value;
        } else if (filled.contains(key)) {
          named.params[key] = filled.at(key);
        } else {
          inner.problem(key,
                        "is \"auto\", and nothing that the program passed says what it is. Write a "
                        "value.");
        }
      }
    }
  }
  section.accept({"legacy_fusion"});
  section.finish();
  return named;
}

template <class T>
void fill(Json& filled, const char* key, const std::optional<T>& value) {
  if (value) filled[key] = *value;
}

}  // namespace

DeepSpeedConfig DeepSpeedConfig::read(const Json& json, const DeepSpeedContext& context) {
  if (!json.is_object())
    throw ConfigError("DeepSpeed's configuration should be a JSON object, and is " +
                      json.dump().substr(0, 40) + ".");
  DeepSpeedConfig config;
  Notes notes;
  Section top(&json, "", notes);
  read_zero(top.section("zero_optimization"), context, config);
  read_precision(top.section("fp16"), top.section("bf16"), context, config, notes);
  read_batches(top, context, config);
  const auto clipping =
      top.at_least<double>(0.0, "gradient_clipping", context.gradient_clipping).value_or(0.0);
  if (clipping > 0.0) config.gradient_clipping = clipping;

  config.communication_dtype = top.value<std::string>("communication_data_type");
  if (config.communication_dtype && *config.communication_dtype != "fp32" &&
      *config.communication_dtype != "fp16" && *config.communication_dtype != "bf16") {
    top.problem("communication_data_type",
                "is \"" + *config.communication_dtype + "\", and should be fp32, fp16 or bf16.");
  }

  Json filled = Json::object();
  fill(filled, "lr", context.lr);
  fill(filled, "weight_decay", context.weight_decay);
  fill(filled, "betas", context.betas);
  fill(filled, "eps", context.eps);
  config.optimizer = read_named(top.section("optimizer"), filled);
  Json of_schedule = {{"warmup_min_lr", 0.0}};
  if (config.optimizer && config.optimizer->params.contains("lr")) {
    of_schedule["warmup_max_lr"] = config.optimizer->params.at("lr");
  } else {
    fill(of_schedule, "warmup_max_lr", context.lr);
  }
  if (context.warmup_num_steps)
    of_schedule["warmup_num_steps"] = std::max<std::int64_t>(1, *context.warmup_num_steps);
  fill(of_schedule, "total_num_steps", context.total_num_steps);
  config.scheduler = read_named(top.section("scheduler"), of_schedule);

  top.accept({"steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state",
              "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio", "checkpoint",
              "disable_allgather"});
  top.only("prescale_gradients", false, "Gradients are divided as they are reduced.");
  top.only("gradient_predivide_factor", 1.0, "Gradients are divided as they are reduced.");
  top.only("sparse_gradients", false, "Make the embedding's gradients dense.");
  top.only_off({"flops_profiler", "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger",
                "autotuning", "elasticity", "data_efficiency", "curriculum_learning",
                "progressive_layer_drop", "eigenvalue", "amp", "hybrid_engine", "compile"});
  top.finish();
  if (!notes.problems.empty()) {
    throw ConfigError("DeepSpeed's configuration cannot be used. " +
                      text::join(notes.problems, " "));
  }
  config.without_effect = std::move(notes.without_effect);
  if (!config.without_effect.empty()) {
    log::info("Of DeepSpeed's configuration these have no effect here: " +
              text::join(config.without_effect, ", ", 100) + ".");
  }
  return config;
}

DeepSpeedConfig DeepSpeedConfig::read_file(const std::filesystem::path& path,
                                           const DeepSpeedContext& context) {
  Json json;
  try {
    json = parse_json(io::read_file(path), JsonComments::ignore);
  } catch (const Error& error) {
    std::throw_with_nested(ConfigError("DeepSpeed's configuration " + path.string() +
                                       " cannot be read. " + error.what()));
  }
  try {
    return read(json, context);
  } catch (const ConfigError& error) {
    throw ConfigError(path.string() + ": " + error.what());
  }
}

}  // namespace accelerate::parallel
