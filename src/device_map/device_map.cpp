#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/device_map/device_map.hpp>
#include <accelerate/io/file.hpp>

#include "base/parse_json.hpp"

#include <algorithm>
#include <limits>
#include <ostream>
#include <set>

namespace accelerate {

Place Place::of(std::string_view given) {
  const std::string text = text::to_lower(text::trim(given));
  if (text == "cpu") return cpu();
  if (text == "disk") return disk();
  std::string_view number = text;
  if (number.starts_with("cuda:")) number.remove_prefix(5);
  if (text == "cuda") return accelerator(0);
  const auto index = text::to_int(number);
  if (index && *index >= 0 && *index <= std::numeric_limits<std::int16_t>::max())
    return accelerator(static_cast<int>(*index));
  throw ConfigError(text::concat(
      "There is no device '", given,
      "'. Devices are accelerators by their number (0, 1, ... or cuda:0), \"cpu\" and \"disk\"."));
}

std::string Place::text() const {
  switch (kind) {
    case Kind::cpu:
      return "cpu";
    case Kind::disk:
      return "disk";
    default:
      return std::to_string(index);
  }
}

std::ostream& operator<<(std::ostream& out, const Place& place) { return out << place.text(); }

DeviceMap parse_device_map(std::string_view json) {
  DeviceMap map;
  Json parsed;
  try {
    parsed = parse_json(json);
  } catch (const DataError& error) {
    std::throw_with_nested(
        ConfigError(text::concat("The device map cannot be read. ", error.what())));
  }
  if (!parsed.is_object())
    throw ConfigError(
        "A device map is an object of module names and devices, such as {\"encoder\": 0, "
        "\"head\": \"cpu\"}.");
  for (const auto& [key, value] : parsed.items()) {
    if (!value.is_string() && !value.is_number_integer()) {
      throw ConfigError(text::concat("The device map gives '", key, "' the device ", value.dump(),
                                     ", which is neither a number nor a name."));
    }
    map.emplace_back(key, Place::of(value.is_string() ? value.get<std::string>() : value.dump()));
  }
  return map;
}

DeviceMap read_device_map(const std::filesystem::path& file) {
  std::string json;
  try {
    json = io::read_file(file);
  } catch (const CheckpointError&) {
    std::throw_with_nested(
        ConfigError(text::concat("The device map ", file,
                                 " cannot be read. A device map is \"auto\", \"balanced\", "
                                 "\"balanced_low_0\", \"sequential\", or a JSON file.")));
  }
  try {
    return parse_device_map(json);
  } catch (const ConfigError&) {
    std::throw_with_nested(ConfigError(text::concat("The device map ", file, " is unusable.")));
  }
}

std::string to_json(const DeviceMap& map) {
  Json json = Json::object();
  for (const auto& [key, place] : map) {
    if (place.kind == Place::Kind::accelerator) {
      json[key] = place.index;
    } else {
      json[key] = place.text();
    }
  }
  return json.dump(2);
}

MaxMemory parse_max_memory(std::string_view text) {
  MaxMemory limits;
  for (const std::string& part : text::split(text, ',')) {
    const auto equals = part.find('=');
    if (equals == std::string::npos) {
      throw ConfigError(text::concat("'", part,
                                     "' is not a memory limit. Write PLACE=SIZE, for example "
                                     "0=10GiB or cpu=30GB."));
    }
    const std::string_view size = text::trim(std::string_view(part).substr(equals + 1));
    const auto bytes = text::to_bytes(size);
    if (!bytes || text::to_double(size)) {
      throw ConfigError(text::concat("'", size, "', the limit of '", part.substr(0, equals),
                                     "', is not a size with a unit, such as 10GiB or 500MB."));
    }
    limits.emplace_back(Place::of(part.substr(0, equals)), *bytes);
  }
  return get_max_memory(std::move(limits));
}

MaxMemory get_max_memory(MaxMemory limits) {
  std::stable_sort(limits.begin(), limits.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.kind, a.first.index) < std::pair(b.first.kind, b.first.index);
  });
  for (std::size_t i = 0; i < limits.size(); ++i) {
    if (limits[i].second < 0) {
      throw ConfigError(text::concat("The memory limit of ", limits[i].first, " is ",
                                     limits[i].second, " bytes."));
    }
    if (i > 0 && limits[i].first == limits[i - 1].first)
      throw ConfigError(text::concat("The memory limit of ", limits[i].first, " is given twice."));
  }
  return limits;
}

}  // namespace accelerate
