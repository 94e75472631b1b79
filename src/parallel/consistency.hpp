#pragma once

#include <accelerate/comm/group.hpp>
#include <accelerate/core/module.hpp>

#include <vector>

namespace accelerate::parallel {

/// Collective. Throws DistributedError on every rank unless names, shapes, dtypes and requires_grad
/// agree, naming the first that differs and what the ranks have there.
void require_same_structure(const std::vector<NamedTensor>& tensors, const comm::Group& group);

/// Collective. Throws DistributedError on every rank unless every tensor has the same bytes
/// everywhere, naming the first that differs and the ranks that agree on it.
void require_same_values(const std::vector<NamedTensor>& tensors, const comm::Group& group);

}  // namespace accelerate::parallel
