// What `estimate-memory` and `inspect` say, as functions and as commands.

#include <support/python.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/device_map/estimate.hpp>
#include <accelerate/io/checksum.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/io/manifest.hpp>
#include <accelerate/io/safetensors.hpp>

#include <gtest/gtest.h>

#include <fstream>
#include <span>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using io::safetensors::Dtype;

void write(const fs::path& path, std::vector<io::safetensors::TensorInfo> tensors,
           std::map<std::string, std::string> metadata = {}) {
  const io::safetensors::Header header(std::move(tensors), std::move(metadata));
  std::ofstream(path, std::ios::binary) << header.text();
  fs::resize_file(path, header.file_bytes());
}

struct Ran {
  int status;
  std::string output;
};
Ran run(const std::string& arguments) {
  FILE* pipe = popen((std::string(ACCELERATE_CLI) + " " + arguments + " 2>&1").c_str(), "r");
  std::string output;
  char buffer[4096];
  for (std::size_t n; (n = fread(buffer, 1, sizeof buffer, pipe)) > 0;) output.append(buffer, n);
  return {WEXITSTATUS(pclose(pipe)), output};
}

class Estimate : public ::testing::Test {
 protected:
  void SetUp() override {
    // Two layers of 1000 and 260 elements, a counter, and a head tied to the first.
    write(folder.path() / "model.safetensors",
          {{"embed.weight", Dtype::kF16, {20, 50}},
           {"blocks.0.weight", Dtype::kF16, {5, 50}},
           {"blocks.0.bias", Dtype::kF32, {10}},
           {"blocks.0.steps", Dtype::kI64, {1}}},
          {{"format", "pt"}, {"head.weight", "embed.weight"}});
  }
  io::TemporaryFolder folder;
};

TEST_F(Estimate, FollowsTheOriginalsArithmetic) {
  const MemoryEstimate estimate = estimate_memory(checkpoint_tree(folder.path()));
  const double total = 1260 * 4 + 8;
  EXPECT_EQ(estimate.elements, 1261);
  EXPECT_EQ(estimate.largest_layers, (std::vector<std::string>{"embed"}));
  ASSERT_EQ(estimate.dtypes.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    const double divisor = 1 << i;
    EXPECT_DOUBLE_EQ(estimate.dtypes[i].total, total / divisor);
    EXPECT_DOUBLE_EQ(estimate.dtypes[i].largest_layer, 4000 / divisor);
  }
  EXPECT_EQ(estimate.dtypes[0].training_with_adam, 4 * total);
  EXPECT_EQ(estimate.dtypes[1].training_with_adam, 2 * total);
  EXPECT_EQ(estimate.dtypes[2].training_with_adam, std::nullopt);
  // On four processes.
  EXPECT_DOUBLE_EQ(estimate.strategies[0].per_process[2].second, 4 * total);
  EXPECT_DOUBLE_EQ(estimate.strategies[1].per_process[2].second, 2.5 * total);
  EXPECT_DOUBLE_EQ(estimate.strategies[2].per_process[2].second, 1.75 * total);
  EXPECT_DOUBLE_EQ(estimate.strategies[3].per_process[2].second, total + total);
  for (const auto& strategy : estimate.strategies)
    EXPECT_DOUBLE_EQ(strategy.per_process[0].second, 4 * total) << strategy.strategy;
}

// A checkpoint with one file, as a stranger would make it.
void write_checkpoint(const fs::path& in, const std::string& group, io::SavedTensor tensor) {
  fs::create_directories(in);
  const std::string data(4, 'x');
  io::write_file(in / "data", data);
  io::Manifest manifest;
  manifest.files = {{"data", 4, {io::checksum(std::as_bytes(std::span(data)))}}};
  manifest.groups[group]["w"] = std::move(tensor);
  io::write_file(in / io::Manifest::kFileName, manifest.text());
}

