#include <accelerate/base/error.hpp>

#include <CLI/CLI.hpp>

#include "cli/commands.hpp"

#include <algorithm>
#include <iostream>

namespace {

constexpr int kUsage = 2;

/// Splits the words after `launch` where its own options end, so that the program's arguments are
/// never read as ours.
std::vector<std::string> split_command(CLI::App& launch, std::vector<std::string>& words) {
  auto word = words.begin() + 1;
  while (word != words.end()) {
    if (*word == "--") {
      word = words.erase(word);
      break;
    }
    if (word->size() < 2 || word->front() != '-') break;
    if (*word == "-np") *word = "-n";  // As mpirun spells it; CLI11 knows one-letter options only.
    const CLI::Option* option = launch.get_option_no_throw(*word);
    const bool takes_value = option != nullptr && option->get_items_expected_max() > 0;
    ++word;
    if (takes_value && word != words.end()) ++word;
  }
  std::vector<std::string> rest(word, words.end());
  words.erase(word, words.end());
  return rest;
}

int run(int argc, char** argv) {
  CLI::App app("Runs LibTorch training programs on one process or many.", "accelerate-cpp");
  app.require_subcommand(1);
  app.set_version_flag("--version,-V", ACCELERATE_VERSION);
  app.add_subcommand("version", "Print the version")->callback([] {
    std::cout << ACCELERATE_VERSION << "\n";
  });
  int exit_code = 0;
  std::vector<std::string> words(argv + 1, argv + argc);
  std::vector<std::string> rest;
  accelerate::cli::add_launch(app, rest, exit_code);
  accelerate::cli::add_env(app, exit_code);
  accelerate::cli::add_models(app, exit_code);
  accelerate::cli::add_merge_weights(app, exit_code);
  if (!words.empty() && !words.front().starts_with('-')) {
    const auto named = app.get_subcommands(
        [&words](const CLI::App* command) { return command->get_name() == words.front(); });
    if (named.empty()) {
      std::cerr << "There is no subcommand " << words.front()
                << ". accelerate-cpp --help lists those there are.\n";
      return kUsage;
    }
    if (words.front() == "launch") rest = split_command(*named.front(), words);
  }
  std::reverse(words.begin(), words.end());  // CLI11 takes them from the back.
  try {
    app.parse(words);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsage;
  }
  return exit_code;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const accelerate::LaunchError& error) {
    std::cerr << "accelerate-cpp: " << accelerate::describe(error) << std::endl;
    return error.exit_code();
  } catch (const std::exception& error) {
    std::cerr << "accelerate-cpp: " << accelerate::describe(error) << std::endl;
    return 1;
  }
}
