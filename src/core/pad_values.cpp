#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/pad_values.hpp>

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace accelerate {
namespace {

bool covers(const std::string& field, const std::string& path) {
  return path == field || (path.starts_with(field) && path[field.size()] == '.');
}

template <class Integer>
bool holds(double value) {
  // The largest 64-bit integers are no doubles; what is compared is.
  return value == std::floor(value) &&
         value >= static_cast<double>(std::numeric_limits<Integer>::min()) &&
         value < std::ldexp(1.0, std::numeric_limits<Integer>::digits);
}

bool can_hold(at::ScalarType dtype, double value) {
  switch (dtype) {
    case at::kBool:
      return value == 0 || value == 1;
    case at::kByte:
      return holds<std::uint8_t>(value);
    case at::kChar:
      return holds<std::int8_t>(value);
    case at::kShort:
      return holds<std::int16_t>(value);
    case at::kInt:
      return holds<std::int32_t>(value);
    case at::kLong:
      return holds<std::int64_t>(value);
    case at::kUInt16:
      return holds<std::uint16_t>(value);
    case at::kUInt32:
      return holds<std::uint32_t>(value);
    case at::kUInt64:
      return holds<std::uint64_t>(value);
    case at::kHalf:
      return !std::isfinite(value) || std::abs(value) <= 65504;
    default:
      return true;
  }
}

}  // namespace

double PadValues::at(const std::string& path) const {
  double value = value_;
  std::size_t longest = 0;
  for (const auto& [field, own] : fields_) {
    if (field.size() < longest || !covers(field, path)) continue;
    longest = field.size();
    value = own;
  }
  return value;
}

void PadValues::require_known(const std::vector<std::string>& paths) const {
  for (const auto& [field, value] : fields_) {
    if (std::any_of(paths.begin(), paths.end(),
                    [&](const std::string& path) { return covers(field, path); }))
      continue;
    throw ConfigError(text::concat(
        "PadValues has a value for the field '", field,
        "', and there is none of that name. The fields are: ", text::join(paths), "."));
  }
}

void PadValues::require_fits(at::ScalarType dtype, const std::string& path) const {
  if (can_hold(dtype, at(path))) return;
  throw ConfigError(text::concat(
      path.empty() ? std::string("The tensor") : text::concat("The field '", path, "'"), " is of ",
      c10::toString(dtype), ", which cannot hold ", at(path),
      ", the value to pad with. Give it one of its own: PadValues(...).field(\"",
      path.empty() ? "name" : path, "\", 0)."));
}

}  // namespace accelerate
