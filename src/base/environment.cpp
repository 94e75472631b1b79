#include <accelerate/base/environment.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <unistd.h>

namespace accelerate {

Environment Environment::process() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string line = *entry;
    if (const auto equals = line.find('='); equals != std::string::npos) {
      variables.emplace(line.substr(0, equals), line.substr(equals + 1));
    }
  }
  return Environment(std::move(variables));
}

std::optional<std::string> Environment::get(const std::string& name) const {
  const auto found = variables_.find(name);
  if (found == variables_.end() || found->second.empty()) return std::nullopt;
  return found->second;
}

std::optional<std::int64_t> Environment::get_int(const std::string& name) const {
  const auto value = get(name);
  if (!value) return std::nullopt;
  const auto number = text::to_int(*value);
  if (!number) {
    throw ConfigError(
        text::concat("The environment variable ", name, " is \"", *value,
                     "\", and a whole number was expected. Set it to one, or unset it."));
  }
  return number;
}

std::optional<double> Environment::get_double(const std::string& name) const {
  const auto value = get(name);
  if (!value) return std::nullopt;
  const auto number = text::to_double(*value);
  if (!number) {
    throw ConfigError(text::concat("The environment variable ", name, " is \"", *value,
                                   "\", and a number was expected. Set it to one, or unset it."));
  }
  return number;
}

std::optional<bool> Environment::get_bool(const std::string& name) const {
  const auto value = get(name);
  if (!value) return std::nullopt;
  const auto flag = text::to_bool(*value);
  if (!flag) {
    throw ConfigError(
        text::concat("The environment variable ", name, " is \"", *value,
                     "\", and a yes or no was expected (1, true, yes, on; or 0, false, no, off)."));
  }
  return flag;
}

}  // namespace accelerate
