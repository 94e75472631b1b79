#include <accelerate/base/error.hpp>
#include <accelerate/base/run.hpp>
#include <accelerate/base/text.hpp>

#include "base/log_level.hpp"
#include "base/terminal_line.hpp"

#include <iostream>
#include <string>

namespace accelerate {

namespace {

// Not through the log, which may be off.
void say(const std::string& error) {
  detail::clear_terminal_line();
  const std::string who =
      log::world_size() > 1 ? "[rank " + std::to_string(log::rank()) + "] " : "";
  std::cerr << who + "The program ends with an error: " + text::printable(error) + "\n"
            << std::flush;
}

}  // namespace

int detail::run(const std::function<int()>& program) {
  try {
    return program();
  } catch (const LaunchError& error) {
    say(describe(error));
    return error.exit_code();
  } catch (const std::exception& error) {
    say(describe(error));
  } catch (...) {
    say("something was thrown that is not a std::exception.");
  }
  return 1;
}

}  // namespace accelerate
