// Collectives that one stream starts and another waits for.

#include "sim_device/sim_device.hpp"
#include "support/distributed.hpp"

#include <ATen/DeviceAccelerator.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace accelerate {
namespace {

using testing::world;

TEST(OnSimCollectives, AnyStreamMayStartAndAnyWait) {
  if (world().size() == 1) GTEST_SKIP() << "One process starts nothing.";
  const at::Device device =
      sim::device(world().rank() % static_cast<int>(at::accelerator::deviceCount()));
  const c10::impl::VirtualGuardImpl guard(device.type());
  const c10::Stream side = guard.getStreamFromGlobalPool(device);
  const double size = world().size(), mean = (size + 1) / 2;
  for (const bool wait_on_side : {true, false}) {
    at::Tensor sum, all;
    {
      std::optional<c10::StreamGuard> on(side);
      sum = at::full({1000}, world().rank() + 1.0, device);
      // Memory that the stream has used for something else.
      { const at::Tensor before = at::full({1000 * world().size()}, 3.0, device) + 1; }
      all = at::empty({1000 * world().size()}, device);
      auto averaging = world().all_reduce(sum, comm::ReduceOp::avg);
      if (!wait_on_side) on.reset();
      averaging.wait();
      EXPECT_EQ((sum + 1).sum().item<double>(), 1000 * (mean + 1));
      auto gathering = world().all_gather_into(all, sum);
      gathering.wait();
      EXPECT_EQ((all + 1).sum().item<double>(), 1000 * size * (mean + 1));
    }
    guard.synchronizeDevice(device.index());
  }
}

}  // namespace
}  // namespace accelerate
