#include "accelerator/exact_json.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>

namespace accelerate::detail {

namespace {

// {"$number": "inf"} stands for a number that JSON has no word for.
constexpr const char* kNumber = "$number";

Json encoded(const Json& value, std::string_view name) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    const double number = value.get<double>();
    return {{kNumber, std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf"}};
  }
  if (!value.is_structured()) return value;
  Json all = value.is_array() ? Json::array() : Json::object();
  for (const auto& [key, item] : value.items()) {
    if (value.is_array()) {
      all.push_back(encoded(item, name));
    } else if (key == kNumber) {
      throw CheckpointError(text::concat("The state ", name, " has the key '", kNumber,
                                         "', which checkpoints use themselves. Rename it."),
                            std::string(name));
    } else {
      all[key] = encoded(item, name);
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
      all[key] = decoded(item);
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
    return decoded(Json::parse(text));
  } catch (const Json::exception&) {
    std::throw_with_nested(CheckpointError(
        text::concat(name, " of the checkpoint is not the JSON that was expected there."),
        std::string(name)));
  }
}

}  // namespace accelerate::detail
