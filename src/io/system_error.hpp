#pragma once

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <exception>
#include <filesystem>
#include <system_error>

namespace accelerate::io {

/// Throws a CheckpointError with the parts as its message, the system's reason after it, and the
/// system's error nested.
template <class... Parts>
[[noreturn]] void throw_system(int error, const std::filesystem::path& path, const Parts&... what) {
  const std::error_code code(error, std::generic_category());
  try {
    throw std::system_error(code);
  } catch (...) {
    std::throw_with_nested(
        CheckpointError(text::concat(what..., ": ", code.message(), "."), path.string()));
  }
}

template <class... Parts>
[[noreturn]] void throw_damaged(const std::filesystem::path& path, const Parts&... what) {
  throw CheckpointError(text::concat(what...), path.string());
}

}  // namespace accelerate::io
