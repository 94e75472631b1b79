// What happens when a run goes wrong. The tests start ranks of this very program, which play the
// case named in FAILURE_CASE, and look at what each rank says and how long it took.
#include <accelerate/base/environment.hpp>
#include <accelerate/base/error.hpp>
#include <accelerate/base/topology.hpp>
#include <accelerate/comm/collectives.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/comm/world.hpp>
#include "comm/world_impl.hpp"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <thread>

namespace accelerate::comm {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
namespace fs = std::filesystem;

// ---- The ranks ----

void reduce(const Group& world, std::int64_t length = 4) {
  world.all_reduce(at::ones({length})).wait();
}

void play(const std::string& name, const Group& world) {
  const int rank = world.rank();
  const int victim = Environment::process().get_int("FAILURE_VICTIM").value_or(1);
  if (name == "kill") {
    reduce(world);
    if (rank == victim) std::raise(SIGKILL);
    while (true) reduce(world);
  } else if (name == "kill_scatter" || name == "stop_scatter") {
    const auto scatter = [&] {
      world.reduce_scatter_into(at::zeros({4}), at::ones({4 * world.size()})).wait();
    };
    scatter();
    if (rank == victim) std::raise(name == "kill_scatter" ? SIGKILL : SIGSTOP);
    while (true) scatter();
  } else if (name == "stop") {
    reduce(world);
    if (rank == victim) {
      std::cout << "STOPS" << std::endl;
      std::raise(SIGSTOP);
    }
    while (true) reduce(world);
  } else if (name == "stop_in_recv") {
    // Nobody computes with the victim; the others wait for each other in vain.
    if (rank == victim) std::raise(SIGSTOP);
    world.recv(at::zeros({2}), victim == 2 ? 1 - rank : 2 - rank).wait();
  } else if (name == "throw") {
    reduce(world);
    if (rank == victim) throw DataError("the data of this rank are unreadable");
    reduce(world);
  } else if (name == "exit" || name == "caught") {
    // The group outlives main(), as that of the library's State does.
    static const auto* const kept = new Group(world);
    reduce(*kept);
    if (rank == victim && name == "exit") std::exit(7);
    if (rank == victim) throw ConfigError("caught by main");
    while (true) reduce(*kept);
  } else if (name == "linger") {
    reduce(world);
    std::cout << "MET" << std::endl;
    std::this_thread::sleep_for(milliseconds(1500));
    reduce(world);
  } else if (name == "late") {
    reduce(world);
    if (rank == victim) std::this_thread::sleep_for(milliseconds(15000));
    reduce(world);
  } else if (name == "leave") {
    reduce(world);
    if (rank == victim) return;
    // The others go on by themselves, then want something of it.
    std::this_thread::sleep_for(milliseconds(1500));
    std::cout << "ALONE" << std::endl;
    reduce(world);
  } else if (name == "part") {
    reduce(world);
    std::this_thread::sleep_for(milliseconds(300) * rank);
  } else if (name == "told") {
    reduce(world);
    if (rank == 2) std::this_thread::sleep_for(milliseconds(400));
    world.broadcast(at::ones({4}), 0).wait();
    throw ConfigError("the ranks differ");
  } else if (name == "failed_pass") {
    // What Ddp does when an exception ends a backward pass; the others wait for its gradients.
    reduce(world);
    const auto fail = [&] {
      world.impl()->watch->say_failed_pass();
      world.impl()->watch->wait_until_all_failed();
    };
    fail();  // everywhere
    if (rank == victim) fail();
    reduce(world);
  } else if (name == "unwaited") {
    const Work left_alone = world.all_reduce(at::ones({1 << 24}));
  } else if (name == "shapes") {
    reduce(world, rank == victim ? 5 : 4);
  } else if (name == "operations") {
    if (rank == victim) {
      world.broadcast(at::ones({4})).wait();
    } else {
      reduce(world);
    }
  } else if (name == "calls") {
    if (rank == victim) {
      comm::reduce(at::ones({4}), world);
    } else {
      comm::gather(at::ones({4}), world);
    }
  } else if (name == "closed") {
    shutdown(world);
    reduce(world);
  } else {
    throw ConfigError("no such case: " + name);
  }
}

/// Says what it caught: "TYPE|operation|lost rank|message".
int rank_main(const std::string& name) {
  const auto report = [](const char* type, const std::string& operation, int lost,
                         const std::exception& error) {
    std::cout << type << "|" << operation << "|" << lost << "|" << describe(error) << std::endl;
    return 3;
  };
  try {
    const auto environment = Environment::process();
    WorldOptions options;
    if (environment.get_bool("FAILURE_NCCL").value_or(false)) options.backend(Backend::nccl);
    if (const auto name = environment.get("ACCELERATE_BACKEND"))
      options.backend(backend_from_string(*name));
    const auto milli = [](double seconds) { return milliseconds(std::lround(seconds * 1e3)); };
    if (const auto seconds = environment.get_double("ACCELERATE_TIMEOUT"))
      options.timeout(milli(*seconds));
    if (const auto seconds = environment.get_double("ACCELERATE_HEARTBEAT_TIMEOUT"))
      options.heartbeat_timeout(milli(*seconds));
    options.debug(environment.get_bool("ACCELERATE_DEBUG_MODE").value_or(false));
    const Group world = create_world(detect_topology(environment), options);
    play(name, world);
    std::cout << "DONE" << std::endl;
    return 0;
  } catch (const PeerLostError& error) {
    return report("PeerLostError", error.operation(), error.lost_rank(), error);
  } catch (const TimeoutError& error) {
    return report("TimeoutError", error.operation(), -1, error);
  } catch (const DistributedError& error) {
    return report("DistributedError", error.operation(), -1, error);
  } catch (const ConfigError& error) {
    return report("ConfigError", "", -1, error);
  } catch (const Error& error) {
    return report("Error", "", -1, error);
  }
}

// ---- The tests ----

struct Outcome {
  std::string said;
  int status = 0;
  double seconds = 0;

