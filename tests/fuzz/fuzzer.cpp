// The entry of libFuzzer. FUZZ_TARGET is the name of a function of targets.hpp.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "fuzz/targets.hpp"

extern "C" {

// Linked in place of mmap and munmap: a mapped file ends in the middle of a page, whose rest can be
// read without anybody noticing. On the heap, AddressSanitizer stands right behind the last byte.
void* __wrap_mmap(void*, std::size_t bytes, int, int, int descriptor, off_t) {
  void* data = nullptr;
  if (::posix_memalign(&data, 64, bytes) != 0) return MAP_FAILED;
  if (::pread(descriptor, data, bytes, 0) != static_cast<ssize_t>(bytes)) {
    ::free(data);
    return MAP_FAILED;
  }
  return data;
}
int __wrap_munmap(void* data, std::size_t) {
  ::free(data);
  return 0;
}

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  accelerate::fuzz::FUZZ_TARGET({data, size});
  return 0;
}
}
