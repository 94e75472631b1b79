#pragma once

#include <functional>
#include <type_traits>
#include <utility>

namespace accelerate {

namespace detail {
int run(const std::function<int()>& program);
}

/// Runs the body of a program's `main` and gives what `main` returns: what `program` does, or 0
/// when that is nothing. An exception that leaves it is written to stderr, as `describe` puts it,
/// behind the process's rank where there are several, without a backtrace; then the result is 1, or
/// the exit code that a LaunchError has, by which the other processes learn that this one failed.
///
///     int main() {
///       return accelerate::run([] {
///         accelerate::Accelerator accelerator;
///         ...
///       });
///     }
template <class Program>
int run(Program&& program) {
  return detail::run([&program]() -> int {
    if constexpr (std::is_void_v<std::invoke_result_t<Program&>>) {
      program();
      return 0;
    } else {
      return program();
    }
  });
}

}  // namespace accelerate
