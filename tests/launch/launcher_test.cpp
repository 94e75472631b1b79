// Ranks are shell scripts here: the launcher knows nothing of what it starts.
#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/launch/launcher.hpp>

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <thread>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

class Launcher : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = fs::temp_directory_path() / "accelerate_launch_XXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  /// Options that run `script` in each process, with $D as the test's own folder.
  LaunchOptions shell(const std::string& script, int processes) {
    Environment environment = Environment::process();
    environment.set("D", folder_);
    environment.unset("OMP_NUM_THREADS");
    return LaunchOptions({"sh", "-c", script}).processes(processes).environment(environment);
  }

  std::string read(const std::string& name) const {
    std::ifstream in(folder_ / name);
    std::ostringstream out;
    out << in.rdbuf();
    return out.str();
  }

  bool wait_for(const std::string& name) const {
    for (int tries = 0; tries < 500; ++tries) {
      if (fs::exists(folder_ / name) && fs::file_size(folder_ / name) > 0) return true;
      std::this_thread::sleep_for(milliseconds(10));
    }
    return false;
  }

  fs::path folder_;
};

/// Whether a process exists and is not a zombie.
bool alive(int pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(in, line)) return false;
  const auto at = line.rfind(')');
  return at != std::string::npos && line.compare(at + 2, 1, "Z") != 0;
}

bool dies_within(int pid, milliseconds limit) {
  const auto end = Clock::now() + limit;
  while (alive(pid)) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(10));
  }
  return true;
}

LaunchError error_of(const LaunchOptions& options) {
  try {
    const int code = launch(options);
    ADD_FAILURE() << "the launch returned " << code << " and an error was expected";
  } catch (const LaunchError& error) {
    return error;
  }
  return LaunchError("", 0);
}

TEST_F(Launcher, GivesEachProcessTorchrunsVariables) {
  const auto options = shell(
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $MASTER_ADDR $MASTER_PORT "
      "$OMP_NUM_THREADS > $D/$RANK",
      3);
  EXPECT_EQ(launch(options), 0);
  std::set<std::string> ports;
  for (int rank = 0; rank < 3; ++rank) {
    const auto words = text::split(std::string(text::trim(read(std::to_string(rank)))), ' ');
    ASSERT_EQ(words.size(), 8u);
    EXPECT_EQ(words[0], std::to_string(rank));
    EXPECT_EQ(words[1], std::to_string(rank));
    EXPECT_EQ(words[2], "3");
    EXPECT_EQ(words[3], "3");
    EXPECT_EQ(words[4], "0");
    EXPECT_EQ(words[5], "127.0.0.1");
    EXPECT_GT(*text::to_int(words[6]), 0);
    ports.insert(words[6]);
    EXPECT_EQ(words[7], std::to_string(std::max(1, available_cores() / 3)));
  }
  EXPECT_EQ(ports.size(), 1u);
}

TEST_F(Launcher, EveryRunHasASecretOfItsOwnThatNoArgumentHolds) {
  const std::string script =
      "echo $ACCELERATE_SECRET > $D/$1$RANK; tr '\\0' ' ' < /proc/$$/cmdline >> $D/arguments";
  for (const char* run : {"a", "b"}) {
    auto options = shell(script, 2);
    options.command().insert(options.command().end(), {"sh", run});
    ASSERT_EQ(launch(options), 0);
  }
  EXPECT_EQ(read("a0").size(), 65u);
  EXPECT_EQ(read("a0"), read("a1"));
  EXPECT_NE(read("a0"), read("b0"));
  EXPECT_EQ(read("arguments").find(read("a0").substr(0, 64)), std::string::npos);
  auto given = shell(script, 1);
  given.command().insert(given.command().end(), {"sh", "c"});
  given.environment().set("ACCELERATE_SECRET", "of the user's own choice");
  ASSERT_EQ(launch(given), 0);
  EXPECT_EQ(read("c0"), "of the user's own choice\n");
}

TEST_F(Launcher, KeepsTheEnvironmentsOpenMpThreadsUnlessTold) {
  auto options = shell("echo $OMP_NUM_THREADS > $D/threads", 1);
  options.environment().set("OMP_NUM_THREADS", "7");
  EXPECT_EQ(launch(options), 0);
  EXPECT_EQ(read("threads"), "7\n");
  EXPECT_EQ(launch(options.omp_num_threads(3)), 0);
  EXPECT_EQ(read("threads"), "3\n");
}

