#include "optim/parameter_lists.hpp"

#include <accelerate/base/log.hpp>
#include <accelerate/io/async_file.hpp>
#include <accelerate/optim/offloaded.hpp>

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/optim/serialize.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <unordered_map>
#include <utility>

namespace accelerate::optim {
namespace {

using io::AsyncFile;
using torch::optim::OptimizerParamGroup;

// A cut inside a parameter falls between vectors of the kernel, and so changes no bit.
constexpr std::int64_t kVectorBytes = 64;
constexpr std::int64_t kCut = AsyncFile::kAlignment;
constexpr std::size_t kSlots = 3;  // one is read, one computes, one is written

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The elements of a dense tensor in memory order.
at::Tensor flat(const at::Tensor& tensor) {
  return tensor.detach().as_strided({tensor.numel()}, {1}, tensor.storage_offset());
}

at::Tensor pinned_copy(const at::Tensor& source) {
  return at::empty(source.sizes(), source.options().device(at::kCPU).pinned_memory(true))
      .copy_(source, /*non_blocking=*/true);
}

/// The kinds of state, in the order of their sections in a store.
enum Kind : std::size_t { kExpAvg, kExpAvgSq, kMaxExpAvgSq, kParameter, kKinds };

void set(FusedAdamWParamState& state, std::size_t kind, at::Tensor tensor) {
  switch (kind) {
    case kExpAvg:
      state.exp_avg(std::move(tensor));
      break;
    case kExpAvgSq:
      state.exp_avg_sq(std::move(tensor));
      break;
    case kMaxExpAvgSq:
      state.max_exp_avg_sq(std::move(tensor));
      break;
    default:
      state.fp32_parameter(std::move(tensor));
  }
}
const at::Tensor& get(const FusedAdamWParamState& state, std::size_t kind) {
  switch (kind) {
    case kExpAvg:
      return state.exp_avg();
    case kExpAvgSq:
      return state.exp_avg_sq();
    case kMaxExpAvgSq:
      return state.max_exp_avg_sq();
    default:
      return state.fp32_parameter();
  }
}

/// A parameter that has a place in a store, and what this step does with it.
struct Entry {
  at::Tensor parameter;
  at::ScalarType dtype;  ///< of its state
  bool has_fp32 = false;
  std::int64_t offset = 0;  ///< bytes into each section

  const FusedAdamWOptions* options = nullptr;  ///< null: no gradient this time
  at::Tensor gradient;
  FusedAdamWParamState* state = nullptr;

  std::int64_t item() const { return static_cast<std::int64_t>(c10::elementSize(dtype)); }
};

/// A run of elements of one entry that lies in one block.
struct Piece {
  Entry* entry;
  std::int64_t begin, count;  ///< elements
};

struct Block {
  std::int64_t begin = 0, bytes = 0;  ///< in each section
  std::vector<Piece> pieces;
};

/// The state of the parameters that were there at one first step. Each kind of state has a section,
/// all laid out alike.
struct Store {
  std::vector<std::unique_ptr<Entry>> entries;
  std::vector<Block> blocks;
  std::array<int, kKinds> section_of{-1, -1, -1, -1};
  std::int64_t sections = 0, section_bytes = 0, block_bytes = 0;
  // On disk:
  std::optional<AsyncFile> file;
  std::shared_ptr<std::byte> map;

  bool has(std::size_t kind) const { return section_of[kind] >= 0; }
  std::int64_t position(std::size_t kind, std::int64_t begin) const {
    return section_of[kind] * section_bytes + begin;
  }
};

/// What belongs to a block on its way through a step.
struct Slot {
  std::unique_ptr<std::byte, decltype(&std::free)> memory{nullptr, std::free};
  std::vector<AsyncFile::Ticket> reads, writes;
  /// Host copies of what a GPU has, by piece; undefined for what is on the CPU.
  std::vector<at::Tensor> parameters, gradients;
  std::vector<c10::Event> copied;
};

OffloadOptions checked(OffloadOptions options) {
  if (options.place() == StatePlace::disk && options.folder().empty()) {
    throw ConfigError(
        "OffloadedAdamW was told to keep its state on disk, and not where. Name a folder on a fast "
        "local disk: OffloadOptions().place(StatePlace::disk).folder(...).");
  }
  if (options.block_bytes() < 1)
    throw ConfigError(text::concat("OffloadedAdamW was given blocks of ", options.block_bytes(),
                                   " bytes. Some MiB work well."));
  return options;
}

}  // namespace

struct OffloadedAdamW::Impl {
  explicit Impl(OffloadOptions offload) : options(checked(std::move(offload))) {}

