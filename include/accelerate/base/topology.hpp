#pragma once

#include <accelerate/base/environment.hpp>

#include <cstdint>
#include <string>

namespace accelerate {

/// Who started this process, which decides how it finds the others.
enum class LaunchKind {
  single,    ///< nobody: one process
  torchrun,  ///< RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (torchrun, `accelerate-cpp launch`)
  openmpi,   ///< mpirun: the address is agreed over MPI unless MASTER_ADDR and MASTER_PORT say it
  slurm,     ///< srun: rank 0 is on the first host of the job
  file       ///< the address is left in a file that every process sees (ACCELERATE_RENDEZVOUS_FILE)
};

/// "single", "torchrun", "openmpi", "slurm", "file".
const char* to_string(LaunchKind kind);

/// Which of how many processes this is, and where they meet.
struct Topology {
  LaunchKind kind = LaunchKind::single;
  /// 0 .. world_size - 1.
  int rank = 0;
  int world_size = 1;
  /// The same among the processes of this machine.
  int local_rank = 0;
  int local_world_size = 1;
  /// Which of how many machines.
  int node_rank = 0;
  int num_nodes = 1;
  /// Host and port on which rank 0 listens. Empty and 0 when they are agreed at the rendezvous
  /// (openmpi without MASTER_ADDR, file) or nobody has to meet.
  std::string master_addr;
  int master_port = 0;
  /// The launcher listens there itself, so rank 0 joins like the others (torchrun's
  /// TORCHELASTIC_USE_AGENT_STORE).
  bool launcher_has_store = false;
  /// LaunchKind::file only.
  std::string rendezvous_file;
  /// What the processes of the run, and nobody else, know: ACCELERATE_SECRET, or the first line of
  /// the file that ACCELERATE_SECRET_FILE names. Empty when neither is set.
  std::string secret;
  /// Tells apart jobs that meet at one address one after the other, where the launcher gives such a
  /// name (TORCHELASTIC_RUN_ID, SLURM_JOB_ID). May be empty.
  std::string run_id;
};

/// Reads the variables of torchrun, OpenMPI and SLURM, in this order; a process with none of them
/// is alone. ACCELERATE_RENDEZVOUS_FILE replaces the address, whoever gave rank and world size.
///
/// SLURM counts only for processes that srun started: inside an interactive allocation or a job of
/// one task, the process is alone.
///
/// Throws ConfigError when half of a set is missing (RANK without WORLD_SIZE), a value is not a
/// number, a rank is not below its world size, or a secret is too short or in a file that others
/// may read.
Topology detect_topology(const Environment& environment);

/// The first host of SLURM's list: "gpu[003-007,12],login" gives "gpu003". Empty when `list` is.
std::string first_slurm_host(const std::string& list);

}  // namespace accelerate
