#include "sim_device/orderings.hpp"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace sim {
namespace {

// Inline code of LibTorch and of C++ that the compiler put into the library.
bool is_inline_code(const char* symbol) {
  if (symbol == nullptr) return false;
  const std::string_view name(symbol);
  for (const char* prefix : {"_ZN3c10", "_ZNK3c10", "_ZN2at", "_ZNK2at", "_ZN5torch", "_ZNK5torch",
                             "_ZNSt", "_ZNKSt", "_ZSt"}) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

bool lies_in(const Dl_info& info, std::string_view library) {
  return info.dli_fname != nullptr &&
         std::string_view(info.dli_fname).find(library) != std::string_view::npos;
}

// The address in the library that asks for this ordering; 0 when it is LibTorch itself or a test.
std::uintptr_t asking_place(Ordering kind) {
  std::array<void*, 64> frames{};
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  for (int i = 0; i < count; ++i) {
    // A return address may be the first of another function: look at the call before it.
    const char* address = static_cast<const char*>(frames[static_cast<std::size_t>(i)]) - 1;
    Dl_info info{};
    if (dladdr(address, &info) == 0) return 0;
    if (lies_in(info, "libsim_device") || is_inline_code(info.dli_sname)) continue;
    if (lies_in(info, "libaccelerate_on_sim"))
      return static_cast<std::uintptr_t>(address - static_cast<const char*>(info.dli_fbase));
    // tensor.record_stream() comes through the dispatcher.
    if (kind == Ordering::record_stream && lies_in(info, "libtorch_cpu")) continue;
    return 0;
  }
  return 0;
}

struct Places {
  const char* file = std::getenv("SIM_ORDERINGS");
  std::set<std::uintptr_t> left_out;
  std::mutex mutex;
  std::map<std::pair<Ordering, std::uintptr_t>, long> met;

  Places() {
    if (const char* list = std::getenv("SIM_LEAVE_OUT")) {
      std::istringstream text(list);
      for (std::string address; std::getline(text, address, ',');)
        left_out.insert(std::strtoull(address.c_str(), nullptr, 16));
    }
    if (file != nullptr) std::atexit(write);
  }
  static void write();
};
Places& places() {
  static auto* const only = new Places;
  return *only;
}

// In one piece: other processes write to the file as well.
void Places::write() {
  std::ostringstream text;
  for (const auto& [place, times] : places().met) {
    const char* const kinds[] = {"wait", "synchronize", "record_stream"};
    text << kinds[static_cast<int>(place.first)] << ' ' << std::hex << place.second << std::dec
         << ' ' << times << '\n';
  }
  const std::string lines = text.str();
  const int file = open(places().file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file < 0 || ::write(file, lines.data(), lines.size()) < 0) std::abort();
  close(file);
}

}  // namespace

bool is_left_out(Ordering kind) {
  Places& all = places();
  if (all.file == nullptr && all.left_out.empty()) return false;
  const std::uintptr_t place = asking_place(kind);
  if (place == 0) return false;
  const std::lock_guard lock(all.mutex);
  ++all.met[{kind, place}];
  return all.left_out.contains(place);
}

}  // namespace sim
