// Checkpoints that were saved before manifests spoke of boxes, and what Python and the commands see
// of those of today.

#include <support/distributed.hpp>
#include <support/python.hpp>
#include <support/shared_folder.hpp>

#include <accelerate/accelerate.hpp>
#include <accelerate/checkpoint/sharded.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <map>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using accelerate::testing::world;

at::Tensor numbers(at::IntArrayRef shape, double from) {
  return (at::arange(c10::multiply_integers(shape), at::kFloat) + from).view(shape);
}

// The program that saved the folders of version1/, on one process, and on two with
// FsdpOptions().unit_names({"conv"}).
struct NetImpl : torch::nn::Module {
  NetImpl() {
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3)));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    norm = register_module("norm", torch::nn::BatchNorm2d(5));
    in = register_module("in", torch::nn::Linear(5, 7));
    scale = register_parameter("scale", at::full({}, 1.5));
    frozen = register_parameter("frozen", at::zeros({7}), /*requires_grad=*/false);
    in_twice = register_module("in_twice", in);
    const torch::NoGradGuard no_grad;
    double base = 0;
    for (auto& parameter : named_parameters()) {
      parameter.value().copy_(numbers(parameter.value().sizes(), base + 0.25));
      base += 100;
    }
    norm->running_mean.copy_(numbers({5}, 2000));
    norm->running_var.copy_(numbers({5}, 3000));
    norm->num_batches_tracked.fill_(4);
  }
  // Each parameter's gradient is known.
  at::Tensor forward() {
    at::Tensor sum = at::zeros({});
    double base = 1;
    for (auto& parameter : named_parameters()) {
      const at::Tensor& value = parameter.value();
      if (value.requires_grad()) sum = sum + (value * numbers(value.sizes(), base)).sum();
      base += 100;
    }
    return sum;
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear in{nullptr}, in_twice{nullptr};
  at::Tensor scale, frozen;
};
TORCH_MODULE(Net);

torch::optim::AdamW make_optimizer(const Net& net) {
  std::vector<at::Tensor> trained;
  for (const at::Tensor& parameter : net->parameters()) {
    if (parameter.requires_grad()) trained.push_back(parameter);
  }
  // Parameters stay as they are.
  return torch::optim::AdamW(trained,
                             torch::optim::AdamWOptions(0.0).betas({0.5, 0.5}).weight_decay(0));
}

// What is in a checkpoint of it, by group and name.
std::map<std::string, at::Tensor> expected() {
  std::map<std::string, at::Tensor> all;
  const auto add = [&](const std::string& name, at::IntArrayRef shape, double value,
                       std::optional<double> gradient, double step = 1) {
    all["model/" + name] = numbers(shape, value + 0.25);
    if (!gradient) return;
    const at::Tensor half = numbers(shape, 0) * (step * 0.5) + *gradient * 0.5;
    all["optimizer/" + name + "/exp_avg"] = half;
    all["optimizer/" + name + "/exp_avg_sq"] = half * half * 2;
  };
  add("scale", {}, 0, 1);
  add("frozen", {7}, 100, std::nullopt);
  add("conv.weight", {5, 3, 3, 3}, 200, 201);
  add("conv.bias", {5}, 300, 301);
  add("norm.weight", {5}, 400, 401);
  add("norm.bias", {5}, 500, 501);
  // Under both names.
  add("in.weight", {7, 5}, 800, 601 + 801, 2);
  add("in.bias", {7}, 900, 701 + 901, 2);
  all["model/norm.running_mean"] = numbers({5}, 2000);
  all["model/norm.running_var"] = numbers({5}, 3000);
  all["model/norm.num_batches_tracked"] = at::full({}, 4, at::kLong);
  return all;
}

void expect_contents(const fs::path& folder) {
  checkpoints::Load load(comm::Group(), folder);
  std::map<std::string, at::Tensor> found;
  for (const auto& [group, tensors] : load.manifest().groups) {
    for (const auto& [name, saved] : tensors) {
      const at::Tensor tensor = at::empty(saved.shape, checkpoints::tensor_dtype(saved.dtype));
      load.want(group, whole_tensor(name, tensor));
      found.emplace(group + "/" + name, tensor);
    }
  }
  load.verify();
  load.read();
  const auto all = expected();
  EXPECT_EQ(found.size(), all.size()) << folder;
  for (const auto& [name, tensor] : all) {
    ASSERT_TRUE(found.contains(name)) << folder << ": " << name;
    EXPECT_TRUE(at::equal(found.at(name), tensor)) << folder << ": " << name;
  }
}

std::pair<int, std::string> command(const std::string& arguments, const fs::path& folder) {
  const fs::path log = folder / "log";
  const int status =
      std::system(("'" ACCELERATE_CLI "' " + arguments + " >'" + log.string() + "' 2>&1").c_str());
  return {WEXITSTATUS(status), io::read_file(log)};
}

