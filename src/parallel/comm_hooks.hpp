#pragma once

#include <accelerate/comm/group.hpp>
#include <accelerate/parallel/ddp.hpp>

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>

namespace accelerate::parallel {

/// The hook that a Reducer is given for these options, or nothing for the plain all-reduce.
std::unique_ptr<c10d::CommHookInterface> make_comm_hook(
    const DdpOptions& options, const comm::Group& group,
    const c10::intrusive_ptr<c10d::ProcessGroup>& process_group);

}  // namespace accelerate::parallel
