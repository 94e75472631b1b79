// A step of AdamW whose state is streamed from disk, against its two parts: the arithmetic alone,
// and the disk alone moving the same bytes in the same blocks. Also the kernel against the memory's
// bandwidth and against torch::optim::AdamW.
//
//     optimizer_state [FOLDER [MILLION_PARAMETERS [BLOCK_MIB]]]
//
// Prints a line of JSON for each figure; every one is a ratio of two things measured in this run.

#include "measure.hpp"

#include <accelerate/io/async_file.hpp>
#include <accelerate/optim/offloaded.hpp>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include <malloc.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>

namespace {

using namespace accelerate;
using optim::FusedAdamW;
using optim::OffloadedAdamW;
using optim::OffloadOptions;

std::vector<at::Tensor> parameters(std::int64_t count) {
  // A few large matrices, as a model has.
  std::vector<at::Tensor> made;
  for (int i = 0; i < 8; ++i) {
    made.push_back(at::full({count / 8}, 0.5F).requires_grad_(true));
    made.back().mutable_grad() = at::full({count / 8}, 0.01F);
  }
  return made;
}

std::vector<double> seconds(int rounds, const std::function<void()>& work) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) times.push_back(measure::time(work).count());
  return times;
}

/// This process' memory that is not a mapped file, in bytes.
double anonymous_memory() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    if (word == "RssAnon:") {
      double kib = 0;
      status >> kib;
      return kib * 1024;
    }
  }
  return 0;
}

/// Reads and writes all of a file as a step does, with nothing in between.
double disk_alone(const std::string& folder, std::size_t bytes, std::size_t block, bool direct) {
  auto file = io::AsyncFile::scratch(folder, bytes, io::AsyncFileOptions().direct(direct));
  std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(io::AsyncFile::kAlignment, 3 * block)), std::free);
  const auto pass = [&] {
    const std::size_t count = bytes / block;
    const auto slot = [&](std::size_t i) {
      return std::span<std::byte>(memory.get() + i % 3 * block, block);
    };
    std::array<io::AsyncFile::Ticket, 3> writes{};
    auto read = file.read(0, slot(0));
    for (std::size_t i = 0; i < count; ++i) {
      auto next = read;
      if (i + 1 < count) {
        file.wait(writes[(i + 1) % 3]);
        next = file.read((i + 1) * block, slot(i + 1));
      }
      file.wait(read);
      writes[i % 3] = file.write(i * block, slot(i));
      read = next;
    }
    file.wait_all();
  };
  pass();
  return measure::median(seconds(5, pass));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string folder = argc > 1 ? argv[1] : "/var/tmp";
  const std::int64_t count = (argc > 2 ? std::atoll(argv[2]) : 50) * 1'000'000 / 8192 * 8192;
  const std::int64_t block = std::int64_t{argc > 3 ? std::atoll(argv[3]) : 8} << 20;

  const auto in_memory = parameters(count);
  FusedAdamW fused(in_memory);
  fused.step();
  const double compute = measure::median(seconds(5, [&] { fused.step(); }));

  // The kernel reads parameter, gradient and two means, and writes all but the gradient: 28 bytes a
  // parameter. Adding one tensor to another moves 12 in the same way.
  const at::Tensor one = at::ones({count}), other = at::ones({count});
  const double add = measure::median(seconds(5, [&] { at::Tensor(one).add_(other); }));
  std::printf(
      R"({"benchmark": "AdamW kernel, bandwidth over that of add_", "ratio": %.3f, "GB_per_s": %.1f})"
      "\n",
      (28.0 / compute) / (12.0 / add), 28e-9 * static_cast<double>(count) / compute);

  const auto plain_parameters = parameters(count);
  torch::optim::AdamW plain(plain_parameters);
  plain.step();
  const double of_torch = measure::median(seconds(3, [&] { plain.step(); }));
  std::printf(
      R"({"benchmark": "torch::optim::AdamW over FusedAdamW", "ratio": %.2f, "fused_ms": %.1f})"
      "\n",
      of_torch / compute, compute * 1e3);

  for (const bool direct : {true, false}) {
    const auto on_disk = parameters(count);
    ::malloc_trim(0);  // what was freed must not serve as the blocks
    const double before = anonymous_memory();
    OffloadedAdamW streamed(on_disk, optim::FusedAdamWOptions(),
                            OffloadOptions()
                                .place(optim::StatePlace::disk)
                                .folder(folder)
                                .block_bytes(block)
                                .direct_io(direct));
    streamed.step();
    const double step = measure::median(seconds(5, [&] { streamed.step(); }));
    const double memory = anonymous_memory() - before;
    const double disk = disk_alone(
        folder, static_cast<std::size_t>(streamed.disk_bytes()) / block * block, block, direct);
    std::printf(
        R"({"benchmark": "AdamW from disk, %s", "over_larger_part": %.3f, "step_ms": %.0f, "disk_ms": %.0f, "compute_ms": %.0f, "memory_over_blocks": %.2f, "state_over_memory": %.1f})"
        "\n",
        direct ? "direct" : "page cache", step / std::max(disk, compute), step * 1e3, disk * 1e3,
        compute * 1e3, memory / static_cast<double>(streamed.block_memory_bytes()),
        static_cast<double>(streamed.disk_bytes()) / memory);
  }
  return 0;
}
