#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <parallel/unit_plan.hpp>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

namespace accelerate::parallel {
namespace {

// A unit of fewer elements than this costs more in calls than it saves in memory, so leaf modules
// are taken together up to it (DeepSpeed keeps parameters below the same number whole).
constexpr std::int64_t kWorthAUnit = 100'000;

constexpr int kRoot = 0;
constexpr int kIgnored = -1;

std::int64_t elements_of(const ModuleNode& node) {
  std::int64_t total = 0;
  for (const NamedTensor& parameter : node.parameters) {
    if (parameter.tensor.defined()) total += parameter.tensor.numel();
  }
  for (const ModuleNode& child : node.children) total += elements_of(child);
  return total;
}

bool is_norm_with_statistics(const ModuleNode& node) {
  return std::any_of(node.buffers.begin(), node.buffers.end(), [&](const NamedTensor& buffer) {
    return buffer.tensor.defined() &&
           (buffer.name == "running_mean" || buffer.name.ends_with(".running_mean"));
  });
}

bool is_type(const ModuleNode& node, const std::string& wanted) {
  return node.type == wanted ||
         (node.type.ends_with(wanted) && node.type[node.type.size() - wanted.size() - 1] == ':') ||
         node.type.ends_with("." + wanted);
}

class Planner {
 public:
  Planner(const ModuleRecord& module, const FsdpOptions& options) : options_(options) {
    names_.push_back(module.root().name);
    count_types(module.root());
    if (!options.unit_names().empty() || !options.unit_types().empty()) {
      choose_named(module.root(), kRoot);
      for (const std::string& name : options.unit_names()) require(name, "unit_names");
      for (const std::string& type : options.unit_types()) require(type, "unit_types");
    } else if (options.min_num_params() > 0) {
      choose_by_size(module.root(), /*is_root=*/true);
    } else {
      choose_automatically(module.root());
    }
    for (const std::string& name : options.ignored_modules()) require(name, "ignored_modules");
  }

  std::vector<intercept::UnitPlan> plans(const ModuleRecord& module) const {
    const MixedPrecisionPolicy& policy = options_.mixed_precision();
    const bool mixed = policy.param_dtype || policy.reduce_dtype;
    std::unordered_map<const void*, int> unit_of;
    std::unordered_set<const void*> of_norms;
    const auto walk = [&](const auto& self, const ModuleNode& node, int unit) -> void {
      if (const auto found = chosen_.find(&node); found != chosen_.end()) unit = found->second;
      const bool norm = mixed && is_norm_with_statistics(node);
      for (const NamedTensor& parameter : node.parameters) {
        if (!parameter.tensor.defined()) continue;
        if (norm) of_norms.insert(parameter.tensor.unsafeGetTensorImpl());
        const auto [at, fresh] = unit_of.try_emplace(parameter.tensor.unsafeGetTensorImpl(), unit);
        if (!fresh && at->second != unit && at->second != kIgnored)
          at->second = unit == kIgnored ? kIgnored : kRoot;
      }
      for (const ModuleNode& child : node.children) self(self, child, unit);
    };
    walk(walk, module.root(), kRoot);

    using Kind = std::tuple<int, at::ScalarType, c10::DeviceType, c10::DeviceIndex, bool, bool>;
    std::map<Kind, std::vector<NamedTensor>> by_kind;
    for (const NamedTensor& parameter : module.parameters()) {
      const int unit = unit_of.at(parameter.tensor.unsafeGetTensorImpl());
      if (unit == kIgnored || parameter.tensor.numel() == 0) continue;
      const at::Device device = parameter.tensor.device();
      by_kind[{unit, parameter.tensor.scalar_type(), device.type(), device.index(),
               !parameter.tensor.requires_grad(),
               of_norms.contains(parameter.tensor.unsafeGetTensorImpl())}]
          .push_back(parameter);
    }
    std::vector<intercept::UnitPlan> plans;
    std::set<std::string> taken;
    for (auto& [kind, parameters] : by_kind) {
      const int unit = std::get<0>(kind);
      std::string name = unit == kRoot ? "(root)" : names_[static_cast<std::size_t>(unit)];
      if (taken.contains(name)) {
        name = text::concat(name, std::get<5>(kind) ? ", norms" : "",
                            std::get<4>(kind) ? ", frozen" : "", ", ", std::get<1>(kind));
      }
      taken.insert(name);
      plans.push_back({std::move(name), std::move(parameters),
                       unit == kRoot ? intercept::Stay::through_pass : intercept::Stay::while_used,
                       /*own_dtype=*/std::get<5>(kind)});
    }
    return plans;
  }

