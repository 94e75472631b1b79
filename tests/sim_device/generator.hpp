#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace sim {

/// A generator of a device, which draws what the CPU's generator draws with the same seed, so that
/// results can be compared bit for bit.
at::Generator make_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);
/// The CPU's generator inside.
at::Generator& inner(const at::Generator& generator);

}  // namespace sim
