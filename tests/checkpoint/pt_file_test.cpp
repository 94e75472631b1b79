// Files of Python's torch and safetensors, read and written; and files that nobody should write.
#include <accelerate/base/error.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/io/file.hpp>

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstring>
#include <fstream>

#include "support/python.hpp"

namespace accelerate::checkpoints {
namespace {

namespace fs = std::filesystem;

// What python_files.py computes too.
at::Tensor values(std::int64_t seed, std::vector<std::int64_t> shape,
                  c10::ScalarType dtype = at::kFloat) {
  std::int64_t count = 1;
  for (const std::int64_t length : shape) count *= length;
  return ((at::arange(count, at::kLong) * 7 + seed) % 11).to(dtype).reshape(shape);
}

const std::vector<std::pair<const char*, c10::ScalarType>> kDtypes{
    {"float64", at::kDouble},
    {"float32", at::kFloat},
    {"float16", at::kHalf},
    {"bfloat16", at::kBFloat16},
    {"int64", at::kLong},
    {"int32", at::kInt},
    {"int16", at::kShort},
    {"int8", at::kChar},
    {"uint8", at::kByte},
    {"bool", at::kBool},
    {"complex64", at::kComplexFloat},
    {"uint16", at::kUInt16},
    {"uint32", at::kUInt32},
    {"uint64", at::kUInt64},
    {"float8_e4m3fn", at::kFloat8_e4m3fn},
    {"float8_e5m2", at::kFloat8_e5m2},
    {"float8_e4m3fnuz", at::kFloat8_e4m3fnuz},
    {"float8_e5m2fnuz", at::kFloat8_e5m2fnuz}};

void expect_same(const at::Tensor& found, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(found.scalar_type(), expected.scalar_type()) << what;
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  const at::Tensor a = found.contiguous(), b = expected.contiguous();
  EXPECT_EQ(std::memcmp(a.const_data_ptr(), b.const_data_ptr(), b.nbytes()), 0) << what;
}

std::string refusal(const fs::path& path) {
  try {
    load_pt(path);
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find(path.filename().string()), std::string::npos)
        << error.what();
    return error.what();
  }
  return "";
}

void expect_refused(const fs::path& path, const std::string& reason) {
  const std::string message = refusal(path);
  EXPECT_NE(message.find(reason), std::string::npos) << path.filename() << ": " << message;
}

class PythonFiles : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!testing::has_python()) GTEST_SKIP() << "LibTorch is in no Python environment";
    folder_ = std::make_unique<io::TemporaryFolder>();
    io::make_folders(folder_->path() / "python");
    testing::run_python("checkpoint/python_files.py",
                        "write '" + (folder_->path() / "python").string() + "'");
  }
  static void TearDownTestSuite() { folder_.reset(); }
  static fs::path python(const std::string& name) { return folder_->path() / "python" / name; }
  static fs::path ours(const std::string& name) { return folder_->path() / name; }
  static std::unique_ptr<io::TemporaryFolder> folder_;
};
std::unique_ptr<io::TemporaryFolder> PythonFiles::folder_;

TEST_F(PythonFiles, EveryDtypeIsRead) {
  const TensorReader reader(python("dtypes.safetensors"));
  EXPECT_EQ(reader.metadata().at("note"), "\u00e9");
  const PyValue pt = load_pt(python("dtypes.pt"));
  for (const auto& [name, dtype] : kDtypes) {
    expect_same(reader.get(name), values(3, {2, 3}, dtype), name);
    expect_same(pt[name].as_tensor(), values(3, {2, 3}, dtype), name);
  }
  expect_same(pt["complex128"].as_tensor(), values(3, {2, 3}, at::kComplexDouble), "complex128");
  EXPECT_EQ(reader.get("scalar").item<float>(), 2.5F);
  EXPECT_EQ(pt["scalar"].as_tensor().item<float>(), 2.5F);
  EXPECT_EQ(reader.get("empty").sizes(), (c10::IntArrayRef{3, 0}));
  EXPECT_EQ(pt["empty"].as_tensor().sizes(), (c10::IntArrayRef{3, 0}));
}