TEST_F(Launcher, NamesTheRankThatFailedAndEndsTheOthers) {
  const auto start = Clock::now();
  const auto error = error_of(
      shell("echo $$ > $D/pid$RANK; [ $RANK = 1 ] && { sleep 0.1; exit 7; }; exec sleep 300", 3));
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(3));
  EXPECT_EQ(error.exit_code(), 7);
  const std::string pid = std::string(text::trim(read("pid1")));
  EXPECT_NE(std::string(error.what()).find("rank 1 of 3 (pid " + pid + ") ended with exit code 7"),
            std::string::npos)
      << error.what();
  EXPECT_NE(std::string(error.what()).find("stopped the other 2 running ranks"), std::string::npos)
      << error.what();
  EXPECT_FALSE(alive(static_cast<int>(*text::to_int(read("pid0")))));
  EXPECT_FALSE(alive(static_cast<int>(*text::to_int(read("pid2")))));
}

TEST_F(Launcher, NamesTheSignalThatKilledARank) {
  const auto error = error_of(shell("[ $RANK = 0 ] && kill -SEGV $$; exec sleep 300", 2));
  EXPECT_EQ(error.exit_code(), 128 + SIGSEGV);
  EXPECT_NE(std::string(error.what()).find("was killed by SIGSEGV"), std::string::npos)
      << error.what();
}

TEST_F(Launcher, KillsRanksThatIgnoreSigterm) {
  auto options = shell(
      "trap '' TERM; echo $$ > $D/pid$RANK; if [ $RANK = 1 ]; then "
      "while [ ! -s $D/pid0 ]; do sleep 0.01; done; exit 3; fi; while :; do sleep 0.05; done",
      2);
  const auto start = Clock::now();
  const auto error = error_of(options.grace_period(milliseconds(300)));
  const auto taken = Clock::now() - start;
  EXPECT_GE(taken, milliseconds(300));
  EXPECT_LT(taken, std::chrono::seconds(3));
  EXPECT_EQ(error.exit_code(), 3);
  EXPECT_NE(std::string(error.what()).find("did not stop on SIGTERM"), std::string::npos)
      << error.what();
  EXPECT_FALSE(alive(static_cast<int>(*text::to_int(read("pid0")))));
}

TEST_F(Launcher, EndsWhatARankStarted) {
  EXPECT_EQ(launch(shell("sleep 300 & echo $! > $D/grandchild", 1)), 0);
  EXPECT_TRUE(dies_within(static_cast<int>(*text::to_int(read("grandchild"))), milliseconds(2000)));
}

TEST_F(Launcher, LeavesNoZombies) {
  EXPECT_EQ(launch(shell("true", 4)), 0);
  error_of(shell("exit $RANK", 4));
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST_F(Launcher, RestoresTheSignalMask) {
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  EXPECT_EQ(launch(shell("true", 1)), 0);
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int number = 1; number < NSIG; ++number) {
    EXPECT_EQ(sigismember(&before, number), sigismember(&after, number)) << number;
  }
}

TEST_F(Launcher, WritesEachRanksOutputToItsOwnFiles) {
  const std::string logs = folder_ / "a" / "b";
  const auto error =
      error_of(shell("echo out $RANK; echo err $RANK >&2; exit $RANK", 2).log_dir(logs));
  EXPECT_EQ(read("a/b/rank_0.out"), "out 0\n");
  EXPECT_EQ(read("a/b/rank_1.err"), "err 1\n");
  EXPECT_NE(std::string(error.what()).find(logs + "/rank_1.err"), std::string::npos);
}

TEST_F(Launcher, SaysWhyAProgramCannotBeStarted) {
  const auto message_of = [](std::vector<std::string> command) {
    return std::string(error_of(LaunchOptions(std::move(command))).what());
  };
  EXPECT_NE(message_of({folder_ / "nothing"}).find("does not exist"), std::string::npos);
  EXPECT_NE(message_of({folder_}).find("is a folder"), std::string::npos);
  EXPECT_NE(message_of({"no-such-program-anywhere"}).find("is not on PATH"), std::string::npos);
  EXPECT_NE(message_of({}).find("No program"), std::string::npos);

  std::ofstream(folder_ / "plain") << "echo hello\n";
  EXPECT_NE(message_of({folder_ / "plain"}).find("is not executable"), std::string::npos);
  fs::permissions(folder_ / "plain", fs::perms::owner_all);
  EXPECT_NE(message_of({folder_ / "plain"}).find("neither a program nor a script"),
            std::string::npos);
  std::ofstream(folder_ / "lost") << "#!/no/such/interpreter\n";
  fs::permissions(folder_ / "lost", fs::perms::owner_all);
  EXPECT_NE(message_of({folder_ / "lost"}).find("interpreter"), std::string::npos);
  EXPECT_EQ(error_of(LaunchOptions({folder_ / "lost"})).exit_code(), 127);
}

