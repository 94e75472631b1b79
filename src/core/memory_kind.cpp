#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/memory_kind.hpp>

namespace accelerate {
namespace {
thread_local MemoryKind kind_now = MemoryKind::other;
}  // namespace

std::string_view to_string(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::other:
      return "other";
    case MemoryKind::parameters:
      return "parameters";
    case MemoryKind::gradients:
      return "gradients";
    case MemoryKind::optimizer_state:
      return "optimizer_state";
  }
  throw ConfigError(text::concat("There is no MemoryKind ", static_cast<int>(kind), "."));
}

MemoryKind current_memory_kind() noexcept { return kind_now; }

MemoryKindScope::MemoryKindScope(MemoryKind kind) noexcept : outer_(kind_now) { kind_now = kind; }

MemoryKindScope::~MemoryKindScope() { kind_now = outer_; }

}  // namespace accelerate