TEST_F(PythonFiles, StateDictsAndTiedTensorsAreRead) {
  const auto model = named_tensors(load_pt(python("model.pt")));
  ASSERT_EQ(model.size(), 8U);
  EXPECT_EQ(model[0].name, "0.weight");
  expect_same(model[0].tensor, values(0, {4, 3}), "0.weight");
  EXPECT_EQ(model[6].name, "1.num_batches_tracked");
  const PyDict dict = load_pt(python("model.pt")).as_dict();
  EXPECT_TRUE(dict.ordered);
  const PyValue metadata = load_pt(python("model.pt")).as_dict().attributes.at(0).second;
  EXPECT_EQ(metadata["1"]["version"].as_int(), 2);
  // Later protocols have other operations.
  const auto later = named_tensors(load_pt(python("protocol5.pt")));
  ASSERT_EQ(later.size(), model.size());
  for (std::size_t i = 0; i < model.size(); ++i)
    expect_same(later[i].tensor, model[i].tensor, model[i].name);
  // Shards of Accelerate's save_model.
  std::vector<NamedTensor> into;
  for (const NamedTensor& named : model) into.push_back({named.name, at::empty_like(named.tensor)});
  load_into(into, python("sharded"));
  for (std::size_t i = 0; i < model.size(); ++i)
    expect_same(into[i].tensor, model[i].tensor, model[i].name);

  const PyValue tied = load_pt(python("tied.pt"));
  EXPECT_EQ(tied["a.weight"].as_tensor().const_data_ptr(),
            tied["b.weight"].as_tensor().const_data_ptr());
  const auto tied_file = load_file(python("tied.safetensors"));
  ASSERT_EQ(tied_file.size(), 2U);
  EXPECT_EQ(tied_file[0].tensor.const_data_ptr(), tied_file[1].tensor.const_data_ptr());
}

TEST_F(PythonFiles, AStateDictOfPythonFillsAModuleHere) {
  torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4),
                            torch::nn::Linear(torch::nn::LinearOptions(4, 3).bias(false)));
  const ModuleRecord record(net.ptr());
  const auto from = named_tensors(load_pt(python("model.pt")));
  const Mismatch mismatch = load_into(module_tensors(record), from, python("model.pt"));
  EXPECT_TRUE(mismatch.missing.empty() && mismatch.unexpected.empty());
  const auto state = net->named_parameters();
  expect_same(state["0.weight"], values(0, {4, 3}), "0.weight");
  expect_same(state["2.weight"], values(4, {3, 4}), "2.weight");
  // In the order of Python's.
  std::vector<std::string> names, theirs;
  for (const NamedTensor& named : module_tensors(record)) names.push_back(named.name);
  for (const NamedTensor& named : from) theirs.push_back(named.name);
  EXPECT_EQ(names, theirs);
  torch::nn::Sequential other(torch::nn::Linear(3, 5));
  EXPECT_THROW(load_into(module_tensors(ModuleRecord(other.ptr())), from, python("model.pt")),
               CheckpointError);
}