TEST_F(Launcher, RefusesNumbersThatMakeNoSense) {
  EXPECT_NE(std::string(error_of(shell("true", 0)).what()).find("number of processes is 0"),
            std::string::npos);
  EXPECT_NE(std::string(error_of(shell("true", 1).master_port(70000)).what()).find("70000"),
            std::string::npos);
  EXPECT_NE(std::string(error_of(shell("true", 1).omp_num_threads(-1)).what()).find("-1"),
            std::string::npos);
}

TEST_F(Launcher, RefusesAPortInUse) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  ASSERT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  socklen_t size = sizeof address;
  getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  const int port = ntohs(address.sin_port);
  const auto error = error_of(shell("true", 1).master_port(port));
  EXPECT_NE(std::string(error.what()).find(text::concat("Port ", port, " is in use")),
            std::string::npos)
      << error.what();
  close(listener);
  EXPECT_EQ(launch(shell("test $MASTER_PORT = " + std::to_string(port), 1).master_port(port)), 0);
}

// ---------------------------------------------------------------- the program

struct Ran {
  int code;
  std::string output;
};

/// Runs a command line with both outputs in one.
Ran run(const std::string& command) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  std::string output;
  char buffer[4096];
  while (const auto got = fread(buffer, 1, sizeof buffer, pipe)) output.append(buffer, got);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), output};
}

const std::string kProgram = ACCELERATE_CLI;

/// Starts the program in the background, as the leader of a process group.
pid_t start(const std::vector<std::string>& arguments) {
  const pid_t child = fork();
  if (child != 0) return child;
  setpgid(0, 0);
  std::vector<char*> argv{const_cast<char*>(kProgram.c_str())};
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(argv[0], argv.data());
  _exit(127);
}