 private:
  void count_types(const ModuleNode& node) {
    if (!node.is_container) ++count_of_type_[node.type];
    for (const ModuleNode& child : node.children) count_types(child);
  }

  int add(const std::string& name) {
    names_.push_back(name);
    return static_cast<int>(names_.size()) - 1;
  }

  bool ignored(const ModuleNode& node) {
    for (const std::string& name : options_.ignored_modules()) {
      if (node.name != name) continue;
      met_.insert(name);
      chosen_[&node] = kIgnored;
      return true;
    }
    return false;
  }

  void choose_named(const ModuleNode& node, int unit) {
    if (ignored(node)) return;
    const auto& names = options_.unit_names();
    bool chosen = false;
    if (const auto at = std::find(names.begin(), names.end(), node.name); at != names.end()) {
      met_.insert(*at);
      chosen = true;
    }
    for (const std::string& type : options_.unit_types()) {
      if (!is_type(node, type)) continue;
      met_.insert(type);
      chosen = true;
    }
    if (chosen && !node.name.empty()) chosen_[&node] = unit = add(node.name);
    for (const ModuleNode& child : node.children) choose_named(child, unit);
  }

  // Elements that no unit inside has.
  std::int64_t choose_by_size(const ModuleNode& node, bool is_root) {
    if (ignored(node)) return 0;
    std::int64_t left = 0;
    for (const NamedTensor& parameter : node.parameters) {
      if (parameter.tensor.defined()) left += parameter.tensor.numel();
    }
    for (const ModuleNode& child : node.children) left += choose_by_size(child, false);
    if (is_root || node.is_container || left < options_.min_num_params()) return left;
    chosen_[&node] = add(node.name);
    return 0;
  }

  void choose_automatically(const ModuleNode& node) {
    if (ignored(node)) return;
    int open = 0;  // the unit that takes small neighbours together
    std::int64_t open_elements = 0;
    for (const ModuleNode& child : node.children) {
      const std::int64_t elements = elements_of(child);
      if (elements == 0 || ignored(child)) continue;
      const bool block = !child.children.empty();
      const bool repeated = count_of_type_[child.type] > 1 && (block || elements >= kWorthAUnit);
      if (child.is_container || (!node.is_container && !repeated)) {
        open = 0;
        choose_automatically(child);
      } else if (block || elements >= kWorthAUnit) {
        open = 0;
        chosen_[&child] = add(child.name);
        for_ignored(child);
      } else {
        if (open == 0 || open_elements >= kWorthAUnit) {
          open = add(child.name);
          open_elements = 0;
        }
        open_elements += elements;
        chosen_[&child] = open;
      }
    }
  }

  void for_ignored(const ModuleNode& node) {
    for (const ModuleNode& child : node.children) {
      if (!ignored(child)) for_ignored(child);
    }
  }

  void require(const std::string& name, const char* option) const {
    if (met_.contains(name)) return;
    std::vector<std::string> types;
    for (const auto& [type, count] : count_of_type_) types.push_back(type);
    throw ConfigError(text::concat("FsdpOptions::", option, " names '", name,
                                   "', and the module has nothing of that name. Its "
                                   "module types are: ",
                                   text::join(types), "."));
  }

  const FsdpOptions& options_;
  std::vector<std::string> names_;
  std::map<const ModuleNode*, int> chosen_;
  std::map<std::string, int> count_of_type_;
  std::set<std::string> met_;
};

}  // namespace

std::unordered_set<const void*> norm_statistics(const ModuleRecord& module) {
  std::unordered_set<const void*> found;
  const auto walk = [&](const auto& self, const ModuleNode& node) -> void {
    if (is_norm_with_statistics(node)) {
      for (const NamedTensor& buffer : node.buffers)
        found.insert(buffer.tensor.unsafeGetTensorImpl());
    }
    for (const ModuleNode& child : node.children) self(self, child);
  };
  walk(walk, module.root());
  return found;
}

std::vector<intercept::UnitPlan> plan_units(const ModuleRecord& module,
                                            const FsdpOptions& options) {
  auto plans = Planner(module, options).plans(module);
  if (plans.empty()) {
    throw ShardingError(module.is_torchscript()
                            ? "The TorchScript module has no parameters to shard. A module that "
                              "went through torch.jit.freeze or "
                              "optimize_for_inference has them as constants; export it without."
                            : "The module has no parameters to shard. Give prepare() a module with "
                              "parameters, and leave some of them out of "
                              "ignored_modules.");
  }
  return plans;
}

}  // namespace accelerate::parallel
