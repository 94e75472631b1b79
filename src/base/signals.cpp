#include <accelerate/base/error.hpp>
#include <accelerate/base/signals.hpp>
#include <accelerate/base/text.hpp>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

namespace accelerate {
namespace {

std::atomic<int> first_signal{0};

void note(int number) {
  int none = 0;
  first_signal.compare_exchange_strong(none, number);
}

}  // namespace

struct SignalWatch::State {
  std::vector<std::pair<int, struct sigaction>> before;
};

SignalWatch::SignalWatch(const std::vector<int>& signals) : state_(std::make_unique<State>()) {
  first_signal = 0;
  struct sigaction action {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int number : signals) {
    struct sigaction before {};
    if (::sigaction(number, &action, &before) != 0) {
      const int error = errno;
      for (const auto& [earlier, old] : state_->before) ::sigaction(earlier, &old, nullptr);
      throw ConfigError(text::concat("Signal ", number, " cannot be caught: ", std::strerror(error),
                                     ". Use SIGTERM, SIGUSR1 or SIGINT."));
    }
    state_->before.emplace_back(number, before);
  }
}

SignalWatch::~SignalWatch() {
  for (const auto& [number, before] : state_->before) ::sigaction(number, &before, nullptr);
}

int SignalWatch::received() const noexcept { return first_signal; }

}  // namespace accelerate
