#include "sim_device/generator.hpp"

#include "sim_device/settings.hpp"
#include "sim_device/streams.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/TensorImpl.h>

#include <utility>
#include <vector>

namespace sim {
namespace {

struct Generator final : c10::GeneratorImpl {
  at::Generator inner;

  Generator(c10::DeviceIndex device, at::Generator inner)
      : GeneratorImpl(c10::Device(kDevice, device), c10::DispatchKeySet(kKey)),
        inner(std::move(inner)) {}
  explicit Generator(c10::DeviceIndex device)
      : Generator(device, at::detail::createCPUGenerator(c10::default_rng_seed_val)) {}

  void set_current_seed(std::uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(std::uint64_t offset) override { inner.set_offset(offset); }
  std::uint64_t get_offset() const override { return inner.get_offset(); }
  std::uint64_t current_seed() const override { return inner.current_seed(); }
  std::uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), inner.clone()); }
};

}  // namespace

at::Generator make_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device() : checked_index(device));
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* const all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < settings().devices; ++i)
      made->push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return all->at(static_cast<std::size_t>(device < 0 ? current_device() : checked_index(device)));
}

at::Generator& inner(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace sim
