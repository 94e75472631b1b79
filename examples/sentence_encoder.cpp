// Turns sentences into vectors with a public transformer (all-MiniLM-L6-v2 and models like it),
// read from its folder of Hugging Face's format. The weights may lie on GPUs, in host memory or
// stay on disk; the vectors are the same.

#include "support/bert.hpp"
#include "support/wordpiece.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/big_model/init_empty.hpp>
#include <accelerate/big_model/load.hpp>
#include <accelerate/big_model/sizes.hpp>
#include <accelerate/tracking/memory_tracker.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <torch/nn/functional/normalization.h>
#include <torch/utils.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>

namespace {

namespace fs = std::filesystem;
using accelerate::DeviceMap;
using accelerate::Place;

struct Flags {
  std::string model;
  std::vector<std::string> texts;
  std::string device_map = "auto";
  std::vector<std::string> max_memory;
  std::string dtype = "float32";
  std::string memory;
  bool json = false;
};

nlohmann::json read_json(const fs::path& file) {
  std::ifstream in(file);
  if (!in)
    throw std::runtime_error("The model's folder has no " + file.filename().string() + ": " +
                             file.string());
  return nlohmann::json::parse(in);
}

bert::Config read_config(const fs::path& folder) {
  const auto json = read_json(folder / "config.json");
  if (json.value("hidden_act", "gelu") != "gelu")
    throw std::runtime_error("The model's activation is " + json["hidden_act"].dump() +
                             "; this example has gelu only.");
  bert::Config config;
  config.vocab_size = json.at("vocab_size");
  config.hidden_size = json.at("hidden_size");
  config.num_hidden_layers = json.at("num_hidden_layers");
  config.num_attention_heads = json.at("num_attention_heads");
  config.intermediate_size = json.at("intermediate_size");
  config.max_position_embeddings = json.at("max_position_embeddings");
  config.type_vocab_size = json.value("type_vocab_size", config.type_vocab_size);
  config.layer_norm_eps = json.value("layer_norm_eps", config.layer_norm_eps);
  return config;
}

// Models of sentence-transformers say in modules.json whether vectors are scaled to length one.
bool normalizes(const fs::path& folder) {
  if (!fs::exists(folder / "modules.json")) return false;
  for (const auto& module : read_json(folder / "modules.json")) {
    if (module.value("type", "").ends_with(".Normalize")) return true;
  }
  return false;
}

std::size_t most_tokens(const fs::path& folder, const bert::Config& config) {
  std::int64_t most = config.max_position_embeddings;
  if (fs::exists(folder / "sentence_bert_config.json"))
    most = std::min(most,
                    read_json(folder / "sentence_bert_config.json").value("max_seq_length", most));
  return static_cast<std::size_t>(std::max<std::int64_t>(most, 2));
}

DeviceMap choose_map(const Flags& flags, const accelerate::ModuleRecord& record,
                     const accelerate::LoadOptions& options) {
  if (flags.device_map == "cpu") return {{"", Place::cpu()}};
  if (flags.device_map == "disk") return {{"", Place::disk()}};
  if (fs::exists(flags.device_map)) return accelerate::read_device_map(flags.device_map);
  return accelerate::device_map_for(record, flags.device_map, options);
}

// What the limit of the CPU leaves for weights that come and go.
std::int64_t resident_limit(const accelerate::MaxMemory& limits, const DeviceMap& map,
                            const accelerate::ModuleRecord& record,
                            const accelerate::LoadOptions& options) {
  for (const auto& [place, limit] : limits) {
    if (place != Place::cpu()) continue;
    std::int64_t stay = 0;
    for (const auto& [name, tensor] : record.parameters()) {
      if (accelerate::place_of(map, name) == Place::cpu())
        stay += tensor.numel() * static_cast<std::int64_t>(c10::elementSize(*options.dtype()));
    }
    return std::max<std::int64_t>(1, limit - stay);
  }
  return 0;
}

int run(const Flags& flags) {
  accelerate::tracking::count_cpu_tensors();
  std::optional<accelerate::tracking::MemoryTracker> tracker;
  if (!flags.memory.empty()) {
    tracker.emplace(accelerate::tracking::MemoryTrackerOptions()
                        .label("sentence_encoder, " + flags.device_map)
                        .interval(std::chrono::milliseconds(1)));
  }
  const torch::NoGradGuard no_grad;
  const fs::path folder = flags.model;
  const bert::Config config = read_config(folder);
  const wordpiece::Tokenizer tokenizer(folder);

  // The whole use of the library: a module without memory, a map, and its weights.
  auto net = accelerate::init_empty_weights([&] { return bert::SentenceEncoder(config); });
  net->eval();
  const accelerate::ModuleRecord record = accelerate::big_model::record_of(net);
  const std::map<std::string, at::ScalarType> dtypes{{"float32", at::kFloat},
                                                     {"float64", at::kDouble},
                                                     {"bfloat16", at::kBFloat16},
                                                     {"float16", at::kHalf}};
  accelerate::LoadOptions load;
  // Copied, not mapped: then what is on the CPU counts as its memory.
  load.dtype(dtypes.at(flags.dtype)).no_split_module_classes({"Layer"}).memory_map(false);
  accelerate::MaxMemory limits;
  for (const std::string& limit : flags.max_memory) {
    for (const auto& entry : accelerate::parse_max_memory(limit)) limits.push_back(entry);
  }
  limits = accelerate::get_max_memory(limits);
  if (!limits.empty()) load.max_memory(limits);
  const DeviceMap map = choose_map(flags, record, load);
  const fs::path weights =
      fs::exists(folder / "model.safetensors") ? folder / "model.safetensors" : folder;
  const accelerate::LoadReport report =
      accelerate::load_checkpoint_in_model(record, weights, map, load);
  if (!report.missing.empty()) {
    std::cerr << "sentence_encoder: the checkpoint lacks " << accelerate::text::join(report.missing)
              << "\n";
    return 1;
  }
  auto model =
      accelerate::dispatch_model(net, map,
                                 accelerate::OffloadOptions()
                                     .weights(report.on_disk)
                                     .resident_limit(resident_limit(limits, map, record, load)));

  std::vector<std::vector<std::int64_t>> tokens;
  std::size_t longest = 0;
  for (const std::string& text : flags.texts) {
    tokens.push_back(tokenizer.encode(text, most_tokens(folder, config)));
    longest = std::max(longest, tokens.back().size());
  }
  const auto rows = static_cast<std::int64_t>(tokens.size());
  at::Tensor ids =
      torch::full({rows, static_cast<std::int64_t>(longest)}, tokenizer.padding(), torch::kLong);
  at::Tensor mask = torch::zeros_like(ids);
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto& line = tokens[static_cast<std::size_t>(row)];
    ids[row].slice(0, 0, static_cast<std::int64_t>(line.size())).copy_(torch::tensor(line));
    mask[row].slice(0, 0, static_cast<std::int64_t>(line.size())).fill_(1);
  }
  at::Tensor embeddings;
  if (tracker) {
    model.offload().track(&*tracker);
    for (const char* name : {"first forward", "second forward"}) {
      const auto region = tracker->region(name);
      embeddings = model(ids, mask);
    }
    model.offload().track(nullptr);
    tracker->write(flags.memory);
  } else {
    embeddings = model(ids, mask);
  }
  embeddings = embeddings.to(torch::kDouble);
  if (normalizes(folder)) embeddings = torch::nn::functional::normalize(embeddings);

