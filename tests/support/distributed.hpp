#pragma once

#include <accelerate/comm/group.hpp>

namespace accelerate::testing {

/// The group of all ranks that run this test program.
const comm::Group& world();

}  // namespace accelerate::testing
