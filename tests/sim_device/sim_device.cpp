// Registers the device when the library is loaded.

#include "sim_device/sim_device.hpp"

#include "sim_device/checker.hpp"
#include "sim_device/generator.hpp"
#include "sim_device/memory.hpp"
#include "sim_device/operators.hpp"
#include "sim_device/passage.hpp"
#include "sim_device/run_on_host.hpp"
#include "sim_device/settings.hpp"
#include "sim_device/streams.hpp"

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <signal.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <utility>

namespace sim {
namespace {

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  int getNumGPUs() const override { return settings().devices; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(settings().devices);
  }
  c10::DeviceIndex current_device() const override { return sim::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return sim::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = sim::current_device();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? sim::current_device() : checked_index(device));
  }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kDevice, static_cast<c10::DeviceIndex>(device_of_address(data))};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return make_generator(device);
  }
};

struct sigaction before_us;

void on_segmentation_fault(int number, siginfo_t* info, void*) {
  const int device = device_of_address(info->si_addr);
  if (device < 0) {  // not ours: the instruction runs again, for who was there before
    sigaction(number, &before_us, nullptr);
    return;
  }
  char text[160];
  const int length = std::snprintf(
      text, sizeof text, "simulated device: host code touched memory of device %d (address %p).\n",
      device, info->si_addr);
  [[maybe_unused]] const auto written = write(2, text, static_cast<std::size_t>(length));
  _exit(kTouchedExitCode);
}

// A composite kernel wins over a fallback. Operators that have one, and a kernel of the CPU's
// besides, would be computed otherwise than on the CPU; convolutions would choose a back-end that
// is not there.
void prefer_the_cpus_kernels() {
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !name.name.starts_with("aten::")) continue;
    if (own_operators().contains(c10::toString(name))) continue;
    using Key = c10::DispatchKey;
    const bool composite = op->hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
                           op->hasKernelForDispatchKey(Key::CompositeImplicitAutograd);
    const bool convolution =
        name.name == "aten::convolution" || name.name == "aten::convolution_backward";
    if ((composite && op->hasKernelForDispatchKey(Key::CPU)) || convolution) {
      library->impl(c10::toString(name).substr(std::string("aten::").size()).c_str(),
                    torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
    }
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

const bool registered = [] {
  TORCH_CHECK(!c10::impl::hasDeviceGuardImpl(kDevice),
              "The simulated device stands in for CUDA, and libtorch_cuda.so is loaded. Link the "
              "program without it.");
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<Hooks>(args);
      });
  register_guard();
  c10::SetAllocator(kDevice, &device_memory());
  at::globalContext().lazyInitDevice(kDevice);  // or no pointer counts as pinned
  prefer_the_cpus_kernels();
  struct sigaction action {};
  action.sa_sigaction = &on_segmentation_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &before_us);
  return true;
}();

}  // namespace

c10::Device device(int index) { return {kDevice, static_cast<c10::DeviceIndex>(index)}; }

void note(const std::string& work, const std::vector<at::Tensor>& reads,
          const std::vector<at::Tensor>& writes) {
  std::vector<Use> uses;
  for (const at::Tensor& tensor : reads) uses.push_back(use_of(tensor, false));
  for (const at::Tensor& tensor : writes) uses.push_back(use_of(tensor, true));
  const at::Tensor& any = reads.empty() ? writes.at(0) : reads.at(0);
  start(stream_of(current_stream(any.device().index())), kept_name(work), uses);
}

at::Tensor host_view(const at::Tensor& tensor) {
  static const std::string name = "host_view";
  Passage passage(name);
  const at::Tensor view = passage.to_host(tensor);
  return at::from_blob(
      view.mutable_data_ptr(), view.sizes(), view.strides(), [keep = tensor](void*) {},
      view.options());
}

}  // namespace sim
