#include <accelerate/base/topology.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>

namespace accelerate {
namespace {

using text::concat;

std::optional<int> read_int(const Environment& environment, const std::string& name) {
  const auto value = environment.get_int(name);
  if (!value) return std::nullopt;
  if (*value < 0 || *value > std::numeric_limits<int>::max()) {
    throw ConfigError(concat("The environment variable ", name, " is ", *value,
                             ", and a number from 0 up was expected. Correct it, or unset it."));
  }
  return static_cast<int>(*value);
}

int require_int(const Environment& environment, const std::string& name,
                const std::string& because) {
  const auto value = read_int(environment, name);
  if (!value) {
    throw ConfigError(concat("The environment variable ", name, " is missing, and ", because,
                             ". Set ", name, " too, or unset the others to run as one process."));
  }
  return *value;
}

void check_rank(int rank, int size, const std::string& rank_name, const std::string& size_name) {
  if (size < 1) {
    throw ConfigError(
        concat(size_name, " is ", size, ", and a number of processes from 1 up was expected."));
  }
  // As many ranks fill tables of their peers, and a mistyped number would fill the memory.
  constexpr int kMostProcesses = 1'000'000;
  if (size > kMostProcesses) {
    throw ConfigError(concat(size_name, " is ", size, ", and at most ", kMostProcesses,
                             " processes can take part. Correct it."));
  }
  if (rank >= size) {
    throw ConfigError(concat(rank_name, " is ", rank, " and ", size_name, " is ", size,
                             "; ranks go from 0 to ", size - 1, ". Correct one of the two."));
  }
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

/// MASTER_ADDR and MASTER_PORT. False when neither is set.
bool read_master(const Environment& environment, Topology& topology) {
  const auto address = environment.get("MASTER_ADDR");
  const auto port = read_int(environment, "MASTER_PORT");
  if (!address && !port) return false;
  if (!address || !port) {
    throw ConfigError(
        concat("The environment variable ", address ? "MASTER_PORT" : "MASTER_ADDR",
               " is missing while ", address ? "MASTER_ADDR" : "MASTER_PORT",
               " is set. The processes meet at MASTER_ADDR:MASTER_PORT, so both are needed."));
  }
  if (*port < 1 || *port > 65535) {
    throw ConfigError(
        concat("MASTER_PORT is ", *port, ", and a port from 1 to 65535 was expected."));
  }
  topology.master_addr = *address;
  topology.master_port = *port;
  return true;
}

/// Fills in what a launcher left unsaid about machines, assuming that all hold equally many
/// processes.
void derive_nodes(Topology& topology) {
  const int per_node = topology.local_world_size;
  if (topology.num_nodes == 1 && per_node < topology.world_size) {
    topology.num_nodes = (topology.world_size + per_node - 1) / per_node;
    topology.node_rank = topology.rank / per_node;
  }
}

Topology from_torchrun(const Environment& environment) {
  Topology topology;
  topology.kind = LaunchKind::torchrun;
  topology.rank = require_int(environment, "RANK", "WORLD_SIZE is set");
  topology.world_size = require_int(environment, "WORLD_SIZE", "RANK is set");
  check_rank(topology.rank, topology.world_size, "RANK", "WORLD_SIZE");
  const bool by_file = environment.has("ACCELERATE_RENDEZVOUS_FILE");
  if (!by_file && !read_master(environment, topology) && topology.world_size > 1) {
    throw ConfigError(concat("RANK and WORLD_SIZE say that there are ", topology.world_size,
                             " processes, and MASTER_ADDR and MASTER_PORT, where they meet, are "
                             "missing. Set both (for one machine: "
                             "MASTER_ADDR=127.0.0.1 and a free MASTER_PORT), or start the program "
                             "with accelerate-cpp launch or torchrun."));
  }
  const auto local_rank = read_int(environment, "LOCAL_RANK");
  const auto local_size = read_int(environment, "LOCAL_WORLD_SIZE");
  if (local_rank) {
    topology.local_rank = *local_rank;
    // Somebody who sets the variables by hand and leaves this one out has one machine.
    topology.local_world_size = local_size.value_or(topology.world_size);
  } else if (topology.world_size == 1 || is_loopback(topology.master_addr)) {
    topology.local_rank = topology.rank;
    topology.local_world_size = topology.world_size;
  } else {
    throw ConfigError(
        "RANK and WORLD_SIZE are set and LOCAL_RANK, this process's number on its own machine, is "
        "missing. It decides "
        "which GPU is used. Set LOCAL_RANK, or start the program with accelerate-cpp launch or "
        "torchrun.");
  }
  check_rank(topology.local_rank, topology.local_world_size, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  topology.num_nodes = read_int(environment, "GROUP_WORLD_SIZE").value_or(1);
  topology.node_rank = read_int(environment, "GROUP_RANK").value_or(0);
  derive_nodes(topology);
  // torchrun's store outlives a restart of the processes, so the count of restarts is part of the
  // name.
  topology.run_id = environment.get("TORCHELASTIC_RUN_ID").value_or("") +
                    environment.get("TORCHELASTIC_RESTART_COUNT").value_or("");
  topology.launcher_has_store =
      environment.get_bool("TORCHELASTIC_USE_AGENT_STORE").value_or(false);
  return topology;
}

Topology from_openmpi(const Environment& environment) {
  const std::string because = "OpenMPI's other variables are set";
  Topology topology;
  topology.kind = LaunchKind::openmpi;
  topology.rank = require_int(environment, "OMPI_COMM_WORLD_RANK", because);
  topology.world_size = require_int(environment, "OMPI_COMM_WORLD_SIZE", because);
  check_rank(topology.rank, topology.world_size, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE");
  topology.local_rank = read_int(environment, "OMPI_COMM_WORLD_LOCAL_RANK").value_or(topology.rank);
  topology.local_world_size =
      read_int(environment, "OMPI_COMM_WORLD_LOCAL_SIZE").value_or(topology.world_size);
  check_rank(topology.local_rank, topology.local_world_size, "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE");
  derive_nodes(topology);
  read_master(environment, topology);
  return topology;
}

/// SLURM writes "2(x3),1": two tasks on each of three nodes, one on the next.
std::optional<int> slurm_tasks_on_node(const std::string& counts, int node) {
  for (const auto& part : text::split(counts, ',')) {
    const auto open = part.find("(x");
    const auto tasks = text::to_int(part.substr(0, open));
    const auto repeat = open == std::string::npos
                            ? std::optional<std::int64_t>(1)
                            : text::to_int(part.substr(open + 2, part.find(')', open) - open - 2));
    if (!tasks || !repeat) return std::nullopt;
    if (node < *repeat) return static_cast<int>(*tasks);
    node -= static_cast<int>(*repeat);
  }
  return std::nullopt;
}

std::optional<Topology> from_slurm(const Environment& environment) {
  // srun describes its own step in SLURM_STEP_*; SLURM_NTASKS may be what the whole job asked for.
  const auto step_tasks = read_int(environment, "SLURM_STEP_NUM_TASKS");
  const auto tasks = step_tasks ? step_tasks : read_int(environment, "SLURM_NTASKS");
  const auto rank = read_int(environment, "SLURM_PROCID");
  // An interactive allocation has no SLURM_PROCID: nothing but srun gives one process several
  // peers.
  if (!rank || !tasks || *tasks <= 1) return std::nullopt;
  Topology topology;
  topology.kind = LaunchKind::slurm;
  topology.rank = *rank;
  topology.world_size = *tasks;
  check_rank(*rank, *tasks, "SLURM_PROCID", step_tasks ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS");
  const std::string because = "SLURM_PROCID says that srun started this process";
  topology.local_rank = require_int(environment, "SLURM_LOCALID", because);
  topology.node_rank = require_int(environment, "SLURM_NODEID", because);
  for (const char* name : {"SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES"}) {
    if (const auto nodes = read_int(environment, name)) {
      topology.num_nodes = *nodes;
      break;
    }
  }
  if (topology.num_nodes <= topology.node_rank) topology.num_nodes = topology.node_rank + 1;
  std::optional<int> local_size;
  for (const char* name :
       {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"}) {
    if (const auto counts = environment.get(name); counts && !local_size) {
      local_size = slurm_tasks_on_node(*counts, topology.node_rank);
    }
  }
  topology.local_world_size =
      local_size.value_or((topology.world_size + topology.num_nodes - 1) / topology.num_nodes);
  if (topology.local_world_size <= topology.local_rank)
    topology.local_world_size = topology.local_rank + 1;
  topology.run_id = environment.get("SLURM_JOB_ID").value_or("") + "." +
                    environment.get("SLURM_STEP_ID").value_or("");
  if (!environment.has("ACCELERATE_RENDEZVOUS_FILE") && !read_master(environment, topology)) {
    const auto nodes = environment.get("SLURM_STEP_NODELIST");
    topology.master_addr =
        first_slurm_host(nodes ? *nodes : environment.get("SLURM_JOB_NODELIST").value_or(""));
    if (topology.master_addr.empty()) {
      throw ConfigError(
          "srun started this process and neither SLURM_JOB_NODELIST nor MASTER_ADDR says where "
          "rank 0 is. Set MASTER_ADDR "
          "and MASTER_PORT.");
    }
    if (topology.num_nodes == 1) topology.master_addr = "127.0.0.1";
    // The same on every rank, and unlikely to be another job's on that host.
    const auto job = environment.get_int("SLURM_JOB_ID").value_or(0);
    const auto step = environment.get_int("SLURM_STEP_ID").value_or(0);
    topology.master_port = static_cast<int>(15000 + ((job * 37 + step) % 15000 + 15000) % 15000);
  }
  return topology;
}

constexpr std::size_t kShortestSecret = 16;

std::string read_secret_file(const std::string& path) {
  const auto refuse = [&](const std::string& why) {
    throw ConfigError(concat("ACCELERATE_SECRET_FILE names ", path, ", which ", why,
                             ". It has to be a file with a secret of at least ", kShortestSecret,
                             " characters in its first line, which nobody but its owner may read "
                             "(chmod 600). Such as: (umask 077; openssl rand -hex 32 > ",
                             path, ")"));
  };
  // A pipe would be waited for.
  const int file = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) refuse(concat("cannot be opened (", std::strerror(errno), ")"));
  struct stat status {};
  std::array<char, 4096> content{};
  const bool plain = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  const auto size = plain ? ::read(file, content.data(), content.size()) : -1;
  ::close(file);
  if (!plain) refuse("is no file");
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) refuse("others may read or write");
  if (size < 0) refuse("cannot be read");
  const std::string_view text(content.data(), static_cast<std::size_t>(size));
  const std::string secret(text::trim(text.substr(0, text.find('\n'))));
  if (secret.size() < kShortestSecret) refuse("holds a shorter one");
  return secret;
}

std::string read_secret(const Environment& environment) {
  const auto secret = environment.get("ACCELERATE_SECRET");
  const auto file = environment.get("ACCELERATE_SECRET_FILE");
  if (secret && file) {
    throw ConfigError(
        "ACCELERATE_SECRET and ACCELERATE_SECRET_FILE are both set, and a run has one secret. "
        "Unset one of the two.");
  }
  if (file) return read_secret_file(*file);
  // The secret itself is never written anywhere.
  if (secret && secret->size() < kShortestSecret) {
    throw ConfigError(concat("ACCELERATE_SECRET has ", secret->size(), " characters, and at least ",
                             kShortestSecret,
                             " were expected, so that nobody can guess it. Such as what openssl "
                             "rand -hex 32 writes."));
  }
  return secret.value_or("");
}

}  // namespace

const char* to_string(LaunchKind kind) {
  switch (kind) {
    case LaunchKind::single:
      return "single";
    case LaunchKind::torchrun:
      return "torchrun";
    case LaunchKind::openmpi:
      return "openmpi";
    case LaunchKind::slurm:
      return "slurm";
    case LaunchKind::file:
      return "file";
  }
  return "unknown";
}

std::string first_slurm_host(const std::string& list) {
  const auto end = list.find_first_of(",[");
  if (end == std::string::npos || list[end] == ',') return list.substr(0, end);
  const auto close = list.find(']', end);
  if (close == std::string::npos) {
    throw ConfigError(concat("SLURM's list of hosts \"", list,
                             "\" has a [ without its ]. Set MASTER_ADDR and MASTER_PORT."));
  }
  const std::string ranges = list.substr(end + 1, close - end - 1);
  const std::string first = ranges.substr(0, ranges.find_first_of(",-"));
  const std::string after = list.substr(close + 1, list.find(',', close) - close - 1);
  // A suffix may have brackets of its own ("rack[1-2]node[1-4]").
  return list.substr(0, end) + first + first_slurm_host(after);
}

Topology detect_topology(const Environment& environment) {
  Topology topology;
  const bool rank = environment.has("RANK");
  const bool world_size = environment.has("WORLD_SIZE");
  const bool openmpi =
      environment.has("OMPI_COMM_WORLD_RANK") || environment.has("OMPI_COMM_WORLD_SIZE");
  if (rank && world_size) {
    topology = from_torchrun(environment);
  } else if (openmpi) {
    topology = from_openmpi(environment);
  } else if (rank || world_size) {
    topology = from_torchrun(environment);
  } else if (auto slurm = from_slurm(environment)) {
    topology = *slurm;
  }
  if (topology.kind != LaunchKind::single) topology.secret = read_secret(environment);
  if (const auto file = environment.get("ACCELERATE_RENDEZVOUS_FILE")) {
    if (topology.kind == LaunchKind::single) {
      throw ConfigError(
          "ACCELERATE_RENDEZVOUS_FILE is set, and nothing says which of how many processes this "
          "is. Set RANK and WORLD_SIZE "
          "too, or unset it.");
    }
    topology.kind = LaunchKind::file;
    topology.rendezvous_file = *file;
    topology.master_addr.clear();
    topology.master_port = 0;
  }
  return topology;
}

}  // namespace accelerate
