#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace sim {

// Of this thread.
c10::DeviceIndex current_device();
c10::Stream current_stream(int device);

void set_device(c10::DeviceIndex device);
/// The index, once it is that of a simulated device. Throws c10::Error otherwise.
c10::DeviceIndex checked_index(c10::DeviceIndex device);
/// That of the current device where `device` has none.
c10::DeviceIndex index_of(c10::Device device);

/// Makes devices, streams and events known to LibTorch.
void register_guard();

}  // namespace sim
