#include <accelerate/base/error.hpp>
#include <accelerate/tracking/memory_tracker.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

namespace accelerate::tracking {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kMiB = 1 << 20;

at::Tensor bytes(std::int64_t count) { return at::empty({count}, at::kByte); }

class Memory : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    EXPECT_FALSE(counts_cpu_tensors());
    EXPECT_THROW(cpu_allocation_snapshot(), StateError);
    uncounted() = bytes(kMiB);
    EXPECT_EQ(tensor_bytes().current, 0);
    count_cpu_tensors();
    count_cpu_tensors();
    EXPECT_TRUE(counts_cpu_tensors());
  }
  static void TearDownTestSuite() { uncounted().reset(); }
  void SetUp() override {
    before_ = tensor_bytes();
    reset_peak();
  }
  void TearDown() override {
    EXPECT_EQ(tensor_bytes().current, before_.current);
    EXPECT_EQ(tensor_bytes().blocks, before_.blocks);
  }
  static at::Tensor& uncounted() {
    static at::Tensor tensor;
    return tensor;
  }
  TensorBytes before_;
};

TEST_F(Memory, CountsWhatIsHeldAndTheMostThatWas) {
  {
    const at::Tensor a = bytes(3 * kMiB);
    { const at::Tensor b = bytes(2 * kMiB); }
    const at::Tensor empty = bytes(0);
    const TensorBytes now = tensor_bytes();
    EXPECT_EQ(now.current - before_.current, 3 * kMiB);
    EXPECT_EQ(now.peak - before_.current, 5 * kMiB);
    EXPECT_EQ(now.blocks - before_.blocks, 1);
    reset_peak();
    EXPECT_EQ(tensor_bytes().peak - before_.current, 3 * kMiB);
  }
  // The memory is as good as any: aligned, and LibTorch can grow and copy it.
  at::Tensor grown = at::ones({5}, at::kFloat);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(grown.data_ptr()) % 64, 0U);
  grown.resize_({100000});
  EXPECT_EQ(grown[4].item<float>(), 1);
  EXPECT_THROW(bytes(std::numeric_limits<std::int64_t>::max()), std::exception);
}

TEST_F(Memory, KnowsWhatMemoryIsFor) {
  at::Tensor parameter, gradient;
  {
    const MemoryKindScope scope(MemoryKind::parameters);
    parameter = bytes(4 * kMiB);
    const MemoryKindScope inner(MemoryKind::optimizer_state);
    const at::Tensor temporary = bytes(kMiB);
  }
  gradient = bytes(2 * kMiB);
  EXPECT_EQ(current_memory_kind(), MemoryKind::other);
  // Freed on another thread and under another kind: it is still the parameter's memory that goes.
  EXPECT_TRUE(label(gradient.slice(0, 5), MemoryKind::gradients));
  EXPECT_FALSE(label(uncounted(), MemoryKind::gradients));
  EXPECT_FALSE(label(at::Tensor(), MemoryKind::gradients));
  TensorBytes now = tensor_bytes();
  EXPECT_EQ(now.by_kind[MemoryKind::parameters], 4 * kMiB);
  EXPECT_EQ(now.by_kind[MemoryKind::gradients], 2 * kMiB);
  EXPECT_EQ(now.by_kind[MemoryKind::optimizer_state], 0);
  EXPECT_EQ(now.by_kind[MemoryKind::other], before_.by_kind[MemoryKind::other]);
  EXPECT_EQ(now.peaks.by_kind[MemoryKind::optimizer_state], kMiB);
  EXPECT_EQ(now.peaks.at_peak[MemoryKind::parameters], 4 * kMiB);
  std::thread([&] {
    const MemoryKindScope scope(MemoryKind::gradients);
    parameter.reset();
  }).join();
  now = tensor_bytes();
  EXPECT_EQ(now.by_kind[MemoryKind::parameters], 0);
  EXPECT_EQ(now.by_kind[MemoryKind::gradients], 2 * kMiB);
}

