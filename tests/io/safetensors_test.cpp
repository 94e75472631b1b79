#include <accelerate/base/error.hpp>
#include <accelerate/io/safetensors.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <fstream>

namespace accelerate::io::safetensors {
namespace {

namespace fs = std::filesystem;

std::string file_text(const std::string& json, std::size_t data_bytes) {
  std::string text(8, '\0');
  for (int i = 0; i < 8; ++i) text[i] = static_cast<char>(json.size() >> 8 * i);
  return text + json + std::string(data_bytes, 'x');
}

// The message with which reading these bytes fails; "" when it does not. Both ways of reading
// agree.
std::string refusal(const std::string& contents) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "some.safetensors";
  std::ofstream(path, std::ios::binary) << contents;
  std::string messages[2];
  const auto attempt = [&](std::string& message, auto&& action) {
    try {
      action();
    } catch (const CheckpointError& error) {
      message = error.what();
      EXPECT_NE(message.find("some.safetensors"), std::string::npos) << message;
      EXPECT_EQ(error.path(), path.string());
    }
  };
  attempt(messages[0], [&] { Header::read(path); });
  attempt(messages[1], [&] {
    const Reader reader(path);
    for (const TensorInfo& info : reader.header().tensors()) reader.bytes(info);
  });
  EXPECT_EQ(messages[0], messages[1]);
  return messages[0];
}

struct Hostile {
  const char* what;
  std::string contents;
  const char* reason;
};

TEST(Safetensors, HostileFilesAreRefusedWithTheReason) {
  const auto one = [](const std::string& fields, std::size_t data = 8) {
    return file_text("{\"a\":{" + fields + "}}", data);
  };
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  ASSERT_EQ(refusal(one(good)), "");
  std::string long_header = file_text("{}", 0), absurd = long_header;
  long_header[1] = 1;
  std::fill(absurd.begin(), absurd.begin() + 8, '\xff');
  std::string many_dimensions = "1";
  for (int i = 0; i < 64; ++i) many_dimensions += ",1";
  const std::vector<Hostile> table{
      {"empty", "", "8 are needed"},
      {"seven bytes", "1234567", "8 are needed"},
      {"header beyond the end", long_header, "was cut short"},
      {"absurd length", absurd, "the format allows 100000000"},
      {"a zip archive", std::string("PK\3\4") + std::string(100, 'x'), "as torch.save writes"},
      {"no JSON", file_text("", 0), "not JSON"},
      {"half JSON", file_text("{\"a\":", 0), "not JSON"},
      {"two values", file_text("{}{}", 0), "not JSON"},
      {"a byte-order mark", file_text("\xef\xbb\xbf{}", 0), "byte-order mark"},
      {"a NUL after the end", file_text(std::string("{}\0", 3), 0), "is a NUL"},
      {"a NUL and more", file_text(std::string("{}\0{\"a\":1}", 10), 0), "is a NUL"},
      {"a list", file_text("[]", 0), "an array where none belongs"},
      {"text", file_text("\"a\"", 0), "text where none belongs"},
      {"not UTF-8", file_text("{\"\xff\":{" + good + "}}", 8), "not JSON in UTF-8"},
      {"deep", file_text("{\"a\":" + std::string(100'000, '['), 0), "an array where none belongs"},
      {"tensor is a number", file_text(R"({"a":1})", 0), "a number where none belongs"},
      {"tensor is null", file_text(R"({"a":null})", 0), "null where none belongs"},
      {"duplicate name", file_text("{\"a\":{" + good + "},\"a\":{" + good + "}}", 8),
       "two tensors are called 'a'"},
      {"duplicate field", one(good + ",\"dtype\":\"F32\""), "'dtype' twice"},
      {"unknown field", one(good + ",\"more\":1"), "unknown field 'more'"},
      {"no dtype", one(R"("shape":[2],"data_offsets":[0,8])"), "lacks one of"},
      {"no offsets", one(R"("dtype":"F32","shape":[2])"), "lacks one of"},
      {"unknown dtype", one(R"("dtype":"F128","shape":[2],"data_offsets":[0,8])"), "dtype 'F128'"},
      {"negative shape", one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"),
       "has -2 in its shape"},
      {"fraction", one(R"("dtype":"F32","shape":[2.5],"data_offsets":[0,8])"), "the number 2.5"},
      {"huge number", one(R"("dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8])"),
       "where none belongs"},
      {"huge dimension", one(R"("dtype":"F32","shape":[9999999999999999999],"data_offsets":[0,8])"),
       "a dimension of"},
      {"overflow", one(R"("dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,8])"),
       "more elements than"},
      {"overflow to the right size",
       one(R"("dtype":"F32","shape":[9223372036854775807,2,2],"data_offsets":[0,8])"),
       "more elements than"},
      {"many dimensions",
       one("\"dtype\":\"F32\",\"shape\":[" + many_dimensions + "],\"data_offsets\":[0,8]"),
       "more than 64 dimensions"},
      {"one offset", one(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), "has 1 data_offsets"},
      {"three offsets", one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,16])"),
       "has 3 data_offsets"},
      {"negative offset", one(R"("dtype":"F32","shape":[2],"data_offsets":[-8,0])"),
       "has -8 in its shape or data_offsets"},
      {"backwards", one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), "before it begins"},
      {"wrong size", one(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"),
       "needs 12 bytes and has 8"},
      {"offsets beyond the end", one(R"("dtype":"F32","shape":[4],"data_offsets":[0,16])"),
       "was cut short"},
      {"offsets far beyond the end",
       one(R"("dtype":"U8","shape":[18446744073709551],"data_offsets":[0,18446744073709551])"),
       "was cut short"},
      {"gap before", one(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])", 12),
       "no tensor has the bytes 0 to 4"},
      {"gap between",
       file_text(
           R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[4,6]}})",
           6),
       "no tensor has the bytes 2 to 4"},
      {"overlap",
       file_text(
           R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}})",
           6),
       "overlaps"},
      {"the same bytes twice",
       file_text(
           R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
           4),
       "overlaps"},
      {"trailing bytes", one(good, 9), "1 bytes follow after the last tensor"},
      {"half a byte", one(R"("dtype":"F4","shape":[3],"data_offsets":[0,2])", 2),
       "whole number of bytes"},
      {"metadata is a list", file_text(R"({"__metadata__":[]})", 0), "an array where none belongs"},
      {"metadata of numbers", file_text(R"({"__metadata__":{"a":1}})", 0),
       "a number where none belongs"},
      {"metadata of objects", file_text(R"({"__metadata__":{"a":{}}})", 0),
       "an object where none belongs"},
      {"metadata twice", file_text(R"({"__metadata__":{},"__metadata__":{}})", 0),
       "two tensors are called '__metadata__'"},
      {"metadata key twice", file_text(R"({"__metadata__":{"k":"1","k":"2"}})", 0), "'k' twice"},
  };
  for (const Hostile& hostile : table) {
    const std::string message = refusal(hostile.contents);
    EXPECT_NE(message.find(hostile.reason), std::string::npos) << hostile.what << ": " << message;
  }
}