  OffloadOptions options;
  // Before the stores, whose files may still be at work in them when a step has thrown.
  std::array<Slot, kSlots> slots;
  std::int64_t slot_bytes = 0;
  std::vector<std::unique_ptr<Store>> stores;
  std::unordered_map<void*, std::pair<Store*, Entry*>> placed;
  bool broken = false;

  bool on_disk() const { return options.place() == StatePlace::disk; }

  /// Gives a place to every parameter that has none.
  void place(const std::vector<OptimizerParamGroup>& groups) {
    auto store = std::make_unique<Store>();
    bool amsgrad = false, fp32 = false;
    std::int64_t end = 0;
    for (const auto& group : groups) {
      for (const at::Tensor& parameter : group.params()) {
        // Frozen ones get a place when they get a gradient.
        if ((!parameter.requires_grad() && !parameter.grad().defined()) || parameter.is_complex() ||
            !parameter.is_non_overlapping_and_dense() ||
            placed.count(parameter.unsafeGetTensorImpl()) > 0)
          continue;
        auto entry = std::make_unique<Entry>();
        entry->parameter = parameter;
        entry->has_fp32 =
            options.fp32_parameters() && c10::isReducedFloatingType(parameter.scalar_type());
        entry->dtype = entry->has_fp32 ? at::kFloat : parameter.scalar_type();
        entry->offset = end;
        end = round_up(end + parameter.numel() * entry->item(), kVectorBytes);
        amsgrad |= static_cast<const FusedAdamWOptions&>(group.options()).amsgrad();
        fp32 |= entry->has_fp32;
        store->entries.push_back(std::move(entry));
      }
    }
    if (store->entries.empty()) return;
    for (std::size_t kind : {kExpAvg, kExpAvgSq, kMaxExpAvgSq, kParameter}) {
      if (kind == kMaxExpAvgSq ? amsgrad : kind == kParameter ? fp32 : true)
        store->section_of[kind] = static_cast<int>(store->sections++);
    }
    store->section_bytes = round_up(end, kCut);
    store->block_bytes = round_up(options.block_bytes() / store->sections, kCut);
    cut(*store);
    if (on_disk() && end > 0) open(*store);
    for (const auto& entry : store->entries)
      placed[entry->parameter.unsafeGetTensorImpl()] = {store.get(), entry.get()};
    stores.push_back(std::move(store));
  }

  static void cut(Store& store) {
    for (std::int64_t begin = 0; begin < store.section_bytes; begin += store.block_bytes) {
      store.blocks.push_back({begin, std::min(store.block_bytes, store.section_bytes - begin), {}});
    }
    for (const auto& entry : store.entries) {
      const std::int64_t item = entry->item(), bytes = entry->parameter.numel() * item;
      for (std::int64_t at = 0; at < bytes;) {
        Block& block = store.blocks[(entry->offset + at) / store.block_bytes];
        const std::int64_t until = std::min(bytes, block.begin + block.bytes - entry->offset);
        block.pieces.push_back({entry.get(), at / item, (until - at) / item});
        at = until;
      }
    }
  }

  void open(Store& store) {
    const std::int64_t bytes = store.sections * store.section_bytes;
    store.file.emplace(AsyncFile::scratch(options.folder(), static_cast<std::uint64_t>(bytes),
                                          io::AsyncFileOptions().direct(options.direct_io())));
    store.map = store.file->map();
    const std::int64_t needed = store.sections * std::min(store.block_bytes, store.section_bytes);
    if (needed > slot_bytes) {
      for (Slot& slot : slots) {
        slot.memory.reset(static_cast<std::byte*>(
            std::aligned_alloc(AsyncFile::kAlignment, static_cast<std::size_t>(needed))));
        if (slot.memory == nullptr)
          throw OutOfMemoryError(text::concat("There is no memory for a block of ",
                                              text::format_bytes(needed), " of optimizer state."));
      }
      slot_bytes = needed;
    }
    log::info(text::concat(
        "Optimizer state is on disk in ", options.folder(), ": ", text::format_bytes(bytes),
        " a process, ", text::format_bytes(static_cast<std::int64_t>(kSlots) * slot_bytes),
        " of it in memory at once, moved by ",
        store.file->engine() == io::AsyncEngine::io_uring ? "io_uring" : "threads",
        store.file->direct() ? " past the page cache." : " through the page cache."));
  }