TEST_F(Estimate, MergingWeightsOfAStrangersCheckpoint) {
  const fs::path in = folder.path() / "in", out = folder.path() / "a" / "out";
  const std::string merge = "merge-weights " + in.string() + " " + out.string();
  fs::create_directories(folder.path() / "a");
  // The group's name would lead out of the folder.
  write_checkpoint(in, "model_/../../escaped", {Dtype::kF32, {1}, {}, {{0, 0, Box::whole({1})}}});
  const Ran escaped = run(merge);
  EXPECT_EQ(escaped.status, 1) << escaped.output;
  EXPECT_NE(escaped.output.find("models are called model, model_1"), std::string::npos)
      << escaped.output;
  EXPECT_FALSE(fs::exists(folder.path() / "a" / "escaped.safetensors"));
  EXPECT_FALSE(fs::exists(folder.path() / "escaped.safetensors"));
  // Rows of elements of four bits were put together for ever.
  write_checkpoint(in, "model",
                   {Dtype::kF4, {2, 4}, {}, {{0, 0, {{0, 0}, {1, 4}}}, {0, 2, {{1, 0}, {1, 4}}}}});
  const Ran endless = run(merge);
  EXPECT_EQ(endless.status, 1) << endless.output;
  EXPECT_NE(endless.output.find("4 bits"), std::string::npos) << endless.output;
  write_checkpoint(in, "model_1", {Dtype::kF32, {1}, {}, {{0, 0, Box::whole({1})}}});
  const Ran good = run(merge);
  EXPECT_EQ(good.status, 0) << good.output;
  EXPECT_TRUE(fs::exists(out / "model_1.safetensors"));
}

TEST_F(Estimate, Commands) {
  const Ran json = run("estimate-memory --json " + folder.path().string());
  ASSERT_EQ(json.status, 0) << json.output;
  const Json parsed = Json::parse(json.output);
  EXPECT_EQ(parsed["dtypes"]["int8"]["largest_layer"], 1000);
  EXPECT_TRUE(parsed["dtypes"]["int8"]["training_with_adam"].is_null());
  EXPECT_EQ(parsed["training_per_process"]["ddp"]["8"], 4 * 5048);
  const Ran table = run("estimate-memory " + folder.path().string() + "/model.safetensors");
  EXPECT_EQ(table.status, 0);
  EXPECT_NE(table.output.find("float16"), std::string::npos) << table.output;

  const Ran inspected = run("inspect " + folder.path().string());
  EXPECT_EQ(inspected.status, 0);
  EXPECT_NE(inspected.output.find("tied: embed.weight, head.weight"), std::string::npos)
      << inspected.output;
  EXPECT_NE(inspected.output.find("[5, 50]"), std::string::npos);
  const Json listed = Json::parse(run("inspect --json " + folder.path().string()).output);
  EXPECT_EQ(listed["total_bytes"], 2000 + 500 + 40 + 8);
  EXPECT_EQ(listed["tensors"].size(), 5u);

  // A name that would clear the screen and set the window's title.
  write(folder.path() / "odd.safetensors", {{"\x1b[2J\x1b]0;x\x07", Dtype::kF16, {2}}});
  for (const char* arguments : {"inspect ", "inspect --json ", "estimate-memory "}) {
    const Ran odd = run(arguments + folder.path().string() + "/odd.safetensors");
    EXPECT_EQ(odd.status, 0) << odd.output;
    EXPECT_EQ(odd.output.find('\x1b'), std::string::npos) << odd.output;
    EXPECT_EQ(odd.output.find('\x07'), std::string::npos) << odd.output;
  }

  const Ran missing = run("inspect " + folder.path().string() + "/nothing");
  EXPECT_NE(missing.status, 0);
  EXPECT_NE(missing.output.find("nothing"), std::string::npos) << missing.output;
  std::ofstream(folder.path() / "text.safetensors") << "this is no such file";
  const Ran damaged = run("estimate-memory " + folder.path().string() + "/text.safetensors");
  EXPECT_NE(damaged.status, 0);
  EXPECT_NE(damaged.output.find("text.safetensors"), std::string::npos) << damaged.output;
  const Ran unknown = run("estimate-memory --dtypes float17 -- " + folder.path().string());
  EXPECT_NE(unknown.status, 0);
  EXPECT_NE(unknown.output.find("float17"), std::string::npos) << unknown.output;
}

}  // namespace
}  // namespace accelerate
