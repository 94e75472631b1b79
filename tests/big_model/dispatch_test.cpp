// Modules whose weights come out of host memory or files give what they give with all weights in
// place, bit for bit, under every map, store and limit.

#include <support/python.hpp>
#include <support/zoo.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/big_model/init_empty.hpp>
#include <accelerate/big_model/load.hpp>
#include <accelerate/big_model/sizes.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/tracking/memory_tracker.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/script.h>

#include <fstream>
#include <set>
#include <sstream>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;

std::vector<NamedTensor> state_of(const ModuleRecord& record) {
  std::vector<NamedTensor> all = record.parameters();
  all.insert(all.end(), record.buffers().begin(), record.buffers().end());
  return all;
}

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
  const bool everything = std::getenv("ACCELERATE_TEST_FULL") != nullptr;
  int runs = 0;
  for (const char* kind : {"cpu", "disk", "mixed", "in place"}) {
    for (const std::int64_t limit : {std::int64_t{0}, std::int64_t{1}, largest, 3 * largest}) {
      for (const int prefetch : {0, 3}) {
        for (const bool buffers : {false, true}) {
          // Every combination takes a minute; a third has each value with each other.
          if (++runs % 3 != 0 && !everything) continue;
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

nn::Sequential mlp(int layers = 4, int width = 64) {
  nn::Sequential net;
  for (int i = 0; i < layers; ++i) {
    net->push_back(nn::Linear(width, width));
    net->push_back(nn::ReLU());
  }
  return net;
}

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

TEST_F(BigModel, LoadsWhatAnyLayoutOfFilesHolds) {
  const auto state = state_of(big_model::record_of(net));
  const auto sharded = folder.path() / "sharded", pickled = folder.path() / "pickled";
  fs::create_directories(pickled);
  checkpoints::save_sharded(state, sharded, "40KB");
  checkpoints::PyDict dict;
  for (const auto& [name, tensor] : state) dict.add(name, tensor.detach());
  checkpoints::save_pt(dict, pickled / "pytorch_model.bin");
  for (const fs::path& path :
       {file(), folder.path(), sharded, sharded / "model.safetensors.index.json", pickled,
        pickled / "pytorch_model.bin"}) {
    for (const bool meta : {true, false}) {
      SCOPED_TRACE(path);
      nn::Sequential other = meta ? empty() : mlp();
      const void* memory = meta ? nullptr : other->parameters()[0].data_ptr();
      LoadReport report = load_checkpoint_in_model(other, path);
      EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
      EXPECT_EQ(report.bytes, 4 * (64 * 64 + 64) * 4);
      torch::NoGradGuard no_grad;
      EXPECT_TRUE(at::equal(other->forward(input), expected));
      EXPECT_TRUE(other->parameters()[0].requires_grad());
      if (!meta) {
        EXPECT_EQ(other->parameters()[0].data_ptr(), memory);
      }
    }
  }
  // A module on disk from files that cannot be read in place needs a folder.
  nn::Sequential other = empty();
  EXPECT_THROW(load_checkpoint_and_dispatch(other, pickled, DeviceMap{{"", Place::disk()}}),
               ConfigError);
  auto model = load_checkpoint_and_dispatch(other, pickled, DeviceMap{{"", Place::disk()}},
                                            LoadOptions().offload_folder(folder.path() / "copy"));
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(model.forward(input), expected));
}

TEST_F(BigModel, DtypesOnLoad) {
  nn::Sequential other = empty();
  auto options = LoadOptions().dtype(at::kBFloat16).keep_in_fp32_modules({"2"});
  auto model = load_checkpoint_and_dispatch(
      other, file(),
      DeviceMap{
          {"0", Place::cpu()}, {"2", Place::disk()}, {"4", Place::disk()}, {"6", Place::disk()}},
      options);
  for (const auto& parameter : other->named_parameters()) {
    EXPECT_EQ(parameter.value().scalar_type(),
              parameter.key()[0] == '2' ? at::kFloat : at::kBFloat16)
        << parameter.key();
    EXPECT_TRUE(at::equal(parameter.value().clone(),
                          net->named_parameters()[parameter.key()].to(parameter.value().dtype())))
        << parameter.key();
  }
}

TEST_F(BigModel, TheBarSaysBytesAndSpeed) {
  const std::string total = text::format_bytes(4 * (64 * 64 + 64) * 4);
  for (const bool copied_to_disk : {false, true}) {
    std::ostringstream out;
    nn::Sequential other = empty();
    auto options = LoadOptions().dtype(at::kDouble).bar(ProgressOptions().output(&out));
    if (copied_to_disk) options.offload_folder(folder.path() / "copy");
    const Place place = copied_to_disk ? Place::disk() : Place::cpu();
    const LoadReport report = load_checkpoint_in_model(other, file(), {{"", place}}, options);
    // What is in the file, whatever it becomes.
    EXPECT_EQ(report.bytes, 4 * (64 * 64 + 64) * 4);
    EXPECT_TRUE(out.str().starts_with("100% " + total + "/" + total + ", ")) << out.str();
    EXPECT_TRUE(out.str().ends_with("B/s\n")) << out.str();
    EXPECT_EQ(out.str().find('\r'), std::string::npos) << "that is for terminals";
    std::ostringstream silent;
    nn::Sequential again = mlp();
    load_checkpoint_in_model(again, file(), {{"", Place::cpu()}},
                             options.progress(false).bar(ProgressOptions().output(&silent)));
    EXPECT_EQ(silent.str(), "");
  }
}

TEST_F(BigModel, NamesThatDiffer) {
  struct Other : nn::Module {
    nn::Linear first{64, 64}, added{2, 2};
    Other() {
      register_module("0", first);
      register_module("added", added);
    }
  };
  auto other = std::make_shared<Other>();
  const LoadReport report = load_checkpoint_in_model(other, file());
  EXPECT_EQ(report.missing, (std::vector<std::string>{"added.weight", "added.bias"}));
  EXPECT_EQ(report.unexpected.size(), 6u);
  EXPECT_TRUE(at::equal(other->first->weight, net->parameters()[0]));
  try {
    load_checkpoint_in_model(other, file(), {{"", Place::cpu()}}, LoadOptions().strict(true));
    FAIL() << "nothing was refused";
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("'added.weight' is not in the checkpoint"),
              std::string::npos);
    EXPECT_NE(std::string(error.what()).find("'6.bias' is not in the module"), std::string::npos);
  }
}

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

template <class Thrown, class Call>
void expect_refusal(const std::string& part, Call&& call) {
  try {
    call();
    FAIL() << "nothing was refused, expected: " << part;
  } catch (const Thrown& error) {
    EXPECT_NE(describe(error).find(part), std::string::npos) << describe(error);
  }
}

TEST_F(BigModel, AFileThatVanishedOrChangedIsNamed) {
  torch::NoGradGuard no_grad;
  const auto copy = folder.path() / "copy.safetensors";
  fs::copy(file(), copy);
  auto model = load_checkpoint_and_dispatch(empty(), copy, DeviceMap{{"", Place::disk()}});
  EXPECT_TRUE(at::equal(model(input), expected));
  fs::resize_file(copy, fs::file_size(copy) - 100);
  expect_refusal<CheckpointError>("copy.safetensors", [&] { model(input); });
  expect_refusal<CheckpointError>("copy.safetensors", [&] { model(input); });
  fs::remove(copy);
  expect_refusal<CheckpointError>("copy.safetensors", [&] { model(input); });
  fs::copy(file(), copy);
  EXPECT_TRUE(at::equal(model(input), expected));
}

TEST_F(BigModel, WhatADispatchedModuleCannotDoIsSaid) {
  auto model = load_checkpoint_and_dispatch(net, file(), DeviceMap{{"", Place::disk()}});
  expect_refusal<StateError>("remove_offload", [&] { net->to(at::kDouble); });
  expect_refusal<StateError>("already", [&] { cpu_offload(net, at::kCPU); });
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
  expect_refusal<ConfigError>("17", [&] { dispatch_model(net, {{"", Place::accelerator(17)}}); });
  expect_refusal<ConfigError>("frist", [&] {
    dispatch_model(net, {{"", Place::cpu()}, {"frist", Place::cpu()}});
  });
  expect_refusal<ConfigError>("6.weight", [&] {
    dispatch_model(net, {{"0", Place::cpu()}, {"2", Place::cpu()}, {"4", Place::cpu()}});
  });
  expect_refusal<ConfigError>("offload_dir", [&] { dispatch_model(net, {{"", Place::disk()}}); });
  expect_refusal<StateError>("load_checkpoint_and_dispatch", [&] {
    dispatch_model(empty(), {{"", Place::cpu()}});
  });
  expect_refusal<ConfigError>("'Convolution'", [&] {
    cpu_offload(mlp(), at::kCPU, OffloadOptions().preload_module_classes({"Convolution"}));
  });
  expect_refusal<CheckpointError>(
      "[64, 64]", [&] { attach_align_device(mlp(4, 32), at::kCPU, WeightStore::open(file())); });
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

// A checkpoint of eight terabytes that takes no room: the file is a hole.
fs::path huge_checkpoint(const fs::path& folder, std::int64_t rows) {
  const io::safetensors::Header header({{"weight", io::safetensors::Dtype::kF32, {rows, 1 << 20}}});
  const auto path = folder / "huge.safetensors";
  std::ofstream(path, std::ios::binary) << header.text();
  fs::resize_file(path, header.file_bytes());
  return path;
}

TEST_F(BigModel, TooLittleMemoryOrDiskIsSaidBeforeLoading) {
  constexpr std::int64_t kRows = 1 << 21;  // of four megabytes
  struct Huge : nn::Module {
    Huge() { register_parameter("weight", torch::empty({kRows, 1 << 20})); }
  };
  const auto path = huge_checkpoint(folder.path(), kRows);
  const auto huge = init_empty_weights([] { return std::make_shared<Huge>(); });
  expect_refusal<OutOfMemoryError>("need 8.00 TiB", [&] { load_checkpoint_in_model(huge, path); });
  expect_refusal<CheckpointError>("need 8.00 TiB", [&] {
    load_checkpoint_in_model(huge, path, {{"", Place::disk()}},
                             LoadOptions().offload_folder(folder.path() / "offload"));
  });
  EXPECT_TRUE(huge->parameters()[0].is_meta());
  auto model = load_checkpoint_and_dispatch(huge, path, DeviceMap{{"", Place::disk()}});
  expect_refusal<OutOfMemoryError>("8.00 TiB", [&] { model.remove_offload(); });
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
    EXPECT_THROW(module.to(at::kFloat), std::exception);
  }
}

TEST_F(BigModel, MapsByName) {
  torch::NoGradGuard no_grad;
  auto options = LoadOptions().max_memory(MaxMemory{{Place::cpu(), 60000}});
  for (const char* name : {"auto", "balanced", "balanced_low_0", "sequential"}) {
    auto model = load_checkpoint_and_dispatch(empty(), file(), name, options);
    EXPECT_TRUE(at::equal(model(input), expected));
    std::set<std::string> places;
    for (const auto& [module, place] : model.device_map()) places.insert(place.text());
    EXPECT_EQ(places, (std::set<std::string>{"cpu", "disk"}));
  }
  EXPECT_THROW(load_checkpoint_and_dispatch(empty(), file(), "best"), ConfigError);
}

TEST_F(BigModel, AChainOfHooksKeepsOneModelOnTheDevice) {
  // On one device nothing moves; AcrossAGpu has one more.
  auto [first, first_hook] = cpu_offload_with_hook(net, at::kCPU);
  auto [second, second_hook] = cpu_offload_with_hook(mlp(), at::kCPU, first_hook);
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(first(input), expected));
  second(first(input));
  second_hook.offload();
  second_hook.remove();
  EXPECT_TRUE(at::equal(first(input), expected));
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

TEST_F(BigModel, OffloadFoldersAreThoseOfPython) {
  if (!testing::has_python()) GTEST_SKIP() << "There is no Python with torch and accelerate.";
  // Of every dtype that both know, a number, and nothing.
  std::vector<NamedTensor> tensors;
  for (const at::ScalarType dtype :
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
        at::kChar, at::kByte, at::kBool, at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
    const at::Tensor values = at::arange(12, at::kFloat).sub(3).abs().reshape({3, 4});
    tensors.push_back({"block." + std::string(c10::toString(dtype)), values.to(dtype)});
  }
  tensors.push_back({"number", at::scalar_tensor(2.5)});
  const auto ours = folder.path() / "ours", theirs = folder.path() / "theirs";
  offload_state_dict(ours, tensors);
  const Json read =
      testing::run_python("big_model/offload_folder.py", ours.string() + " " + theirs.string());
  const WeightStore store = WeightStore::open(theirs);
  EXPECT_EQ(store.entries().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(read[name].get<std::vector<double>>(), [&] {
      const at::Tensor flat = tensor.to(at::kDouble).flatten().contiguous();
      return std::vector<double>(flat.const_data_ptr<double>(),
                                 flat.const_data_ptr<double>() + flat.numel());
    }()) << name;
    const at::Tensor back = at::empty_like(tensor);
    store.read(name, back);
    EXPECT_TRUE(at::equal(back.to(at::kDouble), tensor.to(at::kDouble))) << name;
    EXPECT_EQ(store.find(name)->dtype, tensor.scalar_type()) << name;
    EXPECT_EQ(io::read_file(ours / (name + ".dat")), io::read_file(theirs / (name + ".dat")))
        << name;
  }
  EXPECT_EQ(Json::parse(io::read_file(ours / "index.json")),
            Json::parse(io::read_file(theirs / "index.json")));
}

TEST_F(BigModel, DamagedOffloadFoldersAreRefused) {
  const auto damaged = folder.path() / "damaged";
  offload_state_dict(damaged, state_of(big_model::record_of(net)));
  fs::resize_file(damaged / "0.weight.dat", 7);
  expect_refusal<CheckpointError>("0.weight.dat", [&] { WeightStore::open(damaged); });
  io::write_file(damaged / "index.json", "{");
  expect_refusal<CheckpointError>("not JSON", [&] { WeightStore::open(damaged); });
  io::write_file(damaged / "index.json", R"({"0.weight": {"dtype": "float33", "shape": [1]}})");
  expect_refusal<CheckpointError>("float33", [&] { WeightStore::open(damaged); });
  io::write_file(damaged / "index.json", R"({"0.weight": {"shape": [1]}})");
  expect_refusal<CheckpointError>("0.weight", [&] { WeightStore::open(damaged); });
}

}  // namespace
}  // namespace accelerate