  /// The place of a kind of state as a tensor like the parameter.
  static at::Tensor mapped(const Store& store, const Entry& entry, std::size_t kind) {
    const auto& like = entry.parameter;
    return at::from_blob(
        store.map.get() + store.position(kind, entry.offset), like.sizes(), like.strides(),
        [map = store.map](void*) {}, at::TensorOptions().dtype(entry.dtype));
  }

  /// Sees that a parameter's state is where it belongs: made if there is none, moved there if it
  /// was loaded or replaced.
  void settle(const Store& store, const Entry& entry, FusedAdamWParamState& state, bool amsgrad) {
    if (amsgrad && !store.has(kMaxExpAvgSq)) {
      throw StateError(
          "amsgrad was turned on after OffloadedAdamW's first step, when its state had been given "
          "its place. Turn it on before.");
    }
    if (!state.step().defined())
      state.step(at::zeros({}, at::TensorOptions().dtype(at::kFloat)));
    else if (!state.step().is_cpu())
      state.step(state.step().to(at::kCPU));
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      if (kind == kMaxExpAvgSq ? !amsgrad : kind == kParameter && !entry.has_fp32) continue;
      const at::Tensor& present = get(state, kind);
      const bool fits = present.defined() && present.is_cpu() &&
                        present.scalar_type() == entry.dtype &&
                        present.strides() == entry.parameter.strides();
      at::Tensor home;
      if (store.map != nullptr && entry.parameter.numel() > 0) {
        home = mapped(store, entry, kind);
        if (fits && present.data_ptr() == home.data_ptr()) continue;
      } else {
        if (fits) continue;
        home = at::empty_strided(entry.parameter.sizes(), entry.parameter.strides(),
                                 at::TensorOptions().dtype(entry.dtype));
      }
      if (present.defined()) {
        home.copy_(present);
      } else if (kind == kParameter) {
        home.copy_(entry.parameter.detach());
      } else {
        home.zero_();
      }
      set(state, kind, std::move(home));
    }
  }

  void forget_step() {
    for (const auto& store : stores) {
      for (const auto& entry : store->entries) {
        entry->options = nullptr;
        entry->gradient.reset();
      }
    }
  }

  /// Waits for what a step that failed left in flight.
  void abandon() noexcept {
    for (Slot& slot : slots) {
      slot.reads.clear();
      slot.writes.clear();
      slot.parameters.clear();
      slot.gradients.clear();
      slot.copied.clear();
    }
    for (const auto& store : stores) {
      try {
        if (store->file) store->file->wait_all();
      } catch (const std::exception& error) {
        log::error(describe(error));
      }
    }
    forget_step();
  }

  void run(Store& store) {
    for (const auto& entry : store.entries) {
      if (entry->options != nullptr) *entry->state->step().mutable_data_ptr<float>() += 1.0F;
    }
    std::vector<Block*> active;
    for (Block& block : store.blocks) {
      if (std::any_of(block.pieces.begin(), block.pieces.end(),
                      [](const Piece& piece) { return piece.entry->options != nullptr; }))
        active.push_back(&block);
    }
    for (std::size_t i = 0; i < active.size(); ++i) {
      if (i == 0) begin(store, *active[0], slots[0]);
      if (i + 1 < active.size()) begin(store, *active[i + 1], slots[(i + 1) % kSlots]);
      finish(store, *active[i], slots[i % kSlots]);
    }
    if (store.file) {
      for (Slot& slot : slots) wait(store, slot.writes);
    }
  }

  static void wait(Store& store, std::vector<AsyncFile::Ticket>& tickets) {
    for (const auto ticket : std::exchange(tickets, {})) store.file->wait(ticket);
  }

  std::span<std::byte> memory(const Store& store, const Slot& slot, std::size_t kind,
                              const Block& block) const {
    return {slot.memory.get() +
                store.section_of[kind] * std::min(store.block_bytes, store.section_bytes),
            static_cast<std::size_t>(block.bytes)};
  }

