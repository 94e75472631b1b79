#pragma once

#include <accelerate/optim/fused.hpp>

#include <torch/arg.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace accelerate::optim {

/// Where an optimizer's state lives.
enum class StatePlace {
  cpu,  ///< host memory
  disk  ///< a file, read and written once a step
};

/// Settings of OffloadedAdamW.
class OffloadOptions {
  /// Default: cpu.
  TORCH_ARG(StatePlace, place) = StatePlace::cpu;
  /// The folder of the file, on a fast local disk. Needed for StatePlace::disk. Every process may
  /// name the same one.
  TORCH_ARG(std::string, folder);
  /// Keeps fp32 copies of parameters in bf16 or fp16 beside their state, and state in fp32:
  /// updates are added to the copies, and the parameters are these rounded. Default: false.
  TORCH_ARG(bool, fp32_parameters) = false;
  /// Bytes of state that are worked on at once; on disk, three such blocks are in memory. Default:
  /// 8 MiB.
  TORCH_ARG(std::int64_t, block_bytes) = std::int64_t{8} << 20;
  /// Reads and writes past the page cache where the filesystem can. Default: true.
  TORCH_ARG(bool, direct_io) = true;
};

/// FusedAdamW with its state in host memory or on disk, and with its step on the CPU wherever the
/// parameters are (ZeRO-Offload, Ren et al., 2021; ZeRO-Infinity, Rajbhandari et al., 2021). What a
/// GPU has is copied to pinned memory and back, block by block, while the block before computes.
///
/// On disk the state is streamed: the next block is read and the one before written while one
/// computes, so a step takes about as long as the longer of the two, and memory holds three blocks
/// whatever the size of the model. The file has no name: it is gone when the process ends, in
/// whatever way, and never taken for saved state. `save` and `load` write
/// and read what FusedAdamW does; `state()` shows the state on disk as tensors mapped from it.
///
/// Parameters on the CPU get the same bits as from FusedAdamW.
class OffloadedAdamW : public FusedAdamW {
 public:
  /// Throws ConfigError for settings out of range, and for a place on disk without a folder.
  explicit OffloadedAdamW(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                          FusedAdamWOptions defaults = {}, OffloadOptions offload = {});
  explicit OffloadedAdamW(std::vector<at::Tensor> parameters, FusedAdamWOptions defaults = {},
                          OffloadOptions offload = {});
  ~OffloadedAdamW() override;
  OffloadedAdamW(OffloadedAdamW&&) noexcept;

  /// The first step makes the file, for the parameters there are then. Throws UnsupportedError as
  /// FusedAdamW does; FileError when the disk has too little room, with both figures, before
  /// anything has changed; FileError when it fails in between, and StateError from then on.
  at::Tensor step(LossClosure closure = nullptr) override;
  void load(torch::serialize::InputArchive& archive) override;

  const OffloadOptions& offload() const noexcept;
  /// Bytes taken on the disk, and of memory for blocks of it; 0 before the first step.
  std::int64_t disk_bytes() const noexcept;
  std::int64_t block_memory_bytes() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace accelerate::optim
