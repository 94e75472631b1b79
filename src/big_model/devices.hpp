#pragma once

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/device_map/device_map.hpp>
#include <core/cuda_devices.hpp>

#include <c10/core/Device.h>

namespace accelerate::big_model {

inline std::string accelerators_text() {
  const int devices = cuda_device_count();
  return devices == 0 ? "no accelerator" : text::concat("the accelerators from 0 to ", devices - 1);
}

inline at::Device device_of(Place place) {
  return place.kind == Place::Kind::accelerator
             ? at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(place.index))
             : at::Device(at::kCPU);
}

/// The device that is meant: without a number the current one. Throws ConfigError unless it is the
/// CPU or an accelerator that is there.
inline at::Device existing_device(at::Device device) {
  if (device.is_cpu()) return at::Device(at::kCPU);
  if (!device.is_cuda()) {
    throw ConfigError(text::concat("Weights are to be computed with on the device ", device.str(),
                                   ". Expected is cpu, cuda, or cuda with a number."));
  }
  const int devices = cuda_device_count();
  if (device.index() >= devices || devices == 0) {
    throw ConfigError(text::concat("Weights are to be computed with on ", device.str(),
                                   ", and this machine has ", accelerators_text(), "."));
  }
  return device.has_index() ? device : c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice();
}

/// Throws ConfigError when the place is an accelerator that is not there; `who` names it.
inline void check_place(Place place, const std::string& who) {
  if (place.kind != Place::Kind::accelerator || place.index < cuda_device_count()) return;
  throw ConfigError(text::concat(who, " the accelerator ", place.index, ", and this machine has ",
                                 accelerators_text(), "."));
}

inline void check_places(const DeviceMap& map) {
  for (const auto& [name, place] : map)
    check_place(place, text::concat("The device map puts '", name, "' on"));
}

/// What a map by name may fill of what is free, where the user said nothing: nine tenths of a
/// single accelerator, since computing takes memory too.
inline MaxMemory leave_room(MaxMemory available) {
  std::int64_t* only = nullptr;
  for (auto& [place, limit] : available) {
    if (place.kind != Place::Kind::accelerator) continue;
    if (only != nullptr) return available;
    only = &limit;
  }
  if (only != nullptr) *only = *only / 10 * 9;
  return available;
}

}  // namespace accelerate::big_model
