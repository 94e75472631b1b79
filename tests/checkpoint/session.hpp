#pragma once

// What the tests of sharded checkpoints share: a run with what is hard to save, folders for all
// ranks, and comparing what is in two checkpoints.

#include <support/distributed.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/checkpoint/optimizer_state.hpp>
#include <accelerate/checkpoint/sharded.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/optim/optimizer.hpp>
#include <accelerate/parallel/ddp.hpp>
#include <accelerate/parallel/fsdp.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::checkpoints {

namespace fs = std::filesystem;
using accelerate::testing::world;

// A module with what is hard to cut: an odd number of rows, memory in another order, a parameter
// without dimensions, a frozen one, a tied one and buffers.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t seed, std::int64_t width = 13) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3).padding(1)));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    norm = register_module("norm", torch::nn::BatchNorm2d(5));
    in = register_module("in", torch::nn::Linear(5 * 16, width));
    out = register_module("out", torch::nn::Linear(width, 7));
    scale = register_parameter("scale", at::full({}, 1.5));
    frozen = register_parameter("frozen", at::rand({7}), /*requires_grad=*/false);
    out_twice = register_module("out_twice", out);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = at::relu(norm(conv(x)));
    return out(at::tanh(in(y.flatten(1)))) * scale + frozen;
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear in{nullptr}, out{nullptr}, out_twice{nullptr};
  at::Tensor scale, frozen;
};

enum class Optim { adamw, fused_adamw, sgd, rmsprop };

inline std::shared_ptr<torch::optim::Optimizer> make_optimizer(Optim kind,
                                                               const std::vector<at::Tensor>& all) {
  using torch::optim::OptimizerParamGroup;
  // Two groups with options of their own.
  std::vector<at::Tensor> first(all.begin(), all.begin() + 3), second(all.begin() + 3, all.end());
  const auto groups = [&](auto one, auto other) {
    using O = decltype(one);
    return std::vector<OptimizerParamGroup>{
        OptimizerParamGroup(first, std::make_unique<O>(one)),
        OptimizerParamGroup(second, std::make_unique<O>(other))};
  };
  switch (kind) {
    case Optim::adamw:
      return std::make_shared<torch::optim::AdamW>(
          groups(torch::optim::AdamWOptions(1e-2), torch::optim::AdamWOptions(3e-3).amsgrad(true)));
    case Optim::fused_adamw:
      return std::make_shared<optim::FusedAdamW>(
          groups(optim::FusedAdamWOptions(1e-2), optim::FusedAdamWOptions(3e-3).amsgrad(true)));
    case Optim::sgd:
      return std::make_shared<torch::optim::SGD>(
          groups(torch::optim::SGDOptions(1e-2).momentum(0.9), torch::optim::SGDOptions(1e-3)),
          torch::optim::SGDOptions(1e-3));
    case Optim::rmsprop:
      return std::make_shared<torch::optim::RMSprop>(
          groups(torch::optim::RMSpropOptions(1e-2).centered(true),
                 torch::optim::RMSpropOptions(1e-3).momentum(0.5)));
  }
  return nullptr;
}

// A module with its strategy and optimizer, as one run has them.
struct Session {
  Session(const comm::Group& group, const std::string& strategy_name, std::int64_t seed,
          Optim kind = Optim::adamw, std::int64_t width = 13)
      : group(group), net(std::make_shared<NetImpl>(seed, width)) {
    const ModuleRecord record{std::shared_ptr<torch::nn::Module>(net)};
    std::vector<at::Tensor> parameters;
    for (const NamedTensor& parameter : record.parameters()) {
      if (parameter.tensor.requires_grad()) parameters.push_back(parameter.tensor);
    }
    optimizer = make_optimizer(kind, parameters);
    if (strategy_name == "single") {
      strategy = std::make_shared<parallel::Strategy>(record);
    } else if (strategy_name == "ddp") {
      strategy = std::make_shared<parallel::Ddp>(record, group, DdpOptions());
    } else {
      parallel::FsdpOptions options;
      if (strategy_name == "zero1" || strategy_name == "zero2")
        options.sharding_strategy(parallel::ShardingStrategy::shard_optimizer);
      if (strategy_name == "zero2") options.reduce_every_backward(true);
      if (strategy_name == "fsdp_units") options.unit_names({"conv", "in"});
      strategy = std::make_shared<parallel::Fsdp>(record, options, group, strategy_name);
    }
    core = std::make_shared<OptimizerCore>(optimizer, std::make_shared<GradientState>());
    core->link(strategy);
  }

