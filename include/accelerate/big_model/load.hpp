#pragma once

#include <accelerate/base/progress.hpp>
#include <accelerate/big_model/dispatch.hpp>
#include <accelerate/device_map/solver.hpp>

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <string>
#include <vector>

namespace accelerate {

/// How a checkpoint is loaded.
class LoadOptions {
  /// The dtype that floating-point weights are cast to. Default: that of the module.
  TORCH_ARG(std::optional<at::ScalarType>, dtype);
  /// Modules, by a part of their path, whose weights stay float32 when `dtype` is float16 or
  /// bfloat16.
  TORCH_ARG(std::vector<std::string>, keep_in_fp32_modules);
  /// Whether weights that only the module or only the checkpoint has are an error. Otherwise they
  /// are reported. Default: false.
  TORCH_ARG(bool, strict) = false;
  /// Where weights whose place is the disk are copied to. Default: they are read where the
  /// checkpoint has them, without a copy; files of torch.save need a folder.
  TORCH_ARG(std::filesystem::path, offload_folder);
  /// Whether weights without memory whose place is the CPU get that of the mapped file, where their
  /// dtype stays. It is read now, and not changed by the module; but while the module is used, the
  /// file must be neither written to in place, which would change the weights, nor cut short, which
  /// would end the process. (Replacing it by another, as all savers here do, is safe.) Otherwise
  /// they are copied. Default: true.
  TORCH_ARG(bool, memory_map) = true;
  /// Files are read by so many threads; 0 for one per core, at most 4. Default: 0.
  TORCH_ARG(int, threads) = 0;
  /// Whether a bar is shown, with the bytes read and their speed. Default: true.
  TORCH_ARG(bool, progress) = true;
  /// How it looks and where it goes; its total and unit are set here. Default: on stderr, once
  /// loading has taken half a second.
  TORCH_ARG(ProgressOptions, bar) = ProgressOptions().description("Loading weights").delay(0.5);
  /// For maps by name: what each place may hold. Default: what the machine has free.
  TORCH_ARG(std::optional<MaxMemory>, max_memory);
  /// For maps by name: classes whose modules stay whole.
  TORCH_ARG(std::vector<std::string>, no_split_module_classes);
};

/// What was loaded.
struct LoadReport {
  /// Weights that only the module has, which keep the values they had, and those that only the
  /// checkpoint has.
  std::vector<std::string> missing, unexpected;
  /// Bytes read from the checkpoint.
  std::int64_t bytes = 0;
  /// The weights whose place is the disk. The module's are on the meta device until it is
  /// dispatched with this store.
  WeightStore on_disk;
};

/// Fills a module's weights and buffers, by name, from a checkpoint: a safetensors file, a file of
/// torch.save, an index of several, or a folder with one of these. Each goes where the map says;
/// the root map {{"", Place::cpu()}} loads everything into memory. Weights without memory (see
/// init_empty_weights) get it here; others are filled in place where dtype and device stay. No more
/// memory is needed beside the weights than some megabytes for each thread.
///
/// Before anything is changed: throws CheckpointError when files are missing or damaged or shapes
/// differ, OutOfMemoryError when a device has less free memory than its weights need,
/// CheckpointError when the disk of the offload folder has.
LoadReport load_checkpoint_in_model(const ModuleRecord& module,
                                    const std::filesystem::path& checkpoint, const DeviceMap& map,
                                    const LoadOptions& options = {}, bool offload_buffers = false);
template <big_model::ModuleLike M>
LoadReport load_checkpoint_in_model(M& module, const std::filesystem::path& checkpoint,
                                    const DeviceMap& map = {{"", Place::cpu()}},
                                    const LoadOptions& options = {}, bool offload_buffers = false) {
  return load_checkpoint_in_model(big_model::record_of(module), checkpoint, map, options,
                                  offload_buffers);
}

/// load_checkpoint_in_model, then dispatch_model.
template <big_model::ModuleLike M>
[[nodiscard]] auto load_checkpoint_and_dispatch(M&& module, const std::filesystem::path& checkpoint,
                                                const DeviceMap& map,
                                                const LoadOptions& options = {},
                                                OffloadOptions offload = {}) {
  offload.main_device(big_model::main_device(map, offload));
  auto report = load_checkpoint_in_model(big_model::record_of(module), checkpoint, map, options,
                                         offload.offload_buffers());
  return dispatch_model(std::forward<M>(module), map, offload.weights(std::move(report.on_disk)));
}

/// The map that a name stands for: see named_device_map. Where `max_memory` is not given, a single
/// accelerator is filled to nine tenths of what it has free (by all but "sequential"). Throws
/// ConfigError when `max_memory` names an accelerator that is not there.
DeviceMap device_map_for(const ModuleRecord& module, const std::string& name,
                         const LoadOptions& options = {});

/// The same with a map by name: "auto", "balanced", "balanced_low_0" or "sequential".
template <big_model::ModuleLike M>
[[nodiscard]] auto load_checkpoint_and_dispatch(M&& module, const std::filesystem::path& checkpoint,
                                                const std::string& map,
                                                const LoadOptions& options = {},
                                                OffloadOptions offload = {}) {
  const DeviceMap chosen = device_map_for(big_model::record_of(module), map, options);
  return load_checkpoint_and_dispatch(std::forward<M>(module), checkpoint, chosen, options,
                                      std::move(offload));
}

}  // namespace accelerate
