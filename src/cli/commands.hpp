#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

/// The program's subcommands, one file each. `add_*` declares the options; the command runs when
/// the parsed App's callback does, and puts its exit code into `exit_code`.
namespace accelerate::cli {

/// `rest` is the program to launch with its arguments: everything from the first word on that is
/// neither an option of `launch` nor the value of one.
void add_launch(CLI::App& app, const std::vector<std::string>& rest, int& exit_code);
void add_env(CLI::App& app, int& exit_code);
/// `estimate-memory` and `inspect`.
void add_models(CLI::App& app, int& exit_code);
/// `merge-weights`.
void add_merge_weights(CLI::App& app, int& exit_code);

}  // namespace accelerate::cli
