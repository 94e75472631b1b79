#include "peak_memory.hpp"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>

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

// A block's size stands in front of it, in as many bytes as LibTorch aligns tensors to.
constexpr std::size_t kHeader = c10::gAlignment;

void release(void* data) {
  if (data == nullptr) return;
  char* block = static_cast<char*>(data) - kHeader;
  live_bytes -= *reinterpret_cast<std::int64_t*>(block);
  c10::free_cpu(block);
}

class CountingAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, at::kCPU};
    char* block = static_cast<char*>(c10::alloc_cpu(bytes + kHeader));
    *reinterpret_cast<std::int64_t*>(block) = static_cast<std::int64_t>(bytes);
    const std::int64_t now = live_bytes += static_cast<std::int64_t>(bytes);
    std::int64_t peak = peak_bytes.load();
    while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
    }
    return {block + kHeader, block + kHeader, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

}  // namespace

void count_tensor_bytes() {
  static CountingAllocator allocator;
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
