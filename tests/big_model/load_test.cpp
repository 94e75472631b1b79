// Checkpoints of every layout loaded into modules, offload folders, and what is refused before
// anything is read.

#include "big_model/fixture.hpp"

#include <support/python.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/io/safetensors.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>
#include <big_model/devices.hpp>

#include <fstream>
#include <set>
#include <sstream>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;
using testing::expect_refusal;
using testing::mlp;
using testing::state_of;
using Load = testing::BigModel;

TEST_F(Load, LoadsWhatAnyLayoutOfFilesHolds) {
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
  EXPECT_THROW(static_cast<void>(
                   load_checkpoint_and_dispatch(other, pickled, DeviceMap{{"", Place::disk()}})),
               ConfigError);
  auto model = load_checkpoint_and_dispatch(other, pickled, DeviceMap{{"", Place::disk()}},
                                            LoadOptions().offload_folder(folder.path() / "copy"));
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(model.forward(input), expected));
}

TEST_F(Load, AnIndexOfSeveralFilesOfTorchSave) {
  const auto sharded = folder.path() / "bin";
  fs::create_directories(sharded);
  Json index{{"metadata", Json::object()}, {"weight_map", Json::object()}};
  checkpoints::PyDict parts[2];
  int i = 0;
  for (const auto& [name, tensor] : state_of(big_model::record_of(net))) {
    parts[i % 2].add(name, tensor.detach());
    index["weight_map"][name] = i++ % 2 == 0 ? "a.bin" : "b.bin";
  }
  checkpoints::save_pt(parts[0], sharded / "a.bin");
  checkpoints::save_pt(parts[1], sharded / "b.bin");
  io::write_file(sharded / "pytorch_model.bin.index.json", index.dump());
  torch::NoGradGuard no_grad;
  for (const fs::path& path : {sharded, sharded / "pytorch_model.bin.index.json"}) {
    nn::Sequential other = empty();
    EXPECT_TRUE(load_checkpoint_in_model(other, path).missing.empty());
    EXPECT_TRUE(at::equal(other->forward(input), expected));
  }
  fs::remove(sharded / "b.bin");
  expect_refusal<CheckpointError>("b.bin", [&] { load_checkpoint_in_model(net, sharded); });
}

