#pragma once

#include <string>
#include <string_view>

namespace accelerate::text {

// With so many digits after the point: "0.50". No locale has an effect.
std::string fixed(double value, int digits);

// With control characters, those of terminals included, written as "\\x1b"; line feeds and tabs
// stay. Names come from files, and a terminal would obey what is in them.
std::string printable(std::string_view text);

}  // namespace accelerate::text
