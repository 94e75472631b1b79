#include <accelerate/launch/launcher.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/signals.hpp>
#include <accelerate/base/text.hpp>

#include "launch/spawn.hpp"
#include "net/gate.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <thread>

namespace accelerate {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

/// Blocks the signals the launcher handles while it lives, and hands them out one by one.
class Signals {
 public:
  Signals() {
    sigset_t set;
    sigemptyset(&set);
    for (const int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGUSR1}) sigaddset(&set, number);
    pthread_sigmask(SIG_BLOCK, &set, &before_);
    descriptor_ = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    if (descriptor_ < 0) {
      const int error = errno;
      pthread_sigmask(SIG_SETMASK, &before_, nullptr);
      throw LaunchError(
          text::concat("The launcher cannot watch for signals: ", std::strerror(error), "."), 1);
    }
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;
  ~Signals() {
    close(descriptor_);
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

  void wait(milliseconds at_most) const {
    pollfd waited{descriptor_, POLLIN, 0};
    poll(&waited, 1, static_cast<int>(at_most.count()));
  }

  std::optional<int> next() const {
    signalfd_siginfo info{};
    if (read(descriptor_, &info, sizeof info) != sizeof info) return std::nullopt;
    return static_cast<int>(info.ssi_signo);
  }

 private:
  sigset_t before_{};
  int descriptor_ = -1;
};

/// A signal's name, as kill -l gives it.
std::string signal_name(int number) {
  const char* name = sigabbrev_np(number);
  return name != nullptr ? text::concat("SIG", name) : text::concat("signal ", number);
}

/// One started process, and how it ended. Whatever it started is killed with it.
class Rank {
 public:
  Rank(int rank, pid_t pid) : rank_(rank), pid_(pid) {}

  bool running() const { return running_; }
  bool failed() const { return !running_ && (by_signal_ || code_ != 0); }
  bool by_signal() const { return by_signal_; }
  /// It was asked to stop, saved its state and left.
  bool saved() const { return !running_ && !by_signal_ && code_ == kStoppedExitCode; }
  int rank() const { return rank_; }
  int exit_code() const { return by_signal_ ? 128 + code_ : code_; }

  /// Whether the process has ended since the last look.
  bool ended() {
    if (!running_) return false;
    siginfo_t info{};
    if (waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid != pid_)
      return false;
    by_signal_ = info.si_code != CLD_EXITED;
    code_ = info.si_status;
    // While the process is not yet reaped, nobody else can have got its number.
    send(SIGKILL);
    waitpid(pid_, nullptr, 0);
    running_ = false;
    return true;
  }

  void send(int signal) const {
    if (running_) kill(-pid_, signal);
  }

  /// "rank 1 of 4 (pid 4711) was killed by SIGSEGV (Segmentation fault)".
  std::string describe(std::size_t of) const {
    std::string sentence = text::concat("rank ", rank_, " of ", of, " (pid ", pid_, ") ");
    if (!by_signal_) return sentence + text::concat("ended with exit code ", code_);
    const char* meaning = sigdescr_np(code_);
    return sentence + text::concat("was killed by ", signal_name(code_), " (",
                                   meaning != nullptr ? meaning : "unknown", ")");
  }

 private:
  int rank_;
  pid_t pid_;
  bool running_ = true;
  bool by_signal_ = false;
  int code_ = 0;
};

/// Waits for all ranks, and ends them all when one fails or when this process is told to stop.
class Supervisor {
 public:
  explicit Supervisor(milliseconds grace) : grace_(grace) {}
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;
  ~Supervisor() {  // Nothing stays behind when an exception passes through.
    for (const Rank& rank : ranks_) rank.send(SIGKILL);
    while (running() > 0) {
      look();
      std::this_thread::sleep_for(milliseconds(1));
    }
  }

  void add(pid_t pid) { ranks_.emplace_back(static_cast<int>(ranks_.size()), pid); }

