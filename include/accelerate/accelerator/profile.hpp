#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace accelerate {

/// Which steps are recorded: after `skip_first` steps, cycles of `wait` steps without, `warmup`
/// steps that are recorded and thrown away, and `active` steps that are kept.
struct ProfileSchedule {
  TORCH_ARG(int64_t, wait) = 0;
  TORCH_ARG(int64_t, warmup) = 0;
  TORCH_ARG(int64_t, active) = 1;
  /// Cycles; 0: until the end.
  TORCH_ARG(int64_t, repeat) = 0;
  TORCH_ARG(int64_t, skip_first) = 0;
};

/// What LibTorch's profiler (Kineto) records: the original's ProfileKwargs.
struct ProfileOptions {
  enum class Activity { cpu, cuda };
  /// Empty: the CPU, and CUDA where there is a device.
  TORCH_ARG(std::vector<Activity>, activities);
  /// Nothing: everything from beginning to end.
  TORCH_ARG(std::optional<ProfileSchedule>, schedule) = std::nullopt;
  TORCH_ARG(bool, record_shapes) = false;
  TORCH_ARG(bool, profile_memory) = false;
  TORCH_ARG(bool, with_stack) = false;
  TORCH_ARG(bool, with_flops) = false;
  TORCH_ARG(bool, with_modules) = false;
  /// Where each process writes profile_<rank>.json, a Chrome trace (chrome://tracing, Perfetto);
  /// with a schedule profile_<rank>_<cycle>.json. Empty: nothing is written.
  TORCH_ARG(std::string, output_trace_dir);
};

/// A recording under way; `Accelerator::profile` makes it. One at a time in a process.
class Profiler {
 public:
  /// Throws ConfigError for a schedule without active steps, UnsupportedError for CUDA without a
  /// device, StateError when a recording is under way.
  Profiler(const ProfileOptions& options, int rank);
  /// Ends a recording that was not finished; it is thrown away.
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Ends a step of the schedule.
  void step();
  /// Ends the recording and writes it. Throws ConfigError when the folder cannot be written to.
  void finish();
  /// Files written so far.
  const std::vector<std::string>& files() const noexcept { return files_; }

 private:
  bool records(int64_t step) const;
  bool keeps(int64_t step) const;
  void start();
  void stop(bool keep);

  ProfileOptions options_;
  int rank_;
  int64_t step_ = 0;
  int64_t cycle_ = 0;
  bool running_ = false;
  bool finished_ = false;
  std::vector<std::string> files_;
};

}  // namespace accelerate
