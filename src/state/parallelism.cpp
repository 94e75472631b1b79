#include <accelerate/state/parallelism.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <algorithm>
#include <cstdint>

namespace accelerate {

using text::concat;

bool ParallelismConfig::operator==(const ParallelismConfig& other) const {
  return dp_replicate_size() == other.dp_replicate_size() &&
         dp_shard_size() == other.dp_shard_size() && cp_size() == other.cp_size() &&
         sp_size() == other.sp_size() && tp_size() == other.tp_size() &&
         pp_size() == other.pp_size() && further_axes() == other.further_axes();
}

MeshAxes mesh_axes(const ParallelismConfig& config, int processes) {
  std::vector<std::pair<std::string, ParallelismConfig::Size>> said{
      {"pp", config.pp_size()},
      {"dp_replicate", config.dp_replicate_size()},
      {"dp_shard", config.dp_shard_size()},
      {"cp", config.cp_size()},
      {"sp", config.sp_size()}};
  for (const auto& [name, size] : config.further_axes()) said.emplace_back(name, size);
  said.emplace_back("tp", config.tp_size());

  MeshAxes result;
  std::vector<std::string> computed, described;
  std::int64_t product = 1;
  for (std::size_t i = 0; i < said.size(); ++i) {
    const auto& [name, size] = said[i];
    const bool twice = std::any_of(said.begin(), said.begin() + static_cast<std::ptrdiff_t>(i),
                                   [&](const auto& other) { return other.first == name; });
    const bool is_name =
        !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char letter) {
          return (letter >= 'a' && letter <= 'z') || (letter >= '0' && letter <= '9') ||
                 letter == '_';
        });
    if (twice || !is_name) {
      throw ConfigError(concat("ParallelismConfig has a further axis \"", name, "\", which is ",
                               twice ? "the name of another axis" : "no name",
                               ". Name each axis once, in lower-case letters, digits and "
                               "underscores."));
    }
    if (size && *size < -1) {
      throw ConfigError(concat("The size of the axis ", name, " is ", *size,
                               "; expected was a number from 1 up, or 0 or -1 to have it computed "
                               "from the other sizes."));
    }
    if (size && *size < 1) {
      computed.push_back(name);
    } else if (size && *size > 1) {
      product *= *size;
      described.push_back(concat(name, " ", *size));
    }
    result.axes.emplace_back(name, std::max(size.value_or(1), 1));
    if (product > processes) break;
  }
  if (computed.size() > 1) {
    throw ConfigError(concat("The sizes of the axes ", text::join(computed, " and "),
                             " are all to be computed, and at most one can be. Name the others."));
  }
  const auto find = [&](std::string_view name) -> int& {
    return std::find_if(result.axes.begin(), result.axes.end(),
                        [&](const auto& axis) { return axis.first == name; })
        ->second;
  };
  const auto refuse = [&](const std::string& advice) {
    throw ConfigError(concat(
        "The axes of the ParallelismConfig (",
        described.empty() ? "all of size 1" : text::join(described), ") make ", product,
        " places, and there ",
        processes == 1 ? "is 1 process. " : concat("are ", processes, " processes. "), advice));
  };
  if (product > processes || processes % product != 0) {
    refuse("Choose sizes that multiply to that, or start another number of processes.");
  }
  if (config.cp_size().value_or(1) != 1 && config.sp_size().value_or(1) != 1) {
    throw ConfigError(
        "ParallelismConfig has a cp_size and an sp_size, which are two ways to cut the sequence. "
        "Use one of them.");
  }
  const int rest = static_cast<int>(processes / product);
  const bool data_said =
      config.dp_replicate_size().has_value() || config.dp_shard_size().has_value();
  if (!computed.empty()) {
    find(computed.front()) = rest;
    result.divided = data_said;
  } else if (data_said && product > 1) {
    if (rest > 1) {
      refuse(concat("Multiply one of the sizes by ", rest,
                    ", or make it 0 to have it computed from the others."));
    }
    result.divided = true;
  } else {
    // Sizes that are all 1 say nothing, as in Python Accelerate.
    find("dp_replicate") = rest;
  }
  result.data_parallel = find("dp_replicate") * find("dp_shard");
  return result;
}

}  // namespace accelerate
