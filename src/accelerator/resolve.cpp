#include "accelerator/resolve.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/parallel/deepspeed.hpp>

#include "base/parse_json.hpp"

#include <c10/core/Device.h>

#include <algorithm>
#include <string_view>
#include <utility>

namespace accelerate {
namespace {

/// One setting from the environment or the file: its text, and where it was said.
struct Setting {
  std::string text;
  std::string where;
};

class Sources {
 public:
  Sources(const Environment& environment, const Json& file)
      : environment_(environment), file_(file) {}

  std::optional<Setting> find(const char* variable, const char* key) const {
    if (const auto value = environment_.get(variable)) {
      return Setting{*value, text::concat("The environment variable ", variable)};
    }
    if (const auto entry = file_.find(key); entry != file_.end() && !entry->is_null()) {
      return Setting{entry->is_string() ? entry->get<std::string>() : entry->dump(),
                     text::concat("The configuration file's \"", key, "\"")};
    }
    return std::nullopt;
  }

  /// `parse` turns text into the value or throws ConfigError.
  template <class T>
  T choose(const std::optional<T>& argument, const char* variable, const char* key,
           T (*parse)(std::string_view), T otherwise) const {
    if (argument) return *argument;
    const auto setting = find(variable, key);
    if (!setting) return otherwise;
    try {
      return parse(text::to_lower(setting->text));
    } catch (const ConfigError& error) {
      throw ConfigError(
          text::concat(setting->where, " is \"", setting->text, "\". ", error.what()));
    }
  }

  bool flag(const std::optional<bool>& argument, const char* variable, const char* key,
            bool otherwise) const {
    if (argument) return *argument;
    const auto setting = find(variable, key);
    if (!setting) return otherwise;
    const auto value = text::to_bool(setting->text);
    if (!value) {
      throw ConfigError(text::concat(setting->where, " is \"", setting->text,
                                     "\", and a yes or no was expected."));
    }
    return *value;
  }

  using Milliseconds = std::chrono::milliseconds;
  std::optional<Milliseconds> duration(const std::optional<Milliseconds>& argument,
                                       const char* variable, const char* key) const {
    if (argument) return argument;
    const auto setting = find(variable, key);
    if (!setting) return std::nullopt;
    const auto seconds = text::to_double(setting->text);
    constexpr double kMost = 1e9;
    if (!seconds || !(*seconds >= 0 && *seconds <= kMost)) {
      throw ConfigError(text::concat(setting->where, " is \"", setting->text,
                                     "\", and a number of seconds up to ", kMost,
                                     " was expected."));
    }
    return Milliseconds(static_cast<std::int64_t>(*seconds * 1e3));
  }

