#pragma once

#include <support/message_of.hpp>

#include <accelerate/big_model/init_empty.hpp>
#include <accelerate/big_model/load.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/io/file.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn.h>

namespace accelerate::testing {

namespace fs = std::filesystem;
namespace nn = torch::nn;

inline std::vector<NamedTensor> state_of(const ModuleRecord& record) {
  std::vector<NamedTensor> all = record.parameters();
  all.insert(all.end(), record.buffers().begin(), record.buffers().end());
  return all;
}

inline nn::Sequential mlp(int layers = 4, int width = 64) {
  nn::Sequential net;
  for (int i = 0; i < layers; ++i) {
    net->push_back(nn::Linear(width, width));
    net->push_back(nn::ReLU());
  }
  return net;
}

/// A small module, its checkpoint, and what it gives.
class BigModel : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(1);
    net = mlp();
    input = torch::randn({3, 64});
    torch::NoGradGuard no_grad;
    expected = net->forward(input);
    checkpoints::save_file(state_of(big_model::record_of(net)), file());
  }
  fs::path file() const { return folder.path() / "model.safetensors"; }
  static nn::Sequential empty() {
    return init_empty_weights([] { return mlp(); });
  }
  io::TemporaryFolder folder;
  nn::Sequential net;
  at::Tensor input, expected;
};

template <class Thrown, class Act>
void expect_refusal(const std::string& part, Act&& act) {
  const std::string message = message_of<Thrown>(std::forward<Act>(act));
  EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
}

}  // namespace accelerate::testing