  bool has(const std::string& part) const { return said.find(part) != std::string::npos; }
  friend std::ostream& operator<<(std::ostream& out, const Outcome& outcome) {
    return out << "status " << outcome.status << " after " << outcome.seconds
               << " s: " << outcome.said;
  }
};

// One that the kernel gives to nobody unasked, so that it is still free when a rank listens at it.
int free_port() {
  std::random_device random;
  while (true) {
    const int port = std::uniform_int_distribution(10000, 32767)(random);
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    const bool free = ::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    ::close(socket);
    if (free) return port;
  }
}

class Ranks {
 public:
  Ranks(std::string name, int world_size) : name_(std::move(name)), world_size_(world_size) {
    folder_ = fs::temp_directory_path() / ("accelerate-failure-" + std::to_string(::getpid()) +
                                           "-" + std::to_string(counter_++));
    fs::create_directories(folder_);
    set("ACCELERATE_TIMEOUT", "20");
    set("ACCELERATE_HEARTBEAT_TIMEOUT", "2");
    set("OMP_NUM_THREADS", "1");
    set("MASTER_ADDR", "127.0.0.1");
    set("MASTER_PORT", std::to_string(free_port()));
    set("FAILURE_CASE", name_);
  }
  ~Ranks() {
    for (const auto& [key, process] : processes_) ::kill(process, SIGKILL);
    for (const auto& [key, process] : processes_) ::waitpid(process, nullptr, 0);
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  Ranks& set(const std::string& variable, const std::string& value) {
    return variables_[variable] = value, *this;
  }

  /// `suffix` tells two processes of one rank apart.
  void start(int rank, const std::string& suffix = {}) {
    variables_["RANK"] = std::to_string(rank);
    variables_["LOCAL_RANK"] = std::to_string(rank);
    variables_["WORLD_SIZE"] = std::to_string(world_size_);
    const std::string key = std::to_string(rank) + suffix;
    const std::string output = (folder_ / key).string();
    // Nothing that could hang may be called between fork and exec.
    std::vector<std::string> environment;
    for (const auto& [name, value] : Environment::process().variables()) {
      if (!variables_.count(name)) environment.push_back(name + "=" + value);
    }
    for (const auto& [name, value] : variables_) environment.push_back(name + "=" + value);
    std::vector<char*> pointers;
    for (auto& line : environment) pointers.push_back(line.data());
    pointers.push_back(nullptr);
    std::string program = fs::read_symlink("/proc/self/exe").string();
    char* arguments[] = {program.data(), nullptr};
    const pid_t child = ::fork();
    if (child == 0) {
      const int file = ::open(output.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
      ::dup2(file, 1);
      ::dup2(file, 2);
      ::execve(program.c_str(), arguments, pointers.data());
      ::_exit(127);
    }
    processes_[key] = child;
  }
  void start_all() {
    for (int rank = 0; rank < world_size_; ++rank) start(rank);
  }
  /// What a rank said until it ended; a rank that has not by the limit is killed.
  Outcome outcome(int rank, const std::string& suffix = {}) {
    constexpr double kLimit = 30;
    Outcome outcome;
    const std::string key = std::to_string(rank) + suffix;
    const pid_t process = processes_.at(key);
    while (true) {
      int status = 0;
      const bool over = ::waitpid(process, &status, WNOHANG) == process;
      outcome.seconds = std::chrono::duration<double>(Clock::now() - began_).count();
      if (over) {
        outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        processes_.erase(key);
        break;
      }
      if (outcome.seconds > kLimit) {
        outcome.status = -1;
        break;
      }
      std::this_thread::sleep_for(milliseconds(10));
    }
    outcome.said = said_by(key);
    return outcome;
  }
  /// What a rank has said so far.
  std::string said_by(const std::string& key) const {
    std::ifstream in(folder_ / key);
    std::stringstream said;
    said << in.rdbuf();
    return said.str();
  }
  /// Seconds until a rank has said that; negative when it does not within the time.
  double seconds_until(int rank, const std::string& part, double limit) const {
    const auto start = Clock::now();
    while (true) {
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      if (said_by(std::to_string(rank)).find(part) != std::string::npos) return seconds;
      if (seconds > limit) return -1;
      std::this_thread::sleep_for(milliseconds(10));
    }
  }
  pid_t process(int rank) const { return processes_.at(std::to_string(rank)); }
  int port() const { return std::stoi(variables_.at("MASTER_PORT")); }

 private:
  static inline int counter_ = 0;
  std::string name_;
  int world_size_;
  fs::path folder_;
  std::map<std::string, std::string> variables_;
  std::map<std::string, pid_t> processes_;
  Clock::time_point began_ = Clock::now();
};

void expect_lost(const Outcome& outcome, int lost, const std::string& why, double within,
                 const std::string& operation = "all_reduce") {
  EXPECT_EQ(outcome.status, 3) << outcome;
  EXPECT_TRUE(outcome.has("PeerLostError|" + operation + "|" + std::to_string(lost) + "|"))
      << outcome;
  EXPECT_TRUE(outcome.has("rank " + std::to_string(lost) + " was lost: " + why)) << outcome;
  EXPECT_LT(outcome.seconds, within) << outcome;
}

TEST(Failure, AKilledRankIsNamedAtOnce) {
  for (const int victim : {1, 0}) {
    Ranks run("kill", 3);
    run.set("FAILURE_VICTIM", std::to_string(victim)).start_all();
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != victim) expect_lost(run.outcome(rank), victim, "its process ended", 15);
    }
  }
}

TEST(Failure, AStoppedRankIsNamedAfterTheHeartbeatTimeout) {
  for (const int victim : {1, 0}) {
    Ranks run("stop", 3);
    run.set("FAILURE_VICTIM", std::to_string(victim)).start_all();
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != victim) expect_lost(run.outcome(rank), victim, "it has been silent", 15);
    }
  }
}

