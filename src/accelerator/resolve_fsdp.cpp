#include "accelerator/resolve.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <set>

namespace accelerate {
namespace {

// What one source says about sharding, key by key under FsdpOptions' names. Every key must be asked
// for, so that none is ignored.
class Section {
 public:
  Section(std::map<std::string, std::string> values, std::map<std::string, std::string> where)
      : values_(std::move(values)), where_(std::move(where)) {}

  std::optional<std::string> text(const std::string& key) {
    known_.insert(key);
    const auto found = values_.find(key);
    return found == values_.end() ? std::nullopt : std::optional(found->second);
  }
  std::optional<bool> flag(const std::string& key) {
    const auto given = text(key);
    if (!given) return std::nullopt;
    const auto value = text::to_bool(text::to_lower(*given));
    if (!value) refuse(key, "a yes or no");
    return value;
  }
  std::optional<std::int64_t> number(const std::string& key) {
    const auto given = text(key);
    if (!given) return std::nullopt;
    const auto value = text::to_int(*given);
    if (!value || *value < 0) refuse(key, "a whole number from 0");
    return value;
  }
  std::vector<std::string> names(const std::string& key) {
    std::vector<std::string> all;
    for (const std::string& name : text::split(text(key).value_or(""), ',')) {
      if (!name.empty()) all.push_back(name);
    }
    return all;
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const {
    throw ConfigError(text::concat(where_.at(key), " is \"", values_.at(key), "\", and ", expected,
                                   " was expected."));
  }
  void refuse_unknown() const {
    for (const auto& [key, value] : values_) {
      if (known_.contains(key)) continue;
      throw ConfigError(
          text::concat(where_.at(key), " is not known. Known are: ",
                       text::join(std::vector<std::string>(known_.begin(), known_.end())), "."));
    }
  }

 private:
  std::map<std::string, std::string> values_, where_;
  std::set<std::string> known_;
};

template <class T>
T one_of(Section& section, const std::string& key, const std::string& given,
         const std::vector<std::pair<std::string, T>>& choices) {
  std::vector<std::string> known;
  for (const auto& [name, value] : choices) {
    if (text::to_lower(given) == name) return value;
    known.push_back(name);
  }
  section.refuse(key, "one of " + text::join(known));
}

FsdpOptions read(Section section) {
  FsdpOptions options;
  if (const auto given = section.text("sharding_strategy")) {
    using S = ShardingStrategy;
    options.sharding_strategy(one_of<S>(section, "sharding_strategy", *given,
                                        {{"full_shard", S::full_shard},
                                         {"shard_grad_op", S::shard_grad_op},
                                         {"no_shard", S::no_shard},
                                         {"hybrid_shard", S::hybrid_shard},
                                         {"hybrid_shard_zero2", S::hybrid_shard_zero2},
                                         {"shard_optimizer", S::shard_optimizer},
                                         {"1", S::full_shard},
                                         {"2", S::shard_grad_op},
                                         {"3", S::no_shard},
                                         {"4", S::hybrid_shard},
                                         {"5", S::hybrid_shard_zero2}}));
  }
  if (const auto given = section.text("reshard_after_forward")) {
    const std::string lower = text::to_lower(*given);
    if (const auto on = text::to_bool(lower); on && lower != "1") {
      options.reshard_after_forward(*on);
    } else if (const auto ranks = text::to_int(lower); ranks && *ranks > 0) {
      options.reshard_after_forward(static_cast<int>(*ranks));
    } else {
      section.refuse("reshard_after_forward", "a yes, a no, or a number of ranks");
    }
  }
  if (const auto given = section.text("backward_prefetch")) {
    using P = BackwardPrefetch;
    options.backward_prefetch(one_of<P>(section, "backward_prefetch", *given,
                                        {{"backward_pre", P::backward_pre},
                                         {"backward_post", P::backward_post},
                                         {"no_prefetch", P::none},
                                         {"none", P::none}}));
  }
  if (const auto on = section.flag("forward_prefetch")) options.forward_prefetch(*on);
  if (const auto on = section.flag("cpu_offload")) options.cpu_offload(*on);
  if (const auto on = section.flag("sync_module_states")) options.sync_module_states(*on);
  if (const auto on = section.flag("reduce_every_backward")) options.reduce_every_backward(*on);
  if (const auto on = section.flag("all_units_every_pass")) options.all_units_every_pass(*on);
  if (const auto on = section.flag("verify_control_flow")) options.verify_control_flow(*on);
  if (const auto count = section.number("min_num_params")) options.min_num_params(*count);
  if (const auto count = section.number("prefetch_units"))
    options.prefetch_units(static_cast<int>(*count));
  if (const auto count = section.number("shard_group_size"))
    options.shard_group_size(static_cast<int>(*count));
  if (const auto given = section.text("resident_limit")) {
    const auto bytes = text::to_bytes(*given);
    if (!bytes) section.refuse("resident_limit", "an amount of memory such as \"2GiB\"");
    options.resident_limit(*bytes);
  }
  options.unit_names(section.names("unit_names"));
  options.unit_types(section.names("unit_types"));
  options.ignored_modules(section.names("ignored_modules"));
  section.refuse_unknown();
  return options;
}

}  // namespace

std::optional<FsdpOptions> resolve_fsdp(const Environment& environment, const Json& file) {
  std::map<std::string, std::string> values, where;
  bool asked = false;
  if (const auto entry = file.find("fsdp"); entry != file.end() && !entry->is_null()) {
    if (!entry->is_object())
      throw ConfigError(
          "The configuration file's \"fsdp\" is not an object of FsdpOptions' names.");
    asked = true;
    for (const auto& [key, value] : entry->items()) {
      where[key] = text::concat("The configuration file's \"fsdp.", key, "\"");
      if (value.is_array()) {
        std::vector<std::string> names;
        for (const auto& name : value) names.push_back(name.get<std::string>());
        values[key] = text::join(names, ",");
      } else {
        values[key] = value.is_string() ? value.get<std::string>() : value.dump();
      }
    }
  }
  if (environment.get_bool("ACCELERATE_USE_FSDP").value_or(false)) {
    asked = true;
    static const std::vector<std::pair<const char*, const char*>> kVariables{
        {"FSDP_SHARDING_STRATEGY", "sharding_strategy"},
        {"FSDP_RESHARD_AFTER_FORWARD", "reshard_after_forward"},
        {"FSDP_BACKWARD_PREFETCH", "backward_prefetch"},
        {"FSDP_FORWARD_PREFETCH", "forward_prefetch"},
        {"FSDP_OFFLOAD_PARAMS", "cpu_offload"},
        {"FSDP_SYNC_MODULE_STATES", "sync_module_states"},
        {"FSDP_TRANSFORMER_CLS_TO_WRAP", "unit_types"},
        {"FSDP_MIN_NUM_PARAMS", "min_num_params"}};
    // The policy decides which of the two below it counts.
    const std::string policy =
        text::to_lower(environment.get("FSDP_AUTO_WRAP_POLICY").value_or(""));
    const bool by_type = policy.empty() || policy == "transformer_based_wrap";
    const bool by_size = policy.empty() || policy == "size_based_wrap";
    if (!by_type && !by_size && policy != "no_wrap") {
      throw ConfigError(text::concat("The environment variable FSDP_AUTO_WRAP_POLICY is \"", policy,
                                     "\", and one of transformer_based_wrap, size_based_wrap, "
                                     "no_wrap was expected."));
    }
    for (const auto& [variable, key] : kVariables) {
      const auto value = environment.get(variable);
      if (!value || value->empty()) continue;
      if (std::string_view(key) == "unit_types" && !by_type) continue;
      if (std::string_view(key) == "min_num_params" && !by_size) continue;
      values[key] = *value;
      where[key] = text::concat("The environment variable ", variable);
    }
    if (environment.get_bool("FSDP_ACTIVATION_CHECKPOINTING").value_or(false)) {
      throw UnsupportedError(
          "The environment variable FSDP_ACTIVATION_CHECKPOINTING is set, and which children of a "
          "C++ module can be run again is the program's to say. Unset it, and call "
          "accelerate::checkpoint in the program.");
    }
  }
  if (!asked) return std::nullopt;
  return read(Section(std::move(values), std::move(where)));
}

}  // namespace accelerate