  /// Starts to bring what a block needs.
  void begin(Store& store, const Block& block, Slot& slot) {
    if (store.file) {
      wait(store, slot.writes);
      for (std::size_t kind = 0; kind < kKinds; ++kind) {
        if (!store.has(kind)) continue;
        slot.reads.push_back(
            store.file->read(static_cast<std::uint64_t>(store.position(kind, block.begin)),
                             memory(store, slot, kind, block)));
      }
    }
    slot.parameters.assign(block.pieces.size(), {});
    slot.gradients.assign(block.pieces.size(), {});
    std::vector<c10::Device> devices;
    for (std::size_t i = 0; i < block.pieces.size(); ++i) {
      const auto& [entry, from, count] = block.pieces[i];
      if (entry->options == nullptr || entry->parameter.is_cpu()) continue;
      slot.gradients[i] = pinned_copy(flat(entry->gradient).narrow(0, from, count));
      if (!entry->has_fp32)
        slot.parameters[i] = pinned_copy(flat(entry->parameter).narrow(0, from, count));
      const auto device = entry->parameter.device();
      if (std::find(devices.begin(), devices.end(), device) == devices.end())
        devices.push_back(device);
    }
    for (const auto& device : devices) {
      slot.copied.emplace_back(device.type());
      slot.copied.back().record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    }
  }

  struct Lists {
    std::vector<at::Tensor> parameters, gradients, states[kMaxExpAvgSq + 1], steps;
  };

  /// Steps a block whose parts `begin` asked for, and starts to bring the results home.
  void finish(Store& store, const Block& block, Slot& slot) {
    if (store.file) wait(store, slot.reads);
    for (const c10::Event& event : slot.copied) event.synchronize();
    slot.copied.clear();

    // One kernel call for each run of pieces that have options and dtype in common.
    const FusedAdamWOptions* options_of_run = nullptr;
    at::ScalarType dtype_of_run{};
    Lists lists;
    const auto flush = [&] {
      if (lists.parameters.empty()) return;
      const auto& o = *options_of_run;
      at::_fused_adamw_(lists.parameters, lists.gradients, lists.states[kExpAvg],
                        lists.states[kExpAvgSq], lists.states[kMaxExpAvgSq], lists.steps, o.lr(),
                        std::get<0>(o.betas()), std::get<1>(o.betas()), o.weight_decay(), o.eps(),
                        o.amsgrad(), o.maximize());
      lists = {};
    };
    std::vector<std::pair<at::Tensor, at::Tensor>> results;
    for (std::size_t i = 0; i < block.pieces.size(); ++i) {
      const auto& [entry, from, count] = block.pieces[i];
      if (entry->options == nullptr) continue;
      if (entry->options != options_of_run || entry->dtype != dtype_of_run) {
        flush();
        options_of_run = entry->options;
        dtype_of_run = entry->dtype;
      }
      const auto state = [&, &entry = entry, from = from, count = count](std::size_t kind) {
        if (!store.file) return flat(get(*entry->state, kind)).narrow(0, from, count);
        std::byte* at = memory(store, slot, kind, block).data() + entry->offset +
                        from * entry->item() - block.begin;
        return at::from_blob(at, {count}, at::TensorOptions().dtype(entry->dtype));
      };
      at::Tensor gradient = slot.gradients[i];
      if (!gradient.defined()) gradient = flat(entry->gradient).narrow(0, from, count);
      const at::Tensor home = flat(entry->parameter).narrow(0, from, count);
      at::Tensor parameter = entry->has_fp32 ? state(kParameter) : slot.parameters[i];
      if (parameter.defined()) {
        results.emplace_back(home, parameter);
      } else {
        parameter = home;
      }
      lists.parameters.push_back(std::move(parameter));
      lists.gradients.push_back(gradient.to(entry->dtype));
      lists.states[kExpAvg].push_back(state(kExpAvg));
      lists.states[kExpAvgSq].push_back(state(kExpAvgSq));
      if (entry->options->amsgrad()) lists.states[kMaxExpAvgSq].push_back(state(kMaxExpAvgSq));
      lists.steps.push_back(entry->state->step());
    }
    flush();

    for (const auto& [home, result] : results) {
      if (home.is_cpu()) {
        home.copy_(result);
        continue;
      }
      // Rounded here: fewer bytes to send. The allocator of pinned memory keeps it until it is
      // sent.
      const at::Tensor sent =
          result.scalar_type() == home.scalar_type() && result.is_pinned()
              ? result
              : at::empty(result.sizes(), home.options().device(at::kCPU).pinned_memory(true))
                    .copy_(result);
      home.copy_(sent, /*non_blocking=*/true);
    }
    slot.parameters.clear();
    slot.gradients.clear();
    if (!store.file) return;
    for (std::size_t kind = 0; kind < kKinds; ++kind) {
      if (!store.has(kind)) continue;
      slot.writes.push_back(
          store.file->write(static_cast<std::uint64_t>(store.position(kind, block.begin)),
                            memory(store, slot, kind, block)));
    }
  }
};