TEST(Failure, ReduceScattersEndToo) {
  for (const auto& [name, why] : {std::pair{"kill_scatter", "its process ended"},
                                  std::pair{"stop_scatter", "it has been silent"}}) {
    Ranks run(name, 3);
    run.set("FAILURE_VICTIM", "1").start_all();
    for (const int rank : {0, 2}) expect_lost(run.outcome(rank), 1, why, 15, "reduce_scatter");
  }
}

TEST(Failure, ReceivesEndToo) {
  Ranks run("stop_in_recv", 3);
  run.set("FAILURE_VICTIM", "1").start_all();
  for (const int rank : {0, 2}) {
    const auto outcome = run.outcome(rank);
    EXPECT_TRUE(outcome.has("PeerLostError|recv|1|")) << outcome;
    EXPECT_LT(outcome.seconds, 15) << outcome;
  }
}

TEST(Failure, AnExceptionInOneRankEndsTheOthers) {
  Ranks run("throw", 3);
  run.start_all();
  const auto culprit = run.outcome(1);
  EXPECT_TRUE(culprit.has("the data of this rank are unreadable")) << culprit;
  for (const int rank : {0, 2})
    expect_lost(run.outcome(rank), 1, "an exception ended its part in the run", 8);
}

TEST(Failure, ABackwardPassThatFailsOnOneRankEndsTheOthers) {
  Ranks run("failed_pass", 3);
  run.start_all();
  for (int rank = 0; rank < 3; ++rank) {
    const auto outcome = run.outcome(rank);
    EXPECT_LT(outcome.seconds, 12) << outcome;  // 5 s, the start and a busy machine
    const char* told = rank == 1 ? "PeerLostError|" : "the backward pass of rank 1 failed";
    EXPECT_TRUE(outcome.has(told)) << outcome;
  }
}

