#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <device_map/sizes.hpp>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace accelerate {
namespace device_map {

Sizes measure(const ModelTree& tree, const SizeOptions& options, bool parameters, bool buffers) {
  std::unordered_map<std::string, int> special;
  for (const auto& [name, type] : options.special_dtypes()) special[name] = type.bits;
  Sizes sizes{std::vector<std::int64_t>(tree.modules().size()),
              std::vector<std::int64_t>(tree.tensors().size()),
              tree.unique_tensors(parameters, buffers)};
  for (const int index : sizes.counted) {
    const ModelTree::Tensor& tensor = tree.tensors()[static_cast<std::size_t>(index)];
    std::int64_t bits = tensor.type.bits;
    if (const auto found = special.find(tensor.name); found != special.end()) {
      bits = found->second;
    } else if (options.dtype() && !tensor.type.integral) {
      bits = std::min<std::int64_t>(bits, options.dtype()->bits);
    }
    const std::int64_t bytes = (tensor.elements * bits + 7) / 8;
    sizes.tensors[static_cast<std::size_t>(index)] = bytes;
    for (int module = tensor.module; module >= 0;
         module = tree.modules()[static_cast<std::size_t>(module)].parent) {
      sizes.modules[static_cast<std::size_t>(module)] += bytes;
    }
  }
  return sizes;
}

std::vector<std::vector<int>> tied_groups(const ModelTree& tree) {
  const auto& tensors = tree.tensors();
  std::unordered_map<int, std::vector<int>> names;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i].is_buffer) names[tensors[i].identity].push_back(static_cast<int>(i));
  }
  std::vector<std::vector<int>> groups;
  for (const int first : tree.unique_tensors(/*parameters=*/true, /*buffers=*/false)) {
    auto& group = names[tensors[static_cast<std::size_t>(first)].identity];
    if (group.size() < 2) continue;
    std::sort(group.begin(), group.end(), [&](int a, int b) {
      return tensors[static_cast<std::size_t>(a)].name < tensors[static_cast<std::size_t>(b)].name;
    });
    groups.push_back(group);
  }
  return groups;
}

bool is_layer(const ModelTree& tree, int module, const std::vector<std::string>& no_split) {
  const ModelTree::Module& entry = tree.modules()[static_cast<std::size_t>(module)];
  return entry.children.empty() ||
         std::any_of(no_split.begin(), no_split.end(),
                     [&](const std::string& type) { return is_module_type(entry.type, type); });
}

}  // namespace device_map

using device_map::measure;

SizeTable compute_module_sizes(const ModelTree& tree, const SizeOptions& options,
                               bool buffers_only) {
  const device_map::Sizes sizes = measure(tree, options, !buffers_only, true);
  SizeTable table;
  std::vector<bool> met(tree.modules().size(), false);
  for (const int index : sizes.counted) {
    const ModelTree::Tensor& tensor = tree.tensors()[static_cast<std::size_t>(index)];
    const auto meet = [&](const auto& self, int module) -> void {
      if (module < 0 || met[static_cast<std::size_t>(module)]) return;
      const ModelTree::Module& entry = tree.modules()[static_cast<std::size_t>(module)];
      self(self, entry.parent);
      met[static_cast<std::size_t>(module)] = true;
      table.emplace_back(entry.name, sizes.modules[static_cast<std::size_t>(module)]);
    };
    meet(meet, tensor.module);
    table.emplace_back(tensor.name, sizes.tensors[static_cast<std::size_t>(index)]);
  }
  return table;
}

std::vector<std::vector<std::string>> find_tied_parameters(const ModelTree& tree) {
  std::vector<std::vector<std::string>> names;
  for (const auto& group : device_map::tied_groups(tree)) {
    names.emplace_back();
    for (const int index : group)
      names.back().push_back(tree.tensors()[static_cast<std::size_t>(index)].name);
  }
  return names;
}

MaximumSizes calculate_maximum_sizes(const ModelTree& tree, const SizeOptions& options,
                                     const std::vector<std::string>& no_split) {
  const device_map::Sizes sizes = measure(tree, options);
  MaximumSizes result{sizes.modules[0], 0, {}};
  const auto offer = [&](const std::string& name, std::int64_t bytes) {
    if (bytes > result.largest_layer) result.largest_layers.clear();
    result.largest_layer = std::max(result.largest_layer, bytes);
    if (bytes == result.largest_layer) result.largest_layers.push_back(name);
  };
  const auto walk = [&](const auto& self, int module) -> void {
    const ModelTree::Module& entry = tree.modules()[static_cast<std::size_t>(module)];
    if (device_map::is_layer(tree, module, no_split)) {
      offer(entry.name, sizes.modules[static_cast<std::size_t>(module)]);
    } else {
      for (const int child : entry.children) self(self, child);
    }
  };
  const auto tensors = [&](const std::vector<int>& indices) {
    for (const int index : indices)
      offer(tree.tensors()[static_cast<std::size_t>(index)].name,
            sizes.tensors[static_cast<std::size_t>(index)]);
  };
  const ModelTree::Module& root = tree.modules().front();
  tensors(root.parameters);
  for (const int child : root.children) walk(walk, child);
  tensors(root.buffers);
  return result;
}

