// Devices, streams and events, as LibTorch asks for them.

#include "sim_device/streams.hpp"

#include "sim_device/checker.hpp"
#include "sim_device/memory.hpp"
#include "sim_device/orderings.hpp"
#include "sim_device/settings.hpp"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <utility>

namespace sim {
namespace {

// As CUDA: 32 streams of either priority are handed out in turn.
constexpr c10::StreamId kPool = 32;
constexpr c10::StreamId kFirstNewStream = 1000;

struct Here {
  c10::DeviceIndex device = 0;
  std::array<c10::StreamId, kMostDevices> stream{};
};
thread_local Here here;

struct Handed {
  c10::StreamId from_pool = 0, made = 0;
};
Handed& handed(c10::DeviceIndex device) {
  static std::array<Handed, kMostDevices> of_device;
  return of_device.at(static_cast<std::size_t>(device));
}

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    here.device = index_of(device);
    return before;
  }
  c10::Device getDevice() const override { return {kDevice, here.device}; }
  void setDevice(c10::Device device) const override { here.device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) here.device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    const Lock lock(mutex());
    const c10::DeviceIndex index = index_of(device);
    const c10::StreamId id = 1 + handed(index).from_pool++ % kPool;
    return make_stream(index, high ? id + kPool : id);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const Lock lock(mutex());
    const c10::DeviceIndex index = index_of(device);
    return make_stream(index, kFirstNewStream + handed(index).made++);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::DeviceIndex index = checked_index(stream.device_index());
    return make_stream(index,
                       std::exchange(here.stream.at(static_cast<std::size_t>(index)), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &stream_of(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return host_has(stream_of(stream).clock);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    if (!is_left_out(Ordering::synchronize)) synchronize(stream_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    if (is_left_out(Ordering::synchronize)) return;
    synchronize_device(device < 0 ? here.device : checked_index(device));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "An event of device ",
                static_cast<int>(device), " was recorded on ", stream, ".");
    if (*event == nullptr) *event = new Event;
    sim::record(*static_cast<Event*>(*event), stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr && !is_left_out(Ordering::wait))
      wait_for(stream_of(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr && !is_left_out(Ordering::synchronize))
      host_waits_for(static_cast<Event*>(event)->clock);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(to)->time -
                                                     static_cast<Event*>(from)->time)
        .count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer,
                             const c10::Stream& stream) const override {
    if (!is_left_out(Ordering::record_stream)) device_memory().recordStream(pointer, stream);
  }
};

}  // namespace

c10::DeviceIndex current_device() { return here.device; }

c10::Stream current_stream(int device) {
  return make_stream(static_cast<c10::DeviceIndex>(device),
                     here.stream.at(static_cast<std::size_t>(device)));
}

void set_device(c10::DeviceIndex device) { here.device = checked_index(device); }

c10::DeviceIndex checked_index(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < settings().devices, "There is no simulated device ",
              static_cast<int>(device), "; there are ", settings().devices,
              " (SIM_DEVICES in the environment).");
  return device;
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? checked_index(device.index()) : here.device;
}

void register_guard() { c10::impl::registerDeviceGuard(kDevice, new Guard); }

}  // namespace sim
