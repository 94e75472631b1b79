#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <utility>

namespace accelerate {

/// Where a program keeps what it writes, and how its checkpoints are called; as the original's.
class ProjectConfiguration {
  /// The program's folder. Default: none.
  TORCH_ARG(std::filesystem::path, project_dir);
  /// Where logs go. Default: project_dir.
  TORCH_ARG(std::filesystem::path, logging_dir);
  /// `save_state()` without a folder saves to project_dir/checkpoints/checkpoint_N, where N goes on
  /// from the highest that is there. Default: false.
  TORCH_ARG(bool, automatic_checkpoint_naming) = false;
  /// How many of these are kept. The oldest are deleted once the newest is complete and was
  /// verified. Default: all.
  TORCH_ARG(std::optional<std::int64_t>, total_limit) = std::nullopt;
  /// The least N. Default: 0.
  TORCH_ARG(std::int64_t, iteration) = 0;
  /// Every machine writes a checkpoint of its own, for folders that are not shared; only for
  /// modules that are whole on each. Default: false.
  TORCH_ARG(bool, save_on_each_node) = false;
  /// Besides the newest, keep so many with the best metric (see SaveStateOptions). Default: 0.
  TORCH_ARG(std::int64_t, keep_best) = 0;
  /// Whether a lower metric is better, as of a loss. Default: true.
  TORCH_ARG(bool, lower_is_better) = true;
};

}  // namespace accelerate
