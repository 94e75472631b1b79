#include <accelerate/base/text.hpp>

#include "base/plain_text.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>

namespace accelerate::text {

namespace {

// Those of <cctype> depend on the locale.
bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Two digits at least.
std::string padded(long long value) { return (value < 10 ? "0" : "") + std::to_string(value); }

}  // namespace

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

std::string fixed(double value, int digits) {
  char buffer[400];  // the largest double has 309 digits before the point
  const auto end =
      std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::fixed, digits).ptr;
  return {buffer, end};
}

std::string printable(std::string_view text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string safe;
  safe.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool control = (byte < 0x20 && byte != '\n' && byte != '\t') || byte == 0x7f;
    // U+0080 to U+009F, among which are eight-bit forms of what begins with escape.
    const bool second_set = byte == 0xc2 && i + 1 < text.size() &&
                            static_cast<unsigned char>(text[i + 1]) >= 0x80 &&
                            static_cast<unsigned char>(text[i + 1]) < 0xa0;
    if (!control && !second_set) {
      safe += text[i];
      continue;
    }
    const auto shown = second_set ? static_cast<unsigned char>(text[++i]) : byte;
    safe += {'\\', 'x', kDigits[shown >> 4], kDigits[shown & 15]};
  }
  return safe;
}

std::string to_lower(std::string_view text) {
  std::string lower(text);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  return lower;
}

std::string_view trim(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
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
  while (digits < text.size() && (is_digit(text[digits]) || text[digits] == '.')) ++digits;
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
  return fixed(value, unit == 0 ? 0 : 2) + " " + kUnits[unit];
}

std::string format_seconds(double seconds) {
  if (seconds < 1.0) return fixed(seconds * 1e3, 0) + " ms";
  if (seconds < 60.0) return fixed(seconds, 1) + " s";
  const auto whole = static_cast<long long>(seconds);
  if (whole < 3600) return std::to_string(whole / 60) + ":" + padded(whole % 60);
  return std::to_string(whole / 3600) + ":" + padded(whole / 60 % 60) + ":" + padded(whole % 60);
}

}  // namespace accelerate::text
