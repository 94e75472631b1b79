#include <accelerate/base/text.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <utility>

namespace accelerate::text {

std::optional<std::int64_t> to_int(std::string_view text) {
  text = trim(text);
  if (text.starts_with('+')) text.remove_prefix(1);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

std::optional<double> to_double(std::string_view text) {
  text = trim(text);
  if (text.starts_with('+')) text.remove_prefix(1);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return std::nullopt;
  return value;
}

std::optional<bool> to_bool(std::string_view text) {
  const std::string lower = to_lower(trim(text));
  for (const char* yes : {"1", "true", "yes", "on", "y", "t"}) {
    if (lower == yes) return true;
  }
  for (const char* no : {"0", "false", "no", "off", "n", "f"}) {
    if (lower == no) return false;
  }
  return std::nullopt;
}

std::string to_lower(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return lower;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())))
    text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())))
    text.remove_suffix(1);
  return text;
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  while (true) {
    const auto at = text.find(separator);
    parts.emplace_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::optional<std::int64_t> to_bytes(std::string_view text) {
  text = trim(text);
  std::size_t digits = 0;
  while (digits < text.size() &&
         (std::isdigit(static_cast<unsigned char>(text[digits])) || text[digits] == '.')) {
    ++digits;
  }
  const auto number = to_double(text.substr(0, digits));
  if (!number) return std::nullopt;
  const std::string_view unit = trim(text.substr(digits));
  static constexpr std::array<std::pair<std::string_view, double>, 10> kUnits{
      {{"", 1.0},
       {"B", 1.0},
       {"KB", 1e3},
       {"MB", 1e6},
       {"GB", 1e9},
       {"TB", 1e12},
       {"KiB", 1024.0},
       {"MiB", 1048576.0},
       {"GiB", 1073741824.0},
       {"TiB", 1099511627776.0}}};
  for (const auto& [name, factor] : kUnits) {
    const double bytes = *number * factor;
    if (unit == name && bytes < 9.2e18) return static_cast<std::int64_t>(std::llround(bytes));
  }
  return std::nullopt;
}

std::string format_bytes(std::int64_t bytes) {
  static constexpr std::array<const char*, 5> kUnits{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (std::abs(value) >= 1024.0 && unit + 1 < kUnits.size()) {
    value /= 1024.0;
    ++unit;
  }
  char buffer[48];
  std::snprintf(buffer, sizeof buffer, unit == 0 ? "%.0f %s" : "%.2f %s", value, kUnits[unit]);
  return buffer;
}

std::string format_seconds(double seconds) {
  char buffer[48];
  if (seconds < 1.0) {
    std::snprintf(buffer, sizeof buffer, "%.0f ms", seconds * 1e3);
  } else if (seconds < 60.0) {
    std::snprintf(buffer, sizeof buffer, "%.1f s", seconds);
  } else {
    const auto whole = static_cast<long long>(seconds);
    if (whole >= 3600) {
      std::snprintf(buffer, sizeof buffer, "%lld:%02lld:%02lld", whole / 3600, whole / 60 % 60,
                    whole % 60);
    } else {
      std::snprintf(buffer, sizeof buffer, "%lld:%02lld", whole / 60, whole % 60);
    }
  }
  return buffer;
}

}  // namespace accelerate::text
