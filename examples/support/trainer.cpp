#include "trainer.hpp"

#include "peak_memory.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/optim/fused.hpp>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/optim/optimizer.h>
#include <torch/utils.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <csignal>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string_view>

namespace trainer {

using accelerate::Json;

at::ScalarType Flags::scalar_type() const { return dtype == "float64" ? at::kDouble : at::kFloat; }

accelerate::AcceleratorOptions Flags::accelerator_options() const {
  accelerate::AcceleratorOptions options;
  options.per_process_scheduler_steps(false).dataloader(
      accelerate::data::DataLoaderConfiguration().data_seed(seed));
  if (strategy) options.strategy(accelerate::strategy_from_string(*strategy));
  if (mixed_precision)
    options.mixed_precision(accelerate::mixed_precision_from_string(*mixed_precision));
  if (gradient_accumulation_steps)
    options.gradient_accumulation_steps(*gradient_accumulation_steps);
  if (!checkpoint_dir.empty()) {
    auto project = accelerate::ProjectConfiguration()
                       .project_dir(checkpoint_dir)
                       .automatic_checkpoint_naming(true);
    if (checkpoint_limit > 0) project.total_limit(checkpoint_limit);
    options.project_config(project);
  }
  if (backend != "auto") options.backend(accelerate::comm::backend_from_string(backend));
  if (cpu) options.cpu(true);
  return options;
}

namespace {

/// Lets numbers through that are at least `least`, or above it. The upper bound keeps products of
/// them within 64 bits, and what is not finite out.
CLI::Validator number(double least, bool above = false) {
  constexpr double kMost = 1e9;
  return CLI::Validator(
      [=](const std::string& text) {
        const auto value = accelerate::text::to_double(text);
        if (value && (above ? *value > least : *value >= least) && *value <= kMost)
          return std::string();
        return accelerate::text::concat("\"", text, "\" was given, and a number ",
                                        above ? "above " : "from ", least,
                                        above ? ", up to " : " to ", kMost, " was expected");
      },
      "");
}

}  // namespace

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  file.peek();  // a folder can be opened, and not read
  if (!file.is_open() || file.bad()) {
    throw accelerate::DataError("The data file " + path +
                                " cannot be read. Name one that can be with --data.");
  }
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<Flags> parse(int argc, char** argv, const std::string& description, Flags flags,
                           bool has_layers) {
  CLI::App app(description);
  app.option_defaults()->always_capture_default();
  app.add_option("--strategy", flags.strategy,
                 "how the processes share the work; auto unless the environment says otherwise")
      ->check(CLI::IsMember({"auto", "single", "ddp", "fsdp", "zero1", "zero2", "zero3"}));
  app.add_option("--mixed-precision", flags.mixed_precision,
                 "the dtype forward computes in; no unless the environment says otherwise")
      ->check(CLI::IsMember({"no", "fp16", "bf16"}));
  app.add_option("--dtype", flags.dtype,
                 "the dtype of parameters; float64 tells a bug from rounding")
      ->check(CLI::IsMember({"float32", "float64"}));
  app.add_option("--gradient-accumulation-steps", flags.gradient_accumulation_steps,
                 "micro-batches an optimizer step; 1 unless the environment says otherwise")
      ->check(number(1));
  app.add_option("--batch-size", flags.batch_size, "samples a micro-batch, per process")
      ->check(number(1));
  app.add_option("--epochs", flags.epochs, "passes over the training data")->check(number(1));
  app.add_option("--max-steps", flags.max_steps,
                 "stop after so many optimizer steps; 0 for no limit")
      ->check(number(0));
  app.add_option("--optimizer", flags.optimizer, "the optimizer")
      ->check(CLI::IsMember({"adamw", "sgd"}));
  app.add_option("--lr", flags.lr, "the highest learning rate")->check(number(0, /*above=*/true));
  app.add_option("--clip-norm", flags.clip_norm,
                 "the largest gradient norm; 0 to leave gradients alone")
      ->check(number(0));
  app.add_option("--dropout", flags.dropout, "the probability of dropping an activation")
      ->check(CLI::Range(0.0, 0.99));
  if (has_layers) {
    app.add_option("--layers", flags.layers, "decoder blocks")->check(number(1));
    app.add_option("--width", flags.width, "features of a token, a multiple of 16")
        ->check(number(1));
  }
  app.add_option("--seed", flags.seed, "seed of weights and of the order of samples");
  app.add_option("--backend", flags.backend, "what carries the communication")
      ->check(CLI::IsMember({"auto", "gloo", "mpi", "nccl"}));
  app.add_flag("--cpu", flags.cpu, "use the CPU even where there is a GPU");
  app.add_option("--data", flags.data, "the data file");
  app.add_option("--workers", flags.workers, "threads that prepare batches")->check(number(0));
  app.add_option("--summary", flags.summary, "write what happened to this file, as JSON");
  app.add_option("--memory", flags.memory,
                 "write where memory went to this file, for tools/plot_memory.py");
  app.add_option("--checkpoint-dir", flags.checkpoint_dir,
                 "save checkpoints in this folder: at the end, and when SIGTERM or SIGUSR1 comes");
  app.add_option("--checkpoint-every", flags.checkpoint_every,
                 "save after every so many steps too; 0 not to")
      ->check(number(0));
  app.add_option("--checkpoint-limit", flags.checkpoint_limit,
                 "keep so many checkpoints; 0 for all")
      ->check(number(0));
  app.add_option("--resume", flags.resume,
                 "go on from this checkpoint, or from the latest in --checkpoint-dir");
  app.add_flag("--quiet", flags.quiet, "no progress bar");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    app.exit(help);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw accelerate::ConfigError(std::string(error.what()) + ". Run with --help for the flags.");
  }
  if (flags.checkpoint_dir.empty() &&
      (flags.checkpoint_every > 0 || flags.checkpoint_limit > 0 || flags.resume == "latest")) {
    throw accelerate::ConfigError(
        "--checkpoint-every, --checkpoint-limit and --resume latest need --checkpoint-dir.");
  }
  return flags;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Flags& flags,
                                                        std::vector<at::Tensor> parameters) {
  if (flags.optimizer == "sgd") {
    return std::make_unique<accelerate::optim::FusedSGD>(
        std::move(parameters), accelerate::optim::FusedSGDOptions(flags.lr).momentum(0.9));
  }
  return std::make_unique<accelerate::optim::FusedAdamW>(
      std::move(parameters), accelerate::optim::FusedAdamWOptions(flags.lr).weight_decay(0.01));
}

