#include "peak_memory.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <ctime>
#include <fstream>
#include <sstream>
#include <string>

namespace trainer {
namespace {

std::atomic<std::int64_t> live_bytes{0};
std::atomic<std::int64_t> peak_bytes{0};

// Every block keeps its size and its real context beside the pointer.
struct Block {
  at::DataPtr data;
  std::int64_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  live_bytes -= block->bytes;
  delete block;
}

class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  at::DataPtr allocate(std::size_t bytes) override {
    auto* block = new Block{inner_->allocate(bytes), static_cast<std::int64_t>(bytes)};
    const std::int64_t now = live_bytes += block->bytes;
    std::int64_t peak = peak_bytes.load();
    while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
    }
    return {block->data.get(), block, &release, block->data.device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }

 private:
  c10::Allocator* inner_;
};

}  // namespace

void count_tensor_bytes() {
  static CountingAllocator allocator(c10::GetCPUAllocator());
  c10::SetCPUAllocator(&allocator, /*priority=*/100);
}

std::int64_t peak_tensor_bytes() { return peak_bytes; }

std::int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;
}

double seconds_since_process_start() {
  // Field 22 of /proc/self/stat is the start in clock ticks since boot; the program's name, in
  // parentheses, may hold spaces.
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  std::istringstream fields(line.substr(line.rfind(')') + 2));
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9 -
         std::stod(field) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace trainer
