#pragma once

#include <ATen/core/Tensor.h>
#include <sys/mman.h>

#include <cstdint>

namespace accelerate::big_model {

/// Asks the kernel for large pages under a new tensor on the CPU, before anything is written to it:
/// filling memory for the first time costs a fault for each page.
inline void use_huge_pages(const at::Tensor& tensor) {
  constexpr std::uintptr_t kPage = std::uintptr_t{2} << 20;
  if (!tensor.is_cpu() || tensor.nbytes() < 2 * kPage) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const std::uintptr_t from = (begin + kPage - 1) / kPage * kPage;
  const std::uintptr_t to = (begin + tensor.nbytes()) / kPage * kPage;
  // A wish: where it is not granted, pages are small.
  if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
}

}  // namespace accelerate::big_model