TEST_F(PythonFiles, OptimizersViewsAndValuesAreRead) {
  for (const char* file : {"adamw.pt", "adamw_protocol4.pt"}) {
    const PyValue adamw = load_pt(python(file));
    EXPECT_EQ(adamw["state"].as_dict().items.size(), 3U);
    EXPECT_EQ(adamw["state"][0]["step"].as_tensor().item<float>(), 3.0F);
    EXPECT_EQ(adamw["state"][2]["exp_avg_sq"].as_tensor().sizes(), (c10::IntArrayRef{3, 4}));
    EXPECT_EQ(adamw["param_groups"].as_list()[1]["lr"].as_double(), 0.5);
    EXPECT_EQ(adamw["param_groups"].as_list()[1]["betas"].as_list()[1].as_double(), 0.999);
    EXPECT_TRUE(adamw["param_groups"].as_list()[0]["betas"].is<PyList>());
  }
  EXPECT_EQ(load_pt(python("sgd.pt"))["state"][0]["momentum_buffer"].as_tensor().sizes(),
            (c10::IntArrayRef{4, 3}));

  const PyValue views = load_pt(python("views.pt"));
  const at::Tensor base = values(0, {4, 6});
  expect_same(views["column"].as_tensor(), base.select(1, 2), "column");
  EXPECT_EQ(views["column"].as_tensor().strides(), (c10::IntArrayRef{6}));
  EXPECT_EQ(views["column"].as_tensor().storage().unsafeGetStorageImpl(),
            views["base"].as_tensor().storage().unsafeGetStorageImpl());
  expect_same(views["transposed"].as_tensor(), base.t(), "transposed");
  EXPECT_EQ(views["expanded"].as_tensor().strides(), (c10::IntArrayRef{0}));
  EXPECT_TRUE(views["conjugated"].as_tensor().is_conj());
  EXPECT_TRUE(views["conjugated"].as_tensor().equal(values(1, {3}, at::kComplexFloat)));
  expect_same(views["parameter"].as_tensor(), values(2, {2}), "parameter");

  const PyValue v = load_pt(python("values.pt"));
  EXPECT_TRUE(v["none"].is_none());
  EXPECT_TRUE(v["true"].as_bool());
  EXPECT_EQ(v["int"].as_int(), 1L << 40);
  EXPECT_EQ(v["negative"].as_int(), -5);
  EXPECT_EQ(v["byte"].as_int() + v["short"].as_int(), 40200);
  EXPECT_EQ(v["float"].as_double(), 0.1);
  EXPECT_EQ(v["bytes"].as_bytes().bytes, std::string("\0\xff", 2));
  EXPECT_EQ(v["no_bytes"].as_bytes().bytes, "");
  EXPECT_EQ(v["text"].as_string(), "\u00e9\U0001f600");
  EXPECT_EQ(v["list"].as_list()[1].as_list()[1].as_string(), "x");
  EXPECT_EQ(v["tuple"].as_list().size(), 4U);
  EXPECT_EQ(v["size"].as_list()[1].as_int(), 3);
  EXPECT_EQ(v["dtype"].as_string(), "torch.bfloat16");
  EXPECT_EQ(v["device"].as_string(), "cuda:1");
  EXPECT_EQ(v[7].as_string(), "seven");
  EXPECT_TRUE(v["ordered"].as_dict().ordered);
  EXPECT_THROW(v["none"].as_int(), DataError);
  EXPECT_THROW(v["missing"], DataError);
  EXPECT_THROW(v[8], DataError);
}

TEST_F(PythonFiles, WhatIsNotDataIsRefusedByName) {
  expect_refused(python("module.pt"), "torch.nn.modules.container.Sequential");
  expect_refused(python("sparse.pt"), "torch._utils._rebuild_sparse_tensor");
  expect_refused(python("wide.pt"), "an integer in it has 9 bytes");
  expect_refused(python("legacy.pt"), "before version 1.6. Convert it in Python");
  expect_refused(python("script.pt"), "TorchScript module");
  expect_refused(python("itself.pt"), "contains itself");
  expect_refused(python("laughs.pt"), "far larger than the file");
  expect_refused(python("dtypes.safetensors"), "no zip directory");
}