  double step(std::int64_t number) {
    torch::manual_seed(static_cast<std::uint64_t>(100 * number + group.rank()));
    const at::Tensor x = at::randn({4, 3, 4, 4});
    strategy->before_forward({});
    const at::Tensor y = net->forward(x);
    strategy->after_forward({}, {y});
    const at::Tensor loss = y.square().mean();
    loss.backward();
    strategy->after_backward();
    core->step();
    core->zero_grad();
    return loss.item<double>();
  }

  void save(const fs::path& folder) {
    Save save(group, folder);
    save.add(module_group(*strategy, "model"));
    auto state = optimizer_state(*optimizer, {{"", strategy}}, group, "optimizer");
    save.add(std::move(state.tensors));
    save.add_file("optimizer.json", state.description.dump());
    save.set_about({{"layout", strategy->reduction_layout()}, {"processes", group.size()}});
    save.plan();
    save.write(group);
  }

  void load(const fs::path& folder) {
    Load load(group, folder);
    load.want_all(module_group(*strategy, "model"), /*strict=*/true);
    IncomingOptimizerState state(*optimizer, {{"", strategy}},
                                 Json::parse(load.text("optimizer.json")), "optimizer", load);
    load.verify();
    load.read();
    state.apply();
    const Json& about = load.manifest().about;
    if (about.at("processes") == group.size()) {
      strategy->set_reduction_layout(
          about.at("layout").get<std::vector<std::vector<std::int64_t>>>());
    }
    strategy->load_state_dict(
        {}, parallel::StateDictOptions().type(parallel::StateDictType::sharded), false);
  }

  comm::Group group;
  std::shared_ptr<NetImpl> net;
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::shared_ptr<parallel::Strategy> strategy;
  std::shared_ptr<OptimizerCore> core;
};

// One folder for all ranks, removed at the end by the first.
class SharedFolder {
 public:
  SharedFolder() {
    std::string name;
    if (world().rank() == 0) {
      // In memory where that can be had: this is not about disks, and syncing one is slow.
      own_.emplace(fs::is_directory("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path());
      name = own_->path().string();
    }
    path_ = world().broadcast_bytes(name);
  }
  ~SharedFolder() {
    try {
      world().barrier();
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
  const fs::path& path() const { return path_; }

 private:
  std::optional<io::TemporaryFolder> own_;
  fs::path path_;
};

// The groups of the first 1, 2, ... ranks, made once.
inline const comm::Group& first_ranks(int count) {
  static const std::vector<comm::Group> groups = [] {
    std::vector<comm::Group> all;
    for (int n = 1; n <= world().size(); ++n)
      all.push_back(n == world().size() ? world()
                                        : world().split(world().rank() < n ? 0 : 1, world().rank(),
                                                        "first" + std::to_string(n)));
    return all;
  }();
  return groups[static_cast<std::size_t>(count - 1)];
}

// Every tensor of a checkpoint, whole and in row-major order, by "group/name".
inline std::map<std::string, at::Tensor> everything(const fs::path& folder) {
  Load load(comm::Group(), folder);
  std::map<std::string, at::Tensor> all;
  for (const auto& [group, tensors] : load.manifest().groups) {
    for (const auto& [name, saved] : tensors) {
      at::Tensor tensor = at::empty(
          saved.shape, at::TensorOptions().dtype(
                           saved.dtype == io::safetensors::Dtype::kI64 ? at::kLong : at::kFloat));
      load.want(group, whole_tensor(name, tensor));
      all.emplace(group + "/" + name, tensor);
    }
  }
  load.verify();
  load.read();
  return all;
}

inline void expect_equal(const fs::path& a, const fs::path& b, const std::string& what) {
  const auto left = everything(a);
  const auto right = everything(b);
  ASSERT_GT(left.size(), 12U);
  ASSERT_EQ(left.size(), right.size()) << what;
  for (const auto& [name, tensor] : left) {
    ASSERT_TRUE(right.contains(name)) << what << ": " << name;
    EXPECT_TRUE(at::equal(tensor, right.at(name))) << what << ": " << name;
  }
}

inline bool full() {
  const char* value = std::getenv("ACCELERATE_TEST_FULL");
  return value != nullptr && std::string_view(value) != "0" && *value != '\0';
}

// The message of what `work` throws; it must be thrown on every rank.
template <class Work>
std::string message_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return describe(error);
  }
  ADD_FAILURE() << "nothing was thrown on rank " << world().rank();
  return {};
}

inline void expect_says(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << '"' << part << "\" is not in: " << message;
}

inline std::string own_strategy() { return world().size() == 1 ? "single" : "fsdp"; }

}  // namespace accelerate::checkpoints