  void run(const Signals& signals) {
    while (running() > 0) {
      // The time limit only guards against signals that another thread of this program took.
      signals.wait(deadline_ ? milliseconds(20) : milliseconds(200));
      while (const auto signal = signals.next()) {
        if (*signal == SIGUSR1) {  // how batch systems warn of the end
          warned_ = true;
          send(SIGUSR1);
        } else if (*signal != SIGCHLD) {
          told_to_stop(*signal);
        }
      }
      look();
      if (deadline_ && Clock::now() >= *deadline_) {
        send(SIGKILL);
        killed_ = true;
        deadline_.reset();
      }
    }
  }

  /// What the run amounts to: nothing, a signal from outside, or a LaunchError.
  int verdict(const std::string& log_dir) const {
    const auto failed = [](const Rank& rank) { return rank.failed(); };
    const bool bad = std::any_of(ranks_.begin(), ranks_.end(), failed);
    const bool saved = std::all_of(ranks_.begin(), ranks_.end(),
                                   [](const Rank& rank) { return rank.saved() || !rank.failed(); });
    // A program may save its work and end well.
    if (interrupted_by_) return !bad ? 0 : saved ? kStoppedExitCode : 128 + *interrupted_by_;
    if (warned_ && bad && saved) return kStoppedExitCode;
    if (!culprit_) return 0;
    std::string message = text::concat(
        "The run failed: ", culprit_->describe(ranks_.size()), " after ",
        text::format_seconds(std::chrono::duration<double>(failed_at_ - started_).count()));
    if (stopped_ > 0) {
      const std::string others = stopped_ == 1
                                     ? "the other running rank"
                                     : text::concat("the other ", stopped_, " running ranks");
      message +=
          killed_ ? text::concat("; ", others,
                                 " did not stop on SIGTERM, so the launcher killed what was left")
                  : text::concat("; the launcher stopped ", others);
    }
    message += ".";
    if (culprit_->by_signal() && culprit_->exit_code() == 128 + SIGKILL && !(warned_ && killed_)) {
      message +=
          " Nobody in this run sends SIGKILL: a user did, or the kernel when memory ran out (see "
          "dmesg).";
    }
    if (!log_dir.empty())
      message +=
          text::concat(" What it wrote is in ", log_dir, "/rank_", culprit_->rank(), ".err.");
    throw LaunchError(message, culprit_->exit_code());
  }

 private:
  std::size_t running() const {
    return static_cast<std::size_t>(std::count_if(ranks_.begin(), ranks_.end(),
                                                  [](const Rank& rank) { return rank.running(); }));
  }

  void send(int signal) const {
    for (const Rank& rank : ranks_) rank.send(signal);
  }

  void stop(int signal) {
    send(signal);
    deadline_ = Clock::now() + grace_;
  }

  void told_to_stop(int signal) {
    if (interrupted_by_) {
      send(SIGKILL);
      return;
    }
    interrupted_by_ = signal;
    stop(signal);
  }

  void look() {
    const Rank* first = nullptr;
    for (Rank& rank : ranks_) {
      if (!rank.ended() || !rank.failed()) continue;
      if (warned_ && rank.saved()) {
        if (!deadline_) deadline_ = Clock::now() + grace_;  // for the others, which follow
        continue;
      }
      // Of several that are found at once, one killed by a signal is the likelier cause: its peers
      // notice the broken connection and end with an error of their own.
      if (first == nullptr || (rank.by_signal() && !first->by_signal())) first = &rank;
    }
    if (first == nullptr || culprit_ || interrupted_by_) return;
    culprit_ = *first;
    failed_at_ = Clock::now();
    stopped_ = running();
    if (stopped_ > 0) stop(SIGTERM);
  }