TEST_F(PythonFiles, PythonReadsWhatIsWrittenHere) {
  std::vector<NamedTensor> every;
  PyDict dict;
  for (const auto& [name, dtype] : kDtypes) {
    every.push_back({name, values(3, {2, 3}, dtype)});
    dict.add(name, every.back().tensor);
  }
  save_file(every, ours("dtypes.safetensors"), {{"note", "\u00e9"}});
  save_pt(dict, ours("dtypes.pt"));
  save_pt(load_pt(python("model.pt")), ours("model.pt"));  // with its _metadata
  save_sharded(named_tensors(load_pt(python("model.pt"))), ours("sharded"), "60B");
  const at::Tensor shared = values(5, {2, 2});
  save_file({{"a.weight", shared}, {"b.weight", shared}}, ours("tied.safetensors"));
  save_pt(state_dict({{"a", shared}, {"b", shared}}), ours("tied.pt"));
  for (const char* file : {"adamw.pt", "sgd.pt", "views.pt", "values.pt"})
    save_pt(load_pt(python(file)), ours(file));
  PyDict part;
  part.add("part", values(4, {1000, 1000})[500].slice(0, 0, 10));
  save_pt(part, ours("part.pt"));

  const Json found =
      testing::run_python("checkpoint/python_files.py", "check '" + folder_->path().string() + "'");
  EXPECT_EQ(found.size(), 15U);
  for (const auto& [name, equal] : found.items()) EXPECT_TRUE(equal.get<bool>()) << name;
}

// ----------------------------------------------------------------------------------- hostile files

class HostilePt : public ::testing::Test {
 protected:
  fs::path path() { return folder_.path() / "some.pt"; }
  // A file whose data.pkl is this, and data/0 eight bytes.
  void write(const std::string& pickle) {
    caffe2::serialize::PyTorchStreamWriter writer(path().string());
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeRecord("data/0", "12345678", 8);
    writer.writeEndOfFile();
  }
  static std::string text(const std::string& value) {
    return std::string("X") + static_cast<char>(value.size()) + std::string(3, '\0') + value;
  }
  static std::string storage(const std::string& key = "0", char count = 2,
                             const std::string& type = "FloatStorage") {
    return "(" + text("storage") + "ctorch\n" + type + "\n" + text(key) + text("cpu") + "K" +
           count + "tQ";
  }
  static std::string tensor(const std::string& offset_sizes_strides,
                            const std::string& from = storage()) {
    return "ctorch._utils\n_rebuild_tensor_v2\n(" + from + offset_sizes_strides +
           "\x89"
           "ccollections\nOrderedDict\n)RtR";
  }
  io::TemporaryFolder folder_;
};

