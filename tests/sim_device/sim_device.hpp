#pragma once

// What tests may ask of the simulated accelerator. README.md says what it is.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace sim {

/// Two uses of the same memory that nothing orders. The message names both operators and both
/// streams.
class RaceError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Statistics {
  std::uint64_t operators = 0;   // that ran on a simulated device
  std::uint64_t uses = 0;        // of memory, which were compared with those before
  std::uint64_t host_waits = 0;  // for an event, a stream, a device or a value
  std::uint64_t races = 0;
  /// recordStream through a pointer that is not the allocator's own, which CUDA's allocator
  /// ignores.
  std::uint64_t ignored_record_streams = 0;
};
Statistics statistics();

c10::Device device(int index);

/// For work that is not an operator, such as a simulated NCCL: tells the checker that the current
/// stream reads and writes these tensors. Throws RaceError as an operator would.
void note(const std::string& work, const std::vector<at::Tensor>& reads,
          const std::vector<at::Tensor>& writes);
/// The same bytes as a tensor of the host, whose uses nobody checks.
at::Tensor host_view(const at::Tensor& tensor);

/// For tests that race on purpose: the host waits for all work, and the races so far do not make
/// the process end with an error code (kRacedExitCode).
void forget();

/// A process that ended well though a race was found ends with this code: somebody swallowed it.
constexpr int kRacedExitCode = 87;
/// Host code touched the memory of a device.
constexpr int kTouchedExitCode = 86;

}  // namespace sim