  if (flags.json) {
    nlohmann::ordered_json out;
    out["embeddings"] = nlohmann::ordered_json::array();
    for (std::int64_t row = 0; row < rows; ++row) {
      const double* begin = embeddings[row].const_data_ptr<double>();
      out["embeddings"].push_back(std::vector<double>(begin, begin + embeddings.size(1)));
    }
    out["peak_tensor_bytes"] = accelerate::tracking::tensor_bytes().peak;
    out["weights_read_bytes"] = report.bytes + model.offload().statistics().read_bytes;
    std::cout << out.dump() << "\n";
    return 0;
  }
  const at::Tensor unit = torch::nn::functional::normalize(embeddings);
  const at::Tensor similar = unit.matmul(unit.t());
  std::cout << std::fixed << std::setprecision(4);
  for (std::int64_t row = 0; row < rows; ++row) {
    std::cout << flags.texts[static_cast<std::size_t>(row)] << "\n  [";
    for (std::int64_t i = 0; i < std::min<std::int64_t>(6, embeddings.size(1)); ++i)
      std::cout << embeddings[row][i].item<double>() << ", ";
    std::cout << "...]  similarity";
    for (std::int64_t other = 0; other < rows; ++other)
      std::cout << " " << similar[row][other].item<double>();
    std::cout << "\n";
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Sentences to vectors, with the weights where they fit.", "sentence_encoder");
  Flags flags;
  app.add_option("--model", flags.model,
                 "The model's folder: config.json, the tokenizer, and its weights")
      ->required();
  app.add_option("--text", flags.texts, "A sentence; may be given again")
      ->required()
      ->allow_extra_args(false);
  app.add_option("--device-map", flags.device_map,
                 "Where the weights are: auto or another map by name, cpu, disk, or a JSON file")
      ->capture_default_str();
  app.add_option("--max-memory", flags.max_memory,
                 "What a place may hold: cpu=40MiB, 0=10GiB; of the CPU's, what stays and what "
                 "comes and goes")
      ->allow_extra_args(false);
  app.add_option("--dtype", flags.dtype, "What the weights are computed in")
      ->capture_default_str()
      ->check(CLI::IsMember({"float32", "float64", "bfloat16", "float16"}));
  app.add_option("--memory", flags.memory,
                 "Compute twice, since the first forward shows the second what comes next, and "
                 "write to this file where memory was and which weights came and went, for "
                 "tools/plot_memory.py");
  app.add_flag("--json", flags.json,
               "Print nothing but JSON: embeddings, peak_tensor_bytes, weights_read_bytes");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  try {
    return run(flags);
  } catch (const std::exception& error) {
    std::cerr << "sentence_encoder: " << accelerate::describe(error) << std::endl;
    return 1;
  }
}
