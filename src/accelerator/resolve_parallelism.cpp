#include "accelerator/resolve.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <limits>
#include <string_view>

namespace accelerate {
namespace {

using Size = ParallelismConfig::Size;

struct Axis {
  const char* key;
  const char* variable;
  Size& (ParallelismConfig::*size)() noexcept;
};
constexpr Axis kAxes[] = {
    {"dp_replicate_size", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
     &ParallelismConfig::dp_replicate_size},
    {"dp_shard_size", "PARALLELISM_CONFIG_DP_SHARD_SIZE", &ParallelismConfig::dp_shard_size},
    {"cp_size", "PARALLELISM_CONFIG_CP_SIZE", &ParallelismConfig::cp_size},
    {"sp_size", "PARALLELISM_CONFIG_SP_SIZE", &ParallelismConfig::sp_size},
    {"tp_size", "PARALLELISM_CONFIG_TP_SIZE", &ParallelismConfig::tp_size},
    {"pp_size", "PARALLELISM_CONFIG_PP_SIZE", &ParallelismConfig::pp_size},
};
constexpr std::string_view kFurtherAxes = "further_axes";
constexpr std::string_view kPrefix = "parallelism_config_";  // of Python Accelerate's file

int size_from(const std::string& text, const std::string& where) {
  const auto size = text::to_int(text);
  if (!size || *size < -1 || *size > std::numeric_limits<int>::max()) {
    throw ConfigError(text::concat(where, " is \"", text,
                                   "\"; expected was a number of processes, or 0 or -1 to have it "
                                   "computed from the other sizes."));
  }
  return static_cast<int>(*size);
}

void read_file(const Json& section, ParallelismConfig& config) {
  if (!section.is_object()) {
    throw ConfigError(
        "The configuration file's \"parallelism_config\" is not an object of ParallelismConfig's "
        "names.");
  }
  for (const auto& [full, value] : section.items()) {
    const std::string key(full.starts_with(kPrefix) ? full.substr(kPrefix.size()) : full);
    const auto where = [&, &full = full](const auto&... more) {
      return text::concat("The configuration file's \"parallelism_config.", full, more..., "\"");
    };
    const auto text_of = [](const Json& one) {
      return one.is_string() ? one.get<std::string>() : one.dump();
    };
    const auto axis = std::find_if(std::begin(kAxes), std::end(kAxes),
                                   [&](const Axis& one) { return key == one.key; });
    if (axis != std::end(kAxes)) {
      (config.*axis->size)() = size_from(text_of(value), where());
    } else if (key == kFurtherAxes && value.is_object()) {
      config.further_axes().clear();
      for (const auto& [name, size] : value.items())
        config.further_axes().emplace_back(name, size_from(text_of(size), where(".", name)));
    } else {
      std::vector<std::string_view> known;
      for (const Axis& one : kAxes) known.push_back(one.key);
      throw ConfigError(text::concat(
          where(), key == kFurtherAxes ? " is not an object of sizes." : " is not known.",
          " Known are ", text::join(known), ", and ", kFurtherAxes,
          ", an object of names and sizes."));
    }
  }
}

void read_environment(const Environment& environment, ParallelismConfig& config) {
  const auto where = [](const char* variable) {
    return text::concat("The environment variable ", variable);
  };
  for (const Axis& axis : kAxes) {
    if (const auto text = environment.get(axis.variable); text && !text->empty())
      (config.*axis.size)() = size_from(*text, where(axis.variable));
  }
  constexpr const char* kVariable = "PARALLELISM_CONFIG_FURTHER_AXES";
  const auto axes = environment.get(kVariable);
  if (!axes || axes->empty()) return;
  config.further_axes().clear();
  for (const std::string& entry : text::split(*axes, ',')) {
    const auto equals = entry.find('=');
    if (equals == std::string::npos) {
      throw ConfigError(text::concat(where(kVariable), " is \"", *axes,
                                     "\"; expected were names and sizes, as in \"ep=2,name=4\"."));
    }
    config.further_axes().emplace_back(std::string(text::trim(entry.substr(0, equals))),
                                       size_from(entry.substr(equals + 1), where(kVariable)));
  }
}

}  // namespace

std::optional<ParallelismConfig> resolve_parallelism(const Environment& environment,
                                                     const Json& file) {
  std::optional<ParallelismConfig> config;
  if (const auto section = file.find("parallelism_config");
      section != file.end() && !section->is_null())
    read_file(*section, config.emplace());
  if (environment.get_bool("ACCELERATE_USE_PARALLELISM_CONFIG").value_or(false)) {
    if (!config) config.emplace();
    read_environment(environment, *config);
  }
  return config;
}

}  // namespace accelerate
