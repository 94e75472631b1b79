#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/big_model/dispatch.hpp>
#include <accelerate/big_model/sizes.hpp>
#include <accelerate/core/memory.hpp>
#include <big_model/align.hpp>
#include <big_model/devices.hpp>
#include <big_model/folder_lock.hpp>
#include <big_model/offload_residency.hpp>
#include <core/map_value.hpp>
#include <intercept/internal_ops.hpp>
#include <intercept/replace.hpp>
#include <intercept/torchscript.hpp>

#include <ATen/core/ivalue.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/function_hook.h>

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

namespace accelerate {
namespace {

using big_model::device_of;
using big_model::OffloadResidency;
using big_model::Source;
using intercept::Engine;
using intercept::InternalOpsGuard;

// A gradient that arrives at a weight on disk has nowhere to go.
struct RefuseGradient final : torch::autograd::PostAccumulateGradHook {
  std::string name;
  std::unique_ptr<PostAccumulateGradHook> instead;  // the user's own
  void operator()(const at::Tensor& variable) override {
    const_cast<at::Tensor&>(variable).mutable_grad().reset();
    throw StateError(text::concat(
        "A gradient reached '", name,
        "', which is offloaded to disk, where weights are only read: an optimizer could not change "
        "it. Give it a place on the CPU or on a device to train it, or call requires_grad_(false) "
        "on it."));
  }
};

// An ordinary tensor, which can be given the tag and have it taken away.
bool can_be_guarded(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() && !tensor.is_quantized() &&
         !tensor.is_inference() && !tensor.is_meta();
}

bool has_class(const ModuleNode& node, const std::string& type) {
  return is_module_type(node.type, type) ||
         std::any_of(node.children.begin(), node.children.end(),
                     [&](const ModuleNode& child) { return has_class(child, type); });
}

bool has_several_places(const DeviceMap& map) {
  return std::any_of(map.begin(), map.end(),
                     [&](const auto& entry) { return entry.second != map.front().second; });
}

constexpr const char* kHandleGone =
    "A weight that was offloaded to disk was used after the handle of its module was destroyed: "
    "what dispatch_model, disk_offload or load_checkpoint_and_dispatch returned. Keep the handle "
    "for as long as the module is used, or call remove_offload() on it before. The module can be "
    "loaded or dispatched again.";

c10::IValue sent(const c10::IValue& value, at::Device device) {
  return tree::map_value(value, [&](const at::Tensor& tensor) { return tensor.to(device); });
}

}  // namespace

at::Device big_model::main_device(const DeviceMap& map, const OffloadOptions& options) {
  check_places(map);
  if (options.main_device()) return existing_device(*options.main_device());
  std::optional<int> first;
  for (const auto& [name, place] : map) {
    if (place.kind == Place::Kind::accelerator)
      first = std::min(first.value_or(place.index), place.index);
  }
  return first ? device_of(Place::accelerator(*first)) : at::Device(at::kCPU);
}

struct Dispatched::Impl {
  Impl(ModuleRecord record, DeviceMap given, OffloadOptions chosen);

  Place place_for(const std::string& name) const { return *place_of(map, name); }
  bool is_offloaded(const NamedTensor& entry, bool is_buffer) const;
  std::string stored_name(const NamedTensor& entry) const;
  void settle(const NamedTensor& entry, bool is_buffer);
  void lock_folders();
  std::vector<intercept::UnitPlan> units() const;
  void refuse_training(const NamedTensor& entry);
  void release_hooks();
  void guard_the_rest();
  void release_guards();

