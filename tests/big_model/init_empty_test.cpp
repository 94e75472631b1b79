// Modules constructed without memory, and their buffers all the same.

#include <support/zoo.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/big_model/init_empty.hpp>

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/script.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

namespace accelerate {
namespace {

namespace nn = torch::nn;

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::int64_t bytes_of(const ModuleRecord& module) {
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : module.parameters())
    bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

TEST(InitEmpty, AHundredGigabytesTakeLessThanAHundredthOfThat) {
  const std::int64_t before = resident_bytes();
  const auto net = init_empty_weights([] {
    nn::Sequential layers;
    for (int i = 0; i < 24; ++i) {
      layers->push_back(nn::Linear(32768, 32768));
      layers->push_back(nn::LayerNorm(nn::LayerNormOptions({32768})));
    }
    layers->push_back(nn::Embedding(131072, 32768));
    return layers;
  });
  const ModuleRecord record = big_model::record_of(net);
  EXPECT_GT(bytes_of(record), std::int64_t{100} << 30);
  EXPECT_LT(resident_bytes() - before, bytes_of(record) / 1000);
  for (const auto& [name, parameter] : record.parameters()) {
    EXPECT_TRUE(parameter.is_meta()) << name;
    EXPECT_TRUE(parameter.requires_grad()) << name;
  }
}

// Buffers of every make: of a kind's own, computed in steps, a view, written in parts, like
// another.
struct BufferedImpl : nn::Module {
  nn::Linear linear{8, 8};
  nn::BatchNorm1d norm{8};
  torch::Tensor table, view, like, literal, same;
  BufferedImpl() {
    register_module("linear", linear);
    register_module("norm", norm);
    torch::Tensor positions = torch::zeros({6, 8});
    const torch::Tensor steps = torch::arange(0, 6).unsqueeze(1);
    const torch::Tensor rates = torch::exp(torch::arange(0, 8, 2) * -0.5);
    positions.slice(1, 0, 8, 2).copy_(torch::sin(steps * rates));
    positions.slice(1, 1, 8, 2).copy_(torch::cos(steps * rates));
    table = register_buffer("table", positions);
    view = register_buffer("view", positions.unsqueeze(0).transpose(1, 2));
    like = register_buffer("like", torch::ones_like(linear->weight).mul_(3).triu());
    literal = register_buffer("literal", torch::tensor({1.5, 2.5}) + torch::ones({2}));
    same = register_buffer("same", torch::cat({steps, steps}, 1));
  }
};
TORCH_MODULE(Buffered);

TEST(InitEmpty, BuffersAreWhatTheyWouldHaveBeen) {
  const Buffered plain;
  const Buffered empty = init_empty_weights([] { return Buffered(); });
  EXPECT_TRUE(empty->linear->weight.is_meta());
  const auto expected = plain->named_buffers();
  const auto buffers = empty->named_buffers();
  ASSERT_EQ(buffers.size(), expected.size());
  for (const auto& buffer : expected) {
    const torch::Tensor& actual = buffers[buffer.key()];
    ASSERT_TRUE(actual.is_cpu()) << buffer.key();
    EXPECT_TRUE(torch::equal(actual, buffer.value())) << buffer.key();
    EXPECT_EQ(actual.strides(), buffer.value().strides()) << buffer.key();
  }
  // The member and what was registered are one tensor still, and views of one memory.
  EXPECT_TRUE(torch::equal(empty->table, plain->table));
  EXPECT_TRUE(empty->view.is_alias_of(empty->table));

  const Buffered none = init_empty_weights([] { return Buffered(); }, /*include_buffers=*/true);
  for (const auto& buffer : none->named_buffers())
    EXPECT_TRUE(buffer.value().is_meta() || buffer.key() == "literal") << buffer.key();
}

TEST(InitEmpty, EveryKindOfModule) {
  for (const std::string& name : zoo::names()) {
    SCOPED_TRACE(name);
    if (name.starts_with("script")) continue;  // loaded, not constructed
    const zoo::Specimen plain = zoo::make(name, 1, at::kFloat);
    InitOnDevice scope{at::Device(at::kMeta), /*include_buffers=*/false};
    const zoo::Specimen specimen = zoo::make(name, 1, at::kFloat);
    scope.finish(specimen.record);
    ASSERT_EQ(specimen.record.parameters().size(), plain.record.parameters().size());
    for (std::size_t i = 0; i < plain.record.parameters().size(); ++i) {
      const at::Tensor& parameter = specimen.record.parameters()[i].tensor;
      EXPECT_TRUE(parameter.is_meta()) << plain.record.parameters()[i].name;
      EXPECT_EQ(parameter.sizes(), plain.record.parameters()[i].tensor.sizes());
    }
    for (std::size_t i = 0; i < plain.record.buffers().size(); ++i) {
      EXPECT_TRUE(
          torch::equal(specimen.record.buffers()[i].tensor, plain.record.buffers()[i].tensor))
          << plain.record.buffers()[i].name;
    }
  }
}

TEST(InitEmpty, TorchScriptModulesAreLoadedSo) {
  const std::string folder = std::getenv("ACCELERATE_TEST_MODULES");
  const torch::jit::Module module = torch::jit::load(folder + "/script_branching.pt", torch::kMeta);
  for (const auto& parameter : module.parameters()) EXPECT_TRUE(parameter.is_meta());
}

TEST(InitEmpty, OutsideOfTheScopeAndOnOtherThreadsNothingChanges) {
  {
    InitOnDevice scope{at::Device(at::kMeta)};
    EXPECT_TRUE(torch::empty({2}).is_meta());
    EXPECT_TRUE(torch::empty({2}, torch::kCPU).is_cpu());  // named
    EXPECT_TRUE(torch::tensor({1, 2}).is_cpu());
    bool other_is_cpu = false;
    std::thread([&] { other_is_cpu = torch::empty({2}).is_cpu(); }).join();
    EXPECT_TRUE(other_is_cpu);
  }
  EXPECT_TRUE(torch::empty({2}).is_cpu());
  const nn::Linear on_cpu = init_on_device(torch::kCPU, [] { return nn::Linear(2, 2); });
  EXPECT_TRUE(on_cpu->weight.is_cpu());
}

TEST(InitEmpty, AskingForValuesIsAnError) {
  InitOnDevice scope{at::Device(at::kMeta), false};
  const torch::Tensor tensor = torch::ones({2});
  EXPECT_THROW(static_cast<void>(tensor.mutable_data_ptr<float>()), std::exception);
  const Buffered net;
  scope.finish(big_model::record_of(net));
  EXPECT_THROW(scope.finish(big_model::record_of(net)), StateError);
}

}  // namespace
}  // namespace accelerate
