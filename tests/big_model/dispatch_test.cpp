// Modules whose weights come out of host memory or files give what they give with all weights in
// place, bit for bit, under every map, store and limit.

#include "big_model/fixture.hpp"

#include <support/zoo.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/big_model/load.hpp>
#include <accelerate/big_model/sizes.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/tracking/memory_tracker.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>
#include <big_model/align.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/script.h>
#include <nlohmann/json.hpp>

#include <atomic>
#include <map>
#include <thread>
#include <utility>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;
using testing::BigModel;
using testing::expect_refusal;
using testing::mlp;
using testing::state_of;

std::int64_t largest_of(const ModuleRecord& record) {
  std::int64_t most = 0;
  for (const auto& [name, tensor] : record.parameters())
    most = std::max(most, static_cast<std::int64_t>(tensor.nbytes()));
  return most;
}

// Every third module on the disk, the others on the CPU.
DeviceMap mixed(const ModuleRecord& record) {
  DeviceMap map;
  const ModelTree tree = model_tree(record);
  int i = 0;
  for (const ModelTree::Tensor& tensor : tree.tensors())
    map.emplace_back(tensor.name, i++ % 3 == 0 ? Place::disk() : Place::cpu());
  return map;
}

class Zoo : public ::testing::TestWithParam<std::string> {
 protected:
  // In evaluation, without gradients: what inference is.
  static std::vector<at::Tensor> outputs(zoo::Specimen& specimen, Dispatched* dispatched) {
    const at::NoGradGuard no_grad;
    specimen.record.train(false);
    std::vector<at::Tensor> all;
    torch::manual_seed(5);
    for (int i = 0; i < 3; ++i) {
      const at::Tensor input = specimen.input(3);
      if (dispatched != nullptr) {
        const Dispatched::Forward scope(*dispatched);
        all.push_back(specimen.forward(input));
      } else {
        all.push_back(specimen.forward(input));
      }
    }
    return all;
  }
  static void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i)
      EXPECT_TRUE(at::equal(a[i], b[i])) << "forward " << i;
  }
  io::TemporaryFolder folder;
};

TEST_P(Zoo, GivesTheSameUnderEveryMapStoreAndLimit) {
  zoo::Specimen plain = zoo::make(GetParam(), 3);
  const auto expected = outputs(plain, nullptr);
  const auto checkpoint = folder.path() / "model.safetensors";
  checkpoints::save_file(state_of(plain.record), checkpoint);
  const std::int64_t largest = largest_of(plain.record);
  std::int64_t at_once = 0;
  for (const auto& [name, tensor] : plain.record.parameters()) {
    if (GetParam() == "lstm" || GetParam() == "gru" || name.starts_with("lstm."))
      at_once += static_cast<std::int64_t>(tensor.nbytes()) + 64;
  }
  int runs = 0;
  for (const char* kind : {"cpu", "disk", "mixed", "in place"}) {
    for (const std::int64_t limit : {std::int64_t{0}, std::int64_t{1}, largest, 3 * largest}) {
      for (const int prefetch : {0, 3}) {
        for (const bool buffers : {false, true}) {
          ++runs;
          SCOPED_TRACE(::testing::Message() << kind << " limit " << limit << " prefetch "
                                            << prefetch << " buffers " << buffers);
          zoo::Specimen specimen = zoo::make(GetParam(), 3);
          OffloadOptions options;
          options.resident_limit(limit).prefetch(prefetch).offload_buffers(buffers);
          options.force_hooks(true).offload_dir(folder.path() / ("offload" + std::to_string(runs)));
          DeviceMap map{{"", std::string(kind) == "cpu" ? Place::cpu() : Place::disk()}};
          if (std::string(kind) == "mixed") map = mixed(specimen.record);
          if (std::string(kind) == "in place") {
            options.offload_dir({}).weights(WeightStore::open(checkpoint));
          }
          Dispatched dispatched(specimen.record, map, options);
          expect_equal(outputs(specimen, &dispatched), expected);
          const OffloadStatistics statistics = dispatched.statistics();
          EXPECT_GT(statistics.brought, 0);
          if (limit > 0) {
            // Beside the largest weight, what the same operator takes: a bias, or all of an LSTM's.
            EXPECT_LE(statistics.peak_resident_bytes, limit + std::max(largest * 3 / 2, at_once));
          }
          EXPECT_EQ(statistics.read_bytes > 0, std::string(kind) != "cpu");
          // The bare module, with nothing fetched ahead.
          expect_equal(outputs(specimen, nullptr), expected);
          dispatched.remove_offload();
          expect_equal(outputs(specimen, nullptr), expected);
        }
      }
    }
  }
}

