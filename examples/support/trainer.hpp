#pragma once

// What the bundled trainers share besides the library: their flags and the summary they write. A
// trainer's own work, model, data and loop, is in its own file.

#include <accelerate/accelerate.hpp>

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace trainer {

/// The flags of every trainer. docs/trainers.md describes them.
struct Flags {
  std::string strategy = "auto";
  std::string mixed_precision = "no";
  std::string dtype = "float32";
  std::int64_t gradient_accumulation_steps = 1;
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
  Recorder(accelerate::Accelerator& accelerator, const Flags& flags);

  /// One micro-batch: its mean loss and the ids of its samples.
  void micro_batch(const at::Tensor& loss, const at::Tensor& ids);
  /// One optimizer step, with the norm of the gradients before clipping.
  void step(const at::Tensor& grad_norm);
  std::int64_t steps() const noexcept { return steps_; }
  /// "step 12/100 loss 0.412" for a progress bar; waits for the device.
  double last_loss() const;

  /// Collective. The summary of the run, on every rank.
  accelerate::Json finish(accelerate::PreparedModuleBase& model, const accelerate::Json& eval);

 private:
  accelerate::Accelerator& accelerator_;
  const Flags& flags_;
  std::vector<at::Tensor> losses_;
  std::vector<at::Tensor> grad_norms_;
  std::vector<at::Tensor> ids_;
  std::int64_t steps_ = 0;
  double seconds_to_first_step_ = 0.0;
  std::chrono::steady_clock::time_point first_step_end_;
  std::chrono::steady_clock::time_point last_step_end_;
};

/// Writes the summary on the main process, if a file was asked for.
void write_summary(const accelerate::Accelerator& accelerator, const Flags& flags,
                   const accelerate::Json& summary);

/// Runs `main` and turns an error into a message on stderr and exit code 1.
int guarded(const std::function<int()>& main);

}  // namespace trainer
