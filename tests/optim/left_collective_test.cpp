// Memory runs out on one rank while the others wait for it in a collective. Runs with a short
// timeout, and leaves connections that cannot be used again, so it is a program of its own.
#include "support/distributed.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/core/memory.hpp>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace accelerate {
namespace {

TEST(Ranks, AllSayThatMemoryRanOut) {
  const auto& world = testing::world();
  const int last = world.size() - 1;
  try {
    find_executable_batch_size(
        [&](std::int64_t) {
          if (world.rank() == last) throw std::bad_alloc();
          world.all_reduce(at::ones({3})).wait();
        },
        BatchSizeOptions().starting_batch_size(40), world);
    ADD_FAILURE() << "A batch size was found although no collective can have been completed.";
  } catch (const OutOfMemoryError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("Memory ran out on rank " + std::to_string(last)), std::string::npos)
        << message;
    EXPECT_NE(message.find("at most 36"), std::string::npos) << message;
  } catch (const DistributedError&) {
    // Only for a rank that waited, and could not reach the one without memory any more.
    EXPECT_NE(world.rank(), last);
  }
}

}  // namespace
}  // namespace accelerate