TEST_F(HostilePt, PicklesAreRefusedWithTheReason) {
  const std::string good = tensor(std::string("K\0K\2\x85K\1\x85", 8));
  write("\x80\2" + good + ".");
  EXPECT_TRUE(load_pt(path()).as_tensor().view(at::kByte).equal(at::arange('1', '9', at::kByte)));
  const std::vector<std::pair<std::string, std::string>> table{
      {"", "ends at byte 0"},
      {".", "takes a value where there is none"},
      {"(.", "takes a value where there is none"},
      {"X\xff\xff\xff\xff"
       "abc",
       "within a value"},
      {"cos\nsystem\n(" + text("echo") + "tR.", "it names os.system"},
      {"cposix\nsystem\n(" + text("echo") + "tR.", "it names posix.system"},
      {"cbuiltins\neval\n(" + text("1") + "tR.", "it names builtins.eval"},
      {text("os") + text("system") + "\x93.", "it names os.system"},
      {"ctorch\nload\n.", "it names torch.load"},
      {"ctorch\nQInt8Storage\n.", "it names torch.QInt8Storage"},
      {"ctorch", "within a name"},
      {"c\n\n.", "it names ."},
      {"ios\nsystem\n.", "the operation 0x69"},
      {"\x81.", "the operation 0x81"},
      {"\x80\x06.", "of protocol 6"},
      {"N)R.", "calls something that is not a function"},
      {"ccollections\nOrderedDict\nNR.", "arguments are not as expected"},
      {"ccollections\nOrderedDict\n.", "a function or a storage stands in it"},
      {storage() + ".", "a function or a storage stands in it"},
      {"K\1Q.", "what refers to a storage are not as expected"},
      {storage("1") + ".", "data/1 is missing"},
      {storage("../../x") + ".", "data/../../x is missing"},
      {storage("0", 3) + ".", "has 8 bytes, and 12 were expected"},
      {storage("0", 1) + ".", "has 8 bytes, and 4 were expected"},
      {tensor(std::string("K\1K\2\x85K\1\x85", 8)) + ".",
       "does not fit into its storage of 2 elements"},
      {tensor(std::string("K\0K\2\x85K\2\x85", 8)) + ".", "does not fit"},
      {tensor(std::string("K\0K\3\x85K\1\x85", 8)) + ".", "does not fit"},
      {tensor(std::string("J\xff\xff\xff\xffK\2\x85K\1\x85", 11)) + ".", "does not fit"},
      {tensor(std::string("K\1K\2\x85J\xff\xff\xff\xff\x85", 11)) + ".", "does not fit"},
      {tensor(std::string("K\0J\xfe\xff\xff\xff\x85K\1\x85", 11)) + ".", "does not fit"},
      {tensor(std::string("K\0\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85K\1\x85", 16)) + ".",
       "does not fit"},
      {tensor(std::string("K\0\x8a\x08\x01\0\0\0\0\0\0\x40\x8a\x08\x04\0\0\0\0\0\0\0\x86K\1K\0\x86",
                          28)) +
           ".",
       "does not fit"},
      {tensor(std::string("K\0K\2\x85)", 6)) + ".", "1 dimensions and 0 strides"},
      {tensor(std::string("K\0NK\1\x85", 6)) + ".", "is not a tuple"},
      {tensor(std::string("K\0K\2\x85K\1\x85", 8), "N") + ".", "has no storage"},
      {"N}b.", "sets attributes of something"},
      {"]K\1K\2s.", "sets keys of something that is not a dict"},
      {"}K\1"
       "a.",
       "appends to something that is not a list"},
      {"}(K\1u.", "a key without a value"},
      {"}(K\1NK\1Nu.", "the key 1 twice"},
      {"}(" + text("k") + "N" + text("k") + "Nu.", "the key k twice"},
      {"}(]Nu.", "a key that Python does not allow"},
      {"u.", "ends a group that was not begun"},
      {"h\5.", "refers to value 5"},
      {"]q\1h\1"
       "a.",
       "contains itself"},
      {std::string("X\1\0\0\0\xff.", 7), "is not UTF-8"},
      {std::string(10'000, ']') + std::string(9'999, 'a') + ".", "deep within each other"},
      {"c_codecs\nencode\n" + text("x") + text("rot13") + "\x86R.", "encoded in rot13"},
      {"c_codecs\nencode\n" + text("\u20ac") + text("latin1") + "\x86R.", "have a value of 8364"},
      {"\x8a\x09"
       "123456789.",
       "has 9 bytes"},
  };
  for (const auto& [pickle, reason] : table) {
    write(pickle);
    SCOPED_TRACE(reason);
    expect_refused(path(), reason);
  }
}