TEST(Failure, TheEndOfARankBreaksNothingThatOthersCanFinish) {
  Ranks run("told", 3);
  run.start_all();
  for (int rank = 0; rank < 3; ++rank) {
    const auto outcome = run.outcome(rank);
    EXPECT_TRUE(outcome.has("ConfigError||-1|the ranks differ")) << outcome;
  }
}

TEST(Failure, ARankThatExitsIsNotTakenForDone) {
  for (const auto& [name, code] : {std::pair{"exit", "7"}, std::pair{"caught", "3"}}) {
    for (const int victim : {0, 1}) {
      Ranks run(name, 3);
      run.set("FAILURE_VICTIM", std::to_string(victim))
          .set("ACCELERATE_HEARTBEAT_TIMEOUT", "8")
          .start_all();
      const auto culprit = run.outcome(victim);
      EXPECT_EQ(culprit.status, std::stoi(code)) << culprit;
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == victim) continue;
        expect_lost(run.outcome(rank), victim,
                    std::string("its process ended with exit code ") + code, culprit.seconds + 4);
      }
    }
  }
}

TEST(Failure, AStoppedRankIsNamedInTheLogAtOnce) {
  for (const int victim : {1, 0}) {
    Ranks run("stop", 3);
    run.set("FAILURE_VICTIM", std::to_string(victim))
        .set("ACCELERATE_HEARTBEAT_TIMEOUT", "30")
        .start_all();
    const std::string words = "Rank " + std::to_string(victim) + " has been silent for";
    ASSERT_GE(run.seconds_until(victim, "STOPS", 20), 0);
    const double seconds = run.seconds_until(victim == 0 ? 1 : 0, words, 10);
    EXPECT_TRUE(seconds > 1.5 && seconds < 5) << seconds;
    ::kill(run.process(victim), SIGCONT);  // nothing has ended by it
    EXPECT_GT(run.seconds_until(victim == 0 ? 1 : 0, "is heard again", 5), 0);
    EXPECT_EQ(::kill(run.process(2), 0), 0);
  }
}

TEST(Failure, ATimeoutNamesTheOperationAndWhoIsBehind) {
  Ranks run("late", 3);
  run.set("ACCELERATE_TIMEOUT", "3")
      .set("FAILURE_VICTIM", "2")
      .set("ACCELERATE_HEARTBEAT_TIMEOUT", "30")
      .start_all();
  // Where one is clearly first to time out and end, the other may see that end before.
  int timed_out = 0;
  for (const int rank : {0, 1}) {
    const auto outcome = run.outcome(rank);
    EXPECT_LT(outcome.seconds, 12) << outcome;
    if (outcome.has("TimeoutError|all_reduce|")) {
      ++timed_out;
      EXPECT_TRUE(outcome.has("timeout of 3.0 s")) << outcome;
      EXPECT_TRUE(outcome.has("rank 2 had not started")) << outcome;
    } else {
      expect_lost(outcome, 1 - rank, "an exception ended its part", 12);
    }
  }
  EXPECT_GE(timed_out, 1);
}

