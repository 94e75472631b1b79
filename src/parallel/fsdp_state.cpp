#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <intercept/internal_ops.hpp>
#include <parallel/fsdp_impl.hpp>
#include <parallel/state_names.hpp>

#include <algorithm>
#include <map>

namespace accelerate::parallel {

using intercept::Engine;
using intercept::InternalOpsGuard;
using intercept::Unit;
using intercept::UnitParameter;

namespace {

std::string flat_name(const Unit& unit) { return unit.name() + ".flat"; }

}  // namespace

std::vector<LocalTensor> Fsdp::shards() const {
  impl_->engine->take_assigned();
  impl_->wait_for_copies();  // a checkpoint is read right into them
  std::map<const void*, LocalTensor> found;
  for (const auto& unit : impl_->engine->units()) {
    const Impl::Part& part = impl_->parts[static_cast<std::size_t>(unit->index())];
    for (std::size_t p = 0; p < unit->parameters().size(); ++p) {
      const UnitParameter& own = unit->parameters()[p];
      found[own.parameter.unsafeGetTensorImpl()] = {own.name, part.placements[p], part.leaves[p]};
    }
  }
  std::vector<LocalTensor> all;
  for (LocalTensor& whole : Strategy::shards()) {  // those of ignored modules are whole
    const auto sharded = found.find(whole.tensor.unsafeGetTensorImpl());
    if (sharded == found.end()) {
      all.push_back(std::move(whole));
    } else {
      sharded->second.name = whole.name;
      all.push_back(std::move(sharded->second));
    }
  }
  return all;
}

std::vector<NamedTensor> Fsdp::state_dict(const StateDictOptions& options) const {
  impl_->require_sharded();
  impl_->begin_pass();
  impl_->engine->take_assigned();
  const InternalOpsGuard internal;
  const auto placed = [&](const at::Tensor& tensor) {
    return options.offload_to_cpu() ? tensor.detach().to(at::kCPU, /*non_blocking=*/false,
                                                         /*copy=*/true)
                                    : tensor.detach();
  };
  std::vector<NamedTensor> state;
  if (options.type() == StateDictType::local) {
    for (const auto& unit : impl_->engine->units())
      state.push_back(
          {flat_name(*unit), placed(impl_->parts[static_cast<std::size_t>(unit->index())].shard)});
  } else if (options.type() == StateDictType::sharded) {
    for (const LocalTensor& shard : shards()) state.push_back({shard.name, placed(shard.tensor)});
  } else {
    const bool wanted = !options.rank0_only() || rank() == 0;
    std::map<const void*, at::Tensor> whole;
    for (const auto& unit : impl_->engine->units()) {
      const at::Tensor flat = impl_->bring_full(*unit);
      if (!wanted) continue;
      for (const UnitParameter& own : unit->parameters())
        whole[own.parameter.unsafeGetTensorImpl()] = placed(Unit::over(flat, own));
    }
    if (!wanted) return {};
    for (const NamedTensor& entry : all_names(module_, module_.parameters())) {
      const auto found = whole.find(entry.tensor.unsafeGetTensorImpl());
      state.push_back({entry.name, found != whole.end() ? found->second : placed(entry.tensor)});
    }
  }
  for (const NamedTensor& entry : all_names(module_, module_.buffers()))
    state.push_back({entry.name, placed(entry.tensor)});
  return state;
}

void Fsdp::load_state_dict(const std::vector<NamedTensor>& state, const StateDictOptions& options,
                           bool strict) {
  impl_->require_sharded();
  impl_->begin_pass();
  impl_->engine->take_assigned();
  impl_->wait_for_copies();
  const InternalOpsGuard internal;
  const auto buffers = all_names(module_, module_.buffers());
  if (options.type() == StateDictType::full) {
    StateMatch match(state, all_names(module_, module_.parameters()), buffers, strict);
    for (const auto& unit : impl_->engine->units()) {
      const at::Tensor flat = impl_->bring_full(*unit);
      for (const UnitParameter& own : unit->parameters()) {
        if (const at::Tensor value = match.take(own.parameter); value.defined())
          Unit::over(flat, own).copy_(value);
      }
      impl_->write_back_full(*unit, flat);
    }
    match.copy_rest();
  } else {
    std::vector<NamedTensor> targets;
    if (options.type() == StateDictType::local) {
      for (const auto& unit : impl_->engine->units())
        targets.push_back(
            {flat_name(*unit), impl_->parts[static_cast<std::size_t>(unit->index())].shard});
    } else {
      for (const LocalTensor& shard : shards()) targets.push_back({shard.name, shard.tensor});
    }
    StateMatch(state, targets, buffers, strict).copy_rest();
  }
  impl_->refresh();
}

namespace {

struct FullScope {
  Engine::FullParameters parameters;
};

}  // namespace

std::shared_ptr<void> Fsdp::summon_full_params(bool write_back) {
  impl_->require_sharded();
  impl_->begin_pass();
  impl_->refresh_if_stepped();
  return std::shared_ptr<FullScope>(new FullScope{impl_->engine->full_parameters(write_back)});
}

void Fsdp::restore() {
  if (impl_->gradients != nullptr) impl_->begin_pass();
  if (impl_->gradients) impl_->gradients->settle();
  impl_->gradients.reset();
  impl_->engine->restore();
}

bool Fsdp::is_restored() const noexcept { return impl_->gradients == nullptr; }

}  // namespace accelerate::parallel
