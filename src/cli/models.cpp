#include <accelerate/base/json.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/device_map/estimate.hpp>
#include <accelerate/device_map/solver.hpp>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "base/plain_text.hpp"
#include "cli/commands.hpp"

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

namespace accelerate::cli {
namespace {

using Row = std::vector<std::string>;

std::string size(double bytes) { return text::format_bytes(static_cast<std::int64_t>(bytes)); }

// Control characters in names do not reach the terminal, in JSON's own way.
std::string terminal_json(const Json& value) { return value.dump(2, ' ', /*ensure_ascii=*/true); }

void print_table(const std::vector<Row>& rows) {
  std::vector<std::size_t> widths;
  for (const Row& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i)
      widths[i] = std::max(widths[i], text::printable(row[i]).size());
  }
  for (const Row& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      // Names to the left, numbers to the right.
      std::cout << (i == 0 ? "" : "  ") << (i == 0 ? std::left : std::right)
                << std::setw(static_cast<int>(widths[i])) << text::printable(row[i]);
    }
    std::cout << "\n";
  }
}

struct EstimateFlags {
  std::string path;
  EstimateOptions options;
  bool json = false;
};

void estimate(const EstimateFlags& flags) {
  const MemoryEstimate result = estimate_memory(checkpoint_tree(flags.path), flags.options);
  if (flags.json) {
    Json out{{"path", flags.path},
             {"elements", result.elements},
             {"largest_layers", result.largest_layers},
             {"dtypes", Json::object()},
             {"training_per_process", Json::object()}};
    for (const DtypeEstimate& row : result.dtypes) {
      out["dtypes"][row.dtype] = {{"largest_layer", row.largest_layer}, {"total", row.total}};
      out["dtypes"][row.dtype]["training_with_adam"] =
          row.training_with_adam ? Json(*row.training_with_adam) : Json();
    }
    for (const StrategyEstimate& row : result.strategies) {
      Json& strategy = out["training_per_process"][row.strategy];
      for (const auto& [processes, bytes] : row.per_process)
        strategy[std::to_string(processes)] = bytes;
    }
    std::cout << terminal_json(out) << "\n";
    return;
  }
  std::cout << text::printable(flags.path) << ": " << result.elements << " elements\n\n";
  std::vector<Row> rows{{"dtype", "largest layer", "total", "training with Adam"}};
  for (const DtypeEstimate& row : result.dtypes) {
    rows.push_back({row.dtype, size(row.largest_layer), size(row.total),
                    row.training_with_adam ? size(*row.training_with_adam) : "-"});
  }
  print_table(rows);
  std::cout << "\nEach process, training with Adam in float32:\n\n";
  rows = {{"strategy"}};
  for (const int processes : flags.options.processes())
    rows.front().push_back(std::to_string(processes) +
                           (processes == 1 ? " process" : " processes"));
  for (const StrategyEstimate& row : result.strategies) {
    rows.push_back({row.strategy});
    for (const auto& [processes, bytes] : row.per_process) rows.back().push_back(size(bytes));
  }
  print_table(rows);
  std::cout << "\nWithout activations, and what the device and its libraries need themselves.\n";
}

void inspect(const std::string& path, bool json) {
  const ModelTree tree = checkpoint_tree(path);
  std::int64_t total = 0;
  std::vector<Row> rows{{"tensor", "dtype", "shape", "bytes"}};
  Json tensors = Json::array();
  const auto& all = tree.tensors();
  std::vector<int> order(all.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    return all[static_cast<std::size_t>(a)].name < all[static_cast<std::size_t>(b)].name;
  });
  for (const int index : order) {
    const ModelTree::Tensor& tensor = all[static_cast<std::size_t>(index)];
    const std::int64_t bytes = (tensor.elements * tensor.type.bits + 7) / 8;
    const bool first = tensor.identity == index;
    if (first) total += bytes;
    rows.push_back({tensor.name, tensor.type.name,
                    text::concat("[", text::join(tensor.shape, ", ", 64), "]"),
                    first ? size(static_cast<double>(bytes)) : "tied"});
    tensors.push_back({{"name", tensor.name},
                       {"dtype", tensor.type.name},
                       {"shape", tensor.shape},
                       {"bytes", bytes}});
  }
  const auto tied = find_tied_parameters(tree);
  if (json) {
    std::cout << terminal_json(
                     {{"path", path}, {"tensors", tensors}, {"tied", tied}, {"total_bytes", total}})
              << "\n";
    return;
  }
  print_table(rows);
  for (const auto& group : tied)
    std::cout << "tied: " << text::printable(text::join(group, ", ", 1000)) << "\n";
  std::cout << tree.unique_tensors().size() << " tensors, " << size(static_cast<double>(total))
            << "\n";
}

}  // namespace

void add_models(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<EstimateFlags>();
  CLI::App* command = app.add_subcommand(
      "estimate-memory", "Print what a model needs in memory, to be run and to be trained");
  const char* kPath =
      "A safetensors file, its index, a folder with one of them, or a checkpoint of save_state";
  command->add_option("PATH", flags->path, kPath)->required();
  command->add_option("--dtypes", flags->options.dtypes(), "Element types of the weights")
      ->capture_default_str();
  command->add_option("--processes", flags->options.processes(), "Numbers of processes")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  command->add_flag("--json", flags->json, "Print JSON, with bytes as numbers");
  command->callback([flags, &exit_code] {
    estimate(*flags);
    exit_code = 0;
  });

  auto path = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  command = app.add_subcommand("inspect",
                               "List the tensors of a checkpoint: dtypes, shapes, sizes, ties");
  command->add_option("PATH", *path, kPath)->required();
  command->add_flag("--json", *json, "Print JSON");
  command->callback([path, json, &exit_code] {
    inspect(*path, *json);
    exit_code = 0;
  });
}

}  // namespace accelerate::cli
