#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

namespace accelerate::data::detail {

/// While one lives, LibTorch's random functions draw in this thread from numbers of their own for
/// each unit of a loader's data, where they work on the CPU and are given no generator; the default
/// generator is left alone. So what a dataset draws is decided by the seed of the pass and the
/// unit's place in it: not by workers, by other processes, or by where a run was resumed.
class SampleRandom {
 public:
  /// `seed` is that of the pass.
  explicit SampleRandom(std::int64_t seed);
  SampleRandom(const SampleRandom&) = delete;
  SampleRandom& operator=(const SampleRandom&) = delete;
  ~SampleRandom();

  /// What is drawn from now on is for the unit at `position`; what is drawn for one unit in
  /// different parts (reading it, transforming it) differs. Nothing is computed until something is
  /// drawn.
  void at(std::int64_t position, std::int64_t part = 0) noexcept;

  /// The generator of what `at` said last.
  const at::Generator& generator();
  /// The innermost one of this thread; null when there is none.
  static SampleRandom* current() noexcept;

 private:
  std::int64_t seed_;
  std::int64_t position_ = 0;
  std::int64_t part_ = 0;
  bool seeded_ = false;
  at::Generator generator_;
  SampleRandom* outer_;
};

}  // namespace accelerate::data::detail
