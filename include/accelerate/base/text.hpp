#pragma once

#include <cstdint>
#include <locale>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

/// Small text helpers. `<format>` does not exist in g++ 12, and two versions of fmt would meet
/// where LibTorch's headers are included, so messages are put together with `concat`. Neither C++'s
/// nor C's global locale has an effect on what these read and write: files and messages are the
/// same everywhere.
namespace accelerate::text {

/// Everything streamed one after another.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  (out << ... << parts);
  return std::move(out).str();
}

/// "a, b, c". Prints at most `most` items, then ", ... and N more".
template <class Range>
std::string join(const Range& items, std::string_view separator = ", ", std::size_t most = 20) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  std::size_t count = 0;
  std::size_t left_out = 0;
  for (const auto& item : items) {
    if (count >= most) {
      ++left_out;
      continue;
    }
    if (count++ > 0) out << separator;
    out << item;
  }
  if (left_out > 0) out << separator << "... and " << left_out << " more";
  return std::move(out).str();
}

/// The whole string as a number, or nothing.
std::optional<std::int64_t> to_int(std::string_view text);
std::optional<double> to_double(std::string_view text);
/// 1/true/yes/on/y/t and 0/false/no/off/n/f in any case, or nothing.
std::optional<bool> to_bool(std::string_view text);

/// Of ASCII's letters.
std::string to_lower(std::string_view text);
std::string_view trim(std::string_view text);
std::vector<std::string> split(std::string_view text, char separator);

/// Bytes from text: "10GB" is 10^10, "10GiB" is 10 * 2^30, "512" is 512 bytes. Units: B, KB, MB,
/// GB, TB, KiB, MiB, GiB, TiB. Nothing when the text is not a size or the unit is left to guessing
/// (a lower-case "b" would mean bits).
std::optional<std::int64_t> to_bytes(std::string_view text);
/// "1.50 GiB".
std::string format_bytes(std::int64_t bytes);
/// "1:02:03", "2.5 s", "340 ms".
std::string format_seconds(double seconds);

}  // namespace accelerate::text
