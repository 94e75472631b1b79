#include "launch/spawn.hpp"

#include "net/socket.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <optional>
#include <random>

namespace accelerate::launch_detail {
namespace {

// The shell's exit codes for these two.
constexpr int kNotFound = 127;
constexpr int kNotExecutable = 126;

enum class Step : int { redirect, exec };
struct ChildError {
  Step step;
  int code;
};

// Everything from here to execve runs in the child of a program that may have other threads: only
// async-signal-safe calls, no allocation.
[[noreturn]] void become(const Spawn& what, char* const* argv, char* const* envp, pid_t parent,
                         int report) {
  const auto fail = [report](Step step) {
    const ChildError error{step, errno};
    [[maybe_unused]] const auto written = write(report, &error, sizeof error);
    _exit(kNotFound);
  };
  setsid();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kNotFound);  // It died before the line above.

  for (int number = 1; number < NSIG; ++number) signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);

  const auto redirect = [&](const char* path, int flags, int descriptor) {
    const int file = open(path, flags, 0666);
    if (file < 0 || dup2(file, descriptor) < 0) fail(Step::redirect);
    if (file != descriptor) close(file);
  };
  constexpr int kWrite = O_WRONLY | O_CREAT | O_TRUNC;
  if (!what.keeps_stdin) redirect("/dev/null", O_RDONLY, STDIN_FILENO);
  if (!what.stdout_path.empty()) redirect(what.stdout_path.c_str(), kWrite, STDOUT_FILENO);
  if (!what.stderr_path.empty()) redirect(what.stderr_path.c_str(), kWrite, STDERR_FILENO);
  execve(what.program.c_str(), argv, envp);
  fail(Step::exec);
  _exit(kNotFound);
}

bool is_file(const std::string& path) {
  struct stat status {};
  return stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

std::string why_not_executed(const std::string& program, int code) {
  if (code == ENOEXEC) {
    return text::concat(program,
                        " is neither a program nor a script with a first line that names its "
                        "interpreter (#!/...).");
  }
  if (code == ENOENT) {
    return text::concat(program,
                        " could not be started: the interpreter it names (in its first line, or "
                        "its dynamic loader) does not exist.");
  }
  if (code == E2BIG)
    return text::concat(program,
                        " could not be started: its arguments and environment are too long.");
  return text::concat(program, " could not be started: ", std::strerror(code), ".");
}

}  // namespace

std::string find_program(const std::string& name, const std::string& search_path) {
  const bool named_by_path = name.find('/') != std::string::npos;
  std::string found;
  if (named_by_path) {
    if (!is_file(name)) {
      struct stat status {};
      const bool folder = stat(name.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
      throw LaunchError(text::concat("The program to launch, ", name,
                                     folder ? ", is a folder." : ", does not exist.",
                                     " Give the path of an executable file."),
                        kNotFound);
    }
    found = name;
  } else {
    for (const std::string& folder : text::split(search_path, ':')) {
      const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
      if (!is_file(candidate)) continue;
      if (access(candidate.c_str(), X_OK) == 0) return candidate;
      if (found.empty()) found = candidate;
    }
    if (found.empty()) {
      throw LaunchError(
          text::concat("The program to launch, ", name, ", is not on PATH.",
                       is_file(name) ? " There is one in this folder: write ./" + name + "."
                                     : " Give its path, with a slash in it."),
          kNotFound);
    }
  }
  if (access(found.c_str(), X_OK) != 0) {
    throw LaunchError(
        text::concat("The program to launch, ", found, ", is not executable. Try: chmod +x ", found,
                     ". A script in another language needs its interpreter before it."),
        kNotExecutable);
  }
  return found;
}

pid_t spawn(const Spawn& what) {
  std::vector<char*> argv;
  for (const std::string& argument : what.arguments)
    argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  std::vector<std::string> variables;
  for (const auto& [name, value] : what.environment) variables.push_back(name + "=" + value);
  std::vector<char*> envp;
  for (const std::string& variable : variables) envp.push_back(const_cast<char*>(variable.c_str()));
  envp.push_back(nullptr);

  // Closed by a successful execve; otherwise it brings the reason.
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) {
    throw LaunchError(text::concat("A pipe for ", what.program,
                                   " could not be made: ", std::strerror(errno), "."),
                      1);
  }
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child == 0) become(what, argv.data(), envp.data(), parent, report[1]);
  const int fork_error = errno;
  close(report[1]);
  if (child < 0) {
    close(report[0]);
    throw LaunchError(
        text::concat(
            "A process for ", what.program, " could not be made: ", std::strerror(fork_error),
            ". The machine or the user has too many processes, or too little memory is left."),
        1);
  }
  ChildError error{};
  ssize_t got = 0;
  do {
    got = read(report[0], &error, sizeof error);
  } while (got < 0 && errno == EINTR);
  close(report[0]);
  if (got == 0) return child;
  waitpid(child, nullptr, 0);
  if (error.step == Step::redirect) {
    throw LaunchError(text::concat("The log files ", what.stdout_path, " and ", what.stderr_path,
                                   " could not be opened: ", std::strerror(error.code), "."),
                      1);
  }
  throw LaunchError(why_not_executed(what.program, error.code),
                    error.code == ENOENT ? kNotFound : kNotExecutable);
}

namespace {

/// The port, when it can be listened at; nothing when it is taken. 0 means the kernel's choice.
std::optional<int> try_port(int wanted) {
  try {
    return net::port_of(net::listen_at(net::resolve("127.0.0.1"), wanted).front());
  } catch (const net::ConnectionError& error) {
    if (error.kind() == net::ConnectionError::Kind::taken) return std::nullopt;
    throw LaunchError(text::concat("Port ", wanted, " cannot be used: ", error.what(),
                                   ". Give another --master-port, or 0 to take a free one."),
                      1);
  }
}

/// Where the kernel's own choices begin: connections of any program take ports from there.
int first_ephemeral_port() {
  int first = 32768;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first;
  return first;
}

}  // namespace

int free_port(int wanted) {
  if (wanted == 0) {
    // Rank 0 listens a moment later, and until then the port is anybody's. So take one of those
    // that nobody is given unasked, at random, for other launchers do the same.
    constexpr int kLowest = 10000;
    const int end = first_ephemeral_port();
    std::random_device random;
    for (int attempt = 0; attempt < 64 && end > kLowest; ++attempt) {
      if (const auto port = try_port(std::uniform_int_distribution(kLowest, end - 1)(random)))
        return *port;
    }
  }
  if (const auto port = try_port(wanted)) return *port;
  throw LaunchError(text::concat("Port ", wanted,
                                 " is in use by another process, perhaps another run. Give "
                                 "another --master-port, or 0 to take a free one."),
                    1);
}

}  // namespace accelerate::launch_detail
