#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/device_map/estimate.hpp>
#include <accelerate/device_map/solver.hpp>
#include <accelerate/io/manifest.hpp>
#include <accelerate/io/safetensors.hpp>

#include <algorithm>

namespace accelerate {

namespace {

// `info` has a dtype and a shape.
template <class Info>
void add_to(ModelTree& tree, const std::filesystem::path& path, const std::string& name,
            const Info& info, const std::string& same_as) {
  try {
    tree.add_parameter(name, info.shape, ElementType::of(io::safetensors::name(info.dtype)),
                       same_as);
  } catch (const ConfigError& error) {
    std::throw_with_nested(CheckpointError(
        text::concat("The names in ", path, " are not those of a model."), path.string()));
  }
}

// Of a checkpoint of save_state, whose tensors may lie in pieces: its models, the second and later
// ones with their name before their tensors'.
ModelTree saved_tree(const std::filesystem::path& folder) {
  const io::Manifest manifest = io::Manifest::read(folder);
  ModelTree tree;
  for (std::size_t i = 0;; ++i) {
    const std::string group = i == 0 ? "model" : text::concat("model_", i);
    const auto tensors = manifest.groups.find(group);
    if (tensors == manifest.groups.end()) return tree;
    const std::string prefix = i == 0 ? "" : group + "/";
    for (const auto& [name, saved] : tensors->second)
      add_to(tree, folder, prefix + name, saved, {});
    if (const auto others = manifest.aliases.find(group); others != manifest.aliases.end()) {
      for (const auto& [name, first] : others->second)
        add_to(tree, folder, prefix + name, tensors->second.at(first), prefix + first);
    }
  }
}

}  // namespace

ModelTree checkpoint_tree(const std::filesystem::path& path) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(path / io::Manifest::kFileName, ignored))
    return saved_tree(path);
  const io::safetensors::Collection files(path);
  ModelTree tree;
  const auto add = [&](const std::string& name, const io::safetensors::TensorInfo& info,
                       const std::string& same_as) {
    add_to(tree, files.path(), name, info, same_as);
  };
  for (const auto& reader : files.readers()) {
    for (const auto& info : reader->header().tensors()) add(info.name, info, {});
  }
  for (const auto& reader : files.readers()) {
    for (const auto& [name, stored] : reader->header().metadata()) {
      if (const auto* info = reader->header().find(stored); info != nullptr && name != stored)
        add(name, *info, stored);
    }
  }
  return tree;
}

MemoryEstimate estimate_memory(const ModelTree& tree, const EstimateOptions& options) {
  // All floating-point weights as float32, whatever they are stored in.
  SpecialDtypes as_float32;
  MemoryEstimate estimate;
  for (const int index : tree.unique_tensors()) {
    const ModelTree::Tensor& tensor = tree.tensors()[static_cast<std::size_t>(index)];
    estimate.elements += tensor.elements;
    if (!tensor.type.integral) as_float32.emplace_back(tensor.name, ElementType::of("float32"));
  }
  const MaximumSizes sizes = calculate_maximum_sizes(
      tree, SizeOptions().special_dtypes(std::move(as_float32)), options.no_split_module_classes());
  estimate.largest_layers = sizes.largest_layers;
  const auto bytes = static_cast<double>(sizes.total);
  for (const std::string& name : options.dtypes()) {
    const ElementType type = ElementType::of(name);
    const double share = type.bits / 32.0;
    DtypeEstimate row{
        type.name, static_cast<double>(sizes.largest_layer) * share, bytes * share, {}};
    if (type.name == "float32") row.training_with_adam = 4 * bytes;
    if (type.name == "float16" || type.name == "bfloat16") row.training_with_adam = 2 * bytes;
    estimate.dtypes.push_back(std::move(row));
  }
  struct Cut {
    const char* strategy;
    bool weights, gradients, moments;
  };
  for (const Cut& cut : {Cut{"ddp", false, false, false}, Cut{"zero1", false, false, true},
                         Cut{"zero2", false, true, true}, Cut{"fsdp", true, true, true}}) {
    StrategyEstimate row{cut.strategy, {}};
    for (const int processes : options.processes()) {
      if (processes < 1)
        throw ConfigError(text::concat(processes, " is not a number of processes."));
      const auto part = [&](bool is_cut) { return is_cut ? bytes / processes : bytes; };
      double need = part(cut.weights) + part(cut.gradients) + 2 * part(cut.moments);
      if (cut.weights && processes > 1) {
        need += std::min(bytes, 2 * static_cast<double>(sizes.largest_layer));
      }
      row.per_process.emplace_back(processes, need);
    }
    estimate.strategies.push_back(std::move(row));
  }
  return estimate;
}

}  // namespace accelerate