TEST(Failure, AMissingRankIsNamed) {
  Ranks run("part", 4);
  run.set("ACCELERATE_TIMEOUT", "2").start(0);
  run.start(2);
  for (const int rank : {0, 2}) {
    const auto outcome = run.outcome(rank);
    EXPECT_TRUE(outcome.has("TimeoutError|rendezvous|")) << outcome;
    EXPECT_TRUE(outcome.has("rank 1, 3 did not come")) << outcome;
    EXPECT_LT(outcome.seconds, 15) << outcome;
  }
}

TEST(Failure, ARankZeroThatNeverComes) {
  Ranks run("part", 2);
  run.set("ACCELERATE_TIMEOUT", "2").start(1);
  const auto outcome = run.outcome(1);
  EXPECT_TRUE(outcome.has("TimeoutError|rendezvous|")) << outcome;
  EXPECT_TRUE(outcome.has("found no rank 0 at 127.0.0.1:")) << outcome;
  EXPECT_LT(outcome.seconds, 15) << outcome;
}

TEST(Failure, ATakenPortIsNamed) {
  const int socket = ::socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(socket, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(socket, 8), 0);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  const auto port = std::to_string(ntohs(address.sin6_port));
  Ranks run("part", 2);
  run.set("MASTER_PORT", port).set("ACCELERATE_TIMEOUT", "2").start_all();
  // Rank 0 cannot have it; to the others it is open, and nobody answers there.
  const auto first = run.outcome(0);
  const auto second = run.outcome(1);
  ::close(socket);
  EXPECT_TRUE(first.has("ConfigError|")) << first;
  EXPECT_TRUE(first.has("Port " + port)) << first;
  EXPECT_LT(first.seconds, 15) << first;
  EXPECT_TRUE(second.has("TimeoutError|rendezvous|")) << second;
  EXPECT_TRUE(second.has("does not answer as a store does")) << second;
  EXPECT_LT(second.seconds, 15) << second;
}

TEST(Failure, TwoProcessesOfOneRank) {
  Ranks run("part", 3);
  run.set("ACCELERATE_TIMEOUT", "3");
  run.start(0);
  run.start(1);
  run.start(1, "again");
  const auto first = run.outcome(1);
  const auto second = run.outcome(1, "again");
  // Whichever came later.
  EXPECT_TRUE(first.has("as rank 1 before this one") != second.has("as rank 1 before this one"))
      << first << second;
}

/// What mpirun and three ranks of this program say, and mpirun's status.
Outcome under_mpirun(const std::string& name) {
  const std::string command = "FAILURE_CASE=" + name +
                              " ACCELERATE_TIMEOUT=40 ACCELERATE_HEARTBEAT_TIMEOUT=2 "
                              "OMP_NUM_THREADS=1 timeout -s KILL 35 " ACCELERATE_TEST_MPIEXEC
                              " -n 3 " +
                              fs::read_symlink("/proc/self/exe").string() + " 2>&1";
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) throw DataError("no shell could be started");
  Outcome outcome;
  for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe))
    outcome.said += static_cast<char>(c);
  outcome.status = ::pclose(pipe);
  return outcome;
}

TEST(Failure, UnderMpirunToo) {
  if (std::string(ACCELERATE_TEST_MPIEXEC).empty()) GTEST_SKIP() << "no MPI was found";
  for (const auto& [name, reason] :
       {std::pair{"kill", "its process ended"}, std::pair{"stop", "it has been silent"}}) {
    const Outcome outcome = under_mpirun(name);
    EXPECT_NE(outcome.status, 0) << outcome;
    // mpirun itself ends the others when one dies, and may be faster than their own words.
    EXPECT_TRUE(outcome.has(std::string("rank 1 was lost: ") + reason) ||
                outcome.has("process rank 1"))
        << outcome;
  }
}

