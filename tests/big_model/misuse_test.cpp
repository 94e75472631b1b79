// What can go wrong around a dispatched module is said, and nothing is computed with other weights
// than the module's.

#include "big_model/fixture.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <chrono>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;
using testing::BigModel;
using testing::expect_refusal;
using testing::mlp;
using testing::state_of;

const DeviceMap kDisk{{"", Place::disk()}};

TEST_F(BigModel, AFileOfTheSameSizeIsNotTakenForTheOneThatWasOpened) {
  torch::NoGradGuard no_grad;
  const auto served = folder.path() / "served.safetensors";
  fs::copy(file(), served);
  nn::Sequential other = mlp();
  auto model = load_checkpoint_and_dispatch(empty(), served, kDisk);
  EXPECT_TRUE(at::equal(model(input), expected));
  checkpoints::save_file(state_of(big_model::record_of(other)), served);
  expect_refusal<CheckpointError>("was replaced by another file", [&] { model(input); });

  fs::copy(file(), served, fs::copy_options::overwrite_existing);
  auto again = load_checkpoint_and_dispatch(empty(), served, kDisk);
  EXPECT_TRUE(at::equal(again(input), expected));
  io::File::open_writable(served).write("0123", 4, fs::file_size(served) - 4);
  fs::last_write_time(served, fs::file_time_type::clock::now() + std::chrono::seconds(1));
  expect_refusal<CheckpointError>("was written to", [&] { again(input); });
}

TEST_F(BigModel, TwoModulesDoNotShareAnOffloadFolder) {
  torch::NoGradGuard no_grad;
  const auto shared = folder.path() / "shared";
  nn::Sequential other = mlp();
  const at::Tensor from_other = other->forward(input);
  auto first = disk_offload(net, shared);
  expect_refusal<CheckpointError>("call remove_offload()",
                                  [&] { static_cast<void>(disk_offload(other, shared)); });
  expect_refusal<CheckpointError>("Name another folder", [&] {
    load_checkpoint_in_model(other, file(), kDisk, LoadOptions().offload_folder(shared));
  });
  EXPECT_TRUE(at::equal(first(input), expected));
  EXPECT_TRUE(at::equal(other->forward(input), from_other));
  const WeightStore before = WeightStore::open(shared);
  first.remove_offload();
  auto second = disk_offload(other, shared);
  EXPECT_TRUE(at::equal(second(input), from_other));
  EXPECT_TRUE(at::equal(net->forward(input), expected));
  // Who only has the folder open finds out.
  at::Tensor weight = at::empty({64, 64});
  expect_refusal<CheckpointError>("was replaced by another file",
                                  [&] { before.read("0.weight", weight); });
  for (const auto& left : fs::directory_iterator(shared))
    EXPECT_NE(left.path().extension(), ".partial");
}

TEST_F(BigModel, AnOffloadFolderNeedsOnlyWhatIsReadFromIt) {
  torch::NoGradGuard no_grad;
  const auto old = folder.path() / "old";
  offload_state_dict(old, state_of(big_model::record_of(net)));
  fs::remove(old / "0.bias.dat");
  auto model = disk_offload(net, old);  // writes all of it
  EXPECT_TRUE(at::equal(model(input), expected));
}

// Whose rows are as large as it is.
struct OneRow : nn::Module {
  OneRow() { weight = register_parameter("weight", torch::randn({1, 1 << 20})); }
  at::Tensor forward(const at::Tensor& x) { return (x * weight).sum(); }
  at::Tensor weight;
};

TEST_F(BigModel, AWeightOfAnotherDtypeNeedsNoMoreMemoryWhateverItsShape) {
  tracking::count_cpu_tensors();
  torch::NoGradGuard no_grad;
  constexpr std::int64_t kWeight = (1 << 20) * 2;  // in bfloat16
  const auto path = folder.path() / "row.safetensors";
  auto plain = std::make_shared<OneRow>();
  checkpoints::save_file({{"weight", plain->weight.to(at::kDouble)}}, path);
  const auto empty_row = [] {
    return init_empty_weights([] { return std::make_shared<OneRow>(); });
  };
  const auto options = LoadOptions().dtype(at::kBFloat16);
  const at::Tensor x = at::ones({1}, at::kBFloat16);
  const at::Tensor wanted = (x * plain->weight.to(at::kBFloat16)).sum();
  const auto peak_of = [](const auto& act) {
    const std::int64_t before = tracking::tensor_bytes().current;
    tracking::reset_peak();
    act();
    return static_cast<double>(tracking::tensor_bytes().peak - before);
  };
  auto model = load_checkpoint_and_dispatch(empty_row(), path, kDisk, options,
                                            OffloadOptions().resident_limit(1));
  for (int i = 0; i < 2; ++i) {
    // The product is as large as the weight.
    EXPECT_LE(peak_of([&] { EXPECT_TRUE(at::equal(model(x), wanted)); }), 1.1 * kWeight + kWeight);
  }
  auto loaded = empty_row();
  EXPECT_LE(peak_of([&] {
              load_checkpoint_in_model(loaded, path, {{"", Place::cpu()}}, options);
            }),
            1.1 * kWeight);
  EXPECT_TRUE(at::equal(loaded->forward(x), wanted));
  // In an order of its own, several threads at once, and from a file of torch.save.
  auto turned = std::make_shared<nn::Conv2dImpl>(nn::Conv2dOptions(512, 256, 3).bias(false));
  turned->weight.set_data(turned->weight.contiguous(at::MemoryFormat::ChannelsLast));
  const at::Tensor values = at::randn({256, 512, 3, 3}, at::kDouble);
  checkpoints::save_file({{"weight", values}}, path);
  checkpoints::PyDict dict;
  dict.add("weight", values.permute({1, 0, 2, 3}).contiguous().permute({1, 0, 2, 3}));
  checkpoints::save_pt(dict, folder.path() / "turned.pt");
  for (const fs::path& from : {path, folder.path() / "turned.pt"}) {
    turned->weight.zero_();
    load_checkpoint_in_model(turned, from, {{"", Place::cpu()}}, LoadOptions().threads(3));
    EXPECT_TRUE(at::equal(turned->weight, values.to(at::kFloat))) << from;
    EXPECT_TRUE(turned->weight.is_contiguous(at::MemoryFormat::ChannelsLast));
  }
}

TEST_F(BigModel, AWeightOnDiskIsNotWrittenToNotEvenInMemory) {
  torch::NoGradGuard no_grad;
  auto model = load_checkpoint_and_dispatch(empty(), file(), kDisk);
  const at::Tensor weight = model.module()->parameters()[0];
  const double sum = weight.sum().item<double>();
  expect_refusal<StateError>("offloaded to disk", [&] { weight.zero_(); });
  EXPECT_EQ(weight.sum().item<double>(), sum);
  expect_refusal<StateError>("'0.weight'", [&] { weight[3].add_(1); });
  EXPECT_TRUE(at::equal(model.module()->forward(input), expected));
}

}  // namespace
}  // namespace accelerate