TEST_P(Zoo, TrainsFromHostMemory) {
  zoo::Specimen plain = zoo::make(GetParam(), 3), specimen = zoo::make(GetParam(), 3);
  const auto train = [](zoo::Specimen& trained, Dispatched* dispatched) {
    std::vector<double> losses;
    for (int step = 0; step < 3; ++step) {
      torch::manual_seed(step);
      const at::Tensor input = trained.input(4);
      at::Tensor output;
      if (dispatched != nullptr) {
        const Dispatched::Forward scope(*dispatched);
        output = trained.forward(input);
      } else {
        output = trained.forward(input);
      }
      const at::Tensor loss = zoo::loss_of(output);
      loss.backward();
      losses.push_back(loss.item<double>());
      const at::NoGradGuard no_grad;
      for (const auto& [name, parameter] : trained.record.parameters()) {
        if (!parameter.grad().defined()) continue;
        at::Tensor(parameter).add_(parameter.grad(), -0.05);
        parameter.mutable_grad().reset();
      }
    }
    return losses;
  };
  const auto expected = train(plain, nullptr);
  {
    Dispatched dispatched(specimen.record, {{"", Place::cpu()}},
                          OffloadOptions().force_hooks(true));
    EXPECT_EQ(train(specimen, &dispatched), expected);
  }
  // The weights are the module's again when the dispatch is gone.
  for (std::size_t i = 0; i < plain.record.parameters().size(); ++i) {
    EXPECT_TRUE(
        at::equal(specimen.record.parameters()[i].tensor, plain.record.parameters()[i].tensor))
        << plain.record.parameters()[i].name;
  }
}

INSTANTIATE_TEST_SUITE_P(Modules, Zoo, ::testing::ValuesIn(zoo::names()),
                         [](const auto& info) { return info.param; });

TEST_F(BigModel, FetchesAheadFromTheSecondForwardOn) {
  torch::NoGradGuard no_grad;
  auto model = load_checkpoint_and_dispatch(empty(), file(), DeviceMap{{"", Place::disk()}}, {},
                                            OffloadOptions().prefetch(1));
  tracking::MemoryTracker tracker;
  model.offload().track(&tracker);
  EXPECT_TRUE(at::equal(model(input), expected));
  EXPECT_EQ(model.offload().statistics().prefetched, 0);
  model.offload().reset_statistics();
  EXPECT_TRUE(at::equal(model(input), expected));
  const OffloadStatistics statistics = model.offload().statistics();
  EXPECT_EQ(statistics.brought, 4);
  EXPECT_EQ(statistics.prefetched, 4);  // the first when the forward begins
  EXPECT_EQ(statistics.read_bytes, 4 * (64 * 64 + 64) * 4);
  EXPECT_LE(statistics.peak_resident_bytes, 2 * (64 * 64 + 64) * 4 + 128);
  model.offload().track(nullptr);
  model(input);
  const Json visits = tracker.to_json()["visits"];
  ASSERT_EQ(visits.size(), 8u);
  for (std::size_t i = 0; i < visits.size(); ++i) {
    const Json& visit = visits[i];
    EXPECT_EQ(visit["from"], "disk");
    EXPECT_EQ(visit["place"], "cpu");
    EXPECT_GE(visit["bytes"], (64 * 64 + 64) * 4);
    EXPECT_LE(visit["begin_ns"], visit["used_ns"]);
    EXPECT_LE(visit["used_ns"], visit["end_ns"]);
  }
  // In the second forward each was asked for before the one ahead of it had gone.
  std::map<std::string, Json> last;
  for (const Json& visit : visits) last[visit["name"]] = visit;
  ASSERT_EQ(last.size(), 4u);
  EXPECT_LT(last["2"]["begin_ns"], last["0"]["end_ns"]);
  EXPECT_LT(last["6"]["begin_ns"], last["4"]["end_ns"]);
}

