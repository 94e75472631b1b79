// What can go wrong around a dispatched module is said, and nothing is computed with other weights
// than the module's.

#include "big_model/fixture.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/big_model/sizes.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>
#include <intercept/key.hpp>
#include <support/policies.hpp>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/serialize.h>

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
                                  [&] { return disk_offload(other, shared); });
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

TEST_F(BigModel, ARefusedMoveChangesNothing) {
  torch::NoGradGuard no_grad;
  nn::Sequential normed(nn::Linear(64, 64), nn::BatchNorm1d(64), nn::Linear(64, 64));
  normed->eval();
  const at::Tensor plain = normed->forward(input);
  const auto path = folder.path() / "normed.safetensors";
  checkpoints::save_file(state_of(big_model::record_of(normed)), path);
  {
    auto model = load_checkpoint_and_dispatch(
        normed, path, DeviceMap{{"0", Place::cpu()}, {"1", Place::cpu()}, {"2", Place::disk()}});
    expect_refusal<StateError>("remove_offload()", [&] { normed->to(at::kDouble); });
    expect_refusal<StateError>("remove_offload()", [&] { normed[1]->to(at::kDouble); });
    expect_refusal<StateError>("remove_offload()",
                               [&] { normed->buffers()[0].set_data(at::zeros({64})); });
    for (const auto& [name, tensor] : state_of(big_model::record_of(normed)))
      EXPECT_NE(tensor.scalar_type(), at::kDouble) << name;
    EXPECT_TRUE(at::equal(model(input), plain));
    EXPECT_TRUE(at::equal(normed->forward(input), plain));
    normed->to(at::kCPU);             // where it is
    normed->parameters()[0].mul_(1);  // resident weights are the user's
    expect_refusal<StateError>("already", [&] { return cpu_offload(normed, at::kCPU); });
    model.remove_offload();
    normed->to(at::kDouble);
    normed->to(at::kFloat);
    EXPECT_TRUE(at::equal(normed->forward(input), plain));
  }
  {
    auto model = disk_offload(normed, folder.path() / "normed");
    EXPECT_TRUE(at::equal(model(input), plain));
  }
  EXPECT_EQ(normed->buffers()[0].key_set().has(intercept::kTag), false);
}

TEST_F(BigModel, OperatorPoliciesStayWhereverWeightsLie) {
  torch::NoGradGuard no_grad;
  const auto policy = std::make_shared<policies::InDtype>(at::kDouble);
  std::vector<intercept::PolicyAttachment> attachments;
  for (const std::size_t layer : {0, 2, 4})
    attachments.push_back(intercept::attach(net[layer]->as<nn::Linear>()->weight, policy));
  const at::Tensor replaced = net->forward(input);
  EXPECT_FALSE(at::equal(replaced, expected)) << "rounding shows";
  const auto check = [&](const auto& forward) {
    const int before = policy->calls;
    EXPECT_TRUE(at::equal(forward(), replaced));
    EXPECT_EQ(policy->calls, before + 3);
  };
  {
    auto model = dispatch_model(
        net, {{"0", Place::cpu()}, {"2", Place::disk()}, {"4", Place::cpu()}, {"6", Place::disk()}},
        OffloadOptions().offload_dir(folder.path() / "mixed"));
    check([&] { return model(input); });
    expect_refusal<StateError>("remove_offload()", [&] { net[0]->to(at::kDouble); });
    model.remove_offload();
    check([&] { return net->forward(input); });
  }
  {
    auto model = cpu_offload(net, at::kCPU);
    check([&] { return model(input); });
  }
  check([&] { return net->forward(input); });
  static_cast<void>(disk_offload(net, folder.path() / "lost"));
  expect_refusal<StateError>("after the handle", [&] { net->forward(input); });
  auto again = dispatch_model(net, kDisk,
                              OffloadOptions().weights(WeightStore::open(folder.path() / "lost")));
  check([&] { return again(input); });
  again.remove_offload();
  attachments.clear();
  EXPECT_TRUE(at::equal(net->forward(input), expected));
  for (const at::Tensor& parameter : net->parameters())
    EXPECT_FALSE(parameter.key_set().has(intercept::kTag));
}

TEST_F(BigModel, WithoutItsHandleAModuleSaysSoAndCanBeLoadedAgain) {
  torch::NoGradGuard no_grad;
  static_cast<void>(disk_offload(net, folder.path() / "lost"));
  const auto expect_lost = [&] {
    expect_refusal<StateError>("after the handle of its module was destroyed",
                               [&] { net->forward(input); });
    expect_refusal<std::exception>("after the handle", [&] { net->parameters()[0].data_ptr(); });
  };
  expect_lost();
  {
    auto again = dispatch_model(
        net, kDisk, OffloadOptions().weights(WeightStore::open(folder.path() / "lost")));
    EXPECT_TRUE(at::equal(again(input), expected));
  }
  expect_lost();
  // Without a store there are no values.
  expect_refusal<StateError>("no values", [&] { return cpu_offload(net, at::kCPU); });
  expect_lost();
  {
    auto mixed = dispatch_model(
        net, {{"0", Place::cpu()}, {"2", Place::disk()}, {"4", Place::cpu()}, {"6", Place::disk()}},
        OffloadOptions().offload_dir(folder.path() / "lost"));
    EXPECT_TRUE(at::equal(mixed(input), expected));
  }
  EXPECT_FALSE(net->parameters()[0].is_meta());
  load_checkpoint_in_model(net, file());
  EXPECT_TRUE(at::equal(net->forward(input), expected));
  net->to(at::kDouble);
}