TEST_F(HostilePt, DamagedArchivesAreRefused) {
  write(std::string("\x80\2N.", 4));
  const std::string good = io::read_file(path());
  EXPECT_EQ(refusal(path()), "");
  const auto damage = [&](auto&& change) {
    std::string bytes = good;
    change(bytes);
    std::ofstream(path(), std::ios::binary) << bytes;
    return refusal(path());
  };
  const auto end = good.rfind("PK\5\6"), end64 = good.rfind("PK\6\6"),
             locator = good.rfind("PK\6\7"), directory = good.find("PK\1\2"),
             local = good.find("PK\3\4");
  const std::vector<std::tuple<std::string, std::string, std::function<void(std::string&)>>> table{
      {"empty", "has only 0 bytes", [](std::string& b) { b.clear(); }},
      {"cut short", "no zip directory", [](std::string& b) { b.resize(b.size() - 1); }},
      {"bytes after it", "no zip directory", [](std::string& b) { b += "x"; }},
      {"more entries", "ends within an entry",
       [&](std::string& b) { ++b[end + 10], ++b[end64 + 32]; }},
      {"fewer entries", "another length", [&](std::string& b) { --b[end + 10], --b[end64 + 32]; }},
      {"two numbers of entries", "two different", [&](std::string& b) { ++b[end + 10]; }},
      {"absurdly many entries", "cannot hold",
       [&](std::string& b) { b[end + 10] = b[end + 11] = b[end64 + 39] = -1; }},
      {"directory far away", "lies outside",
       [&](std::string& b) { b.replace(end + 16, 4, 4, '\xff'), b[end64 + 55] = 1; }},
      {"directory elsewhere", "no directory entry",
       [&](std::string& b) { --b[end + 16], --b[end64 + 48]; }},
      {"no zip64 record", "zip64 record lies outside",
       [&](std::string& b) { b[locator + 15] = 1; }},
      {"zip64 record elsewhere", "no zip64 record", [&](std::string& b) { --b[locator + 8]; }},
      {"compressed", "is compressed", [&](std::string& b) { b[directory + 10] = 8; }},
      {"sizes differ", "is compressed", [&](std::string& b) { ++b[directory + 24]; }},
      {"encrypted", "is encrypted", [&](std::string& b) { b[directory + 8] |= 1; }},
      {"record too long", "lies outside",
       [&](std::string& b) { b[directory + 23] = b[directory + 27] = 1; }},
      {"record overlaps", "overlaps",
       [&](std::string& b) { b[directory + 20] = b[directory + 24] = 127; }},
      {"record elsewhere", "no record at byte", [&](std::string& b) { ++b[directory + 42]; }},
      {"name differs", "called otherwise", [&](std::string& b) { b[local + 30] ^= 1; }},
      {"name too long", "ends within an entry", [&](std::string& b) { b[directory + 29] = 127; }},
  };
  for (const auto& [what, reason, change] : table) {
    const std::string message = damage(change);
    EXPECT_NE(message.find(reason), std::string::npos) << what << ": " << message;
  }
  // Cut at any place, the file is refused.
  for (std::size_t size = 0; size < good.size(); size += 7) {
    EXPECT_NE(damage([&](std::string& b) { b.resize(size); }), "") << size;
  }
}

TEST_F(HostilePt, SavingRefusesAndFailsWithoutARest) {
  PyDict dict;
  dict.add("a", at::zeros({2}).to_sparse());
  EXPECT_THROW(save_pt(dict, path()), UnsupportedError);
  EXPECT_THROW(save_pt(PyValue(at::Tensor()), path()), UnsupportedError);
  PyValue deep;
  for (int i = 0; i < 300; ++i) {
    PyList list;
    list.items.push_back(std::move(deep));
    deep = std::move(list);
  }
  EXPECT_THROW(save_pt(deep, path()), DataError);
  write(std::string("\x80\2N.", 4));
  static int left = 0;
  for (int at = 0; at < 8; ++at) {
    left = at;
    io::faults::set_hook([](io::faults::Operation operation, const fs::path&, std::size_t&) {
      return operation == io::faults::Operation::kWrite && left-- == 0 ? ENOSPC : 0;
    });
    std::string message;
    try {
      save_pt(PyValue(at::zeros({4})), path());
    } catch (const CheckpointError& error) {
      message = error.what();
    }
    io::faults::set_hook(nullptr);
    EXPECT_NE(message.find("Make room"), std::string::npos) << at << ": " << message;
    EXPECT_TRUE(load_pt(path()).is_none());  // what was there
    EXPECT_EQ(io::names_in(folder_.path()).size(), 1U);
  }
}

}  // namespace
}  // namespace accelerate::checkpoints