namespace {

// FNV-1a, 64 bits: enough to see whether two runs did the same.
class Checksum {
 public:
  void add(const void* data, std::size_t size) {
    for (const unsigned char byte : std::string_view(static_cast<const char*>(data), size)) {
      hash_ = (hash_ ^ byte) * 1099511628211ULL;
    }
  }
  void add(std::string_view text) { add(text.data(), text.size()); }
  std::string text() const {
    char buffer[24];
    std::snprintf(buffer, sizeof buffer, "%016llx", static_cast<unsigned long long>(hash_));
    return buffer;
  }

 private:
  std::uint64_t hash_ = 14695981039346656037ULL;
};

// The first rows of every rank are those of the first micro-batch: order them step by step,
// micro-batch by micro-batch, rank by rank.
std::string sample_ids_checksum(const std::vector<Json>& by_rank) {
  Checksum checksum;
  for (std::size_t batch = 0; batch < by_rank.front().at("batches").size(); ++batch) {
    for (const Json& rank : by_rank) {
      for (const auto& id : rank.at("batches").at(batch)) {
        const auto value = id.get<std::int64_t>();
        checksum.add(&value, sizeof value);
      }
    }
  }
  return checksum.text();
}

std::vector<double> to_doubles(const std::vector<at::Tensor>& values) {
  if (values.empty()) return {};
  const at::Tensor all = at::stack(values).to(at::kCPU, at::kDouble).contiguous();
  return {all.const_data_ptr<double>(), all.const_data_ptr<double>() + all.numel()};
}

}  // namespace