TEST(Safetensors, OddButValidFilesAreRead) {
  EXPECT_EQ(refusal(file_text("{}", 0)), "");
  EXPECT_EQ(refusal(file_text("{}     ", 0)), "");
  EXPECT_EQ(refusal(file_text(R"({"__metadata__":null})", 0)), "");
  // Misaligned, empty, without dimensions, with offsets out of order, and four bits wide.
  EXPECT_EQ(
      refusal(file_text(
          R"({"b":{"dtype":"F32","shape":[],"data_offsets":[1,5]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
          R"("c":{"dtype":"I64","shape":[0,7],"data_offsets":[5,5]},"d":{"dtype":"F4","shape":[2,3],"data_offsets":[5,8]}})",
          8)),
      "");
}

TEST(Safetensors, EveryDtypeIsWrittenAndRead) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "all.safetensors";
  std::vector<TensorInfo> infos;
  for (int i = 0; i < 22; ++i) {
    const auto dtype = static_cast<Dtype>(i);
    EXPECT_EQ(parse_dtype(name(dtype)), dtype);
    infos.push_back({.name = "t." + std::string(name(dtype)), .dtype = dtype, .shape = {4, 3, 2}});
  }
  infos.push_back({.name = "scalar \"é\"", .dtype = Dtype::kF32, .shape = {}});
  infos.push_back({.name = "empty", .dtype = Dtype::kF16, .shape = {3, 0}});
  EXPECT_EQ(parse_dtype("f32"), std::nullopt);
  const auto value = [](const TensorInfo& info) {
    return std::string(info.bytes(), static_cast<char>('A' + info.begin % 26));
  };
  {
    Writer writer(path, Header(infos, {{"format", "pt"}, {"note", "line\nbreak"}}));
    EXPECT_EQ(writer.header().data_offset() % 64, 0U);
    auto order = writer.header().tensors();
    std::reverse(order.begin(), order.end());  // the order of writing is free
    for (const TensorInfo& info : order) {
      EXPECT_EQ(info.begin % std::max(1, bits(info.dtype) / 8), 0U) << info.name;  // aligned
      const std::string bytes = value(info);
      const std::size_t half = bytes.size() / 2;
      writer.write(info.name, std::as_bytes(std::span(bytes)).subspan(half), half);
      writer.write(info.name, std::as_bytes(std::span(bytes)).first(half));
    }
    writer.finish();
  }
  const Reader reader(path);
  EXPECT_EQ(reader.header().metadata().at("note"), "line\nbreak");
  ASSERT_EQ(reader.header().tensors().size(), infos.size());
  for (const TensorInfo& expected : infos) {
    const TensorInfo& info = reader.info(expected.name);
    EXPECT_EQ(info.shape, expected.shape);
    EXPECT_EQ(info.dtype, expected.dtype);
    const auto bytes = reader.bytes(info);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), value(info));
  }
  EXPECT_THROW(reader.info("none"), CheckpointError);
}

