#pragma once

#include <accelerate/parallel/saved_tensors.hpp>

#include <torch/arg.h>

#include <cstdint>
#include <memory>

namespace accelerate {

/// Which activations `OffloadActivations` moves.
class ActivationOffloadOptions {
  /// Tensors of fewer bytes stay where they are. Default: 64 KiB.
  TORCH_ARG(std::int64_t, min_bytes) = 64 << 10;
  /// Whether host memory is page-locked, so that copies from and to a GPU run beside its work.
  /// Default: true.
  TORCH_ARG(bool, pin_memory) = true;
  /// Whether tensors that are in host memory already are copied too. That saves nothing; it shows
  /// on a machine without a GPU what would happen on one. Default: false.
  TORCH_ARG(bool, host_tensors) = false;
};

/// What the forwards under one or more OffloadActivations did.
struct ActivationOffloadStatistics {
  std::int64_t tensors = 0;         ///< moved to the host
  std::int64_t bytes = 0;           ///< of these
  std::int64_t kept = 0;            ///< left where they are: parameters, small ones, views of less
  std::int64_t brought_back = 0;    ///< asked for by backward
  std::int64_t resident_bytes = 0;  ///< on the host now
  std::int64_t peak_bytes = 0;      ///< the most that was on the host at one time
};

/// While it lives, what this thread's operators save for backward waits in host memory, and returns
/// to its device when backward asks for it. Parameters stay. Backward may run after the scope. On a
/// GPU the copies run on a stream of their own, out of and into page-locked memory.
///
/// Tensors come back with their values, and with their strides if they are dense; others
/// contiguous. A call of `checkpoint` inside the scope keeps only its inputs, and these are
/// offloaded: the least device memory there is.
class [[nodiscard]] OffloadActivations {
 public:
  /// Throws ConfigError when `min_bytes` is negative.
  explicit OffloadActivations(const ActivationOffloadOptions& options = {});
  ~OffloadActivations();
  OffloadActivations(const OffloadActivations&) = delete;
  OffloadActivations& operator=(const OffloadActivations&) = delete;

  ActivationOffloadStatistics statistics() const;

 private:
  class Impl;
  std::shared_ptr<Impl> impl_;
  parallel::SavedTensorScope scope_;
};

}  // namespace accelerate