OffloadedAdamW::OffloadedAdamW(const std::vector<OptimizerParamGroup>& groups,
                               FusedAdamWOptions defaults, OffloadOptions offload)
    : FusedAdamW(groups, std::move(defaults)), impl_(std::make_unique<Impl>(std::move(offload))) {}

OffloadedAdamW::OffloadedAdamW(std::vector<at::Tensor> parameters, FusedAdamWOptions defaults,
                               OffloadOptions offload)
    : OffloadedAdamW(std::vector<OptimizerParamGroup>{OptimizerParamGroup(std::move(parameters))},
                     std::move(defaults), std::move(offload)) {}

OffloadedAdamW::~OffloadedAdamW() = default;
OffloadedAdamW::OffloadedAdamW(OffloadedAdamW&&) noexcept = default;

at::Tensor OffloadedAdamW::step(LossClosure closure) {
  const at::NoGradGuard no_grad;
  if (impl_->broken) {
    throw StateError(
        "An earlier step of OffloadedAdamW ended in an error, with some parameters updated and "
        "others not. Go on from a checkpoint.");
  }
  at::Tensor loss = loss_of(closure);
  const at::Tensor found_inf = std::exchange(found_inf_, {});
  if (found_inf.defined() && found_inf.item<float>() > 0.0F) return loss;

  // Throws before anything has changed.
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients;
  for (const auto& group : param_groups_) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined())
        gradients.emplace_back(parameter,
                               gradient_laid_out_as(parameter, parameter.grad(), "OffloadedAdamW"));
    }
  }
  impl_->place(param_groups_);
  impl_->forget_step();
  auto next = gradients.begin();
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const FusedAdamWOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      const auto [store, entry] = impl_->placed.at(parameter.unsafeGetTensorImpl());
      auto& slot = state_[parameter.unsafeGetTensorImpl()];
      if (slot == nullptr) slot = std::make_unique<FusedAdamWParamState>();
      entry->state = static_cast<FusedAdamWParamState*>(slot.get());
      impl_->settle(*store, *entry, *entry->state, options.amsgrad());
      entry->gradient = std::move((next++)->second);
      entry->options = &options;
    }
  }
  impl_->broken = true;
  try {
    for (const auto& store : impl_->stores) impl_->run(*store);
  } catch (...) {
    impl_->abandon();
    throw;
  }
  impl_->broken = false;
  impl_->forget_step();
  return loss;
}

void OffloadedAdamW::load(torch::serialize::InputArchive& archive) {
  FusedAdamW::load(archive);
  const at::NoGradGuard no_grad;
  impl_->place(param_groups_);
  for (const auto& group : param_groups_) {
    const auto& options = static_cast<const FusedAdamWOptions&>(group.options());
    for (const at::Tensor& parameter : group.params()) {
      const auto found = state_.find(parameter.unsafeGetTensorImpl());
      const auto place = impl_->placed.find(parameter.unsafeGetTensorImpl());
      if (found == state_.end() || place == impl_->placed.end()) continue;
      impl_->settle(*place->second.first, *place->second.second,
                    static_cast<FusedAdamWParamState&>(*found->second), options.amsgrad());
    }
  }
  impl_->broken = false;
}

const OffloadOptions& OffloadedAdamW::offload() const noexcept { return impl_->options; }

std::int64_t OffloadedAdamW::disk_bytes() const noexcept {
  std::int64_t bytes = 0;
  for (const auto& store : impl_->stores)
    bytes += store->file ? static_cast<std::int64_t>(store->file->size()) : 0;
  return bytes;
}

std::int64_t OffloadedAdamW::block_memory_bytes() const noexcept {
  return static_cast<std::int64_t>(kSlots) * impl_->slot_bytes;
}

}  // namespace accelerate::optim
