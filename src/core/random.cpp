#include "core/cuda_devices.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/random.hpp>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <nlohmann/json.hpp>

#include <cstring>

namespace accelerate {
namespace {

std::map<std::string, at::Generator> default_generators() {
  std::map<std::string, at::Generator> generators;
  generators.emplace("cpu", at::globalContext().defaultGenerator(at::kCPU));
  const int count = cuda_device_count();
  for (int index = 0; index < count; ++index) {
    const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
    generators.emplace(device.str(), at::globalContext().defaultGenerator(device));
  }
  return generators;
}

std::string to_hex(const std::string& bytes) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string hex;
  hex.reserve(bytes.size() * 2);
  for (const char byte : bytes) {
    const auto value = static_cast<unsigned char>(byte);
    hex += digits[value >> 4];
    hex += digits[value & 15];
  }
  return hex;
}

std::optional<std::string> from_hex(const std::string& hex) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
  };
  if (hex.size() % 2 != 0) return std::nullopt;
  std::string bytes;
  bytes.reserve(hex.size() / 2);
  for (std::size_t i = 0; i < hex.size(); i += 2) {
    const int high = digit(hex[i]);
    const int low = digit(hex[i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    bytes += static_cast<char>(high * 16 + low);
  }
  return bytes;
}

}  // namespace

void set_seed(std::uint64_t seed, const SeedOptions& options) {
  if (options.device_specific()) seed += static_cast<std::uint64_t>(options.rank());
  at::manual_seed(seed);
  if (options.deterministic())
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
}

std::string generator_state(at::Generator generator) {
  const std::scoped_lock lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  return {static_cast<const char*>(state.const_data_ptr()),
          static_cast<std::size_t>(state.nbytes())};
}

void set_generator_state(at::Generator generator, const std::string& bytes) {
  const at::Tensor state = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
  const std::scoped_lock lock(generator.mutex());
  try {
    generator.set_state(state);
  } catch (const c10::Error&) {
    std::throw_with_nested(DataError(text::concat(
        bytes.size(), " bytes are not the state of a generator of ", generator.device().str(),
        ". Give back bytes that came from a generator of the same kind and LibTorch version.")));
  }
}

RngState RngState::capture() {
  RngState state;
  for (const auto& [device, generator] : default_generators())
    state.states_.emplace(device, generator_state(generator));
  return state;
}

void RngState::check() const {
  const auto generators = default_generators();
  std::vector<std::string> missing;
  for (const auto& [device, bytes] : states_) {
    if (!generators.contains(device)) missing.push_back(device);
  }
  if (!missing.empty()) {
    throw StateError(text::concat(
        "The random state was saved with devices that are not here: ", text::join(missing),
        ". Restore it on a machine that has them, or seed anew with set_seed."));
  }
  for (const auto& [device, bytes] : states_) {
    at::Generator generator = generators.at(device);
    const auto copy = [&] {
      const std::scoped_lock lock(generator.mutex());
      return generator.clone();
    };
    set_generator_state(copy(), bytes);
  }
}

void RngState::restore() const {
  check();
  const auto generators = default_generators();
  for (const auto& [device, bytes] : states_) set_generator_state(generators.at(device), bytes);
}

Json RngState::to_json() const {
  Json json = Json::object();
  for (const auto& [device, bytes] : states_) json[device] = to_hex(bytes);
  return json;
}

RngState RngState::from_json(const Json& json) {
  RngState state;
  if (!json.is_object())
    throw DataError("A random state is a JSON object of devices, and this is something else.");
  for (const auto& [device, value] : json.items()) {
    const auto bytes = value.is_string() ? from_hex(value.get<std::string>()) : std::nullopt;
    if (!bytes) {
      throw DataError(
          text::concat("The random state of ", device, " is not a string of hexadecimal digits."));
    }
    state.states_.emplace(device, *bytes);
  }
  return state;
}

std::string_view to_string(RngType type) {
  switch (type) {
    case RngType::torch:
      return "torch";
    case RngType::cuda:
      return "cuda";
    case RngType::generator:
      return "generator";
  }
  throw ConfigError(text::concat("There is no RngType ", static_cast<int>(type), "."));
}

RngType rng_type_from_string(std::string_view name) {
  for (RngType type : {RngType::torch, RngType::cuda, RngType::generator}) {
    if (name == to_string(type)) return type;
  }
  throw ConfigError(text::concat("There is no random generator type \"", name,
                                 "\". Use torch, cuda or generator."));
}

at::Generator generator_of(RngType type, const std::optional<at::Generator>& generator) {
  switch (type) {
    case RngType::torch:
      return at::globalContext().defaultGenerator(at::kCPU);
    case RngType::cuda: {
      if (cuda_device_count() == 0) {
        throw ConfigError(
            "The random state of cuda was to be synchronised, and this process has no CUDA device. "
            "Leave cuda out of rng_types.");
      }
      const auto current = c10::impl::getDeviceGuardImpl(at::kCUDA)->getDevice();
      return at::globalContext().defaultGenerator(current);
    }
    case RngType::generator:
      break;
  }
  if (!generator || !generator->defined()) {
    throw ConfigError(
        "The state of a generator was to be synchronised, and no generator was given. Pass one, or "
        "leave generator out of rng_types.");
  }
  return *generator;
}

}  // namespace accelerate
