#pragma once

#include <accelerate/base/error.hpp>

#include <string>
#include <utility>

namespace accelerate::testing {

/// The message of the E that `act` throws, or "no error".
template <class E = Error, class Act>
std::string message_of(Act&& act) {
  try {
    std::forward<Act>(act)();
  } catch (const E& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace accelerate::testing