Recorder::Recorder(accelerate::Accelerator& accelerator, const Flags& flags,
                   std::vector<at::Tensor> parameters)
    : accelerator_(accelerator), flags_(flags), parameters_(std::move(parameters)) {
  if (accelerator.mixed_precision() != accelerate::MixedPrecision::no && flags.dtype != "float32") {
    throw accelerate::ConfigError(accelerate::text::concat(
        "Mixed precision ", accelerate::to_string(accelerator.mixed_precision()), " and --dtype ",
        flags.dtype,
        " were both asked for. Mixed precision trains float32 parameters: drop one of the two."));
  }
  if (!flags.memory.empty()) {
    for (const at::Tensor& parameter : parameters_)
      accelerate::tracking::label(parameter, accelerate::MemoryKind::parameters);
    memory_.emplace(
        accelerate::tracking::MemoryTrackerOptions()
            .label(accelerate::text::concat(
                accelerate::to_string(accelerator.strategy()), ", ", accelerator.num_processes(),
                accelerator.num_processes() == 1 ? " process" : " processes"))
            .rank(accelerator.process_index())
            .device(accelerator.device()));
    // A path that cannot be written is found out now, and not after training.
    if (accelerator.is_main_process()) memory_->write(flags.memory);
  }
  forget_traffic();
}

void Recorder::forget_traffic() { accelerator_.world().reset_traffic(); }

void Recorder::phase(const std::string& name) {
  phase_.reset();
  if (memory_ && !name.empty()) {
    // A region cannot be moved; it is made in its place.
    phase_.reset(new accelerate::tracking::MemoryTracker::Region(memory_->region(name)));
  }
}

void Recorder::micro_batch(const at::Tensor& loss, const at::Tensor& ids) {
  if (memory_) {
    for (const at::Tensor& parameter : parameters_)
      accelerate::tracking::label(parameter.grad(), accelerate::MemoryKind::gradients);
  }
  phase();
  losses_.push_back(loss.detach());
  ids_.push_back(ids.detach());
}

void Recorder::step(const at::Tensor& grad_norm) {
  grad_norms_.push_back(grad_norm.detach());
  for (const auto& [kind, count] : accelerator_.world().traffic().by_kind) {
    traffic_[kind].calls += count.calls;
    traffic_[kind].bytes += count.bytes;
  }
  forget_traffic();
  last_step_end_ = std::chrono::steady_clock::now();
  if (steps_++ == 0) {
    seconds_to_first_step_ = seconds_since_process_start();
    first_step_end_ = last_step_end_;
  }
}

double Recorder::last_loss() const { return losses_.empty() ? 0.0 : losses_.back().item<double>(); }