TEST_F(BigModel, TreesGoInAndComeOut) {
  torch::NoGradGuard no_grad;
  nn::LSTM lstm(nn::LSTMOptions(64, 64));
  const at::Tensor x = input.unsqueeze(1);
  const auto state = std::tuple(at::ones({1, 1, 64}), at::ones({1, 1, 64}));
  const auto [plain, last] = lstm->forward(x, state);
  const auto expect_equal = [&](const auto& result) {
    EXPECT_TRUE(at::equal(std::get<0>(result), plain));
    EXPECT_TRUE(at::equal(std::get<1>(std::get<1>(result)), std::get<1>(last)));
  };
  {
    auto model = disk_offload(lstm, folder.path() / "lstm");
    expect_equal(model(x, state));
    model.remove_offload();
  }
  auto [hooked, hook] = cpu_offload_with_hook(lstm, at::kCPU);
  expect_equal(hooked(x, state));
}

TEST_F(BigModel, SeveralThreadsCallOneModule) {
  for (const std::int64_t limit : {0, 20000}) {
    auto model = load_checkpoint_and_dispatch(empty(), file(), DeviceMap{{"", Place::disk()}}, {},
                                              OffloadOptions().resident_limit(limit));
    std::atomic<int> right{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        torch::NoGradGuard no_grad;
        for (int i = 0; i < 20; ++i) right += at::equal(model(input), expected) ? 1 : 0;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(right, 80);
  }
}

TEST_F(BigModel, AFileThatVanishedOrChangedIsNamed) {
  torch::NoGradGuard no_grad;
  const auto copy = folder.path() / "copy.safetensors";
  fs::copy(file(), copy);
  auto model = load_checkpoint_and_dispatch(empty(), copy, DeviceMap{{"", Place::disk()}});
  EXPECT_TRUE(at::equal(model(input), expected));
  fs::rename(copy, folder.path() / "away");
  expect_refusal<CheckpointError>("copy.safetensors\" cannot be opened", [&] { model(input); });
  fs::copy(file(), copy);
  expect_refusal<CheckpointError>("was replaced by another file", [&] { model(input); });
  fs::rename(folder.path() / "away", copy);
  EXPECT_TRUE(at::equal(model(input), expected));
  fs::resize_file(copy, fs::file_size(copy) - 100);
  expect_refusal<CheckpointError>("copy.safetensors", [&] { model(input); });
  expect_refusal<CheckpointError>("and now has", [&] { model(input); });
}

TEST_F(BigModel, WhatADispatchedModuleCannotDoIsSaid) {
  auto model = load_checkpoint_and_dispatch(net, file(), DeviceMap{{"", Place::disk()}});
  expect_refusal<StateError>("remove_offload", [&] { net->to(at::kDouble); });
  expect_refusal<StateError>("already", [&] { return cpu_offload(net, at::kCPU); });
  expect_refusal<StateError>("offloaded", [&] { load_checkpoint_in_model(net, file()); });
  expect_refusal<StateError>("offloaded to disk", [&] { model(input).sum().backward(); });
  expect_refusal<StateError>("offloaded to disk", [&] {
    torch::NoGradGuard no_grad;
    net->parameters()[0].add_(1);
  });
  {
    torch::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(model(input), expected));
    net->to(at::kCPU);  // where it computes: nothing moves
    EXPECT_TRUE(at::equal(model(input), expected));
  }
  model.remove_offload();
  net->to(at::kDouble);
  EXPECT_EQ(net->parameters()[0].scalar_type(), at::kDouble);
}

