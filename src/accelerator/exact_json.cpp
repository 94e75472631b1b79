#include "accelerator/exact_json.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include "base/parse_json.hpp"

#include <cmath>
#include <limits>
#include <utility>

namespace accelerate::detail {

namespace {

// {"$number": "inf"} stands for a number that JSON has no word for.
constexpr const char* kNumber = "$number";

// `[key]` would go through all keys before it.
void put(Json& object, const std::string& key, Json value) {
  object.get_ref<Json::object_t&>().push_back({key, std::move(value)});
}

Json encoded(const Json& value, std::string_view name, std::size_t depth = 0) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const double number = value.get<double>();
    return {{kNumber, std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf"}};
  }
  if (!value.is_structured()) return value;
  if (depth == kDeepestJson) {
    throw CheckpointError(
        text::concat("The state ", name, " has arrays and objects inside each other, more than ",
                     kDeepestJson, " deep, which could not be read again."),
        std::string(name));
  }
  Json all = value.is_array() ? Json::array() : Json::object();
  for (const auto& [key, item] : value.items()) {
    if (value.is_array()) {
      all.push_back(encoded(item, name, depth + 1));
    } else if (key == kNumber) {
      throw CheckpointError(text::concat("The state ", name, " has the key '", kNumber,
                                         "', which checkpoints use themselves. Rename it."),
                            std::string(name));
    } else {
      put(all, key, encoded(item, name, depth + 1));
    }
  }
  return all;
}

Json decoded(const Json& value) {
  if (!value.is_structured()) return value;
  if (value.is_object() && value.size() == 1 && value.contains(kNumber)) {
    const auto& word = value.at(kNumber).get_ref<const std::string&>();
    if (word == "nan") return std::numeric_limits<double>::quiet_NaN();
    return word == "inf" ? std::numeric_limits<double>::infinity()
                         : -std::numeric_limits<double>::infinity();
  }
  Json all = value.is_array() ? Json::array() : Json::object();
  for (const auto& [key, item] : value.items()) {
    if (value.is_array()) {
      all.push_back(decoded(item));
    } else {
      put(all, key, decoded(item));
    }
  }
  return all;
}

}  // namespace

std::string exact_text(const Json& value, std::string_view name) {
  try {
    return encoded(value, name).dump(1) + "\n";
  } catch (const Json::exception&) {
    std::throw_with_nested(CheckpointError(
        text::concat("The state ", name,
                     " cannot be written as JSON. Text in it has to be UTF-8; keep bytes as an "
                     "array of numbers, or in a tensor."),
        std::string(name)));
  }
}

Json parse_exact(std::string_view text, std::string_view name) {
  try {
    return decoded(parse_json(text));
  } catch (const DataError& error) {
    throw CheckpointError(text::concat(name, " of the checkpoint cannot be read. ", error.what()),
                          std::string(name));
  } catch (const Json::exception&) {
    std::throw_with_nested(CheckpointError(
        text::concat(name, " of the checkpoint is not the JSON that was expected there."),
        std::string(name)));
  }
}

}  // namespace accelerate::detail