TEST_F(BigModel, AGraphThatOutlivesTheOffloadingSaysSo) {
  auto model = cpu_offload(net, at::kCPU);
  const at::Tensor loss = model(input).sum();
  model.remove_offload();
  expect_refusal<StateError>("call backward() before remove_offload()", [&] { loss.backward(); });
}

TEST_F(BigModel, SavingADispatchedModuleSaysWhatToDo) {
  auto model = load_checkpoint_and_dispatch(empty(), file(), kDisk);
  const auto state = state_of(big_model::record_of(model.module()));
  const auto path = folder.path() / "saved.safetensors";
  expect_refusal<std::exception>("remove_offload()", [&] { checkpoints::save_file(state, path); });
  expect_refusal<std::exception>("remove_offload()",
                                 [&] { offload_state_dict(folder.path() / "saved", state); });
  expect_refusal<std::exception>("remove_offload()", [&] {
    torch::save(model.module(), (folder.path() / "saved.pt").string());
  });
  model.remove_offload();
  checkpoints::save_file(state, path);
}

struct CountGradients final : torch::autograd::PostAccumulateGradHook {
  explicit CountGradients(int& count) : count(count) {}
  void operator()(const at::Tensor&) override { ++count; }
  int& count;
};

TEST_F(BigModel, AHookOfTheUsersDoesNotHideThatAWeightOnDiskIsNotTrained) {
  int count = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(net->parameters()[0],
                                                 std::make_unique<CountGradients>(count));
  auto model = disk_offload(net, folder.path() / "hooked");
  for (auto& parameter : net->parameters()) parameter.requires_grad_(false);
  net->parameters()[0].requires_grad_(true);
  expect_refusal<StateError>("'0.weight', which is offloaded to disk",
                             [&] { model(input).sum().backward(); });
  EXPECT_EQ(count, 0);
  model.remove_offload();
  net->forward(input).sum().backward();
  EXPECT_EQ(count, 1);
}

TEST_F(BigModel, DevicesThatAreNotThereAreRefusedBeforeAnythingElse) {
  const bool gpu = get_max_memory().front().first.kind == Place::Kind::accelerator;
  const DeviceMap far{{"", Place::accelerator(17)}};
  nn::Sequential other = empty();
  expect_refusal<ConfigError>("accelerator 17",
                              [&] { load_checkpoint_in_model(other, file(), far); });
  expect_refusal<ConfigError>("accelerator 17",
                              [&] { return load_checkpoint_and_dispatch(other, file(), far); });
  expect_refusal<ConfigError>("accelerator 17", [&] {
    device_map_for(big_model::record_of(other), "auto",
                   LoadOptions().max_memory(MaxMemory{{Place::accelerator(17), 1 << 20}}));
  });
  std::vector<std::pair<std::string, at::Device>> devices{
      {"meta", at::kMeta}, {"mps", at::kMPS}, {"cuda:17", at::Device(at::kCUDA, 17)}};
  if (!gpu) devices.emplace_back("no accelerator", at::kCUDA);
  for (const auto& [said, device] : devices) {
    const auto in = folder.path() / said;
    expect_refusal<ConfigError>(said, [&] { return cpu_offload(net, device); });
    expect_refusal<ConfigError>(said, [&] { return disk_offload(net, in, device); });
    expect_refusal<ConfigError>(said, [&] { return cpu_offload_with_hook(net, device); });
    expect_refusal<ConfigError>(said, [&] {
      return load_checkpoint_and_dispatch(other, file(), kDisk, {},
                                          OffloadOptions().main_device(device));
    });
    EXPECT_FALSE(fs::exists(in));
  }
  for (const at::Tensor& tensor : other->parameters()) EXPECT_TRUE(tensor.is_meta());
  torch::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(net->forward(input), expected));
}

struct Tied : nn::Module {
  Tied() {
    register_module("first", first);
    register_module("second", second);
    second->weight = second->register_parameter("tied", first->weight);
  }
  nn::Linear first{4, 4}, second{4, 4};
};

TEST_F(BigModel, OneWeightWithTwoValuesIsWarnedOf) {
  const auto path = folder.path() / "tied.safetensors";
  const auto said = [&](const at::Tensor& one, const at::Tensor& other) {
    checkpoints::save_file({{"first.weight", one}, {"second.tied", other}}, path);
    auto tied = std::make_shared<Tied>();
    ::testing::internal::CaptureStderr();
    load_checkpoint_in_model(tied, path);
    EXPECT_TRUE(at::equal(tied->first->weight, one));
    return ::testing::internal::GetCapturedStderr();
  };
  const at::Tensor ones = at::ones({4, 4});
  EXPECT_EQ(said(ones, ones).find("different values"), std::string::npos);
  EXPECT_EQ(said(ones, ones.clone()).find("different values"), std::string::npos);
  EXPECT_NE(said(ones, ones * 2).find("different values for 'first.weight' and 'second.tied'"),
            std::string::npos);
}

TEST_F(BigModel, OneWeightWithTwoPlacesIsWarnedOf) {
  auto tied = std::make_shared<Tied>();
  ::testing::internal::CaptureStderr();
  auto model = dispatch_model(tied, {{"first", Place::cpu()}, {"second", Place::disk()}},
                              OffloadOptions().offload_dir(folder.path() / "tied"));
  EXPECT_NE(
      ::testing::internal::GetCapturedStderr().find(
          "'first.weight' and 'second.weight' are one weight, and the device map puts them on "
          "cpu and on disk. It goes to cpu."),
      std::string::npos);
}

}  // namespace
}  // namespace accelerate