MaxMemory get_balanced_memory(const ModelTree& tree, const MaxMemory& max_memory,
                              const DeviceMapOptions& options, bool low_zero) {
  MaxMemory limits = get_max_memory(max_memory);
  std::vector<std::size_t> used;  // accelerators that may hold anything
  for (std::size_t i = 0; i < limits.size(); ++i) {
    if (limits[i].first.kind == Place::Kind::accelerator && limits[i].second > 0) used.push_back(i);
  }
  if (used.empty()) return limits;
  const auto count = static_cast<std::int64_t>(used.size());
  if (count == 1) low_zero = false;  // there is nowhere else to go

  const device_map::Sizes sizes = measure(tree, options.sizes());
  std::int64_t per_device = sizes.modules[0] / (low_zero ? count - 1 : count);

  // A share alone is too small: modules do not end where it does.
  std::int64_t unsplittable = 0;
  const auto& no_split = options.no_split_module_classes();
  std::vector<bool> class_met(no_split.size(), false);
  std::vector<int> order;
  std::vector<bool> has_tensor(tree.modules().size(), false),
      has_module(tree.modules().size(), false);
  for (const int index : sizes.counted) {
    const int module = tree.tensors()[static_cast<std::size_t>(index)].module;
    const auto meet = [&](const auto& self, int at) -> void {
      if (at <= 0 || has_tensor[static_cast<std::size_t>(at)]) return;
      const int parent = tree.modules()[static_cast<std::size_t>(at)].parent;
      self(self, parent);
      has_tensor[static_cast<std::size_t>(at)] = true;
      has_module[static_cast<std::size_t>(parent)] = true;
      order.push_back(at);
    };
    meet(meet, module);
  }
  std::int64_t leaves = 0, leaf_bytes = 0;
  for (const int module : order) {
    const ModelTree::Module& entry = tree.modules()[static_cast<std::size_t>(module)];
    for (std::size_t c = 0; c < no_split.size(); ++c) {
      if (class_met[c] || !is_module_type(entry.type, no_split[c])) continue;
      class_met[c] = true;
      unsplittable = std::max(unsplittable, sizes.modules[static_cast<std::size_t>(module)]);
    }
    if (!has_module[static_cast<std::size_t>(module)]) {
      ++leaves;
      leaf_bytes += sizes.modules[static_cast<std::size_t>(module)];
    }
  }
  const std::int64_t mean_leaf = leaf_bytes / std::max<std::int64_t>(leaves, 1);
  per_device +=
      static_cast<std::int64_t>(1.25 * static_cast<double>(std::max(unsplittable, mean_leaf)));

  // The last keeps its limit, in case the shares were too small all the same.
  const bool has_zero = limits.front().first == Place::accelerator(0);
  const std::size_t spared = has_zero ? 0 : used.front();
  for (std::size_t i = 0; i + 1 < used.size(); ++i) {
    if (low_zero && used[i] == spared) continue;
    std::int64_t& limit = limits[used[i]].second;
    limit = std::min(limit, per_device);
  }
  if (low_zero) {
    std::int64_t rest = sizes.modules[0];
    for (const std::size_t other : used) {
      if (other != spared) rest -= std::min(rest, limits[other].second);
    }
    limits[spared].second = std::min(limits[spared].second, rest);
  }
  return limits;
}

std::optional<Place> place_of(const DeviceMap& map, const std::string& path) {
  std::optional<Place> place;
  std::size_t longest = 0;
  for (const auto& [key, where] : map) {
    const bool covers = key.empty() || (path.starts_with(key) &&
                                        (path.size() == key.size() || path[key.size()] == '.'));
    if (covers && (!place || key.size() >= longest)) {
      place = where;
      longest = key.size();
    }
  }
  return place;
}

void check_device_map(const ModelTree& tree, const DeviceMap& map) {
  std::vector<std::string> unknown, left_out;
  std::unordered_set<std::string> keys;
  for (const auto& [key, place] : map) {
    keys.insert(key);
    if (tree.find_module(key) < 0 && tree.find_tensor(key) < 0) unknown.push_back(key);
  }
  std::vector<bool> covered(tree.modules().size());
  for (std::size_t i = 0; i < covered.size(); ++i) {
    const ModelTree::Module& module = tree.modules()[i];  // its parent comes before it
    covered[i] = keys.contains(module.name) ||
                 (module.parent >= 0 && covered[static_cast<std::size_t>(module.parent)]);
  }
  for (const ModelTree::Tensor& tensor : tree.tensors()) {
    if (!covered[static_cast<std::size_t>(tensor.module)] && !keys.contains(tensor.name))
      left_out.push_back(tensor.name);
  }
  if (!unknown.empty()) {
    throw ConfigError(text::concat(
        "The device map names what the model does not have: ", text::join(unknown),
        ". Its modules are: ",
        [&] {
          std::vector<std::string> names;
          for (const int child : tree.modules().front().children)
            names.push_back(tree.modules()[static_cast<std::size_t>(child)].name);
          return text::join(names);
        }(),
        "."));
  }
  if (!left_out.empty()) {
    throw ConfigError(text::concat("The device map gives no device to: ", text::join(left_out),
                                   ". Add them, or a module above them."));
  }
}

}  // namespace accelerate