Json Recorder::finish(accelerate::PreparedModuleBase& model, const Json& eval) {
  const torch::NoGradGuard no_grad;
  phase();
  const Json peaks{{"resident", peak_resident_bytes()},
                   {"tensors", accelerate::tracking::tensor_bytes().peak}};
  const Json memory = memory_ ? memory_->to_json() : Json();
  Json bytes = Json::object();
  Json calls = Json::object();
  for (const auto& [kind, count] : traffic_) {
    bytes[kind] =
        static_cast<double>(count.bytes) / static_cast<double>(std::max<std::int64_t>(steps_, 1));
    calls[kind] =
        static_cast<double>(count.calls) / static_cast<double>(std::max<std::int64_t>(steps_, 1));
  }
  const std::chrono::duration<double> timed = last_step_end_ - first_step_end_;

  const std::int64_t micro = accelerator_.gradient_accumulation_steps();
  std::vector<double> losses;
  if (steps_ > 0) {
    const at::Tensor own = at::stack(losses_)
                               .to(at::kDouble)
                               .narrow(0, 0, steps_ * micro)
                               .view({steps_, micro})
                               .mean(1);
    const at::Tensor mean = accelerator_.reduce(own, accelerate::comm::Reduction::mean).cpu();
    losses.assign(mean.const_data_ptr<double>(), mean.const_data_ptr<double>() + mean.numel());
  }
  Json own_ids = Json::array();
  for (const at::Tensor& ids : ids_) {
    const at::Tensor host = ids.cpu().contiguous();
    own_ids.push_back(std::vector<std::int64_t>(
        host.const_data_ptr<std::int64_t>(), host.const_data_ptr<std::int64_t>() + host.numel()));
  }

  Checksum parameter_checksum;
  std::int64_t parameter_count = 0;
  double squares = 0.0;
  const auto whole = model.summon_full_params();
  for (const auto& [name, tensor] : model.named_parameters()) {
    const at::Tensor host = tensor.detach().cpu().contiguous();
    parameter_checksum.add(name);
    for (const std::int64_t size : host.sizes()) parameter_checksum.add(&size, sizeof size);
    parameter_checksum.add(host.const_data_ptr(), host.nbytes());
    parameter_count += host.numel();
    squares += host.to(at::kDouble).square().sum().item<double>();
  }

  std::vector<std::int64_t> resident;
  std::vector<std::int64_t> tensor_bytes;
  for (const Json& other : accelerator_.gather_object(peaks)) {
    resident.push_back(other.at("resident").get<std::int64_t>());
    tensor_bytes.push_back(other.at("tensors").get<std::int64_t>());
  }

  if (memory_) {
    const auto processes = accelerator_.gather_object(memory);
    if (accelerator_.is_main_process())
      accelerate::tracking::write_memory_file(flags_.memory, processes);
  }

  Json summary;
  summary["first_step"] = steps_before_ + 1;
  summary["losses"] = losses;
  summary["grad_norms"] = to_doubles(grad_norms_);
  summary["eval"] = eval;
  summary["steps"] = steps_;
  summary["world_size"] = accelerator_.num_processes();
  summary["strategy"] = accelerate::to_string(accelerator_.strategy());
  summary["mixed_precision"] = accelerate::to_string(accelerator_.mixed_precision());
  summary["seconds_to_first_step"] = seconds_to_first_step_;
  summary["steps_per_second"] = steps_ > 1 ? static_cast<double>(steps_ - 1) / timed.count() : 0.0;
  summary["peak_memory_bytes"] = resident;
  summary["peak_tensor_bytes"] = tensor_bytes;
  summary["communication_bytes"] = bytes;
  summary["communication_calls"] = calls;
  summary["parameter_count"] = parameter_count;
  summary["parameter_norm"] = std::sqrt(squares);
  summary["parameter_checksum"] = parameter_checksum.text();
  summary["sample_ids_checksum"] =
      sample_ids_checksum(accelerator_.gather_object(Json{{"batches", own_ids}}));
  return summary;
}

Json Recorder::state_dict() const { return {{"steps", steps()}}; }

void Recorder::load_state_dict(const Json& state) {
  steps_before_ = state.at("steps").get<std::int64_t>();
}

Checkpoints::Checkpoints(accelerate::Accelerator& accelerator, const Flags& flags,
                         Recorder& recorder)
    : accelerator_(accelerator), flags_(flags), recorder_(recorder) {
  accelerator_.register_for_checkpointing(recorder);
  if (!flags_.checkpoint_dir.empty()) accelerator_.stop_on_signals({SIGTERM, SIGUSR1});
  if (flags_.resume.empty()) return;
  accelerator_.load_state(flags_.resume == "latest" ? "" : flags_.resume);
  saved_at_ = recorder_.steps();
  recorder_.forget_traffic();
}

void Checkpoints::save() {
  accelerator_.save_state();
  saved_at_ = recorder_.steps();
  recorder_.forget_traffic();
}

bool Checkpoints::after_step() {
  if (flags_.checkpoint_dir.empty()) return false;
  const bool stop = accelerator_.stop_requested();
  if (stop || (flags_.checkpoint_every > 0 && recorder_.steps() % flags_.checkpoint_every == 0))
    save();
  if (stop) {
    accelerate::log::info(
        accelerate::text::concat("A signal came, so training stops after step ", recorder_.steps(),
                                 ", which was saved. Go on with --resume latest."));
  }
  return stop;
}

void Checkpoints::finish() {
  if (!flags_.checkpoint_dir.empty() && saved_at_ != recorder_.steps()) save();
}

void write_summary(const accelerate::Accelerator& accelerator, const Flags& flags,
                   const Json& summary) {
  if (flags.summary.empty() || !accelerator.is_main_process()) return;
  std::ofstream out(flags.summary);
  out << summary.dump(2) << '\n';
  out.flush();
  if (!out) {
    throw accelerate::ConfigError("The summary cannot be written to " + flags.summary +
                                  ". Check that its folder exists and has space.");
  }
}

}  // namespace trainer