  milliseconds grace_;
  std::vector<Rank> ranks_;
  Clock::time_point started_ = Clock::now();
  Clock::time_point failed_at_;
  std::optional<Clock::time_point> deadline_;
  bool warned_ = false;
  std::optional<int> interrupted_by_;
  std::optional<Rank> culprit_;
  std::size_t stopped_ = 0;
  bool killed_ = false;
};

void check(const LaunchOptions& options) {
  constexpr int kUsage = 2;
  if (options.command().empty()) throw LaunchError("No program to launch was given.", kUsage);
  if (options.processes() < 1) {
    throw LaunchError(text::concat("The number of processes is ", options.processes(),
                                   ", and at least 1 was expected."),
                      kUsage);
  }
  if (options.master_port() < 0 || options.master_port() > 65535) {
    throw LaunchError(
        text::concat("The master port is ", options.master_port(),
                     ", and one from 1 to 65535 was expected, or 0 for any free one."),
        kUsage);
  }
  if (options.omp_num_threads() < 0) {
    throw LaunchError(text::concat("The number of OpenMP threads is ", options.omp_num_threads(),
                                   ", and at least 1 was expected, or 0 to share the cores out."),
                      kUsage);
  }
  if (options.grace_period().count() < 0)
    throw LaunchError("The grace period is negative.", kUsage);
}

}  // namespace

int launch(const LaunchOptions& options) {
  check(options);
  const Environment& base = options.environment();
  launch_detail::Spawn what;
  what.program = launch_detail::find_program(
      options.command().front(), base.get("PATH").value_or("/usr/local/bin:/usr/bin:/bin"));
  what.arguments = options.command();
  if (!options.log_dir().empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.log_dir(), error);
    if (error)
      throw LaunchError(text::concat("The folder for logs, ", options.log_dir(),
                                     ", could not be made: ", error.message(), "."),
                        1);
  }

  Environment variables = base;
  const int threads = options.omp_num_threads();
  if (threads > 0 || !base.has("OMP_NUM_THREADS")) {
    variables.set(
        "OMP_NUM_THREADS",
        std::to_string(threads > 0 ? threads
                                   : std::max(1, available_cores() / options.processes())));
  }
  const std::string world = std::to_string(options.processes());
  variables.set("WORLD_SIZE", world);
  variables.set("LOCAL_WORLD_SIZE", world);
  variables.set("GROUP_RANK", "0");
  variables.set("MASTER_ADDR", "127.0.0.1");
  variables.set("MASTER_PORT", std::to_string(launch_detail::free_port(options.master_port())));

  // By this the processes know each other from whoever else reaches the port. In the environment,
  // which only the user's own processes can read, and never in the arguments, which all can.
  if (!base.has("ACCELERATE_SECRET") && !base.has("ACCELERATE_SECRET_FILE"))
    variables.set("ACCELERATE_SECRET", net::draw_secret());

  const Signals signals;
  Supervisor supervisor(options.grace_period());
  for (int rank = 0; rank < options.processes(); ++rank) {
    variables.set("RANK", std::to_string(rank));
    variables.set("LOCAL_RANK", std::to_string(rank));
    what.environment = variables.variables();
    what.keeps_stdin = rank == 0;
    if (!options.log_dir().empty()) {
      what.stdout_path = text::concat(options.log_dir(), "/rank_", rank, ".out");
      what.stderr_path = text::concat(options.log_dir(), "/rank_", rank, ".err");
    }
    supervisor.add(launch_detail::spawn(what));
  }
  supervisor.run(signals);
  return supervisor.verdict(options.log_dir());
}

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = sched_getaffinity(0, sizeof set, &set) == 0
                  ? CPU_COUNT(&set)
                  : static_cast<int>(std::thread::hardware_concurrency());
  // A container's quota, in microseconds of processor time for each period: "200000 100000", or
  // "max 100000".
  std::ifstream quota("/sys/fs/cgroup/cpu.max");
  quota.imbue(std::locale::classic());
  double time = 0;
  double period = 0;
  if (quota >> time >> period && period > 0)
    cores = std::min(cores, static_cast<int>(std::ceil(time / period)));
  return std::max(1, cores);
}

}  // namespace accelerate
