// The main of tests that run on several ranks. Every rank runs the same cases in the same order; a
// rank returns non-zero when one of its cases failed, and the launcher then ends the others.
#include "support/distributed.hpp"

#include <accelerate/accelerator/accelerator.hpp>
#include <accelerate/base/error.hpp>

#include <gtest/gtest.h>

#include <iostream>
#include <optional>
#include <string>

namespace accelerate::testing {
namespace {

std::optional<Accelerator> accelerator;

/// Prints which rank failed; the failures of ranks other than 0 are all that they print.
class RankPrinter : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& test) override { name_ = test.name(); }
  // GoogleTest holds its lock here, so the test cannot be asked for.
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed()) return;
    std::cerr << "[rank " << accelerator->process_index() << "] " << name_ << ": "
              << (result.file_name() ? result.file_name() : "") << ":" << result.line_number()
              << ": " << result.message() << std::endl;
  }

  std::string name_;
};

}  // namespace

const comm::Group& world() { return accelerator->world(); }
const comm::Group& data_parallel() { return accelerator->data_parallel_group(); }

}  // namespace accelerate::testing

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  try {
    // From the environment, as a user's program: cases that make Accelerators of their own share
    // its world.
    accelerate::testing::accelerator.emplace();
  } catch (const accelerate::Error& error) {
    std::cerr << accelerate::describe(error) << std::endl;
    return 2;
  }
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (accelerate::testing::world().rank() != 0)
    delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new accelerate::testing::RankPrinter);
  const int failed = RUN_ALL_TESTS();
  accelerate::testing::accelerator.reset();
  accelerate::State::shutdown();
  return failed;
}
