#pragma once

#include <accelerate/base/arg.hpp>
#include <accelerate/base/environment.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace accelerate {

/// What to start, how often, and how to treat it.
class LaunchOptions {
 public:
  LaunchOptions() = default;
  explicit LaunchOptions(std::vector<std::string> command) : command_(std::move(command)) {}

  /// The program and its arguments. A name without a slash is looked up on PATH.
  ACCELERATE_ARG(std::vector<std::string>, command);
  /// How many processes to start on this machine.
  ACCELERATE_ARG(int, processes) = 1;
  /// The port at which the processes find each other, on this machine's loopback address; 0 takes a
  /// free one.
  ACCELERATE_ARG(int, master_port) = 0;
  /// OMP_NUM_THREADS of each process; 0 leaves it as the environment has it, and when that says
  /// nothing shares the cores out evenly.
  ACCELERATE_ARG(int, omp_num_threads) = 0;
  /// How long the processes have to end after they were told to, before they are killed.
  ACCELERATE_ARG(std::chrono::milliseconds, grace_period) = std::chrono::seconds(10);
  /// A folder (made when missing) that takes what each process writes, in `rank_<N>.out` and
  /// `rank_<N>.err`; empty lets it through to this process' own stdout and stderr.
  ACCELERATE_ARG(std::string, log_dir);
  /// What every process gets, before the launcher's own variables are added.
  ACCELERATE_ARG(Environment, environment) = Environment::process();
};

/// Runs `options.command()` once per process on this machine, with the variables that torchrun sets
/// (RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT), and
/// waits until all have ended. Unless the environment has one, they are given a random secret
/// (ACCELERATE_SECRET) by which they know each other from strangers.
///
/// As soon as one ends badly the others are told to stop (SIGTERM, and SIGKILL after the grace
/// period), so that nobody waits for a peer that is gone. SIGINT, SIGTERM and SIGHUP are passed on
/// likewise; a second one kills at once. SIGUSR1, with which batch systems warn of the end, is
/// passed on and nobody is killed. Each process has its own session, and whatever it
/// started is ended with it; all of them die with this process, however it dies. The process of
/// rank 0 has this process' stdin, the others an empty one.
///
/// Returns 0 when every process did, `kStoppedExitCode` (of <accelerate/base/signals.hpp>) when
/// after a signal those that did not saved their state and left with it, and 128 + N when signal N
/// ended the run from outside otherwise. Throws LaunchError when a process could not be started, or
/// ended badly: it then names the rank, the pid and what happened, and `exit_code()` is that
/// process' own, or 128 + N when signal N killed it. The calling thread blocks the five signals it
/// handles meanwhile; other threads of the program should block them too.
int launch(const LaunchOptions& options);

/// Processor cores that this process may use: its CPU affinity, cut to the control group's quota.
int available_cores();

}  // namespace accelerate
