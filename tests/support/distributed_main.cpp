// The main of tests that run on several ranks. Every rank runs the same cases in the same order; a
// rank returns non-zero when one of its cases failed, and the launcher then ends the others.
#include "support/distributed.hpp"

#include <accelerate/base/environment.hpp>
#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/topology.hpp>
#include <accelerate/comm/world.hpp>

#include <gtest/gtest.h>

#include <iostream>

namespace accelerate::testing {
namespace {

comm::Group the_world;

/// Prints which rank failed; the failures of ranks other than 0 are all that they print.
class RankPrinter : public ::testing::EmptyTestEventListener {
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    std::cerr << "[rank " << the_world.rank() << "] " << (test ? test->name() : "") << ": "
              << (result.file_name() ? result.file_name() : "") << ":" << result.line_number()
              << ": " << result.message() << std::endl;
  }
};

}  // namespace

const comm::Group& world() { return the_world; }

}  // namespace accelerate::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  try {
    const auto environment = accelerate::Environment::process();
    const auto topology = accelerate::detect_topology(environment);
    accelerate::log::set_process(topology.rank, topology.world_size, topology.local_rank);
    accelerate::testing::the_world = accelerate::comm::create_world(
        topology, accelerate::comm::WorldOptions().read(environment));
  } catch (const accelerate::Error& error) {
    std::cerr << accelerate::describe(error) << std::endl;
    return 2;
  }
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (accelerate::testing::world().rank() != 0)
    delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new accelerate::testing::RankPrinter);
  const int failed = RUN_ALL_TESTS();
  accelerate::comm::shutdown(accelerate::testing::world());
  accelerate::testing::the_world = {};
  return failed;
}