int wait_code(pid_t pid) {
  int status = 0;
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_F(Launcher, ProgramPassesEverythingAfterTheProgramThrough) {
  for (const char* spelling : {"-n 2", "-np 2", "-n2", "--nproc-per-node=2", "--num_processes 2"}) {
    const Ran ran =
        run(kProgram + " launch " + spelling +
            " --cpu sh -c '[ $RANK = 0 ] || exit 0; echo $WORLD_SIZE \"$@\"' x -np 3 -- --help -n");
    EXPECT_EQ(ran.code, 0) << spelling << ran.output;
    EXPECT_EQ(ran.output, "2 -np 3 -- --help -n\n") << spelling;
  }
}

TEST_F(Launcher, ProgramSetsTheOriginalsVariables) {
  const Ran ran = run(
      kProgram +
      " launch --cpu --debug --mixed-precision bf16 --strategy zero2 --gradient-accumulation-steps "
      "4 --omp-num-threads 5 sh -c 'echo $ACCELERATE_USE_CPU "
      "$ACCELERATE_DEBUG_MODE $ACCELERATE_MIXED_PRECISION $ACCELERATE_STRATEGY "
      "$ACCELERATE_GRADIENT_ACCUMULATION_STEPS $OMP_NUM_THREADS'");
  EXPECT_EQ(ran.output, "true true bf16 zero2 4 5\n");
}

TEST_F(Launcher, ProgramReportsMistakesInUse) {
  for (const auto& [arguments, word] : std::vector<std::pair<std::string, std::string>>{
           {"launch", "PROGRAM"},
           {"launch --wrong 3 true", "--wrong"},
           {"launch -n x true", "x"},
           {"launch -n 0 true", "at least 1"},
           {"launch --mixed-precision fp7 true", "fp7"},
           {"launch --mixed-precision fp8 true", "fp8"},  // the library has none
           {"launch --strategy zero4 true", "zero4"},
           {"nonsense", "nonsense"},
           {"", "subcommand"}}) {
    const Ran ran = run(kProgram + " " + arguments);
    EXPECT_EQ(ran.code, 2) << arguments << ": " << ran.output;
    EXPECT_NE(ran.output.find(word), std::string::npos) << arguments << ": " << ran.output;
  }
}

TEST_F(Launcher, ProgramExitsAsTheFailedRankDid) {
  const Ran ran = run(kProgram + " launch -n 3 sh -c 'exit $((RANK * 5 % 7))'");
  EXPECT_TRUE(ran.code == 5 || ran.code == 3) << ran.output;
  EXPECT_EQ(run(kProgram + " launch -n 2 /no/such/program").code, 127);
}

TEST_F(Launcher, ProgramPassesSignalsOn) {
  setenv("D", folder_.c_str(), 1);
  const std::string script =
      "trap 'echo got > $D/got$RANK; exit $CODE' INT TERM USR1; echo $$ > $D/pid$RANK; while :; do "
      "sleep 0.05; done";
  for (const auto& [signal, code, expected] :
       std::vector<std::tuple<int, const char*, int>>{{SIGINT, "1", 128 + SIGINT},
                                                      {SIGTERM, "1", 128 + SIGTERM},
                                                      {SIGTERM, "0", 0},
                                                      {SIGTERM, "75", 75},
                                                      {SIGUSR1, "75", 75},
                                                      {SIGUSR1, "1", 1}}) {
    for (const char* name : {"pid0", "pid1", "got0", "got1"}) fs::remove(folder_ / name);
    setenv("CODE", code, 1);
    const pid_t program = start({"launch", "-n", "2", "sh", "-c", script});
    ASSERT_TRUE(wait_for("pid0") && wait_for("pid1"));
    kill(program, signal);
    EXPECT_EQ(wait_code(program), expected);
    EXPECT_EQ(read("got0"), "got\n");
    EXPECT_EQ(read("got1"), "got\n");
  }
  unsetenv("CODE");
  unsetenv("D");
}

TEST_F(Launcher, AWarningThatNobodyHeedsStopsNothing) {
  // A rank that leaves with 75 unasked has failed; one that finishes in spite of the warning has
  // not.
  EXPECT_EQ(run(kProgram + " launch -n 2 sh -c 'exit 75'").code, 75);
  setenv("D", folder_.c_str(), 1);
  const pid_t program = start({"launch", "-n", "2", "sh", "-c",
                               "trap 'echo got > $D/got$RANK' USR1; echo $$ > $D/pid$RANK; "
                               "while [ ! -e $D/end ]; do sleep 0.02; done; exit 0"});
  ASSERT_TRUE(wait_for("pid0") && wait_for("pid1"));
  kill(program, SIGUSR1);
  ASSERT_TRUE(wait_for("got0") && wait_for("got1"));
  std::ofstream(folder_ / "end") << "now";
  EXPECT_EQ(wait_code(program), 0);
  unsetenv("D");
}

TEST_F(Launcher, ASecondSignalKillsAtOnce) {
  setenv("D", folder_.c_str(), 1);
  const pid_t program =
      start({"launch", "-n", "1", "sh", "-c",
             "trap 'echo got > $D/got' INT; echo $$ > $D/pid0; while :; do sleep 0.05; done"});
  ASSERT_TRUE(wait_for("pid0"));
  kill(program, SIGINT);
  ASSERT_TRUE(wait_for("got"));
  const auto start_time = Clock::now();
  kill(program, SIGINT);
  EXPECT_EQ(wait_code(program), 128 + SIGINT);
  EXPECT_LT(Clock::now() - start_time, std::chrono::seconds(2));
  unsetenv("D");
}

TEST_F(Launcher, RanksDieWithTheProgramHoweverItDies) {
  setenv("D", folder_.c_str(), 1);
  const pid_t program =
      start({"launch", "-n", "2", "sh", "-c", "echo $$ > $D/pid$RANK; exec sleep 300"});
  ASSERT_TRUE(wait_for("pid0") && wait_for("pid1"));
  kill(program, SIGKILL);
  EXPECT_EQ(wait_code(program), 128 + SIGKILL);
  for (const char* name : {"pid0", "pid1"}) {
    EXPECT_TRUE(dies_within(static_cast<int>(*text::to_int(read(name))), milliseconds(2000)));
  }
  unsetenv("D");
}

TEST_F(Launcher, ProgramStartsAtOnceAndWithoutLibTorch) {
  const auto fastest = [](const std::string& command) {
    auto least = Clock::duration::max();
    for (int i = 0; i < 20; ++i) {
      const auto start_time = Clock::now();
      EXPECT_EQ(run(command).code, 0);
      least = std::min(least, Clock::now() - start_time);
    }
    return least;
  };
  EXPECT_LT(fastest(kProgram + " -h"), milliseconds(20));
  EXPECT_LT(fastest(kProgram + " launch -n 2 true"), milliseconds(50));
  const Ran libraries = run("ldd " + kProgram);
  EXPECT_EQ(libraries.output.find("torch"), std::string::npos) << libraries.output;
  EXPECT_NE(run(kProgram + " env").output.find("built for LibTorch:"), std::string::npos);
}

}  // namespace
}  // namespace accelerate
