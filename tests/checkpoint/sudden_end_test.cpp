// Saves that fail or are killed at every instant: the checkpoint before stays, or the new one is
// complete.

#include "checkpoint/session.hpp"

#include <accelerate/base/environment.hpp>
#include <accelerate/base/text.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <random>
#include <thread>

namespace accelerate::checkpoints {
namespace {

// ------------------------------------------------------------------- faults at every operation

std::atomic<int> calls{0};
std::atomic<int> failing{-1};

int fail_one(io::faults::Operation, const fs::path&, std::size_t& bytes) {
  if (bytes > 4096) bytes /= 2;
  return calls++ == failing ? ENOSPC : 0;
}

TEST(SuddenEnds, AFailureAtAnyCallOnOneProcessLeavesThePreviousCheckpoint) {
  const SharedFolder folder;
  const fs::path saved = folder.path() / "saved";
  Session run(world(), own_strategy(), 1);
  run.step(1);
  run.save(saved);
  run.save(folder.path() / "copy");
  const auto weight = [&](const fs::path& of) { return everything(of).at("model/in.weight"); };
  run.step(2);
  run.save(folder.path() / "next");
  const auto put_back = [&] {  // puts back what was replaced
    if (world().rank() == 0) {
      io::delete_path(saved);
      fs::copy(folder.path() / "copy", saved, fs::copy_options::recursive);
    }
    world().barrier();
  };
  // One process fails, the others are told.
  const int culprit = world().size() - 1;
  for (const int rank : {0, culprit}) {
    for (int at = 0;; ++at) {
      calls = 0;
      failing = world().rank() == rank ? at : -1;
      io::faults::set_hook(fail_one);
      std::string message;
      try {
        run.save(saved);
      } catch (const CheckpointError& error) {
        message = describe(error);
      }
      io::faults::set_hook(nullptr);
      world().barrier();
      // Once the new one has its name, what fails is a warning.
      if (message.empty()) {
        if (world().rank() == 0) {
          EXPECT_TRUE(at::equal(weight(saved), weight(folder.path() / "next"))) << "call " << at;
        }
        const bool reached = world().broadcast_bytes(calls > at ? "1" : "0", rank) == "1";
        if (!reached) break;
        ASSERT_EQ(rank, 0) << "call " << at << " failed and nobody was told";
        put_back();
        continue;
      }
      expect_says(message, {"No space left on device"});
      if (world().rank() == 0) {
        EXPECT_TRUE(at::equal(weight(saved), weight(folder.path() / "copy"))) << "call " << at;
      }
      ASSERT_LT(at, 500);
    }
    put_back();
  }
}

// ------------------------------------------------------------------------------ sudden ends

// What a child process does until it is killed: saves over and over in one folder, and says through
// the pipe which save is complete.
[[noreturn]] void save_until_killed(const fs::path& folder, int pipe, int first) {
  Session run(comm::Group(), "single", 1);
  for (int number = first;; ++number) {
    Save save(comm::Group(), folder);
    save.add(module_group(*run.strategy, "model"));
    save.set_about({{"number", number}});
    save.plan();
    save.write(comm::Group());
    if (::write(pipe, &number, sizeof number) != sizeof number) ::_exit(1);
  }
}

// Forks a child that saves, has `meanwhile` end it, and checks what is left. Returns the number of
// the checkpoint that is there.
template <class Meanwhile>
int check_after_death(const fs::path& folder, int first, bool kills_itself, Meanwhile&& meanwhile) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    if (kills_itself) meanwhile(child);
    save_until_killed(folder, ends[1], first);
  }
  ::close(ends[1]);
  if (!kills_itself) meanwhile(child);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  int finished = first - 1;
  for (int number = 0; ::read(ends[0], &number, sizeof number) == sizeof number;) finished = number;
  ::close(ends[0]);
  Load load(comm::Group(), folder);
  load.verify();
  const int there = load.manifest().about.at("number").template get<int>();
  EXPECT_GE(there, finished);
  EXPECT_LE(there, finished + 1);
  return there;
}

// A checkpoint, so that there is one whenever the child dies.
fs::path first_save(const fs::path& folder) {
  Save save(comm::Group(), folder / "saved");
  save.set_about({{"number", 0}});
  save.plan();
  save.write(comm::Group());
  return save.folder();
}

