#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/precision/mixed_precision.hpp>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

/// DeepSpeed's JSON configuration, read as Python Accelerate's DeepSpeedPlugin reads it.
namespace accelerate::parallel {

/// What fills in a configuration's "auto" values, from the program and what it prepares. Fields
/// that nobody knows stay empty: an "auto" that needs one is then an error.
struct DeepSpeedContext {
  /// Processes that data is spread over.
  std::int64_t world_size = 1;
  /// Samples in a batch of one process.
  std::optional<std::int64_t> micro_batch_size = {};
  std::int64_t gradient_accumulation_steps = 1;
  double gradient_clipping = 1.0;
  /// As AcceleratorOptions has it; decides fp16.enabled and bf16.enabled where these are "auto" or
  /// missing. Nothing: the file alone decides.
  std::optional<MixedPrecision> mixed_precision = {};
  /// The model's hidden size, which the sizes of buckets follow.
  std::optional<std::int64_t> hidden_size = {};
  /// The optimizer's and the scheduler's settings.
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
  std::optional<std::vector<double>> betas = {};
  std::optional<double> eps = {};
  std::optional<std::int64_t> warmup_num_steps = {};
  std::optional<std::int64_t> total_num_steps = {};
};

/// Where a part of the training state lives when it is not on the device.
struct DeepSpeedOffload {
  enum class Device { none, cpu, nvme };
  Device device = Device::none;
  /// The folder, for nvme.
  std::string nvme_path;
};

/// A type and its settings, for optim::make_optimizer and optim::make_schedule.
struct DeepSpeedNamed {
  std::string type;
  Json params = Json::object();
};

/// Settings of fp16's loss scale.
struct DeepSpeedLossScale {
  double initial = 65536.0;
  /// Good steps before it doubles.
  std::int64_t window = 1000;
  /// Overflows that are let pass before it halves.
  std::int64_t hysteresis = 2;
  /// Good steps give the hysteresis back, not only growth.
  bool consecutive_hysteresis = false;
  /// It does not fall below.
  double minimum = 1.0;
};

/// What a configuration asks for, in plain values and with every "auto" filled in.
struct DeepSpeedConfig {
  /// 0: data parallel; 1: optimizer state is sharded; 2: gradients too; 3: parameters too.
  int stage = 0;
  DeepSpeedOffload optimizer_offload;
  /// `none` or `cpu`.
  DeepSpeedOffload parameter_offload;

  std::int64_t train_batch_size = 0;
  std::int64_t micro_batch_size = 0;
  std::int64_t gradient_accumulation_steps = 1;
  /// The norm that gradients are clipped to; nothing: not clipped.
  std::optional<double> gradient_clipping;

  MixedPrecision mixed_precision = MixedPrecision::no;
  DeepSpeedLossScale loss_scale;
  /// Gradients are reduced in this: "fp32", "fp16" or "bf16". Nothing: in their own.
  std::optional<std::string> communication_dtype;

  /// Parameters (their number, not bytes) that may be whole at one time in stage 3; nothing: no
  /// limit was given.
  std::optional<std::int64_t> max_live_parameters;
  /// Whether stage 3 gathers parameters ahead of their use: false for a prefetch bucket of size 0.
  bool prefetch = true;
  /// Elements reduced at once in stage 0 to 2; nothing: not said.
  std::optional<std::int64_t> reduce_bucket_size;
  /// Whether saving a model of stage 3 gathers it, in 16 bits if it trains so.
  bool gather_on_save = false;

  std::optional<DeepSpeedNamed> optimizer;
  std::optional<DeepSpeedNamed> scheduler;

  /// Dotted paths of keys that DeepSpeed has use for and this library has not, with a value that
  /// asks for nothing but speed or output. Said once, at info level, by `read`.
  std::vector<std::string> without_effect;

  /// Throws ConfigError, with the key's dotted path, for a key that is not supported, a value of
  /// the wrong kind or out of range, an "auto" that the context cannot fill, and batch sizes that
  /// contradict each other.
  static DeepSpeedConfig read(const Json& json, const DeepSpeedContext& context);
  /// Reads a file. Errors name it.
  static DeepSpeedConfig read_file(const std::filesystem::path& path,
                                   const DeepSpeedContext& context);
};

}  // namespace accelerate::parallel
