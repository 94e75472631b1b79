#pragma once

#include <accelerate/base/json.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <string_view>

namespace accelerate {

// How many arrays and objects may be inside each other. No file of this library or of Python has
// more than ten, and functions that call themselves for each level have stack for many times that.
constexpr std::size_t kDeepestJson = 200;

enum class JsonComments { refuse, ignore };

// The value that `text` describes: the one way to read JSON in this library, so that no file can
// end the process or keep it busy. Takes time in proportion to the text. Throws DataError, whose
// message says where and why, for what is not JSON in UTF-8, has a key twice in one object, has
// more than kDeepestJson levels, or has a NUL, at which nlohmann's parser would stop as at the end.
Json parse_json(std::string_view text, JsonComments comments = JsonComments::refuse);

// Likewise, but tells `reader` of each part instead of building a value. What it throws comes out;
// `parse_error` is how it learns of text that is not JSON.
void scan_json(std::string_view text, nlohmann::json_sax<Json>& reader,
               JsonComments comments = JsonComments::refuse);

}  // namespace accelerate