TEST(SuddenEnds, AfterAKillAtAnyInstantACompleteCheckpointLoads) {
  if (world().size() > 1) GTEST_SKIP() << "forks a process of its own";
  const SharedFolder folder;
  const fs::path saved = first_save(folder.path());
  std::mt19937 random(17);
  std::uniform_real_distribution<double> when(0, 1);
  std::chrono::duration<double> longest = std::chrono::milliseconds(15);
  int there = 0;
  for (int round = 0; round < (full() ? 400 : 40); ++round) {
    const int before = there;
    const auto delay = longest * when(random);
    there = check_after_death(saved, there + 1, false, [&](pid_t child) {
      std::this_thread::sleep_for(delay);
      ::kill(child, SIGKILL);
    });
    ASSERT_FALSE(::testing::Test::HasFailure()) << "round " << round;
    if (there == before) longest *= 1.5;  // a slow machine gets the time of some saves, too
  }
  EXPECT_GT(there, 0);  // some saves came to an end
}

std::atomic<int> dies_in{0};
std::atomic<bool> exchanges{true};
int die_at(io::faults::Operation operation, const fs::path&, std::size_t& bytes) {
  if (bytes > 4096) bytes /= 2;
  if (dies_in-- == 0) ::raise(SIGKILL);
  // As on a file system that cannot exchange two names.
  return operation == io::faults::Operation::kExchange && !exchanges ? EINVAL : 0;
}

TEST(SuddenEnds, AfterADeathAtEveryOperationACompleteCheckpointLoads) {
  if (world().size() > 1) GTEST_SKIP() << "forks a process of its own";
  for (const bool can : {true, false}) {
    const SharedFolder folder;
    const fs::path saved = first_save(folder.path());
    int there = 0;
    int operations = 0;
    for (; operations < 300; ++operations) {
      const int last = there;
      there = check_after_death(saved, last + 1, true, [&](pid_t) {
        exchanges = can;
        dies_in = operations;
        io::faults::set_hook(die_at);
      });
      ASSERT_FALSE(::testing::Test::HasFailure()) << "operation " << operations;
      if (there > last + 1) break;  // two saves came to an end: every operation of one had its turn
    }
    EXPECT_GT(operations, 8);
  }
}

// ------------------------------------------------------------------------- one of several dies

// Run by the ranks that the next test starts, of which one is killed while it saves.
TEST(SuddenEnds, DISABLED_SavesUntilOneIsKilled) {
  const Environment environment = Environment::process();
  const fs::path folder = environment.get("SUDDEN_FOLDER").value();
  std::signal(SIGTERM, SIG_IGN);  // the launcher ends the survivors; they are to end by themselves
  Session run(world(), "fsdp", 1);
  run.step(1);
  run.save(folder / "saved");
  run.step(2);
  if (world().rank() == environment.get_int("SUDDEN_VICTIM")) {
    dies_in = static_cast<int>(environment.get_int("SUDDEN_AT").value());
    io::faults::set_hook(die_at);
  }
  std::string end = "nothing was thrown";
  try {
    for (int saves = 0; saves < 20; ++saves) run.save(folder / "saved");
  } catch (const PeerLostError& error) {
    end = text::concat("lost ", error.lost_rank());
  } catch (const Error& error) {
    end = describe(error);
  }
  io::write_file(folder / ("end" + std::to_string(world().rank())), end);
  ::_exit(0);  // the others are gone
}

TEST(SuddenEnds, WhenOneOfSeveralIsKilledTheOthersSayItAndThePreviousCheckpointLoads) {
  if (world().size() > 1) GTEST_SKIP() << "starts ranks of its own";
  const std::string self = fs::read_symlink("/proc/self/exe").string();
  std::vector<std::pair<int, int>> deaths{{0, 3}, {2, 1}};
  if (full()) {
    deaths.clear();
    for (int at = 0; at < 24; ++at)
      for (const int victim : {0, 1, 2}) deaths.emplace_back(victim, at);
  }
  for (const auto& [victim, at] : deaths) {
    const io::TemporaryFolder folder;
    const std::string command =
        text::concat("SUDDEN_FOLDER='", folder.path().string(), "' SUDDEN_VICTIM=", victim,
                     " SUDDEN_AT=", at, " '" ACCELERATE_CLI "' launch -n 3 '", self,
                     "' --gtest_also_run_disabled_tests --gtest_filter=*SavesUntilOneIsKilled >'",
                     (folder.path() / "log").string(), "' 2>&1");
    const int status = std::system(command.c_str());
    const std::string log = io::read_file(folder.path() / "log");
    EXPECT_EQ(WEXITSTATUS(status), 128 + SIGKILL) << log;
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      const fs::path end = folder.path() / ("end" + std::to_string(rank));
      ASSERT_TRUE(fs::exists(end)) << "rank " << rank << " did not end by itself: " << log;
      EXPECT_EQ(io::read_file(end), text::concat("lost ", victim)) << "killed at call " << at;
    }
    EXPECT_GT(everything(folder.path() / "saved").size(), 12U);
    Session run(comm::Group(), "single", 2);
    run.load(folder.path() / "saved");
  }
}

}  // namespace
}  // namespace accelerate::checkpoints
