#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/DispatchKey.h>

#include <cstddef>

namespace sim {

// The simulated device stands in for CUDA in programs that are linked without libtorch_cuda.so.
inline constexpr c10::DeviceType kDevice = c10::DeviceType::CUDA;
inline constexpr c10::DispatchKey kKey = c10::DispatchKey::CUDA;
inline constexpr int kMostDevices = 16;

/// From the environment, read once.
struct Settings {
  int devices;         // SIM_DEVICES: 3
  std::size_t memory;  // SIM_MEMORY: bytes of each device, 4 GiB
  bool check;          // SIM_CHECK: 1. Without it nothing is compared
  bool trace;          // SIM_TRACE: 0. With it every operator and event is written to stderr
};
const Settings& settings();

}  // namespace sim