TEST(Failure, AnExitUnderMpirunEndsAllAtOnce) {
  if (std::string(ACCELERATE_TEST_MPIEXEC).empty()) GTEST_SKIP() << "no MPI was found";
  const Outcome outcome = under_mpirun("exit");
  EXPECT_NE(outcome.status, 0) << outcome;
  EXPECT_TRUE(outcome.has("its process ended with exit code 7") || outcome.has("Exit code:    7"))
      << outcome;
  // What they say when they wait for a rank that seems to be done.
  EXPECT_FALSE(outcome.has("has left the run")) << outcome;
}

TEST(Failure, WhatNobodyWaitedForEndsBeforeMpiDoes) {
  if (std::string(ACCELERATE_TEST_MPIEXEC).empty()) GTEST_SKIP() << "no MPI was found";
  const Outcome outcome = under_mpirun("unwaited");
  EXPECT_EQ(outcome.status, 0) << outcome;
}

TEST(Failure, LeavingIsNoDeath) {
  Ranks run("part", 3);
  run.start_all();
  for (int rank = 0; rank < 3; ++rank) {
    const auto outcome = run.outcome(rank);
    EXPECT_EQ(outcome.status, 0) << outcome;
    EXPECT_TRUE(outcome.has("DONE")) << outcome;
  }
}

TEST(Failure, WhoeverNeedsARankThatLeftIsTold) {
  Ranks run("leave", 3);
  run.start_all();
  EXPECT_EQ(run.outcome(1).status, 0);
  // As with a timeout: the second to give up may see the first one's end.
  int told = 0;
  for (const int rank : {0, 2}) {
    const auto outcome = run.outcome(rank);
    EXPECT_TRUE(outcome.has("ALONE")) << outcome;
    EXPECT_LT(outcome.seconds, 10) << outcome;  // 5 s after it left, a moment after the start
    if (outcome.has("PeerLostError|all_reduce|1|")) {
      ++told;
      EXPECT_TRUE(outcome.has("has left the run")) << outcome;
    } else {
      expect_lost(outcome, 2 - rank, "an exception ended its part", 20);
    }
  }
  EXPECT_GE(told, 1);
}

// ---- Strangers ----

/// The addresses and ports at which a process listens, as the kernel writes them.
std::vector<std::pair<std::string, int>> listening(pid_t process) {
  const fs::path proc = "/proc/" + std::to_string(process);
  std::string sockets;
  for (const auto& entry : fs::directory_iterator(proc / "fd")) {
    std::error_code ignored;
    sockets += fs::read_symlink(entry.path(), ignored).string() + " ";
  }
  std::vector<std::pair<std::string, int>> found;
  for (const char* table : {"tcp", "tcp6"}) {
    std::ifstream in(proc / "net" / table);
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) {
      std::istringstream fields(line);
      std::string number, local, remote, state, queues, timer, retries, user, timeout, inode;
      fields >> number >> local >> remote >> state >> queues >> timer >> retries >> user >>
          timeout >> inode;
      if (state != "0A" || sockets.find("socket:[" + inode + "]") == std::string::npos) continue;
      const auto colon = local.find(':');
      found.emplace_back(local.substr(0, colon), std::stoi(local.substr(colon + 1), nullptr, 16));
    }
  }
  return found;
}

