// The zoo of modules, sharded and trained on the simulated device, against the same on the CPU.

#include "support/zoo.hpp"
#include "parallel/fsdp_training.hpp"
#include "sim_device/sim_device.hpp"
#include "support/distributed.hpp"

#include <accelerate/parallel/fsdp.hpp>

#include <ATen/DeviceAccelerator.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace accelerate::parallel {
namespace {

// Whole with ACCELERATE_TEST_FULL=1; otherwise each module meets some strategies.
bool full() { return std::getenv("ACCELERATE_TEST_FULL") != nullptr; }

at::Device own_device() { return sim::device(world().rank() % at::accelerator::deviceCount()); }

struct Outcome {
  History history;
  std::vector<at::Tensor> tensors;
};

// Dropout draws from the device's generator, which is set when the input has been drawn.
zoo::Specimen on(at::Device device, zoo::Specimen specimen) {
  specimen.record.to(device);
  specimen.input = [device, input = specimen.input](std::int64_t samples) {
    const at::Tensor drawn = input(samples).to(device);
    torch::manual_seed(17);
    return drawn;
  };
  return specimen;
}

Outcome train_on(at::Device device, const std::string& name, const FsdpOptions& options) {
  zoo::Specimen specimen = on(device, zoo::make(name, 3));
  Outcome outcome;
  Fsdp fsdp(specimen.record, options, world());
  outcome.history = train_sharded(specimen, fsdp, 3, kInTurns);
  fsdp.restore();
  for (const auto& tensors : {specimen.record.parameters(), specimen.record.buffers()}) {
    for (const NamedTensor& each : tensors) outcome.tensors.push_back(each.tensor.detach().cpu());
  }
  return outcome;
}

class ZooOnSim : public ::testing::TestWithParam<std::string> {};

TEST_P(ZooOnSim, TrainsWithTheBitsOfTheCpu) {
  // Their cells are not the CPU's.
  const bool rounds_otherwise = GetParam() == "lstm" || GetParam() == "gru";
  std::vector<FsdpOptions> all{small_units(), small_units().cpu_offload(true),
                               small_units().sharding_strategy(ShardingStrategy::shard_grad_op),
                               small_units().sharding_strategy(ShardingStrategy::shard_optimizer),
                               small_units().sharding_strategy(ShardingStrategy::no_shard)};
  if (!full()) all.resize(2);
  for (const FsdpOptions& options : all) {
    SCOPED_TRACE(::testing::Message()
                 << "strategy " << static_cast<int>(options.sharding_strategy())
                 << (options.cpu_offload() ? ", shards in host memory" : ""));
    FsdpOptions on_host = options;
    const Outcome expected = train_on(at::kCPU, GetParam(), on_host.cpu_offload(false));
    const Outcome found = train_on(own_device(), GetParam(), options);
    expect_equal(found.history, expected.history, rounds_otherwise ? 1e-9 : 0);
    ASSERT_EQ(found.tensors.size(), expected.tensors.size());
    for (std::size_t i = 0; i < found.tensors.size(); ++i) {
      EXPECT_TRUE(rounds_otherwise ? at::allclose(found.tensors[i], expected.tensors[i], 0, 1e-9)
                                   : at::equal(found.tensors[i], expected.tensors[i]))
          << "tensor " << i;
    }
  }
}

// A module that was traced on the CPU makes its first hidden state there.
std::vector<std::string> names() {
  std::vector<std::string> all = zoo::names();
  std::erase(all, "script_traced");
  return all;
}

INSTANTIATE_TEST_SUITE_P(Modules, ZooOnSim, ::testing::ValuesIn(names()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace accelerate::parallel
