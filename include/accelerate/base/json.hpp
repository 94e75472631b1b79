#pragma once

#include <nlohmann/json_fwd.hpp>

namespace accelerate {

/// JSON values keep the order in which their keys were written.
using Json = nlohmann::ordered_json;

}  // namespace accelerate