TEST_F(Memory, WatchesOverlapAndThreadsAreSafe) {
  const PeakWatch all;
  const at::Tensor base = bytes(kMiB);
  PeakWatch first;
  { const at::Tensor a = bytes(7 * kMiB); }
  const PeakWatch second;
  { const at::Tensor a = bytes(2 * kMiB); }
  EXPECT_EQ(first.peaks().total - before_.current, 8 * kMiB);
  EXPECT_EQ(second.peaks().total - before_.current, 3 * kMiB);
  EXPECT_EQ(first.restart().total - before_.current, 8 * kMiB);
  EXPECT_EQ(first.peaks().total - before_.current, kMiB);
  EXPECT_EQ(all.peaks().total - before_.current, 8 * kMiB);

  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<at::Tensor> held;
      for (int i = 0; i < 3000; ++i) {
        const MemoryKindScope scope(kMemoryKinds[random() % kMemoryKinds.size()]);
        if (random() % 2 == 0)
          held.push_back(bytes(1 + static_cast<std::int64_t>(random() % 4096)));
        else if (!held.empty())
          held.pop_back();
        if (i % 500 == 0) {
          const PeakWatch watch;
          static_cast<void>(live_blocks());
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(Memory, ListsLiveBlocks) {
  const at::Tensor small = bytes(1000);
  const MemoryKindScope scope(MemoryKind::parameters);
  const at::Tensor large = bytes(5 * kMiB);
  const Json snapshot = cpu_allocation_snapshot();
  EXPECT_EQ(snapshot.at("units"), "bytes");
  EXPECT_EQ(snapshot.at("blocks").at(0).at("bytes"), 5 * kMiB);
  EXPECT_EQ(snapshot.at("blocks").at(0).at("kind"), "parameters");
  EXPECT_EQ(snapshot.at("total"), tensor_bytes().current);
  EXPECT_EQ(snapshot.at("by_kind").at("parameters"), 5 * kMiB);
  const std::string path = ::testing::TempDir() + "/snapshot.json";
  write_allocation_snapshot(path);
  std::ifstream file(path);
  EXPECT_EQ(Json::parse(file), snapshot);
}

TEST_F(Memory, ACudaSnapshotNeedsCuda) {
  // With a GPU the allocator is not in use yet in this program.
  EXPECT_THROW(cuda_allocation_snapshot(), UnsupportedError);
  EXPECT_THROW(record_cuda_allocations(true), UnsupportedError);
  EXPECT_THROW(write_allocation_snapshot("nowhere", at::Device(at::kMPS)), UnsupportedError);
}

TEST_F(Memory, TracksPeaksThatNoSampleSaw) {
  MemoryTracker tracker(
      MemoryTrackerOptions().interval(std::chrono::milliseconds(100000)).label("a run").rank(3));
  at::Tensor kept;
  for (int i = 0; i < 2; ++i) {
    const auto step = tracker.region("step");
    {
      const auto forward = tracker.region("forward");
      kept = bytes((4 + i) * kMiB);
      { const at::Tensor gone = bytes(16 * kMiB); }
    }
    const auto backward = tracker.region("backward");
    const at::Tensor gone = bytes(kMiB);
  }
  std::thread([&] { const auto alone = tracker.region("other thread"); }).join();
  tracker.stop();
  const Json json = tracker.to_json();
  EXPECT_EQ(json.at("label"), "a run");
  EXPECT_EQ(json.at("rank"), 3);
  EXPECT_EQ(json.at("samples").at("rss").size(), 1U) << "there was no time for a second sample";
  EXPECT_GT(json.at("samples").at("rss").at(0), kMiB);
  EXPECT_GT(json.at("samples").at("pss").at(0), kMiB);
  EXPECT_TRUE(json.at("samples").at("device_peak").at(0).is_null());
  EXPECT_EQ(json.at("peaks").at("tensors"), before_.current + 21 * kMiB);
  const auto peak = [&](const char* path) {
    return json.at("region_totals").at(path).at("peaks").at("tensors").get<std::int64_t>() -
           before_.current;
  };
  EXPECT_EQ(peak("step"), 21 * kMiB);
  EXPECT_EQ(peak("step/forward"), 21 * kMiB);
  EXPECT_EQ(peak("step/backward"), 6 * kMiB);
  EXPECT_EQ(json.at("region_totals").at("step").at("count"), 2);
  EXPECT_EQ(json.at("regions").size(), 7U);
  EXPECT_NE(json.at("regions").at(6).at("thread"), json.at("regions").at(0).at("thread"));
  for (const Json& region : json.at("regions"))
    EXPECT_LE(region.at("begin_ns"), region.at("end_ns"));
  EXPECT_EQ(json.at("clock").at("unit"), "ns");
  kept.reset();
}

TEST_F(Memory, TheBufferIsBoundedAndLosesNoPeak) {
  MemoryTracker tracker(
      MemoryTrackerOptions().interval(std::chrono::milliseconds(1)).pss_every(7).capacity(17));
  for (int i = 0; i < 200; ++i) {
    const auto region = tracker.region(i % 2 == 0 ? "even" : "odd" + std::to_string(i));
    const at::Tensor spike = bytes(i == 77 ? 32 * kMiB : kMiB);
    std::this_thread::sleep_for(std::chrono::microseconds(1100));
  }
  tracker.stop();
  const Json json = tracker.to_json();
  const Json& samples = json.at("samples");
  EXPECT_LE(samples.at("time_ns").size(), 16U);
  EXPECT_GE(samples.at("time_ns").size(), 8U);
  EXPECT_GT(json.at("sampling").at("samples_in_one"), 4);
  std::int64_t most = 0;
  std::int64_t last = -1;
  for (std::size_t i = 0; i < samples.at("time_ns").size(); ++i) {
    most = std::max(most, samples.at("tensors_peak").at(i).get<std::int64_t>());
    EXPECT_GT(samples.at("time_ns").at(i), last);
    last = samples.at("time_ns").at(i);
  }
  EXPECT_EQ(most, before_.current + 32 * kMiB);
  EXPECT_EQ(json.at("peaks").at("tensors"), most);
  EXPECT_LE(json.at("regions").size(), 16U);
  EXPECT_LE(json.at("region_totals").size(), 18U);
  std::int64_t count = 0;
  for (const auto& [path, total] : json.at("region_totals").items())
    count += total.at("count").get<std::int64_t>();
  EXPECT_EQ(count, 200);
  EXPECT_EQ(json.at("region_totals").at("even").at("count"), 100);
}

TEST_F(Memory, VisitsAreRecordedFromAnyThreadAndBounded) {
  MemoryTracker tracker(
      MemoryTrackerOptions().interval(std::chrono::milliseconds(100000)).capacity(16));
  const auto now = std::chrono::steady_clock::now();
  const auto ms = [](int count) { return std::chrono::milliseconds(count); };
  std::thread([&] {
    tracker.add({"0.weight", "disk", "cpu", 5 * kMiB, now + ms(1), now + ms(3), now + ms(8)});
  }).join();
  const Json visit = tracker.to_json().at("visits").at(0);
  EXPECT_EQ(visit.at("name"), "0.weight");
  EXPECT_EQ(visit.at("from"), "disk");
  EXPECT_EQ(visit.at("place"), "cpu");
  EXPECT_EQ(visit.at("bytes"), 5 * kMiB);
  const auto time = [&](const char* key) { return visit.at(key).get<std::int64_t>(); };
  EXPECT_GE(time("begin_ns"), 1000000);
  EXPECT_EQ(time("used_ns") - time("begin_ns"), 2000000);
  EXPECT_EQ(time("end_ns") - time("used_ns"), 5000000);
  for (int i = 0; i < 40; ++i) tracker.add({std::to_string(i), "cpu", "cuda:0", 1, now, now, now});
  const Json json = tracker.to_json();
  EXPECT_LE(json.at("visits").size(), 16U);
  EXPECT_EQ(json.at("sampling").at("visits_kept_one_in"), 4);
}

TEST_F(Memory, FilesAreWholeOrNotThere) {
  const std::string folder = ::testing::TempDir() + "/memory_files";
  std::filesystem::create_directories(folder);
  MemoryTracker tracker;
  tracker.write(folder + "/memory.json");
  std::ifstream file(folder + "/memory.json");
  const Json json = Json::parse(file);
  EXPECT_EQ(json.at("format"), "accelerate-cpp memory");
  EXPECT_EQ(json.at("units"), "bytes");
  EXPECT_EQ(json.at("processes").size(), 1U);
  EXPECT_THROW(tracker.write(folder + "/no/such/folder.json"), ConfigError);
  EXPECT_THROW(tracker.write(folder), ConfigError);
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    EXPECT_EQ(entry.path().filename(), "memory.json");
}

TEST_F(Memory, OptionsAreChecked) {
  EXPECT_THROW(MemoryTracker(MemoryTrackerOptions().interval(std::chrono::milliseconds(0))),
               ConfigError);
  EXPECT_THROW(MemoryTracker(MemoryTrackerOptions().capacity(3)), ConfigError);
  EXPECT_THROW(MemoryTracker(MemoryTrackerOptions().pss_every(-1)), ConfigError);
}

}  // namespace
}  // namespace accelerate::tracking
