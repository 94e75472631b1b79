#include <accelerate/core/module.hpp>

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <vector>

namespace accelerate {
namespace {

TEST(ModuleRecord, ItsListsOutliveARecordThatIsNeverNamed) {
  const torch::nn::Linear net(3, 2);
  std::vector<std::string> names;
  for (const auto& [name, tensor] : ModuleRecord(net.ptr()).parameters()) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"weight", "bias"}));
  const auto& parameters = ModuleRecord(net.ptr()).parameters();
  EXPECT_TRUE(parameters[0].tensor.is_same(net->weight));
  EXPECT_EQ(ModuleRecord(net.ptr()).root().parameters.size(), 2U);
  const ModuleRecord record(net.ptr());
  EXPECT_EQ(&record.parameters(), &record.parameters());  // no copy
}

}  // namespace
}  // namespace accelerate
