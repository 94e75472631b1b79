#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace accelerate {

/// What memory is for. Whoever allocates says so with a MemoryKindScope; who counts is
/// tracking/tensor_bytes.hpp, and without it a scope costs two writes to a thread's own variable.
enum class MemoryKind : std::uint8_t {
  other,  ///< activations, batches, and what nobody has named
  parameters,
  gradients,
  optimizer_state
};

inline constexpr std::array kMemoryKinds{MemoryKind::other, MemoryKind::parameters,
                                         MemoryKind::gradients, MemoryKind::optimizer_state};

/// "other", "parameters", "gradients" or "optimizer_state".
std::string_view to_string(MemoryKind kind);

/// The kind of what this thread allocates now.
MemoryKind current_memory_kind() noexcept;

/// While it lives, what this thread allocates is of `kind`. Scopes nest.
class [[nodiscard]] MemoryKindScope {
 public:
  explicit MemoryKindScope(MemoryKind kind) noexcept;
  ~MemoryKindScope();
  MemoryKindScope(const MemoryKindScope&) = delete;
  MemoryKindScope& operator=(const MemoryKindScope&) = delete;

 private:
  MemoryKind outer_;
};

}  // namespace accelerate