TEST_F(Load, DtypesOnLoad) {
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

TEST_F(Load, NoMoreMemoryIsTakenThanTheWeightsAndTheLargest) {
  tracking::count_cpu_tensors();
  const std::int64_t largest = 64 * 64 * 4, all = 4 * (largest + 64 * 4);
  const auto peak_of = [&](const DeviceMap& map, const LoadOptions& options) {
    nn::Sequential other = empty();
    const std::int64_t before = tracking::tensor_bytes().current;
    tracking::reset_peak();
    load_checkpoint_in_model(other, file(), map, options);
    return tracking::tensor_bytes().peak - before;
  };
  const DeviceMap cpu{{"", Place::cpu()}}, disk{{"", Place::disk()}};
  EXPECT_LE(peak_of(cpu, LoadOptions().memory_map(false)), all);
  EXPECT_LE(peak_of(cpu, LoadOptions()), largest) << "mapped pages are the file's";
  EXPECT_LE(peak_of(cpu, LoadOptions().dtype(at::kDouble).threads(1)), 2 * all + largest);
  EXPECT_LE(peak_of(disk, LoadOptions()), 0);
  // Copied into a folder one after the other.
  EXPECT_LE(peak_of(disk, LoadOptions().offload_folder(folder.path() / "same")), largest);
  EXPECT_LE(
      peak_of(disk, LoadOptions().dtype(at::kDouble).offload_folder(folder.path() / "double")),
      2 * largest + largest);
}

TEST_F(Load, TheBarSaysBytesAndSpeed) {
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

TEST_F(Load, NamesThatDiffer) {
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

TEST_F(Load, FractionsAreNotPutIntoIntegers) {
  struct Counts : nn::Module {
    Counts() { register_buffer("counts", torch::zeros({2}, at::kLong)); }
  };
  const auto path = folder.path() / "counts.safetensors";
  checkpoints::save_file({{"counts", at::full({2}, 1.5)}}, path);
  auto module = std::make_shared<Counts>();
  expect_refusal<CheckpointError>("'counts' is Float in the checkpoint and Long in the module",
                                  [&] { load_checkpoint_in_model(module, path); });
}

TEST_F(Load, MapsByName) {
  torch::NoGradGuard no_grad;
  auto options = LoadOptions().max_memory(MaxMemory{{Place::cpu(), 60000}});
  for (const char* name : {"auto", "balanced", "balanced_low_0", "sequential"}) {
    auto model = load_checkpoint_and_dispatch(empty(), file(), name, options);
    EXPECT_TRUE(at::equal(model(input), expected));
    std::set<std::string> places;
    for (const auto& [module, place] : model.device_map()) places.insert(place.text());
    EXPECT_EQ(places, (std::set<std::string>{"cpu", "disk"}));
  }
  EXPECT_THROW(static_cast<void>(load_checkpoint_and_dispatch(empty(), file(), "best")),
               ConfigError);
}

TEST_F(Load, WeightsThatStayInFloat32AreCountedSo) {
  // In bfloat16 all of it would fit, in float32 it does not.
  const auto options = LoadOptions()
                           .dtype(at::kBFloat16)
                           .keep_in_fp32_modules({"0", "2", "4", "6"})
                           .max_memory(MaxMemory{{Place::cpu(), 60000}});
  nn::Sequential other = empty();
  auto model = load_checkpoint_and_dispatch(other, file(), "auto", options);
  std::int64_t on_cpu = 0;
  for (const auto& [name, tensor] : state_of(big_model::record_of(other))) {
    EXPECT_EQ(tensor.scalar_type(), at::kFloat);
    if (*place_of(model.device_map(), name) == Place::cpu())
      on_cpu += static_cast<std::int64_t>(tensor.nbytes());
  }
  EXPECT_LE(on_cpu, 60000);
  EXPECT_GT(on_cpu, 0);
}

TEST(FreeMemory, OfASingleAcceleratorATenthIsLeft) {
  const Place first = Place::accelerator(0), second = Place::accelerator(1), cpu = Place::cpu();
  using big_model::leave_room;
  EXPECT_EQ(leave_room({{first, 1000}, {cpu, 500}}), (MaxMemory{{first, 900}, {cpu, 500}}));
  for (const MaxMemory& limits :
       {MaxMemory{{first, 1000}, {second, 1000}, {cpu, 500}}, MaxMemory{{cpu, 500}}})
    EXPECT_EQ(leave_room(limits), limits);
}

// A checkpoint of eight terabytes that takes no room: the file is a hole.
fs::path huge_checkpoint(const fs::path& folder, std::int64_t rows) {
  const io::safetensors::Header header({{"weight", io::safetensors::Dtype::kF32, {rows, 1 << 20}}});
  const auto path = folder / "huge.safetensors";
  std::ofstream(path, std::ios::binary) << header.text();
  fs::resize_file(path, header.file_bytes());
  return path;
}

TEST_F(Load, TooLittleMemoryOrDiskIsSaidBeforeLoading) {
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

TEST_F(Load, OffloadFoldersAreThoseOfPython) {
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

TEST_F(Load, DamagedOffloadFoldersAreRefused) {
  const auto damaged = folder.path() / "damaged";
  offload_state_dict(damaged, state_of(big_model::record_of(net)));
  fs::resize_file(damaged / "0.weight.dat", 7);
  expect_refusal<CheckpointError>("0.weight.dat", [&] { WeightStore::open(damaged); });
  io::write_file(damaged / "index.json", "{");
  expect_refusal<CheckpointError>("not JSON", [&] { WeightStore::open(damaged); });
  io::write_file(damaged / "index.json", R"({"0.weight": {"dtype": "float33", "shape": [1]}})");
  expect_refusal<CheckpointError>("float33", [&] { WeightStore::open(damaged); });
  for (const auto& [index, said] :
       {std::pair{R"({"0.weight": {"dtype": "float32", "shape": [4294967296, 4294967296]}})",
                  "more elements than can be counted"},
        std::pair{R"({"../0.weight": {"dtype": "float32", "shape": [1]}})", "'../0.weight'"},
        std::pair{R"({"w": {"safetensors_file": "../other.safetensors"}})", "not a file in its"},
        std::pair{R"({"w": {"safetensors_file": "/etc/passwd"}})", "not a file in its folder"},
        std::pair{R"({"w": {"safetensors_file": 3}})", "dtype and shape of 'w'"}}) {
    io::write_file(damaged / "index.json", index);
    expect_refusal<CheckpointError>(said, [&] { WeightStore::open(damaged); });
  }
  io::write_file(damaged / "index.json", std::string(50'000, '['));
  expect_refusal<CheckpointError>("200 deep", [&] { WeightStore::open(damaged); });
  io::write_file(damaged / "index.json", R"({"0.weight": {"shape": [1]}})");
  expect_refusal<CheckpointError>("0.weight", [&] { WeightStore::open(damaged); });
}

}  // namespace
}  // namespace accelerate
