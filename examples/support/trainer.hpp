#pragma once

// What the bundled trainers share besides the library: their flags and the summary they write. A
// trainer's own work, model, data and loop, is in its own file.

#include <accelerate/accelerate.hpp>
#include <accelerate/tracking/memory_tracker.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace trainer {

/// The flags of every trainer. docs/trainers.md describes them.
struct Flags {
  // What is not given comes from the environment or the configuration file.
  std::optional<std::string> strategy;
  std::optional<std::string> mixed_precision;
  std::string dtype = "float32";
  std::optional<std::int64_t> gradient_accumulation_steps;
  std::int64_t batch_size = 32;
  std::int64_t epochs = 1;
  std::int64_t max_steps = 0;  ///< 0: no limit
  std::string optimizer = "adamw";
  double lr = 1e-3;
  double clip_norm = 0.0;  ///< 0: gradients are measured and not clipped
  double dropout = 0.0;
  std::int64_t layers = 2;
  std::int64_t width = 64;
  std::int64_t seed = 42;
  std::string backend = "auto";
  bool cpu = false;
  std::string data;
  std::string summary;
  std::string memory;
  std::string checkpoint_dir;
  std::int64_t checkpoint_every = 0;  ///< 0: at the end only
  std::int64_t checkpoint_limit = 0;  ///< 0: all are kept
  std::string resume;
  std::int64_t workers = 0;
  bool quiet = false;

  at::ScalarType scalar_type() const;
  accelerate::AcceleratorOptions accelerator_options() const;
};

/// Reads the flags. `language_model` has --layers and --width. Exits through `std::optional`:
/// nothing when --help was asked for and printed. Throws accelerate::ConfigError for what cannot
/// be.
std::optional<Flags> parse(int argc, char** argv, const std::string& description, Flags defaults,
                           bool has_layers);

/// The whole file. Throws accelerate::DataError when it cannot be read.
std::string read_file(const std::string& path);

/// The optimizer the flags ask for.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Flags& flags,
                                                        std::vector<at::Tensor> parameters);

/// Gathers what the summary says while training goes on. It adds no collective to a step: losses
/// and sample ids stay on their rank until `finish`.
class Recorder {
 public:
  /// `parameters` are the model's, so that the memory file knows theirs and their gradients' bytes.
  Recorder(accelerate::Accelerator& accelerator, const Flags& flags,
           std::vector<at::Tensor> parameters);

  /// What the program does from now on, for the memory file; nothing in particular if empty.
  void phase(const std::string& name = {});

  /// One micro-batch is done: its mean loss and the ids of its samples. Ends the phase.
  void micro_batch(const at::Tensor& loss, const at::Tensor& ids);
  /// What the processes have sent since the last step is no part of a step.
  void forget_traffic();
  /// One optimizer step, with the norm of the gradients before clipping.
  void step(const at::Tensor& grad_norm);
  /// Steps since training began, in the runs before this one too.
  std::int64_t steps() const noexcept { return steps_before_ + steps_; }
  /// "step 12/100 loss 0.412" for a progress bar; waits for the device.
  double last_loss() const;

  /// For checkpoints: how many steps were done.
  accelerate::Json state_dict() const;
  void load_state_dict(const accelerate::Json& state);

  /// Collective. The summary of the run, on every rank. Writes the memory file, if one was asked
  /// for.
  accelerate::Json finish(accelerate::PreparedModuleBase& model, const accelerate::Json& eval);

 private:
  accelerate::Accelerator& accelerator_;
  const Flags& flags_;
  std::vector<at::Tensor> parameters_;
  std::optional<accelerate::tracking::MemoryTracker> memory_;
  std::unique_ptr<accelerate::tracking::MemoryTracker::Region> phase_;
  std::vector<at::Tensor> losses_;
  std::vector<at::Tensor> grad_norms_;
  std::vector<at::Tensor> ids_;
  std::int64_t steps_before_ = 0;
  std::map<std::string, accelerate::comm::Traffic::Count> traffic_;  // of steps
  std::int64_t steps_ = 0;
  double seconds_to_first_step_ = 0.0;
  std::chrono::steady_clock::time_point first_step_end_;
  std::chrono::steady_clock::time_point last_step_end_;
};

/// Saves and resumes as the flags say.
class Checkpoints {
 public:
  /// Resumes, if the flags say so: everything was prepared.
  Checkpoints(accelerate::Accelerator& accelerator, const Flags& flags, Recorder& recorder);

  /// Collective, after each step: saves when its turn has come. True when a signal asked the
  /// program to stop: then the state was saved.
  bool after_step();
  /// Collective, after the last step: saves it.
  void finish();

 private:
  void save();

  accelerate::Accelerator& accelerator_;
  const Flags& flags_;
  Recorder& recorder_;
  std::int64_t saved_at_ = 0;
};

/// Writes the summary on the main process, if a file was asked for.
void write_summary(const accelerate::Accelerator& accelerator, const Flags& flags,
                   const accelerate::Json& summary);

}  // namespace trainer
