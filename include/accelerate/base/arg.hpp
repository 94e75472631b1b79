#pragma once

#include <utility>

/// One field of an options class, with a setter that returns the object (so that setters chain) and
/// a getter of the same name: LibTorch's TORCH_ARG, for the rooms that have no LibTorch in them.
/// Write the default after it: `ACCELERATE_ARG(int, processes) = 1;`
#define ACCELERATE_ARG(T, name)                                         \
 public:                                                                \
  auto name(T new_##name)->decltype(*this) { /* NOLINT */               \
    this->name##_ = std::move(new_##name);                              \
    return *this;                                                       \
  }                                                                     \
  T const& name() const noexcept { return this->name##_; } /* NOLINT */ \
  T& name() noexcept { return this->name##_; }             /* NOLINT */ \
                                                                        \
 private:                                                               \
  T name##_ /* NOLINT */
