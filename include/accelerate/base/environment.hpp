#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace accelerate {

/// A snapshot of environment variables. Everything in this library that depends on the environment
/// takes one of these, so that a test can make up its own.
class Environment {
 public:
  /// An empty environment.
  Environment() = default;
  Environment(std::initializer_list<std::pair<const std::string, std::string>> variables)
      : variables_(variables) {}
  explicit Environment(std::map<std::string, std::string> variables)
      : variables_(std::move(variables)) {}

  /// The variables of this process, as they are now.
  static Environment process();

  /// The value, or nothing when the variable is unset or empty.
  std::optional<std::string> get(const std::string& name) const;
  /// The value as a whole number. Throws ConfigError when it is not one.
  std::optional<std::int64_t> get_int(const std::string& name) const;
  /// The value as a number. Throws ConfigError when it is not one.
  std::optional<double> get_double(const std::string& name) const;
  /// The value as a flag: 1/true/yes/on/y/t or 0/false/no/off/n/f in any case, as the original's
  /// `str_to_bool`. Throws ConfigError when it is neither.
  std::optional<bool> get_bool(const std::string& name) const;
  bool has(const std::string& name) const { return get(name).has_value(); }

  void set(const std::string& name, std::string value) { variables_[name] = std::move(value); }
  void unset(const std::string& name) { variables_.erase(name); }
  const std::map<std::string, std::string>& variables() const& noexcept { return variables_; }
  /// Of a temporary, a copy of its own: `for (auto& v : Environment::process().variables())` is
  /// fine.
  std::map<std::string, std::string> variables() && { return std::move(variables_); }

 private:
  std::map<std::string, std::string> variables_;
};

}  // namespace accelerate
