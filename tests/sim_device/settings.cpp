#include "sim_device/settings.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

namespace sim {
namespace {

std::int64_t number(const char* variable, std::int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoll(text);
}

}  // namespace

const Settings& settings() {
  static const Settings read{
      static_cast<int>(std::clamp<std::int64_t>(number("SIM_DEVICES", 3), 1, kMostDevices)),
      static_cast<std::size_t>(number("SIM_MEMORY", std::int64_t{4} << 30)),
      number("SIM_CHECK", 1) != 0, number("SIM_TRACE", 0) != 0};
  return read;
}

}  // namespace sim