TEST_F(BigModel, MapsAndStoresThatDoNotFitAreRefusedBeforeAnythingMoves) {
  expect_refusal<ConfigError>("17", [&] {
    return dispatch_model(net, {{"", Place::accelerator(17)}});
  });
  expect_refusal<ConfigError>("frist", [&] {
    return dispatch_model(net, {{"", Place::cpu()}, {"frist", Place::cpu()}});
  });
  expect_refusal<ConfigError>("6.weight", [&] {
    return dispatch_model(net, {{"0", Place::cpu()}, {"2", Place::cpu()}, {"4", Place::cpu()}});
  });
  expect_refusal<ConfigError>("cannot be negative", [&] {
    return dispatch_model(net, {{"", Place::cpu()}}, OffloadOptions().resident_limit(-1));
  });
  expect_refusal<ConfigError>("cuda:17",
                              [&] { return cpu_offload(net, at::Device(at::kCUDA, 17)); });
  expect_refusal<ConfigError>("offload_dir", [&] {
    return dispatch_model(net, {{"", Place::disk()}});
  });
  expect_refusal<StateError>("load_checkpoint_and_dispatch", [&] {
    return dispatch_model(empty(), {{"", Place::cpu()}});
  });
  expect_refusal<ConfigError>("'Convolution'", [&] {
    return cpu_offload(mlp(), at::kCPU, OffloadOptions().preload_module_classes({"Convolution"}));
  });
  expect_refusal<ConfigError>("'Convolution'", [&] {
    return dispatch_model(net, {{"", Place::cpu()}},
                          OffloadOptions().preload_module_classes({"Convolution"}));
  });
  expect_refusal<CheckpointError>("[64, 64]", [&] {
    return attach_align_device(mlp(4, 32), at::kCPU, WeightStore::open(file()));
  });
  expect_refusal<CheckpointError>("'0.weight' is [64, 64]", [&] {
    nn::Sequential other = mlp(4, 32);
    load_checkpoint_in_model(other, file());
  });
  expect_refusal<CheckpointError>("nowhere", [&] { load_checkpoint_in_model(net, "nowhere"); });
  const auto sharded = folder.path() / "sharded";
  const auto names =
      checkpoints::save_sharded(state_of(big_model::record_of(net)), sharded, "40KB");
  fs::remove(sharded / names.back());
  expect_refusal<CheckpointError>(names.back(), [&] { load_checkpoint_in_model(net, sharded); });
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(net->forward(input), expected));
}

TEST_F(BigModel, TorchScriptModulesAreCalledAsTheyAre) {
  const std::string modules = std::getenv("ACCELERATE_TEST_MODULES");
  torch::NoGradGuard no_grad;
  // Loaded empty; and, since a trace keeps constants, which would be empty too, from the CPU.
  for (const auto& [name, sizes, device] :
       {std::tuple{"script_branching", std::vector<std::int64_t>{2, 12}, torch::kMeta},
        std::tuple{"script_traced", std::vector<std::int64_t>{2, 7, 16}, torch::kCPU}}) {
    const std::string path = modules + "/" + name + ".pt";
    torch::jit::Module plain = torch::jit::load(path);
    plain.eval();
    const auto weights = folder.path() / (std::string(name) + ".safetensors");
    checkpoints::save_file(state_of(ModuleRecord(plain)), weights);
    const std::vector<c10::IValue> inputs{torch::randn(sizes, torch::kDouble)};
    const at::Tensor output = plain.forward(inputs).toTensor();
    torch::jit::Module module = torch::jit::load(path, device);
    module.eval();
    auto model = load_checkpoint_and_dispatch(module, weights, DeviceMap{{"", Place::disk()}});
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(model(inputs).toTensor(), output)) << name;
    EXPECT_GT(model.offload().statistics().prefetched, 0);
    expect_refusal<std::exception>("remove_offload()", [&] { module.to(at::kFloat); });
    model.remove_offload();
    auto [hooked, hook] = cpu_offload_with_hook(module, at::kCPU);
    EXPECT_TRUE(at::equal(hooked(inputs).toTensor(), output)) << name;
  }
}

