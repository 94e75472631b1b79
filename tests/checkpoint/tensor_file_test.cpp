#include <accelerate/base/error.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

namespace accelerate::checkpoints {
namespace {

namespace fs = std::filesystem;

template <class E, class Action>
std::string message_of(Action&& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "Nothing was thrown";
  return "";
}

class TensorFile : public ::testing::Test {
 protected:
  fs::path path(const std::string& name = "x.safetensors") { return folder_.path() / name; }
  std::size_t files() { return io::names_in(folder_.path()).size(); }
  io::TemporaryFolder folder_;
};

TEST_F(TensorFile, StridesDevicesAndSpecialDtypesComeBack) {
  const at::Tensor base = at::randn({4, 6});
  const at::Tensor pairs = at::arange(6, at::kByte).reshape({2, 3}).view(at::kFloat4_e2m1fn_x2);
  const std::vector<NamedTensor> tensors{
      {"transposed", base.t()},
      {"column", base.slice(1, 2, 3)},
      {"conjugated", at::randn({3}, at::kComplexFloat).conj()},
      {"pairs", pairs},
      {"exponents", at::arange(3, at::kByte).view(at::kFloat8_e8m0fnu)},
      {"wide", at::randn({5}, at::kDouble)},
      {"odd", at::zeros({3}, at::kBool)}};
  save_file(tensors, path());
  EXPECT_EQ(files(), 1U);  // and nothing half-written beside it
  const auto loaded = load_file(path());
  ASSERT_EQ(loaded.size(), tensors.size());
  const TensorReader reader(path());
  for (const NamedTensor& expected : tensors) {
    const at::Tensor found = reader.get(expected.name);
    EXPECT_EQ(found.scalar_type(), expected.tensor.scalar_type()) << expected.name;
    EXPECT_EQ(found.sizes(), expected.tensor.sizes()) << expected.name;
    const at::Tensor plain = expected.tensor.resolve_conj().contiguous();
    EXPECT_EQ(std::memcmp(found.const_data_ptr(), plain.const_data_ptr(), plain.nbytes()), 0)
        << expected.name;
  }
  EXPECT_EQ(reader.info("pairs").shape,
            (std::vector<std::int64_t>{2, 6}));  // in the file each counts
}

TEST_F(TensorFile, LoadedTensorsOutliveTheReaderAndTheFileAndCanBeWrittenTo) {
  save_file({{"a", at::full({1000}, 3.0)}}, path());
  at::Tensor loaded = load_file(path())[0].tensor;
  loaded[0] = 7.0;
  EXPECT_EQ(TensorReader(path()).get("a")[0].item<float>(), 3.0F);  // the file never changes
  save_file({{"a", at::full({1000}, 4.0)}}, path());                // another file of this name
  EXPECT_EQ(loaded[0].item<float>(), 7.0F);
  EXPECT_EQ(loaded[999].item<float>(), 3.0F);
  fs::remove(path());
  EXPECT_EQ(loaded.sum().item<float>(), 3004.0F);
}

TEST_F(TensorFile, TiedTensorsAreStoredOnce) {
  const at::Tensor shared = at::randn({100, 10});
  const std::vector<NamedTensor> tensors{
      {"embedding", shared}, {"other", at::randn({2})}, {"head", shared.view({100, 10})}};
  save_file(tensors, path());
  EXPECT_LT(fs::file_size(path()), 4500U);
  const TensorReader reader(path());
  EXPECT_EQ(reader.names(), (std::vector<std::string>{"embedding", "other", "head"}));
  EXPECT_EQ(reader.stored_name("head"), "embedding");
  EXPECT_EQ(reader.metadata().at("head"), "embedding");
  const auto loaded = load_file(path());
  EXPECT_EQ(loaded[0].tensor.const_data_ptr(), loaded[2].tensor.const_data_ptr());
  EXPECT_TRUE(loaded[2].tensor.equal(shared));
  // A model that is not tied gets both, and one that is tied needs one.
  const at::Tensor a = at::empty({100, 10}), b = at::empty({100, 10}), c = at::empty({2});
  EXPECT_TRUE(load_into({{"embedding", a}, {"head", b}, {"other", c}}, path()).missing.empty());
  EXPECT_TRUE(a.equal(shared) && b.equal(shared));
  a.zero_();
  const Mismatch mismatch = load_into({{"first", a}, {"head", a}, {"other", c}}, path());
  EXPECT_TRUE(mismatch.missing.empty() && mismatch.unexpected.empty());
  EXPECT_TRUE(a.equal(shared));
}

TEST_F(TensorFile, LoadingConvertsAndFillsStridedTensors) {
  const at::Tensor value = at::arange(24, at::kFloat).reshape({4, 6});
  save_file({{"a", value}}, path());
  const at::Tensor half = at::empty({4, 6}, at::kHalf), transposed = at::empty({6, 4}).t(),
                   part = at::zeros({8, 6}).slice(0, 2, 6);
  for (const at::Tensor& into : {half, transposed, part}) {
    load_into({{"a", into}}, path());
    EXPECT_TRUE(into.to(at::kFloat).equal(value));
  }
  EXPECT_EQ(transposed.strides(), (c10::IntArrayRef{1, 4}));
}

TEST_F(TensorFile, NothingIsTouchedBeforeEverythingFits) {
  save_file({{"a", at::full({2}, 1.0)}, {"b", at::full({3}, 1.0)}, {"extra", at::full({1}, 1.0)}},
            path());
  const at::Tensor a = at::zeros({2}), b = at::zeros({4}), c = at::zeros({1});
  const std::string message = message_of<CheckpointError>([&] {
    load_into({{"a", a}, {"b", b}, {"c", c}}, path());
  });
  for (const char* part : {"x.safetensors", "nothing was changed",
                           "'b' is [3] in the file and [4] here", "lacks c", "also has extra"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nlacks: " << part;
  }
  EXPECT_EQ(a.sum().item<float>(), 0.0F);
  // Without `strict` names may differ, and shapes still not.
  EXPECT_THROW(load_into({{"a", a}, {"b", b}}, path(), false), CheckpointError);
  EXPECT_EQ(a.sum().item<float>(), 0.0F);
  const Mismatch mismatch = load_into({{"a", a}, {"c", c}}, path(), false);
  EXPECT_EQ(mismatch.missing, std::vector<std::string>{"c"});
  EXPECT_EQ(mismatch.unexpected, (std::vector<std::string>{"b", "extra"}));
  EXPECT_EQ(a.sum().item<float>(), 2.0F);
}

TEST_F(TensorFile, AFileCutShortAfterItWasOpenedIsAnError) {
  save_file({{"a", at::full({100'000}, 1.0)}}, path());
  const TensorReader reader(path());
  fs::resize_file(path(), 1000);
  const at::Tensor dense = at::zeros({100'000}), strided = at::zeros({100'000, 2}).select(1, 0);
  EXPECT_NE(message_of<CheckpointError>([&] { reader.read_into("a", dense); }).find("cut short"),
            std::string::npos);
  EXPECT_NE(message_of<CheckpointError>([&] { reader.read_into("a", strided); }).find("cut short"),
            std::string::npos);
}

TEST_F(TensorFile, WhatCannotBeSavedIsRefusedByName) {
  const auto refuse = [&](const at::Tensor& tensor) {
    return message_of<UnsupportedError>([&] {
      save_file({{"good", at::zeros({1})}, {"some.weight", tensor}}, path());
    });
  };
  EXPECT_NE(refuse(at::zeros({2}).to_sparse()).find("'some.weight' is sparse"), std::string::npos);
  EXPECT_NE(refuse(at::empty({2}, at::kMeta)).find("'some.weight' is on the meta device"),
            std::string::npos);
  EXPECT_NE(refuse(at::Tensor()).find("'some.weight' is undefined"), std::string::npos);
  EXPECT_NE(refuse(at::zeros({2}, at::kComplexDouble)).find("ComplexDouble"), std::string::npos);
  EXPECT_THROW(save_file({{"a", at::zeros({1})}, {"a", at::zeros({1})}}, path()), ConfigError);
  EXPECT_EQ(files(), 0U);
}

TEST_F(TensorFile, SixBitNumbersAreRefusedAndOthersOfTheFileRead) {
  {
    io::safetensors::Writer writer(
        path(), io::safetensors::Header(
                    {{.name = "six", .dtype = io::safetensors::Dtype::kF6E3M2, .shape = {4}},
                     {.name = "odd", .dtype = io::safetensors::Dtype::kF4, .shape = {2, 1}},
                     {.name = "one", .dtype = io::safetensors::Dtype::kU8, .shape = {1}}}));
    const std::string bytes = "abcdef";
    for (const auto& info : writer.header().tensors())
      writer.write(info, std::as_bytes(std::span(bytes)).first(info.bytes()));
    writer.finish();
  }
  const TensorReader reader(path());
  EXPECT_NE(message_of<UnsupportedError>([&] { reader.get("six"); }).find("F6_E3M2"),
            std::string::npos);
  EXPECT_NE(message_of<CheckpointError>([&] { reader.get("odd"); }).find("in pairs"),
            std::string::npos);
  EXPECT_EQ(reader.get("one").item<std::uint8_t>(), 'a' + 0);
}

TEST_F(TensorFile, ASaveOverALargerOneLeavesNoStaleShard) {
  const at::Tensor shared = at::full({10}, 5.0);
  std::vector<NamedTensor> tensors{{"tied.a", shared}};
  for (int i = 0; i < 5; ++i)
    tensors.push_back({"t" + std::to_string(i), at::full({10}, static_cast<float>(i))});
  tensors.push_back({"tied.b", shared});
  io::write_file(path("model-notes.safetensors"), "kept");
  const auto first = save_sharded(tensors, folder_.path(), "80B");
  EXPECT_EQ(first, (std::vector<std::string>{
                       "model.safetensors.index.json", "model-00001-of-00003.safetensors",
                       "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"}));
  const auto loaded = load_file(folder_.path());
  EXPECT_EQ(loaded.size(), tensors.size());
  for (const NamedTensor& named : loaded) {
    EXPECT_EQ(named.tensor.sum().item<float>(),
              named.name.starts_with("tied") ? 50.0F : 10.0F * (named.name[1] - '0'))
        << named.name;
  }
  EXPECT_EQ(save_sharded(tensors, folder_.path(), "120B").size(), 3U);
  EXPECT_EQ(files(), 4U);
  EXPECT_EQ(save_sharded(tensors, folder_.path()), std::vector<std::string>{"model.safetensors"});
  EXPECT_EQ(io::names_in(folder_.path()),
            (std::vector<std::string>{"model-notes.safetensors", "model.safetensors"}));
  EXPECT_THROW(save_sharded(tensors, folder_.path(), "5 gigabytes"), ConfigError);
}

TEST_F(TensorFile, WhatADeadProcessLeftIsRemovedAndNoOthers) {
  const pid_t child = ::fork();
  if (child == 0) {
    for (const char* name : {"model-00001-of-00009.safetensors", "other"})
      io::File::create(io::partial_of(path(name)));
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  const fs::path own = io::partial_of(path("model-00002-of-00009.safetensors"));
  io::File::create(own);
  EXPECT_EQ(files(), 3U);
  save_sharded({{"a", at::zeros({10})}}, folder_.path());
  EXPECT_EQ(files(), 3U);
  EXPECT_TRUE(fs::exists(own));
  EXPECT_TRUE(fs::exists(path("model.safetensors")));
  io::write_file(path("other"), "text");
  EXPECT_EQ(files(), 3U);
  EXPECT_TRUE(fs::exists(path("other")));
}

int fail_after = 0;
TEST_F(TensorFile, AFullDiskLeavesWhatWasThere) {
  const std::vector<NamedTensor> tensors{{"a", at::full({10}, 1.0)}, {"b", at::full({10}, 2.0)}};
  save_sharded(tensors, folder_.path(), "40B");
  const auto before = io::names_in(folder_.path());
  for (int at = 0; at < 6; ++at) {  // while the new files are being written
    fail_after = at;
    io::faults::set_hook([](io::faults::Operation operation, const fs::path&, std::size_t&) {
      return operation != io::faults::Operation::kRename &&
                     operation != io::faults::Operation::kCreate && fail_after-- == 0
                 ? ENOSPC
                 : 0;
    });
    EXPECT_THROW(save_sharded({{"a", at::full({10}, 7.0)}, {"b", at::full({10}, 8.0)}},
                              folder_.path(), "40B"),
                 CheckpointError)
        << at;
    io::faults::set_hook(nullptr);
    EXPECT_EQ(io::names_in(folder_.path()), before) << at;
    EXPECT_EQ(load_file(folder_.path())[0].tensor.sum().item<float>(), 10.0F) << at;
  }
}

}  // namespace
}  // namespace accelerate::checkpoints
