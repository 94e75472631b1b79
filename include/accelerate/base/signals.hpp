#pragma once

#include <memory>
#include <vector>

namespace accelerate {

/// What a program exits with that a signal asked to stop, once it has saved: EX_TEMPFAIL of
/// sysexits.h, "try again".
inline constexpr int kStoppedExitCode = 75;

/// While it lives, the given signals do what they usually do no longer, but are noted.
class SignalWatch {
 public:
  /// Throws ConfigError for a signal that cannot be caught.
  explicit SignalWatch(const std::vector<int>& signals);
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
  /// What the signals did before, they do again.
  ~SignalWatch();

  /// The first of them that came to this process; 0 when none has.
  int received() const noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace accelerate
