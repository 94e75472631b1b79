#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace accelerate {

/// CUDA devices that this process can use; 0 with a LibTorch for the CPU too.
inline int cuda_device_count() {
  return c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)
             ? c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount()
             : 0;
}

}  // namespace accelerate