int connect_to_loopback(int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  if (::connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return socket;
  ::close(socket);
  return -1;
}

TEST(Strangers, NothingListensBeyondLoopback) {
  Ranks run("linger", 2);
  run.start_all();
  for (int rank = 0; rank < 2; ++rank) ASSERT_GE(run.seconds_until(rank, "MET", 20), 0);
  for (int rank = 0; rank < 2; ++rank) {
    const auto sockets = listening(run.process(rank));
    EXPECT_FALSE(sockets.empty());
    for (const auto& [address, port] : sockets) EXPECT_EQ(address, "0100007F") << port;
  }
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(run.outcome(rank).status, 0);
}

TEST(Strangers, WhoeverReachesThePortsBreaksNothing) {
  Ranks run("linger", 3);
  run.set("ACCELERATE_SECRET", "of this test and of no other process").start(0);
  std::vector<int> sockets;
  // Before the others come: silence, noise, and words that an older version believed.
  const auto attack = [&](int port) {
    for (int i = 0; i < 40; ++i) {
      const int socket = connect_to_loopback(port);
      if (socket < 0) continue;
      std::string words(static_cast<std::size_t>(i % 4) * 30, static_cast<char>(i));
      if (i % 5 == 1)
        words = std::string("\x00\x1e\xce\xac\x01\x00\x00\x00", 8) + std::string(120, '\0');
      if (i % 5 == 2) words = "\x00";
      [[maybe_unused]] const auto sent = ::send(socket, words.data(), words.size(), MSG_NOSIGNAL);
      sockets.push_back(socket);
    }
  };
  int first = -1;
  for (int i = 0; i < 500 && first < 0; ++i) {
    first = connect_to_loopback(run.port());
    std::this_thread::sleep_for(milliseconds(10));
  }
  ASSERT_GE(first, 0);
  attack(run.port());
  run.start(1);
  run.start(2);
  // And while they train. The watch's port closes as soon as all have come: liveness_test.
  while (run.seconds_until(1, "MET", 0.05) < 0) attack(run.port());
  attack(run.port());
  for (int rank = 0; rank < 3; ++rank) {
    const auto outcome = run.outcome(rank);
    EXPECT_EQ(outcome.status, 0) << outcome;
    EXPECT_FALSE(outcome.has("was lost")) << outcome;
  }
  ::close(first);
  for (const int socket : sockets) ::close(socket);
}

TEST(Strangers, AnotherSecretIsRefused) {
  Ranks run("part", 2);
  run.set("ACCELERATE_TIMEOUT", "2").set("ACCELERATE_SECRET", "the first of two secrets");
  run.start(0);
  run.set("ACCELERATE_SECRET", "the second of two secrets").start(1);
  const auto refused = run.outcome(1);
  EXPECT_TRUE(refused.has("ConfigError|")) << refused;
  EXPECT_TRUE(refused.has("another secret is expected there")) << refused;
  EXPECT_TRUE(run.outcome(0).has("rank 1 did not come"));
}

TEST(Strangers, WhereOtherMachinesCanComeASecretIsNeeded) {
  for (const char* secret : {"", "a secret for all the ranks"}) {
    Ranks run("part", 2);
    // An address of nobody here: rank 0 would listen at all interfaces.
    run.set("MASTER_ADDR", "192.0.2.1").set("ACCELERATE_TIMEOUT", "2");
    run.set("ACCELERATE_SECRET", secret).start_all();
    for (int rank = 0; rank < 2; ++rank) {
      const auto outcome = run.outcome(rank);
      EXPECT_EQ(outcome.has("ConfigError|"), std::string(secret).empty()) << outcome;
      EXPECT_EQ(outcome.has("openssl rand -hex 32"), std::string(secret).empty()) << outcome;
    }
  }
}

TEST(Strangers, ASecretInAFileIsTheOwnersAlone) {
  const auto file = fs::temp_directory_path() / ("accelerate-secret-" + std::to_string(::getpid()));
  std::ofstream(file) << "a secret in the first line\nand more\n";
  fs::permissions(file, fs::perms::owner_read | fs::perms::owner_write);
  Ranks run("part", 2);
  run.set("ACCELERATE_SECRET_FILE", file.string()).start_all();
  for (int rank = 0; rank < 2; ++rank) {
    const auto outcome = run.outcome(rank);
    EXPECT_EQ(outcome.status, 0) << outcome;
  }
  fs::permissions(file, fs::perms::others_read, fs::perm_options::add);
  Ranks open("part", 2);
  open.set("ACCELERATE_SECRET_FILE", file.string()).start(0);
  const auto outcome = open.outcome(0);
  EXPECT_TRUE(outcome.has("others may read or write")) << outcome;
  EXPECT_FALSE(outcome.has("a secret in the first line")) << outcome;
  fs::remove(file);
}

TEST(Failure, DebugModeFindsMismatchesOnEveryRank) {
  for (const auto& [name, found] :
       {std::pair{"shapes",
                  "rank 0 calls all_reduce of Float[4] (sum); rank 1 calls all_reduce of Float[5] "
                  "(sum). All ranks have to make the same calls"},
        std::pair{"operations",
                  "rank 0 calls all_reduce of Float[4] (sum); rank 1 calls broadcast of Float[4] "
                  "(from rank 0)."},
        std::pair{"calls",
                  "rank 0 calls all_gather of Float[4] in gather(); rank 1 calls all_reduce of "
                  "Float[4] (sum) in reduce()."}}) {
    Ranks run(name, 2);
    run.set("ACCELERATE_DEBUG_MODE", "1").start_all();
    for (int rank = 0; rank < 2; ++rank) {
      const auto outcome = run.outcome(rank);
      EXPECT_TRUE(outcome.has("DistributedError|")) << outcome;
      EXPECT_TRUE(outcome.has(found)) << outcome;
      EXPECT_FALSE(outcome.has("CollectiveFingerPrint")) << outcome;
      EXPECT_LT(outcome.seconds, 15) << outcome;
    }
  }
  Ranks plain("shapes", 2);  // Gloo ends the process then, and that is explained
  plain.start_all();
  const auto one = plain.outcome(0), other = plain.outcome(1);
  EXPECT_TRUE(one.has("with ACCELERATE_DEBUG_MODE=1") || other.has("with ACCELERATE_DEBUG_MODE=1"));
}

TEST(Failure, DebugModeSaysNoLessOfATimeout) {
  for (const bool debug : {false, true}) {
    Ranks run("late", 2);
    run.set("ACCELERATE_DEBUG_MODE", debug ? "1" : "0").set("ACCELERATE_TIMEOUT", "3");
    run.start_all();
    const auto outcome = run.outcome(0);
    EXPECT_TRUE(outcome.has("TimeoutError|all_reduce|")) << outcome;
    EXPECT_TRUE(outcome.has("By its last sign of life, rank 1 had not started this operation."))
        << outcome;
    EXPECT_NE(outcome.has("ACCELERATE_DEBUG_MODE=1"), debug) << outcome;
  }
}

TEST(Failure, AfterShutdownNothingRuns) {
  Ranks run("closed", 2);
  run.start_all();
  const auto outcome = run.outcome(1);
  EXPECT_TRUE(outcome.has("after the run was shut down")) << outcome;
}

TEST(Failure, BackendsThatCannotWorkAreRefused) {
  Ranks nccl("part", 2);
  nccl.set("FAILURE_NCCL", "1").start(0);
  EXPECT_TRUE(nccl.outcome(0).has("ConfigError||-1|The nccl backend communicates CUDA tensors"));
  Ranks nonsense("part", 2);
  nonsense.set("ACCELERATE_BACKEND", "smoke").start(0);
  EXPECT_TRUE(nonsense.outcome(0).has("The backends are auto, gloo, mpi and nccl"));
}

TEST(Failure, ByFile) {
  Ranks run("part", 2);
  const auto file = fs::temp_directory_path() / ("accelerate-meet-" + std::to_string(::getpid()));
  std::ofstream(file) << "stale.host.invalid 1\n";  // left over from an earlier run
  run.set("ACCELERATE_RENDEZVOUS_FILE", file.string()).start_all();
  for (int rank = 0; rank < 2; ++rank) {
    const auto outcome = run.outcome(rank);
    EXPECT_EQ(outcome.status, 0) << outcome;
  }
  EXPECT_FALSE(fs::exists(file));
  ASSERT_EQ(::mkfifo(file.c_str(), 0600), 0);
  Ranks piped("part", 2);
  piped.set("ACCELERATE_RENDEZVOUS_FILE", file.string()).set("ACCELERATE_TIMEOUT", "3").start_all();
  for (int rank = 0; rank < 2; ++rank) {
    const auto outcome = piped.outcome(rank);
    EXPECT_TRUE(outcome.has("which is a named pipe")) << outcome;
  }
  fs::remove(file);
  Ranks unwritable("part", 2);
  unwritable.set("ACCELERATE_RENDEZVOUS_FILE", "/nowhere/at/all").start(0);
  EXPECT_TRUE(unwritable.outcome(0).has("cannot be written"));
}

}  // namespace
}  // namespace accelerate::comm

int main(int argc, char** argv) {
  if (const char* name = std::getenv("FAILURE_CASE")) return accelerate::comm::rank_main(name);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
