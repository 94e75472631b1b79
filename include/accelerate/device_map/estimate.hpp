#pragma once

#include <accelerate/base/arg.hpp>
#include <accelerate/device_map/model_tree.hpp>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace accelerate {

/// A checkpoint of safetensors files (one, an index, or a folder with either), or one of save_state,
/// whole or sharded, as a tree: its names are the modules; those of the second model and later ones
/// begin with "model_1/" and so on. Reads no weights. Names that are tied to another are one tensor.
/// Throws CheckpointError when it is no such thing.
ModelTree checkpoint_tree(const std::filesystem::path& path);

/// What is estimated.
class EstimateOptions {
  /// Element types of the weights. Default: float32, float16, int8, int4.
  ACCELERATE_ARG(std::vector<std::string>, dtypes) = {"float32", "float16", "int8", "int4"};
  /// Numbers of processes. Default: 1, 2, 4, 8.
  ACCELERATE_ARG(std::vector<int>, processes) = {1, 2, 4, 8};
  /// Classes whose modules count as one layer.
  ACCELERATE_ARG(std::vector<std::string>, no_split_module_classes);
};

/// Bytes for one type of weights.
struct DtypeEstimate {
  std::string dtype;
  double largest_layer = 0;
  double total = 0;
  /// The most at one time while training with Adam, without activations: weights, gradients and
  /// moments of float32, and with float16 or bfloat16 what mixed precision needs. Nothing for types
  /// that are not trained.
  std::optional<double> training_with_adam;
};

/// Bytes that each process needs to train with Adam in float32, without activations.
struct StrategyEstimate {
  /// "ddp", "zero1", "zero2", "fsdp".
  std::string strategy;
  /// Number of processes, and bytes for each of them.
  std::vector<std::pair<int, double>> per_process;
};

struct MemoryEstimate {
  std::int64_t elements = 0;
  std::vector<std::string> largest_layers;
  std::vector<DtypeEstimate> dtypes;
  std::vector<StrategyEstimate> strategies;
};

/// What a model needs. The figures of each dtype are in the arithmetic of Python Accelerate's
/// `estimate-memory`: all follow from the bytes in float32. Those of the strategies count weights,
/// gradients and two moments, each cut over the processes where the strategy cuts it, and under
/// fsdp two layers that are whole at one time. Throws ConfigError for an unknown dtype or a number
/// of processes below one.
MemoryEstimate estimate_memory(const ModelTree& tree, const EstimateOptions& options = {});

}  // namespace accelerate