  ModuleRecord module;
  DeviceMap map;
  OffloadOptions options;
  at::Device main;
  WeightStore store;
  std::unordered_map<std::string, std::vector<std::string>> tied;  // by first name
  std::vector<NamedTensor> offloaded, to_write;
  std::vector<NamedTensor> refusing;
  std::vector<at::Tensor> guarded;
  std::vector<big_model::FolderLock> folders;  // with files that weights come from
  std::unique_ptr<OffloadResidency> residency;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<big_model::AlignDevices> align;
};

Dispatched::Impl::Impl(ModuleRecord record, DeviceMap given, OffloadOptions chosen)
    : module(std::move(record)),
      map(std::move(given)),
      options(std::move(chosen)),
      main(big_model::main_device(map, options)),
      store(options.weights()) {
  check_device_map(model_tree(module), map);
  if (options.resident_limit() < 0 || options.prefetch() < 0)
    throw ConfigError("OffloadOptions::resident_limit and prefetch cannot be negative.");
  for (const std::string& type : options.preload_module_classes()) {
    if (has_class(module.root(), type)) continue;
    throw ConfigError(text::concat("OffloadOptions::preload_module_classes names '", type,
                                   "', and the module has nothing of that class."));
  }
  for (const auto& names : module.tied()) {
    tied[names.front()] = names;
    for (const std::string& name : names) {
      if (place_for(name) == place_for(names.front())) continue;
      log::warning(text::concat("'", names.front(), "' and '", name,
                                "' are one weight, and the device map puts them on ",
                                place_for(names.front()).text(), " and on ", place_for(name).text(),
                                ". It goes to ", place_for(names.front()).text(), "."));
      break;
    }
  }
  const auto wants_values = [](const NamedTensor& entry) {
    return entry.tensor.is_meta() && entry.tensor.numel() > 0;
  };
  if (!options.offload_dir().empty() &&
      (std::any_of(module.parameters().begin(), module.parameters().end(), wants_values) ||
       std::any_of(module.buffers().begin(), module.buffers().end(), wants_values))) {
    const auto index = options.offload_dir() / "index.json";
    if (std::filesystem::exists(index)) {
      const WeightStore there = WeightStore::open(index);
      for (const auto& [name, entry] : there.entries()) {
        if (store.find(name) == nullptr) store.add(name, entry);
      }
    }
  }

  // What can be refused is refused before anything is moved.
  std::vector<std::string> empty, with_gradient;
  const auto check = [&](const NamedTensor& entry, bool is_buffer) {
    const std::string stored = stored_name(entry);
    // A tagged one without memory was left behind by a handle.
    if (intercept::is_claimed(entry.tensor) && !entry.tensor.is_meta()) {
      throw StateError(text::concat("'", entry.name,
                                    "' is sharded or offloaded already. A module is dispatched "
                                    "once; call remove_offload() before it is dispatched again."));
    }
    if (entry.tensor.is_meta() && stored.empty() && entry.tensor.numel() > 0)
      empty.push_back(entry.name);
    if (!is_offloaded(entry, is_buffer)) return;
    if (entry.tensor.grad().defined()) with_gradient.push_back(entry.name);
    if (place_for(entry.name) != Place::disk() || entry.tensor.numel() == 0) return;
    // Values in memory go before those that a folder has from an earlier time.
    const bool use_stored =
        !stored.empty() && (entry.tensor.is_meta() || options.weights().find(stored) != nullptr);
    if (use_stored) {
      const WeightStore::Entry& found = *store.find(stored);
      if (at::IntArrayRef(found.shape) != entry.tensor.sizes()) {
        throw CheckpointError(text::concat("'", stored, "' has the shape [",
                                           text::join(found.shape), "] in ", found.file, ", and [",
                                           text::join(entry.tensor.sizes()), "] in the module."),
                              found.file.string());
      }
    } else if (options.offload_dir().empty()) {
      throw ConfigError(text::concat("The device map puts '", entry.name,
                                     "' on the disk. Set OffloadOptions::offload_dir to a folder "
                                     "that it can be written to, or "
                                     "OffloadOptions::weights to a store that has it."));
    } else {
      to_write.push_back(entry);
    }
  };
  for (const NamedTensor& entry : module.parameters()) check(entry, false);
  for (const NamedTensor& entry : module.buffers()) check(entry, true);
  if (!empty.empty()) {
    throw StateError(
        text::concat("These weights have shapes and no values (they are on the meta "
                     "device), and nothing says where the values are: ",
                     text::join(empty),
                     ". Load them with load_checkpoint_and_dispatch, or name a store "
                     "in OffloadOptions::weights."));
  }
  if (!with_gradient.empty()) {
    throw StateError(text::concat(
        "These weights have gradients, which offloading would lose: ", text::join(with_gradient),
        ". Call the optimizer's zero_grad() first."));
  }
  const InternalOpsGuard internal;
  if (!to_write.empty()) {
    const WeightStore written = offload_state_dict(options.offload_dir(), to_write);
    for (const auto& [name, entry] : written.entries()) store.add(name, entry);
    to_write.clear();
  }
  residency = std::make_unique<OffloadResidency>(main, store);
  lock_folders();
  for (const NamedTensor& entry : module.parameters()) settle(entry, false);
  for (const NamedTensor& entry : module.buffers()) settle(entry, true);

  if (offloaded.empty()) folders.clear();

  bool elsewhere = !main.is_cpu();
  for (const NamedTensor& entry : module.parameters())
    elsewhere = elsewhere || !(entry.tensor.is_cpu() || entry.tensor.is_meta());
  if (!offloaded.empty()) {
    if (module.is_torchscript()) intercept::switch_off_fusers();
    intercept::EngineOptions engine_options;
    engine_options.compute_device = main;
    engine_options.prefetch = engine_options.prefetch_in_backward = options.prefetch();
    engine_options.resident_limit = options.resident_limit();
    engine_options.oversized_alone = true;
    engine_options.advice =
        "Before code that changes a weight's shape or memory, or reads it raw, such as "
        "torch::save() or data_ptr(), call remove_offload().";
    engine = std::make_unique<Engine>(units(), engine_options, *residency,
                                      std::function<void(const intercept::Unit&, at::Tensor)>());
    for (const NamedTensor& entry : offloaded) {
      if (entry.tensor.requires_grad() && place_for(entry.name) == Place::disk())
        refuse_training(entry);
    }
  }
  if (elsewhere) {
    std::vector<NamedTensor> weights = module.parameters();
    weights.insert(weights.end(), module.buffers().begin(), module.buffers().end());
    align = std::make_unique<big_model::AlignDevices>(weights);
  }
  if (engine || has_several_places(map)) guard_the_rest();
}

// So that a module that is told to move refuses at its first tensor, with none changed.
void Dispatched::Impl::guard_the_rest() {
  for (const auto* tensors : {&module.parameters(), &module.buffers()}) {
    for (const auto& [name, tensor] : *tensors) {
      if (intercept::is_claimed(tensor) || !can_be_guarded(tensor)) continue;
      intercept::guard(tensor, true);
      guarded.push_back(tensor);
    }
  }
}

void Dispatched::Impl::release_guards() {
  for (const at::Tensor& tensor : guarded) intercept::guard(tensor, false);
  guarded.clear();
}

bool Dispatched::Impl::is_offloaded(const NamedTensor& entry, bool is_buffer) const {
  if (entry.tensor.numel() == 0 || (is_buffer && !options.offload_buffers())) return false;
  const Place place = place_for(entry.name);
  return place == Place::disk() ||
         (place == Place::cpu() && (!main.is_cpu() || options.force_hooks()));
}

// The first of the tensor's names that the store has, or nothing.
std::string Dispatched::Impl::stored_name(const NamedTensor& entry) const {
  if (store.find(entry.name) != nullptr) return entry.name;
  if (const auto names = tied.find(entry.name); names != tied.end()) {
    for (const std::string& name : names->second) {
      if (store.find(name) != nullptr) return name;
    }
  }
  return {};
}

// Nobody else writes to the folders that weights come from.
void Dispatched::Impl::lock_folders() {
  std::set<std::filesystem::path> used;
  for (const auto& [name, entry] : store.entries()) {
    if (entry.file.extension() == ".dat") used.insert(entry.file.parent_path());
  }
  for (const std::filesystem::path& folder : used)
    folders.emplace_back(folder, big_model::FolderLock::Kind::use);
}

// Says where an offloaded weight is from now on, and sends one that stays to its device.
void Dispatched::Impl::settle(const NamedTensor& entry, bool is_buffer) {
  const Place place = place_for(entry.name);
  const auto values = [&](at::Device device) {
    if (!entry.tensor.is_meta()) return entry.tensor.detach().to(device);
    at::Tensor read = at::empty_like(entry.tensor, at::TensorOptions(device));
    if (read.numel() > 0) store.read(stored_name(entry), read);
    return read;
  };
  if (!is_offloaded(entry, is_buffer)) {
    const at::Device device = place.kind == Place::Kind::accelerator ? device_of(place) : main;
    if (entry.tensor.device() != device) {
      const at::Tensor there = values(device);
      intercept::replace_data(entry.tensor, there);
      if (entry.tensor.grad().defined())
        const_cast<at::Tensor&>(entry.tensor).mutable_grad() = entry.tensor.grad().to(device);
    }
    return;
  }
  Source source;
  if (place == Place::disk()) {
    source.stored_as = stored_name(entry);
    if (intercept::is_tagged(entry.tensor)) {
      intercept::replace_data(
          entry.tensor,
          at::empty_strided(entry.tensor.sizes(), entry.tensor.strides(), entry.tensor.options()));
    }
  } else {
    source.home = values(at::kCPU);
    if (!main.is_cpu() && !source.home.is_pinned()) source.home = source.home.pin_memory();
  }
  residency->set_source(entry.tensor, std::move(source));
  offloaded.push_back(entry);
}

std::vector<intercept::UnitPlan> Dispatched::Impl::units() const {
  std::unordered_set<const void*> waiting;
  for (const NamedTensor& entry : offloaded) waiting.insert(entry.tensor.unsafeGetTensorImpl());
  std::vector<intercept::UnitPlan> plans;
  const auto add = [&](const std::string& name, const std::vector<NamedTensor>& tensors) {
    std::map<at::ScalarType, std::vector<NamedTensor>> by_dtype;
    for (const NamedTensor& entry : tensors) {
      if (entry.tensor.defined() && waiting.erase(entry.tensor.unsafeGetTensorImpl()) > 0)
        by_dtype[entry.tensor.scalar_type()].push_back(entry);
    }
    for (auto& [dtype, group] : by_dtype) {
      std::int64_t bytes = 0;
      for (const NamedTensor& entry : group)
        bytes += static_cast<std::int64_t>(entry.tensor.nbytes());
      if (options.resident_limit() > 0 && bytes > options.resident_limit()) {
        for (const NamedTensor& entry : group) plans.push_back({entry.name, {entry}});
      } else {
        plans.push_back({name.empty() ? "(root)" : name, std::move(group)});
      }
    }
  };
  const auto gather = [](const auto& self, const ModuleNode& node,
                         std::vector<NamedTensor>& into) -> void {
    into.insert(into.end(), node.parameters.begin(), node.parameters.end());
    into.insert(into.end(), node.buffers.begin(), node.buffers.end());
    for (const ModuleNode& child : node.children) self(self, child, into);
  };
  const auto walk = [&](const auto& self, const ModuleNode& node) -> void {
    bool whole = false;
    for (const std::string& type : options.preload_module_classes()) {
      whole = whole || is_module_type(node.type, type);
    }
    std::vector<NamedTensor> tensors;
    if (whole) {
      gather(gather, node, tensors);
      return add(node.name, tensors);
    }
    tensors = node.parameters;
    tensors.insert(tensors.end(), node.buffers.begin(), node.buffers.end());
    add(node.name, tensors);
    for (const ModuleNode& child : node.children) self(self, child);
  };
  walk(walk, module.root());
  return plans;
}

void Dispatched::Impl::refuse_training(const NamedTensor& entry) {
  auto hook = std::make_unique<RefuseGradient>();
  hook->name = entry.name;
  hook->instead = std::move(torch::autograd::impl::post_acc_grad_hooks(entry.tensor));
  torch::autograd::impl::set_post_acc_grad_hooks(entry.tensor, std::move(hook));
  refusing.push_back(entry);
}

void Dispatched::Impl::release_hooks() {
  for (const NamedTensor& entry : refusing) {
    auto& hook = torch::autograd::impl::post_acc_grad_hooks(entry.tensor);
    if (auto* const refusing_one = dynamic_cast<RefuseGradient*>(hook.get()))
      hook = std::exchange(refusing_one->instead, nullptr);
  }
  refusing.clear();
}

Dispatched::Dispatched(ModuleRecord module, DeviceMap map, OffloadOptions options)
    : impl_(std::make_unique<Impl>(std::move(module), std::move(map), std::move(options))) {}

Dispatched::~Dispatched() {
  impl_->release_guards();
  if (!impl_->engine) return;
  const InternalOpsGuard internal;
  impl_->release_hooks();
  for (const NamedTensor& entry : impl_->offloaded) {
    const Source& source = impl_->residency->source(entry.tensor);
    intercept::replace_data(entry.tensor, source.home.defined()
                                              ? source.home
                                              : intercept::given_up(entry.tensor, kHandleGone));
  }
}

const DeviceMap& Dispatched::device_map() const noexcept { return impl_->map; }
at::Device Dispatched::main_device() const noexcept { return impl_->main; }

OffloadStatistics Dispatched::statistics() const {
  if (!impl_->engine) return {};
  const intercept::EngineStatistics engine = impl_->engine->statistics();
  const OffloadResidency::Counts counts = impl_->residency->counts();
  return {engine.brought, engine.prefetched, counts.brought_bytes, counts.read_bytes,
          engine.peak_resident_bytes};
}

void Dispatched::reset_statistics() {
  if (!impl_->engine) return;
  impl_->engine->reset_statistics();
  impl_->residency->reset_counts();
}

void Dispatched::track(tracking::MemoryTracker* tracker) { impl_->residency->track(tracker); }

void Dispatched::remove_offload() {
  if (!impl_->engine) {
    impl_->release_guards();
    impl_->align.reset();
    return;
  }
  std::int64_t needed = 0;
  for (const NamedTensor& entry : impl_->offloaded) {
    if (!impl_->residency->source(entry.tensor).home.defined())
      needed += static_cast<std::int64_t>(entry.tensor.nbytes());
  }
  if (const std::int64_t free = available_memory(at::kCPU); needed > free) {
    throw OutOfMemoryError(text::concat("The weights on disk need ", text::format_bytes(needed),
                                        " of memory and ", text::format_bytes(free),
                                        " are free, so the offloading cannot be ended."));
  }
  impl_->engine->end_pass();
  const InternalOpsGuard internal;
  std::vector<at::Tensor> values;
  for (const NamedTensor& entry : impl_->offloaded)
    values.push_back(impl_->residency->whole(entry.tensor));
  impl_->release_guards();
  impl_->release_hooks();
  for (std::size_t i = 0; i < values.size(); ++i)
    intercept::replace_data(impl_->offloaded[i].tensor, values[i]);
  impl_->engine.reset();
  impl_->align.reset();
  impl_->folders.clear();
}

struct Dispatched::Forward::State {
  Impl* module;
  bool inference;
  std::optional<at::Device> input;
  std::optional<intercept::Region> region;
  int exceptions;  // on their way when it began
};

Dispatched::Forward::Forward(Dispatched& module)
    : state_(new State{
          module.impl_.get(), !at::GradMode::is_enabled(), {}, {}, std::uncaught_exceptions()}) {
  Impl& impl = *state_->module;
  if (impl.engine) {
    // A pass is a forward, with the backward that may follow it: it ends when the next begins.
    impl.engine->end_pass();
    impl.engine->begin_pass(state_->inference ? Engine::Pass::inference : Engine::Pass::training);
  }
  if (impl.align) state_->region.emplace(*impl.align);
}

Dispatched::Forward::~Forward() {
  state_->region.reset();
  Impl& impl = *state_->module;
  if (!impl.engine) return;
  try {
    if (state_->inference) impl.engine->end_pass();
    impl.residency->rest();
  } catch (const std::exception& error) {
    // Weights that were fetched ahead and not used. The forward is over, or ends with an error that
    // says the same.
    if (std::uncaught_exceptions() > state_->exceptions) return;
    log::warning(text::concat("After the forward of a dispatched module: ", describe(error)));
  }
}

void Dispatched::Forward::sees(const at::Tensor& input) {
  if (!state_->input && input.defined()) state_->input = input.device();
}

void Dispatched::Forward::sees(const c10::IValue& input) {
  input.visit([&](const c10::IValue& value) {
    if (value.isTensor()) sees(value.toTensor());
    return false;
  });
}

bool Dispatched::Forward::moves() const { return state_->module->align && state_->input; }

at::Tensor Dispatched::Forward::back(const at::Tensor& result) const {
  const intercept::Below below;
  return result.to(*state_->input);
}

c10::IValue Dispatched::Forward::back(const c10::IValue& result) const {
  const intercept::Below below;
  return sent(result, *state_->input);
}

struct CpuOffloadHook::State {
  ModuleRecord module;
  at::Device device;
  std::optional<CpuOffloadHook> previous;
  bool removed = false;
  bool brought = false;
};

CpuOffloadHook::CpuOffloadHook(ModuleRecord module, at::Device execution_device,
                               std::optional<CpuOffloadHook> previous)
    : state_(new State{std::move(module), big_model::existing_device(execution_device),
                       std::move(previous)}) {
  state_->module.to(at::kCPU);
}

at::Tensor CpuOffloadHook::sent(const at::Tensor& input) const {
  return state_->removed ? input : input.to(state_->device);
}

c10::IValue CpuOffloadHook::sent(const c10::IValue& input) const {
  return state_->removed ? input : accelerate::sent(input, state_->device);
}

void CpuOffloadHook::bring() const {
  if (state_->removed) return;
  if (state_->previous) state_->previous->offload();
  if (!state_->brought) state_->module.to(state_->device);
  state_->brought = true;
}

void CpuOffloadHook::offload() const {
  if (state_->removed) return;
  state_->module.to(at::kCPU);
  state_->brought = false;
}

void CpuOffloadHook::remove() const { state_->removed = true; }

}  // namespace accelerate