class OldCheckpoints : public testing::WithSharedFolder {
 protected:
  static fs::path saved(const char* which) {
    return fs::path(ACCELERATE_TESTS_DIR) / "checkpoint" / "version1" / which;
  }
};

TEST_F(OldCheckpoints, OfVersionOneAreReadByEveryStrategy) {
  for (const char* which : {"single", "fsdp"}) {
    const Json manifest = Json::parse(io::read_file(saved(which) / io::Manifest::kFileName));
    ASSERT_EQ(manifest.at("version"), 1);
    expect_contents(saved(which));
    for (const bool sharded : {false, true}) {
      AcceleratorOptions options = AcceleratorOptions().cpu(true);
      if (sharded) options.fsdp(FsdpOptions().unit_names({"norm", "in"}));
      Accelerator accelerator(options);
      Net net;
      {
        const torch::NoGradGuard no_grad;
        for (const at::Tensor& parameter : net->parameters()) parameter.zero_();
        for (const at::Tensor& buffer : net->buffers()) buffer.zero_();
      }
      auto adam = make_optimizer(net);
      auto [model, optimizer] = accelerator.prepare(net, adam);
      accelerator.load_state(saved(which));
      const auto values = expected();
      for (const NamedTensor& entry : model.state_dict()) {
        if (entry.name.starts_with("in_twice")) continue;
        EXPECT_TRUE(at::equal(entry.tensor, values.at("model/" + entry.name)))
            << which << ", " << entry.name;
      }
      // With the optimizer's state, as it is saved today.
      const fs::path again = folder / (std::string(which) + (sharded ? "sharded" : "whole"));
      accelerator.save_state(again);
      const Json now = Json::parse(io::read_file(again / io::Manifest::kFileName));
      EXPECT_EQ(now.at("version"), 2);
      expect_contents(again);
    }
  }
}

TEST_F(OldCheckpoints, CommandsReadBothVersions) {
  Accelerator accelerator(AcceleratorOptions().cpu(true).fsdp(FsdpOptions().unit_names({"conv"})));
  Net net;
  auto adam = make_optimizer(net);
  auto [model, optimizer] = accelerator.prepare(net, adam);
  accelerator.backward(model());
  optimizer.step();
  optimizer.zero_grad();
  accelerator.save_state(folder / "saved");
  expect_contents(folder / "saved");
  world().barrier();
  if (world().rank() != 0) return;
  const auto values = expected();
  for (const fs::path& from : {saved("single"), saved("fsdp"), folder / "saved"}) {
    const fs::path merged = folder / "merged";
    const auto [code, said] =
        command("merge-weights '" + from.string() + "' '" + merged.string() + "'", folder);
    ASSERT_EQ(code, 0) << said;
    std::size_t found = 0;
    for (const NamedTensor& entry : checkpoints::load_file(merged)) {
      if (entry.name.starts_with("in_twice")) continue;
      ++found;
      EXPECT_TRUE(at::equal(entry.tensor, values.at("model/" + entry.name)))
          << from << ": " << entry.name;
    }
    EXPECT_EQ(found, 11U);
    for (const char* name : {"inspect", "estimate-memory"}) {
      const auto [status, printed] =
          command(std::string(name) + " '" + from.string() + "'", folder);
      EXPECT_EQ(status, 0) << printed;
    }
    EXPECT_NE(command("inspect '" + from.string() + "'", folder).second.find("conv"),
              std::string::npos);
  }
}

TEST_F(OldCheckpoints, PythonFindsThePartsByTheirNames) {
  if (!testing::has_python()) GTEST_SKIP() << "there is no Python";
  Accelerator accelerator(AcceleratorOptions().cpu(true).fsdp(FsdpOptions().unit_names({"conv"})));
  Net net;
  auto adam = make_optimizer(net);
  auto [model, optimizer] = accelerator.prepare(net, adam);
  accelerator.backward(model());
  optimizer.step();
  accelerator.save_state(folder / "saved");
  world().barrier();
  if (world().rank() != 0) return;
  const Json read = testing::run_python("accelerator/boxes_reference.py",
                                        "'" + (folder / "saved").string() + "'");
  std::size_t found = 0;
  for (const auto& [name, tensor] : expected()) {
    if (!read.contains(name)) continue;
    ++found;
    const at::Tensor values = tensor.to(at::kDouble).contiguous();
    const auto* const first = values.const_data_ptr<double>();
    EXPECT_EQ(read.at(name).get<std::vector<double>>(),
              std::vector<double>(first, first + values.numel()))
        << name;
  }
  EXPECT_EQ(found, read.size());
  EXPECT_GE(found, 11U);
}

}  // namespace
}  // namespace accelerate