// Notes where it is sent, so that a chain can be watched where there is one device only.
struct Travelling : nn::Module {
  Travelling(std::string name, std::vector<std::string>& log) : name(std::move(name)), log(log) {}
  void to(torch::Device device, bool) override { log.push_back(name + " to " + device.str()); }
  at::Tensor forward(const at::Tensor& x) {
    log.push_back(name);
    return x + 1;
  }
  std::string name;
  std::vector<std::string>& log;
};

TEST_F(BigModel, AChainOfHooksKeepsOneModelOnTheDevice) {
  using Log = std::vector<std::string>;
  Log log;
  const auto take = [&] { return std::exchange(log, {}); };
  const at::Device device(at::kCPU);
  auto [first, first_hook] = cpu_offload_with_hook(std::make_shared<Travelling>("1", log), device);
  auto [second, second_hook] =
      cpu_offload_with_hook(std::make_shared<Travelling>("2", log), device, first_hook);
  EXPECT_EQ(take(), (Log{"1 to cpu", "2 to cpu"}));
  first(input);
  EXPECT_TRUE(at::equal(first(input), input + 1));
  EXPECT_EQ(take(), (Log{"1 to cpu", "1", "1"})) << "it stays while it is called again";
  second(input);
  EXPECT_EQ(take(), (Log{"1 to cpu", "2 to cpu", "2"}));
  second_hook.offload();
  EXPECT_EQ(take(), (Log{"2 to cpu"}));
  first(input);
  first_hook.remove();
  first_hook.offload();
  second(input);
  EXPECT_EQ(take(), (Log{"1 to cpu", "1", "2 to cpu", "2"})) << "a removed hook moves nothing";
  if (get_max_memory().front().first.kind != Place::Kind::accelerator) {
    expect_refusal<ConfigError>(
        "no accelerator", [&] { return cpu_offload_with_hook(net, at::Device(at::kCUDA, 0)); });
  }
}

struct BlockImpl : nn::Module {
  explicit BlockImpl(int width) : up(width, width), down(width, width) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return x + down(at::relu(up(x))); }
  nn::Linear up, down;
};
TORCH_MODULE(Block);

TEST_F(BigModel, PreloadedClassesComeAndGoWhole) {
  torch::NoGradGuard no_grad;
  nn::Sequential blocks(Block(64), nn::Linear(64, 64), Block(64));
  const at::Tensor plain = blocks->forward(input);
  auto model = disk_offload(blocks, folder.path() / "blocks", at::kCPU,
                            OffloadOptions().preload_module_classes({"Block"}).prefetch(1));
  for (int i = 0; i < 2; ++i) {
    model.offload().reset_statistics();
    EXPECT_TRUE(at::equal(model(input), plain));
    EXPECT_EQ(model.offload().statistics().brought, 3);  // and not five
  }
  EXPECT_EQ(model.offload().main_device(), at::kCPU);
}

TEST_F(BigModel, AttachedWeightsComeFromAnyStore) {
  torch::NoGradGuard no_grad;
  const auto offloaded = folder.path() / "offloaded";
  offload_state_dict(offloaded, state_of(big_model::record_of(net)));
  for (const fs::path& path : {file(), offloaded}) {
    nn::Sequential other = empty();
    auto model = attach_align_device(other, at::kCPU, WeightStore::open(path));
    for (int i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(model(input), expected)) << path;
    EXPECT_EQ(model.offload().statistics().read_bytes, 2 * 4 * (64 * 64 + 64) * 4);
    model.remove_offload();
    EXPECT_TRUE(at::equal(other->forward(input), expected)) << path;
  }
}

