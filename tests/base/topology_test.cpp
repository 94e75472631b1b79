#include <accelerate/base/topology.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/log_level.hpp"

namespace accelerate {
namespace {

/// The message of the ConfigError that the environment causes.
std::string refusal(const Environment& environment) {
  try {
    const auto topology = detect_topology(environment);
    return std::string("no error, but ") + to_string(topology.kind);
  } catch (const ConfigError& error) {
    return error.what();
  }
}

#define EXPECT_SAYS(environment, part) \
  EXPECT_NE(refusal(environment).find(part), std::string::npos) << refusal(environment)

Environment torchrun() {
  return {{"RANK", "5"},
          {"WORLD_SIZE", "8"},
          {"LOCAL_RANK", "1"},
          {"LOCAL_WORLD_SIZE", "4"},
          {"MASTER_ADDR", "node0"},
          {"MASTER_PORT", "29500"}};
}

TEST(Topology, OneProcessWithoutALauncher) {
  const auto topology = detect_topology({});
  EXPECT_EQ(topology.kind, LaunchKind::single);
  EXPECT_EQ(topology.world_size, 1);
  EXPECT_EQ(topology.rank, 0);
}

TEST(Topology, Torchrun) {
  const auto topology = detect_topology(torchrun());
  EXPECT_EQ(topology.kind, LaunchKind::torchrun);
  EXPECT_EQ(topology.rank, 5);
  EXPECT_EQ(topology.world_size, 8);
  EXPECT_EQ(topology.local_rank, 1);
  EXPECT_EQ(topology.local_world_size, 4);
  EXPECT_EQ(topology.node_rank, 1);
  EXPECT_EQ(topology.num_nodes, 2);
  EXPECT_EQ(topology.master_addr, "node0");
  EXPECT_EQ(topology.master_port, 29500);
}

TEST(Topology, LocalRankByHandOnOneMachine) {
  Environment environment{
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1234"}};
  EXPECT_EQ(detect_topology(environment).local_rank, 1);
  environment.set("MASTER_ADDR", "node0");
  EXPECT_SAYS(environment, "LOCAL_RANK");
}

TEST(Topology, HalfASetIsRefused) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    auto environment = torchrun();
    environment.unset(name);
    EXPECT_SAYS(environment, name);
    EXPECT_SAYS(environment, "missing");
  }
  auto environment = torchrun();
  environment.unset("MASTER_ADDR");
  environment.unset("MASTER_PORT");
  EXPECT_SAYS(environment, "MASTER_ADDR and MASTER_PORT");
  EXPECT_SAYS((Environment{{"OMPI_COMM_WORLD_RANK", "0"}}), "OMPI_COMM_WORLD_SIZE is missing");
}

TEST(Topology, NonsenseIsRefused) {
  auto environment = torchrun();
  environment.set("RANK", "8");
  EXPECT_SAYS(environment, "ranks go from 0 to 7");
  environment.set("RANK", "-1");
  EXPECT_SAYS(environment, "from 0 up");
  environment.set("RANK", "two");
  EXPECT_SAYS(environment, "\"two\"");
  environment = torchrun();
  environment.set("MASTER_PORT", "70000");
  EXPECT_SAYS(environment, "65535");
  environment = torchrun();
  environment.set("LOCAL_RANK", "4");
  EXPECT_SAYS(environment, "LOCAL_RANK is 4");
  environment = torchrun();
  environment.set("WORLD_SIZE", "0");
  EXPECT_SAYS(environment, "WORLD_SIZE is 0");
}

TEST(Topology, OneProcessOfTorchrunNeedsNoAddress) {
  const auto topology = detect_topology({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(topology.world_size, 1);
}

TEST(Topology, OpenMpi) {
  Environment environment{{"OMPI_COMM_WORLD_RANK", "3"},
                          {"OMPI_COMM_WORLD_SIZE", "4"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
  auto topology = detect_topology(environment);
  EXPECT_EQ(topology.kind, LaunchKind::openmpi);
  EXPECT_EQ(topology.rank, 3);
  EXPECT_EQ(topology.node_rank, 1);
  EXPECT_TRUE(topology.master_addr.empty());  // agreed over MPI
  environment.set("MASTER_ADDR", "node0");
  EXPECT_SAYS(environment, "MASTER_PORT");
  environment.set("MASTER_PORT", "4000");
  EXPECT_EQ(detect_topology(environment).master_port, 4000);
  // torchrun, started once on each machine by mpirun, knows better.
  const auto both = torchrun();
  for (const auto& [name, value] : both.variables()) environment.set(name, value);
  EXPECT_EQ(detect_topology(environment).kind, LaunchKind::torchrun);
}

Environment slurm() {
  return {{"SLURM_JOB_ID", "4242"},     {"SLURM_PROCID", "3"},
          {"SLURM_NTASKS", "4"},        {"SLURM_LOCALID", "1"},
          {"SLURM_NODEID", "1"},        {"SLURM_JOB_NODELIST", "gpu[003-004,9],login"},
          {"SLURM_JOB_NUM_NODES", "2"}, {"SLURM_TASKS_PER_NODE", "2(x2)"}};
}

TEST(Topology, Slurm) {
  auto environment = slurm();
  const auto topology = detect_topology(environment);
  EXPECT_EQ(topology.kind, LaunchKind::slurm);
  EXPECT_EQ(topology.rank, 3);
  EXPECT_EQ(topology.world_size, 4);
  EXPECT_EQ(topology.local_rank, 1);
  EXPECT_EQ(topology.local_world_size, 2);
  EXPECT_EQ(topology.node_rank, 1);
  EXPECT_EQ(topology.num_nodes, 2);
  EXPECT_EQ(topology.master_addr, "gpu003");
  EXPECT_GT(topology.master_port, 1024);
  environment.set("SLURM_PROCID", "0");
  EXPECT_EQ(detect_topology(environment).master_port, topology.master_port);
  environment.set("SLURM_PROCID", "4");
  EXPECT_SAYS(environment, "SLURM_PROCID is 4");
  environment = slurm();
  environment.unset("SLURM_LOCALID");
  EXPECT_SAYS(environment, "SLURM_LOCALID is missing");
  environment = slurm();
  environment.unset("SLURM_JOB_NODELIST");
  EXPECT_SAYS(environment, "SLURM_JOB_NODELIST");
}

TEST(Topology, SlurmOnOneMachineMeetsOnLoopback) {
  auto environment = slurm();
  environment.set("SLURM_JOB_NUM_NODES", "1");
  environment.set("SLURM_TASKS_PER_NODE", "4");
  environment.set("SLURM_NODEID", "0");
  EXPECT_EQ(detect_topology(environment).master_addr, "127.0.0.1");
  environment.set("MASTER_ADDR", "node0");
  environment.set("MASTER_PORT", "29500");
  EXPECT_EQ(detect_topology(environment).master_addr, "node0");
}

TEST(Topology, TheSecretOfTheRun) {
  auto environment = torchrun();
  EXPECT_EQ(detect_topology(environment).secret, "");
  environment.set("ACCELERATE_SECRET", "sixteen letters.");
  EXPECT_EQ(detect_topology(environment).secret, "sixteen letters.");
  environment.set("ACCELERATE_SECRET_FILE", "/nowhere");
  EXPECT_SAYS(environment, "Unset one of the two");
  environment.unset("ACCELERATE_SECRET");
  EXPECT_SAYS(environment, "cannot be opened");
  environment.set("ACCELERATE_SECRET_FILE", "/tmp");
  EXPECT_SAYS(environment, "is no file");
  environment.unset("ACCELERATE_SECRET_FILE");
  environment.set("ACCELERATE_SECRET", "too short a one");
  EXPECT_SAYS(environment, "has 15 characters");
  EXPECT_EQ(refusal(environment).find("too short a one"), std::string::npos);
}

TEST(Topology, SlurmWithoutSrunIsOneProcess) {
  auto allocation = slurm();  // salloc, then the program itself
  allocation.unset("SLURM_PROCID");
  allocation.unset("SLURM_LOCALID");
  allocation.unset("SLURM_NODEID");
  EXPECT_EQ(detect_topology(allocation).kind, LaunchKind::single);
  auto one_task = slurm();
  one_task.set("SLURM_PROCID", "0");
  one_task.set("SLURM_NTASKS", "1");
  EXPECT_EQ(detect_topology(one_task).kind, LaunchKind::single);
  auto interactive_step = slurm();  // srun --pty bash in a job of four tasks
  interactive_step.set("SLURM_PROCID", "0");
  interactive_step.set("SLURM_STEP_NUM_TASKS", "1");
  EXPECT_EQ(detect_topology(interactive_step).kind, LaunchKind::single);
}

TEST(Topology, SlurmHostLists) {
  EXPECT_EQ(first_slurm_host("node1"), "node1");
  EXPECT_EQ(first_slurm_host("node1,node2"), "node1");
  EXPECT_EQ(first_slurm_host("gpu[003-007,12],login"), "gpu003");
  EXPECT_EQ(first_slurm_host("gpu[7]"), "gpu7");
  EXPECT_EQ(first_slurm_host("rack[1-2]node[04-08]"), "rack1node04");
  EXPECT_EQ(first_slurm_host("gpu[1-2].cluster,b"), "gpu1.cluster");
  EXPECT_EQ(first_slurm_host(""), "");
  EXPECT_THROW(first_slurm_host("gpu[1-2"), ConfigError);
}

TEST(Topology, ANumberOfProcessesThatCannotBeIsRefusedAtOnce) {
  auto many = torchrun();
  many.set("WORLD_SIZE", "2000000000");
  EXPECT_SAYS(many, "WORLD_SIZE is 2000000000, and at most 1000000");
}

TEST(LogLevel, AnUnknownNameIsAnError) {
  const auto message = [](const char* name) {
    ::setenv("ACCELERATE_LOG_LEVEL", name, 1);
    std::string said = "no error";
    try {
      log::level_from_environment();
    } catch (const ConfigError& error) {
      said = error.what();
    }
    ::unsetenv("ACCELERATE_LOG_LEVEL");
    return said;
  };
  EXPECT_NE(message("verbose").find("\"verbose\", and debug, info,"), std::string::npos);
  for (const char* name : {"debug", "INFO", "Warning", "warn", "error", "critical", "off"})
    EXPECT_EQ(message(name), "no error");
}

TEST(Topology, RendezvousByFile) {
  Environment environment{{"RANK", "1"},
                          {"WORLD_SIZE", "2"},
                          {"ACCELERATE_RENDEZVOUS_FILE", "/somewhere/meet"},
                          {"LOCAL_RANK", "1"}};
  const auto topology = detect_topology(environment);
  EXPECT_EQ(topology.kind, LaunchKind::file);
  EXPECT_EQ(topology.rendezvous_file, "/somewhere/meet");
  EXPECT_SAYS((Environment{{"ACCELERATE_RENDEZVOUS_FILE", "/somewhere/meet"}}),
              "RANK and WORLD_SIZE");
}

}  // namespace
}  // namespace accelerate
