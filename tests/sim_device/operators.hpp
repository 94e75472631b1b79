#pragma once

#include <ATen/core/Tensor.h>

#include <set>
#include <string>

namespace sim {

/// A storage of the device gets another size; what it held stays.
void resize_storage(c10::StorageImpl& storage, std::size_t bytes);

/// Operators that the device has kernels of its own for, rather than the CPU's.
const std::set<std::string>& own_operators();

}  // namespace sim