 private:
  const Environment& environment_;
  const Json& file_;
};

void refuse_what_libtorch_lacks(const Environment& environment) {
  const auto wants = [&](const char* variable) {
    return environment.get_bool(variable).value_or(false);
  };
  if (wants("ACCELERATE_USE_XLA") || wants("ACCELERATE_USE_TPU")) {
    throw UnsupportedError(
        "The environment asks for TPU/XLA, which LibTorch has no C++ interface for. Unset "
        "ACCELERATE_USE_XLA and "
        "ACCELERATE_USE_TPU to train on CPU or CUDA.");
  }
  if (wants("ACCELERATE_USE_MPS_DEVICE")) {
    throw UnsupportedError(
        "The environment asks for MPS, which exists on macOS only. Unset ACCELERATE_USE_MPS_DEVICE "
        "to train on CPU or "
        "CUDA.");
  }
  if (const auto dynamo = environment.get("ACCELERATE_DYNAMO_BACKEND");
      dynamo && text::to_lower(*dynamo) != "no") {
    throw UnsupportedError(text::concat("The environment variable ACCELERATE_DYNAMO_BACKEND is \"",
                                        *dynamo,
                                        "\", and dynamo compiles Python bytecode, which a C++ "
                                        "program has none of. Unset it; to run a compiled graph, "
                                        "export the module to TorchScript and prepare that."));
  }
  if (wants("ACCELERATE_USE_MEGATRON_LM")) {
    throw UnsupportedError(
        "The environment asks for Megatron-LM, a Python library. Unset "
        "ACCELERATE_USE_MEGATRON_LM.");
  }
}

std::optional<at::Device> parse_device(const std::string& text, const std::string& where) {
  const std::string lower = text::to_lower(text);
  for (const char* absent : {"xla", "mps", "hpu", "npu", "mlu", "musa", "xpu", "ipu"}) {
    if (lower.starts_with(absent)) {
      throw UnsupportedError(text::concat(where, " is \"", text,
                                          "\", and this build of LibTorch knows the devices cpu "
                                          "and cuda. Use one of them."));
    }
  }
  try {
    return at::Device(lower);
  } catch (const std::exception&) {
    std::throw_with_nested(ConfigError(text::concat(
        where, " is \"", text, "\", and a device such as \"cpu\" or \"cuda:0\" was expected.")));
  }
}

}  // namespace

namespace {

constexpr std::pair<StrategyKind, std::string_view> kStrategies[] = {
    {StrategyKind::automatic, "auto"}, {StrategyKind::single, "single"},
    {StrategyKind::ddp, "ddp"},        {StrategyKind::fsdp, "fsdp"},
    {StrategyKind::zero1, "zero1"},    {StrategyKind::zero2, "zero2"},
    {StrategyKind::zero3, "zero3"},
};

}  // namespace

AcceleratorOptions& AcceleratorOptions::deepspeed(const parallel::DeepSpeedConfig& config) {
  deepspeed_ = std::make_shared<const parallel::DeepSpeedConfig>(config);
  return *this;
}

std::string_view to_string(StrategyKind strategy) {
  for (const auto& [kind, name] : kStrategies) {
    if (kind == strategy) return name;
  }
  return "";
}

StrategyKind strategy_from_string(std::string_view name) {
  std::vector<std::string_view> known;
  for (const auto& [kind, own] : kStrategies) {
    if (name == own) return kind;
    known.push_back(own);
  }
  throw ConfigError(
      text::concat("There is no strategy \"", name, "\". Known are ", text::join(known), "."));
}

void set_stage(StrategyKind strategy, FsdpOptions& fsdp) {
  switch (strategy) {
    case StrategyKind::zero1:
      fsdp.sharding_strategy(ShardingStrategy::shard_optimizer);
      break;
    case StrategyKind::zero2:
      fsdp.sharding_strategy(ShardingStrategy::shard_optimizer).reduce_every_backward(true);
      break;
    case StrategyKind::zero3:
      fsdp.sharding_strategy(ShardingStrategy::full_shard);
      break;
    default:
      break;
  }
}

namespace {

// Units are gathered in the dtype that forward computes in, so that autocast makes no copy of its
// own; gradients are reduced in fp32 unless the program says otherwise.
void set_precision(MixedPrecision precision, FsdpOptions& fsdp) {
  MixedPrecisionPolicy& policy = fsdp.mixed_precision();
  if (precision == MixedPrecision::no) {
    if (policy.param_dtype) {
      throw ConfigError(text::concat(
          "FsdpOptions::mixed_precision has a param_dtype of ", c10::toString(*policy.param_dtype),
          ", and the Accelerator's mixed precision is \"no\", so inputs would meet parameters of "
          "another dtype. Set AcceleratorOptions::mixed_precision to bf16 or fp16."));
    }
    return;
  }
  if (!policy.param_dtype) policy.param_dtype = compute_dtype(precision);
  if (!policy.reduce_dtype) policy.reduce_dtype = at::kFloat;
}

}  // namespace

ResolvedOptions resolve(const AcceleratorOptions& options, const Environment& environment,
                        const Json& file) {
  refuse_what_libtorch_lacks(environment);
  static const std::vector<std::string> kKeys{
      "mixed_precision",   "gradient_accumulation_steps", "strategy", "cpu",    "backend",
      "timeout",           "heartbeat_timeout",           "debug",    "device", "fsdp",
      "parallelism_config"};
  std::vector<std::string> unknown;
  for (const auto& [key, value] : file.items()) {
    if (std::find(kKeys.begin(), kKeys.end(), key) == kKeys.end()) unknown.push_back(key);
  }
  if (!unknown.empty()) {
    throw ConfigError(text::concat("The configuration file has the unknown key(s) ",
                                   text::join(unknown), ". Known are: ", text::join(kKeys), "."));
  }

  const Sources sources(environment, file);
  ResolvedOptions resolved;
  resolved.mixed_precision =
      sources.choose(options.mixed_precision(), "ACCELERATE_MIXED_PRECISION", "mixed_precision",
                     mixed_precision_from_string, MixedPrecision::no);
  resolved.strategy = sources.choose(options.strategy(), "ACCELERATE_STRATEGY", "strategy",
                                     strategy_from_string, StrategyKind::automatic);
  const auto fsdp = options.fsdp() ? options.fsdp() : resolve_fsdp(environment, file);
  if (fsdp) {
    if (resolved.strategy == StrategyKind::automatic) resolved.strategy = StrategyKind::fsdp;
    if (resolved.strategy == StrategyKind::single || resolved.strategy == StrategyKind::ddp) {
      throw ConfigError(text::concat("The strategy is ", to_string(resolved.strategy),
                                     ", and FsdpOptions were given, which it has no use for. Name "
                                     "the strategy fsdp, or leave them out."));
    }
    resolved.fsdp = *fsdp;
  }
  if (options.gradient_accumulation()) {
    if (options.gradient_accumulation_steps().value_or(1) != 1) {
      throw ConfigError(text::concat(
          "AcceleratorOptions has both gradient_accumulation and gradient_accumulation_steps(",
          *options.gradient_accumulation_steps(), "). Say the number of steps in one of them."));
    }
    resolved.gradient_accumulation = *options.gradient_accumulation();
  } else if (options.gradient_accumulation_steps()) {
    resolved.gradient_accumulation.num_steps(*options.gradient_accumulation_steps());
  } else if (const auto setting = sources.find("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
                                               "gradient_accumulation_steps")) {
    const auto steps = text::to_int(setting->text);
    if (!steps) {
      throw ConfigError(text::concat(setting->where, " is \"", setting->text,
                                     "\", and a whole number was expected."));
    }
    resolved.gradient_accumulation.num_steps(*steps);
  }
  if (resolved.gradient_accumulation.num_steps() < 1) {
    throw ConfigError(text::concat("Gradient accumulation over ",
                                   resolved.gradient_accumulation.num_steps(),
                                   " micro-batches was asked for, and at least 1 is needed."));
  }
  resolved.ddp = options.ddp();
  resolved.grad_scaler = options.grad_scaler();
  resolved.state.parallelism_config(options.parallelism_config()
                                        ? options.parallelism_config()
                                        : resolve_parallelism(environment, file));
  resolved.deepspeed = read_deepspeed(options, environment, resolved.state.parallelism_config());
  if (resolved.deepspeed) apply_deepspeed(*resolved.deepspeed, resolved);
  set_stage(resolved.strategy, resolved.fsdp);
  set_precision(resolved.mixed_precision, resolved.fsdp);

  resolved.state.cpu(sources.flag(options.cpu(), "ACCELERATE_USE_CPU", "cpu", false));
  resolved.state.debug(sources.flag(options.debug(), "ACCELERATE_DEBUG_MODE", "debug", false));
  resolved.state.backend(sources.choose(options.backend(), "ACCELERATE_BACKEND", "backend",
                                        comm::backend_from_string, comm::Backend::automatic));
  resolved.state.timeout(sources.duration(options.timeout(), "ACCELERATE_TIMEOUT", "timeout"));
  if (resolved.state.timeout() && resolved.state.timeout()->count() <= 0) {
    throw ConfigError(text::concat("The timeout is ", resolved.state.timeout()->count(),
                                   " ms, and it must be greater than 0."));
  }
  resolved.state.heartbeat_timeout(sources.duration(
      options.heartbeat_timeout(), "ACCELERATE_HEARTBEAT_TIMEOUT", "heartbeat_timeout"));
  if (options.device()) {
    resolved.state.device(parse_device(*options.device(), "AcceleratorOptions::device"));
  } else if (const auto setting = sources.find("ACCELERATE_TORCH_DEVICE", "device")) {
    resolved.state.device(parse_device(setting->text, setting->where));
  }
  return resolved;
}

Json read_config_file(const AcceleratorOptions& options, const Environment& environment) {
  const auto path =
      options.config_file() ? options.config_file() : environment.get("ACCELERATE_CONFIG_FILE");
  if (!path) return Json::object();
  std::string text;
  try {
    text = io::read_file(*path);
  } catch (const CheckpointError&) {
    std::throw_with_nested(ConfigError(
        text::concat("The configuration file ", *path,
                     " cannot be read. Check the path, or unset ACCELERATE_CONFIG_FILE.")));
  }
  try {
    Json file = parse_json(text);
    if (!file.is_object()) throw ConfigError("Its top level is not an object.");
    return file;
  } catch (const std::exception&) {
    std::throw_with_nested(ConfigError(
        text::concat("The configuration file ", *path, " is not a JSON object of settings.")));
  }
}

}  // namespace accelerate