TEST(Safetensors, TheWriterRefusesWhatTheFormatCannotHold) {
  const auto info = [](std::string name, Dtype dtype, std::vector<std::int64_t> shape) {
    return TensorInfo{.name = std::move(name), .dtype = dtype, .shape = std::move(shape)};
  };
  EXPECT_THROW(Header({info("a", Dtype::kF32, {1}), info("a", Dtype::kF32, {1})}), ConfigError);
  EXPECT_THROW(Header({info("__metadata__", Dtype::kF32, {1})}), ConfigError);
  EXPECT_THROW(Header({info("\xff", Dtype::kF32, {1})}), ConfigError);
  EXPECT_THROW(Header({info("a", Dtype::kF32, {-1})}), ConfigError);
  EXPECT_THROW(Header({info("a", Dtype::kF4, {1})}), ConfigError);
  EXPECT_THROW(Header({info("a", Dtype::kU8, {1L << 40, 1L << 40})}), ConfigError);
  const TemporaryFolder folder;
  Writer writer(folder.path() / "x", Header({info("a", Dtype::kU8, {4})}));
  const std::string bytes = "12345";
  EXPECT_THROW(writer.write("b", {}), ConfigError);
  EXPECT_THROW(writer.write("a", std::as_bytes(std::span(bytes))), ConfigError);
  EXPECT_THROW(writer.write("a", std::as_bytes(std::span(bytes)).first(4), 1), ConfigError);
  writer.write("a", std::as_bytes(std::span(bytes)).first(3));
  EXPECT_THROW(writer.finish(), StateError);
}

// ------------------------------------------------------------------------------------------ sets

