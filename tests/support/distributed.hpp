#pragma once

#include <accelerate/comm/group.hpp>

namespace accelerate::testing {

/// The group of all ranks that run this test program.
const comm::Group& world();
/// Those of them that have different data: all, unless the environment lays them out otherwise.
const comm::Group& data_parallel();

}  // namespace accelerate::testing
