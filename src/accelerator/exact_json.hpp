#pragma once

#include <accelerate/base/json.hpp>

#include <string>
#include <string_view>

namespace accelerate::detail {

// Text of `value` that gives back what it was: JSON itself has no infinities and no NaN, and would
// make them null. Throws CheckpointError naming `name` where that cannot be, as with text that is
// not UTF-8.
std::string exact_text(const Json& value, std::string_view name);
Json parse_exact(std::string_view text, std::string_view name);

}  // namespace accelerate::detail