TEST(Shards, SizesNamesAndSplitsAreHuggingFaces) {
  EXPECT_EQ(parse_size("5GB"), 5'000'000'000U);
  EXPECT_EQ(parse_size("5GiB"), 5368709120U);
  EXPECT_EQ(parse_size("100"), 100U);
  for (const char* bad : {"", "GB", "5 gigabytes", "0", "-1GB", "5gb"})
    EXPECT_THROW(parse_size(bad), ConfigError) << bad;
  EXPECT_EQ(shard_name("model", 0, 1), "model.safetensors");
  EXPECT_EQ(shard_name("model", 2, 30), "model-00003-of-00030.safetensors");
  std::vector<TensorInfo> infos;
  for (const std::int64_t bytes : {4, 4, 4, 20, 1, 9, 1}) {
    infos.push_back({.name = std::to_string(infos.size()), .dtype = Dtype::kU8, .shape = {bytes}});
  }
  std::vector<std::string> shards;
  for (const auto& shard : split(infos, 10)) {
    std::string names;
    for (const TensorInfo& info : shard) names += info.name;
    shards.push_back(names);
  }
  EXPECT_EQ(shards, (std::vector<std::string>{"01", "3", "24", "56"}));
  EXPECT_EQ(split({}, 10).size(), 1U);
}

class CollectionTest : public ::testing::Test {
 protected:
  void write(const std::string& file, const std::vector<std::string>& names) {
    std::vector<TensorInfo> infos;
    for (const std::string& name : names)
      infos.push_back({.name = name, .dtype = Dtype::kU8, .shape = {1}});
    Writer writer(path(file), Header(infos));
    for (const std::string& name : names)
      writer.write(name, std::as_bytes(std::span(name)).first(1));
    writer.finish();
  }
  void write_index(const std::string& weight_map) {
    write_file(path("model.safetensors.index.json"),
               "{\"metadata\":{\"total_size\":3},\"weight_map\":" + weight_map + "}");
  }
  fs::path path(const std::string& file) { return folder_.path() / file; }
  std::string refusal() {
    try {
      const Collection collection(folder_.path());
    } catch (const CheckpointError& error) {
      EXPECT_NE(std::string(error.what()).find(folder_.path().string()), std::string::npos);
      return error.what();
    }
    return "";
  }
  TemporaryFolder folder_;
};

TEST_F(CollectionTest, ReadsAFileAnIndexOrAFolder) {
  write("1.safetensors", {"a", "b"});
  write("2.safetensors", {"c"});
  EXPECT_NE(refusal().find("has 2 safetensors files"), std::string::npos);
  EXPECT_EQ(Collection(path("1.safetensors")).tensors().size(), 2U);
  write_index(R"({"a":"1.safetensors","b":"1.safetensors","c":"2.safetensors"})");
  const Collection collection(folder_.path());
  EXPECT_EQ(collection.tensors().size(), 3U);
  EXPECT_EQ(collection.readers().size(), 2U);
  const auto& [reader, info] = collection.at("c");
  EXPECT_EQ(static_cast<char>(reader->bytes(*info)[0]), 'c');
  EXPECT_THROW(collection.at("d"), CheckpointError);
  const Index index = Index::read(path("model.safetensors.index.json"));
  EXPECT_EQ(index.total_size, 3U);
  write_file(path("again.json"), index.text());
  EXPECT_EQ(Index::read(path("again.json")).weight_map, index.weight_map);
}

TEST_F(CollectionTest, RefusesSetsThatDoNotFitTogether) {
  write("1.safetensors", {"a", "b"});
  const std::vector<std::pair<std::string, std::string>> table{
      {R"({"a":"1.safetensors","c":"2.safetensors"})", "is missing"},
      {R"({"a":"1.safetensors","c":"1.safetensors"})",
       "tensor 'c' is in 1.safetensors, and it is not"},
      {R"({"a":"/etc/passwd"})", "not a file in its folder"},
      {R"({"a":"../1.safetensors"})", "not a file in its folder"},
      {R"({"a":""})", "not a file in its folder"},
      {R"({"a":1})", "names no file"},
      {R"([])", "no object 'weight_map'"},
      {R"({"a":"1.safetensors","a":"1.safetensors"})", "'a' twice"},
      {R"({"a":)", "not JSON"},
      {R"({"a":)" + std::string(50'000, '[') + std::string(50'000, ']') + "}", "200 deep"},
  };
  for (const auto& [weight_map, reason] : table) {
    write_index(weight_map);
    const std::string message = refusal();
    EXPECT_NE(message.find(reason), std::string::npos) << weight_map << ": " << message;
  }
  write("2.safetensors", {"a"});
  write_index(R"({"b":"1.safetensors","a":"2.safetensors"})");
  EXPECT_NE(refusal().find("both have a tensor 'a'"), std::string::npos);
  fs::remove(path("model.safetensors.index.json"));
  fs::remove(path("1.safetensors"));
  EXPECT_EQ(refusal(), "");  // the only one
}

}  // namespace
}  // namespace accelerate::io::safetensors