TEST_F(BigModel, ThePeakOfTensorBytesIsTheLimitAndTheLargestWeight) {
  tracking::count_cpu_tensors();
  torch::NoGradGuard no_grad;
  constexpr std::int64_t kWeight = 256 * 256 * 4;
  const auto path = folder.path() / "wide.safetensors";
  nn::Sequential wide = mlp(12, 256);
  checkpoints::save_file(state_of(big_model::record_of(wide)), path);
  const at::Tensor x = at::ones({1, 256});
  const at::Tensor plain = wide->forward(x);
  for (const std::int64_t limit : {std::int64_t{1}, kWeight, 5 * kWeight / 2}) {
    for (const int prefetch : {0, 4}) {
      auto model = load_checkpoint_and_dispatch(
          init_empty_weights([] { return mlp(12, 256); }), path, DeviceMap{{"", Place::disk()}}, {},
          OffloadOptions().resident_limit(limit).prefetch(prefetch));
      for (int i = 0; i < 3; ++i) {
        const std::int64_t before = tracking::tensor_bytes().current;
        tracking::reset_peak();
        EXPECT_TRUE(at::equal(model(x), plain));
        const std::int64_t peak = tracking::tensor_bytes().peak - before;
        EXPECT_GE(peak, kWeight);
        EXPECT_LE(static_cast<double>(peak), 1.1 * static_cast<double>(limit + kWeight))
            << "limit " << limit << " prefetch " << prefetch << " forward " << i;
      }
    }
  }
}

// Computing on the meta device shows where operators run, without a GPU.
TEST_F(BigModel, ActivationsFollowTheWeightsTheyMeet) {
  const at::Tensor here = at::ones({64}), there = at::empty({64}, at::kMeta);
  EXPECT_ANY_THROW(input * there);
  big_model::AlignDevices align({{"here", here}, {"there", there}});
  const intercept::Region region(align);
  EXPECT_TRUE((input * here).is_cpu());
  const at::Tensor activation = input * here * there;
  EXPECT_TRUE(activation.is_meta());
  EXPECT_TRUE((input + activation).is_meta()) << "what has no weight goes where the last one was";
  EXPECT_TRUE(at::cat({input, activation}).is_meta());
  EXPECT_TRUE((activation + at::scalar_tensor(2)).is_meta());
}

TEST_F(BigModel, AcrossAGpuTheHostAndTheDisk) {
  if (get_max_memory().front().first.kind != Place::Kind::accelerator)
    GTEST_SKIP() << "There is no GPU.";
  torch::NoGradGuard no_grad;
  const Place gpu = Place::accelerator(0);
  for (const DeviceMap& map :
       {DeviceMap{{"", gpu}},
        DeviceMap{{"0", gpu}, {"2", Place::cpu()}, {"4", Place::disk()}, {"6", gpu}},
        DeviceMap{{"0", Place::cpu()}, {"2", gpu}, {"4", Place::disk()}, {"6", Place::disk()}}}) {
    for (const std::int64_t limit : {0, 1, 40000}) {
      auto model = load_checkpoint_and_dispatch(empty(), file(), map, {},
                                                OffloadOptions().resident_limit(limit));
      for (int i = 0; i < 3; ++i) {
        const at::Tensor output = model(input);
        EXPECT_TRUE(output.is_cpu());  // where the input was
        EXPECT_TRUE(at::allclose(output, expected, 1e-4, 1e-5));
      }
      EXPECT_TRUE(model(input.cuda()).is_cuda());
    }
  }
  nn::Sequential whole = empty();
  load_checkpoint_in_model(whole, file());
  auto offloaded = cpu_offload(whole, at::Device(at::kCUDA, 0));
  EXPECT_TRUE(at::allclose(offloaded(input), expected, 1e-4, 1e-5));
  auto [hooked, hook] = cpu_offload_with_hook(net, at::Device(at::kCUDA, 0));
  EXPECT_TRUE(at::allclose(hooked(input.cuda()).cpu(), expected, 1e-4, 1e-5));
  EXPECT_TRUE(net->parameters()[0].is_cuda());
  hook.offload();
  EXPECT_TRUE(net->parameters()[0].is_cpu());
}

}  // namespace
}  // namespace accelerate
