#pragma once

#include <accelerate/comm/group.hpp>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace accelerate::comm {

/// The c10d object behind a group, for code that speaks c10d (c10d::Reducer, torch's own functional
/// collectives). What goes through it is counted and watched like the group's own calls; its errors
/// are the library's. Null for a group of one.
c10::intrusive_ptr<c10d::ProcessGroup> process_group(const Group& group);

}  // namespace accelerate::comm
