#include <accelerate/launch/launcher.hpp>

#include <CLI/CLI.hpp>

#include "cli/commands.hpp"

#include <memory>

namespace accelerate::cli {
namespace {

struct Flags {
  LaunchOptions options;
  double grace_period = std::chrono::duration<double>(LaunchOptions().grace_period()).count();
  bool cpu = false;
  bool debug = false;
  std::string mixed_precision;
  std::string strategy;
  int gradient_accumulation_steps = 0;
};

struct Help : CLI::Formatter {
  std::string make_usage(const CLI::App*, std::string) const override {
    return "Usage: accelerate-cpp launch [OPTIONS] PROGRAM [ARGUMENTS]...\n";
  }
};

int run(Flags& flags, const std::vector<std::string>& rest) {
  if (rest.empty()) throw CLI::RequiredError("PROGRAM");
  Environment& environment = flags.options.environment();
  // The names that the original's launcher uses.
  if (flags.cpu) environment.set("ACCELERATE_USE_CPU", "true");
  if (flags.debug) environment.set("ACCELERATE_DEBUG_MODE", "true");
  if (!flags.mixed_precision.empty())
    environment.set("ACCELERATE_MIXED_PRECISION", flags.mixed_precision);
  if (!flags.strategy.empty()) environment.set("ACCELERATE_STRATEGY", flags.strategy);
  if (flags.gradient_accumulation_steps > 0) {
    environment.set("ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
                    std::to_string(flags.gradient_accumulation_steps));
  }
  flags.options.grace_period(
      std::chrono::milliseconds(static_cast<long>(flags.grace_period * 1000)));
  flags.options.command(rest);
  return launch(flags.options);
}

}  // namespace

void add_launch(CLI::App& app, const std::vector<std::string>& rest, int& exit_code) {
  auto flags = std::make_shared<Flags>();
  LaunchOptions& options = flags->options;
  CLI::App* command =
      app.add_subcommand("launch", "Run a program on several processes of this machine");
  command->formatter(std::make_shared<Help>());
  command->footer(
      "Options come before PROGRAM; everything after it is the program's own.\n"
      "-np N and --nproc_per_node N are understood too. When a process ends badly, the others are\n"
      "ended, the launcher says which one it was, and exits with that process' exit code.");
  command
      ->add_option("-n,--num-processes,--num_processes,--nproc-per-node,--nproc_per_node",
                   options.processes(), "Processes to start")
      ->capture_default_str();
  command
      ->add_option("--master-port,--master_port,--main_process_port", options.master_port(),
                   "Port where the processes meet; 0 takes a free one")
      ->capture_default_str();
  command->add_option(
      "--omp-num-threads,--num_cpu_threads_per_process", options.omp_num_threads(),
      "OMP_NUM_THREADS of each process [the environment's, else cores / processes]");
  command->add_flag("--cpu", flags->cpu, "Use the CPU even where there is a GPU");
  command
      ->add_option("--mixed-precision,--mixed_precision", flags->mixed_precision,
                   "Precision of the program's Accelerator, unless it sets its own")
      ->check(CLI::IsMember({"no", "bf16", "fp16"}));
  command
      ->add_option("--strategy", flags->strategy,
                   "How modules are spread over the processes, unless the program says so itself")
      ->check(CLI::IsMember({"auto", "single", "ddp", "fsdp", "zero1", "zero2", "zero3"}));
  command
      ->add_option("--gradient-accumulation-steps,--gradient_accumulation_steps",
                   flags->gradient_accumulation_steps,
                   "Micro-batches per optimizer step, unless the program sets its own")
      ->check(CLI::PositiveNumber);
  command->add_flag("--debug", flags->debug,
                    "Check in each collective that all processes mean the same one");
  command->add_option(
      "--log-dir,--log_dir", options.log_dir(),
      "Write each process' output to DIR/rank_N.out and .err instead of the terminal");
  command
      ->add_option("--grace-period", flags->grace_period,
                   "Seconds between SIGTERM and SIGKILL for processes that must end")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  command->callback([flags, &rest, &exit_code] { exit_code = run(*flags, rest); });
}

}  // namespace accelerate::cli
