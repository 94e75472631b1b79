#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/memory_kind.hpp>
#include <intercept/engine.hpp>
#include <intercept/internal_ops.hpp>

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace accelerate::intercept {

Engine::Engine(std::vector<UnitPlan> plans, const EngineOptions& options, Residency& residency,
               const std::function<void(const Unit&, at::Tensor)>& adopt)
    : residency_(residency), options_(options) {
  for (UnitPlan& plan : plans) {
    if (plan.parameters.empty())
      throw ShardingError(text::concat("The unit '", plan.name, "' has no parameters."));
    const at::Tensor& first = plan.parameters.front().tensor;
    // A complex number would lose its imaginary part.
    const bool cast = first.is_floating_point() && !plan.own_dtype;
    const at::ScalarType own = first.scalar_type();
    const at::ScalarType compute_dtype = cast ? options.compute_dtype.value_or(own) : own;
    const at::ScalarType reduce_dtype =
        cast ? options.reduce_dtype.value_or(compute_dtype) : compute_dtype;
    units_.push_back(std::make_unique<Unit>(
        static_cast<int>(units_.size()), plan.name, std::move(plan.parameters), options.parts,
        compute_dtype, reduce_dtype, options.compute_device.value_or(first.device()), *this));
    Entry entry;
    entry.unit = units_.back().get();
    entry.stay = plan.stay;
    entries_.push_back(std::move(entry));
    const std::int64_t bytes = units_.back()->storage().bytes();
    if (!options.oversized_alone && options.resident_limit > 0 && bytes > options.resident_limit) {
      throw ShardingError(
          text::concat("The unit '", plan.name, "' needs ", text::format_bytes(bytes),
                       " while it is used, and the "
                       "limit on parameters in memory is ",
                       text::format_bytes(options.resident_limit),
                       ". Raise the limit, or split the module into smaller units."));
    }
  }
  if (options.all_every_pass && options.resident_limit > 0) {
    std::int64_t all = 0;
    for (const auto& unit : units_) all += unit->storage().bytes();
    if (all > options.resident_limit) {
      throw ShardingError(
          text::concat("Every pass is to bring all units, which need ", text::format_bytes(all),
                       " together, and the limit on parameters in memory is ",
                       text::format_bytes(options.resident_limit), ". Raise the limit."));
    }
  }
  // Everything that can be refused has been; from here on the user's parameters change.
  const MemoryKindScope kind(MemoryKind::parameters);
  for (const auto& unit : units_) {
    if (adopt) adopt(*unit, unit->flatten());
    unit->tag();
  }
}

Engine::~Engine() = default;

bool Engine::stays(const Entry& entry) const noexcept {
  return entry.stay == Stay::always || (entry.stay == Stay::through_pass && pass_open_);
}

void Engine::start(Entry& entry, bool ahead) {
  const MemoryKindScope kind(MemoryKind::parameters);
  const bool has_memory = entry.buffer.defined();
  entry.buffer = residency_.start_bring(*entry.unit, std::move(entry.buffer));
  entry.state = State::arriving;
  if (!has_memory) resident_bytes_ += entry.unit->storage().bytes();
  statistics_.peak_resident_bytes = std::max(statistics_.peak_resident_bytes, resident_bytes_);
  ++statistics_.brought;
  if (ahead) ++statistics_.prefetched;
}

void Engine::start_all() {
  for (Entry& entry : entries_) {
    if (entry.state == State::absent) start(entry, /*ahead=*/true);
  }
}

void Engine::finish(Entry& entry) {
  at::Tensor buffer = std::move(entry.buffer);
  entry.buffer.reset();
  entry.state = State::absent;
  try {
    residency_.finish_bring(*entry.unit, buffer);
  } catch (...) {
    resident_bytes_ -= entry.unit->storage().bytes();
    throw;
  }
  entry.unit->storage().fill(std::move(buffer));
  entry.state = State::resident;
}

void Engine::bring_anew(Entry& entry) {
  // An operator of another thread still uses the memory. It sees the values change under it, as it
  // does where an optimizer steps in place.
  const at::Tensor buffer = residency_.start_bring(*entry.unit, entry.unit->storage().contents());
  residency_.finish_bring(*entry.unit, buffer);
  entry.stale = false;
  ++statistics_.brought;
}

void Engine::outdate(Entry& entry) {
  if (entry.unit->index() == current_) current_ = -1;
  let_go(entry);
  entry.stale = entry.state == State::resident;
}

void Engine::let_go(Entry& entry) {
  if (entry.state == State::arriving) finish(entry);  // its collective is under way on every rank
  if (entry.state != State::resident) return;
  entry.unit->storage().set_ready(false);
  if (!entry.unit->storage().want_empty()) empty(entry);
}

void Engine::empty(Entry& entry) {
  at::Tensor contents = entry.unit->storage().empty();
  if (pass_open_ && kind_ == Pass::training) residency_.leaving(*entry.unit, contents);
  entry.state = State::absent;
  entry.stale = false;
  if (entry.stay == Stay::always) {
    entry.buffer = std::move(contents);
  } else {
    resident_bytes_ -= entry.unit->storage().bytes();
    residency_.gone(*entry.unit, std::move(contents));
  }
}

std::vector<int> Engine::next_units() const {
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  return next_units(in_backward ? options_.prefetch_in_backward : options_.prefetch);
}

std::vector<int> Engine::next_units(int most) const {
  std::vector<int> next;
  if (!pass_open_ || most <= 0) return next;
  std::int64_t bytes = 0;
  for (const Entry& entry : entries_) {
    const bool counted =
        entry.unit->index() == current_ || (entry.state != State::absent && stays(entry));
    if (counted) bytes += entry.unit->storage().bytes();
  }
  trace().look_ahead([&](int index) {
    const Entry& entry = entries_[static_cast<std::size_t>(index)];
    if (index == current_ || std::find(next.begin(), next.end(), index) != next.end()) return true;
    if (stays(entry) && entry.state != State::absent) return true;
    bytes += entry.unit->storage().bytes();
    if (options_.resident_limit > 0 && bytes > options_.resident_limit) return false;
    next.push_back(index);
    return static_cast<int>(next.size()) < most;
  });
  return next;
}

void Engine::drop_all_but(const std::vector<int>& wanted) {
  for (Entry& entry : entries_) {
    const int index = entry.unit->index();
    if (index == current_ || stays(entry) ||
        std::find(wanted.begin(), wanted.end(), index) != wanted.end())
      continue;
    let_go(entry);
  }
}

void Engine::demand(TaggedStorage& storage) {
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  Entry& entry = entries_[static_cast<std::size_t>(storage.id())];
  storage.cancel_empty();
  if (storage.ready()) return;  // another thread was faster
  ++statistics_.demands;
  const bool staying = stays(entry);
  if (pass_open_ && !entry.in_trace) {
    trace().visit(storage.id());
    entry.in_trace = staying;
  }
  const int left = current_;
  if (!staying) {
    if (left >= 0) entries_[static_cast<std::size_t>(left)].unit->storage().set_ready(false);
    current_ = storage.id();
  }
  const std::vector<int> next = next_units();
  if (left != current_ && std::find(next.begin(), next.end(), left) != next.end())
    ++statistics_.kept;
  // Memory is given back before more is taken, and what is demanded is on its way before what is
  // not.
  drop_all_but(next);
  if (entry.state == State::absent) start(entry, /*ahead=*/false);
  for (const int index : next) {
    Entry& ahead = entries_[static_cast<std::size_t>(index)];
    if (ahead.state == State::absent) start(ahead, /*ahead=*/true);
  }
  if (entry.state == State::arriving) finish(entry);
  if (entry.stale) bring_anew(entry);
  storage.set_ready(true);
}

void Engine::unheld(TaggedStorage& storage) noexcept {
  const std::lock_guard lock(mutex_);
  if (!storage.empty_is_wanted()) return;
  Entry& entry = entries_[static_cast<std::size_t>(storage.id())];
  if (!storage.want_empty() && entry.state == State::resident) empty(entry);
}

// Calls `act(unit, parameter, begin, end)` for what a view can reach of each parameter, in elements
// of the unit.
template <class Act>
void Engine::for_parameters_in(const TaggedStorage& storage, const at::Tensor& view,
                               const Act& act) const {
  if (view.numel() == 0) return;
  const Unit& unit = *units_[static_cast<std::size_t>(storage.id())];
  std::int64_t last = view.storage_offset();
  for (std::int64_t d = 0; d < view.dim(); ++d) last += (view.size(d) - 1) * view.stride(d);
  // Views of another dtype, as view_as_real makes them, count in elements of their own.
  const auto size = static_cast<std::int64_t>(view.element_size());
  const auto own_size = static_cast<std::int64_t>(c10::elementSize(unit.compute_dtype()));
  const std::int64_t begin = view.storage_offset() * size / own_size;
  const std::int64_t end = ((last + 1) * size + own_size - 1) / own_size;
  for (const UnitParameter& parameter : unit.parameters()) {
    const std::int64_t from = std::max(begin, parameter.offset);
    const std::int64_t to = std::min(end, parameter.offset + parameter.elements);
    if (from < to) act(unit, parameter, from, to);
  }
}

void Engine::will_write(TaggedStorage& storage, const at::Tensor& view) {
  for_parameters_in(storage, view,
                    [&](const Unit& unit, const UnitParameter& parameter, std::int64_t,
                        std::int64_t) { residency_.will_write(unit, parameter); });
}

void Engine::written(TaggedStorage& storage, const at::Tensor& view, const std::string& op) {
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  const bool all = (op == "aten::copy_" || op == "aten::fill_" || op == "aten::zero_") &&
                   view.is_non_overlapping_and_dense();
  for_parameters_in(
      storage, view,
      [&](const Unit& unit, const UnitParameter& parameter, std::int64_t begin, std::int64_t end) {
        residency_.write_back(unit, parameter, {begin, end, all}, storage.contents());
      });
}

void Engine::repointed(TaggedStorage& storage) {
  residency_.repointed(*units_[static_cast<std::size_t>(storage.id())]);
}

void Engine::begin_pass(Pass kind) {
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  if (pass_open_) {
    if (options_.all_every_pass) start_all();  // a step has made them absent
    return;
  }
  kind_ = kind;
  pass_open_ = true;
  current_ = -1;
  for (Entry& entry : entries_) {
    entry.in_trace = false;
    entry.unit->storage().set_ready(false);
  }
  trace().begin();
  if (options_.all_every_pass) return start_all();
  const std::vector<int> next = next_units();
  drop_all_but(next);
  for (const int index : next) {
    Entry& ahead = entries_[static_cast<std::size_t>(index)];
    if (ahead.state == State::absent) start(ahead, /*ahead=*/true);
  }
}

void Engine::end_pass() {
  const std::lock_guard lock(mutex_);
  if (!pass_open_) return;
  const InternalOpsGuard internal;
  if (std::exchange(pass_forgotten_, false)) {
    trace().begin();
  } else {
    trace().end();
  }
  pass_open_ = false;
  current_ = -1;
  drop_all_but({});
}

void Engine::forget_pass() {
  const std::lock_guard lock(mutex_);
  pass_forgotten_ = pass_open_;
}

void Engine::abandon_pass() {
  {
    const std::lock_guard lock(mutex_);
    pass_forgotten_ = pass_open_;
    const InternalOpsGuard internal;
    for (Entry& entry : entries_) {
      if (entry.state != State::arriving) continue;
      try {
        finish(entry);
      } catch (const Error&) {
        // It never set out; finish has made it absent.
      }
    }
  }
  end_pass();
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  for (Entry& entry : entries_) let_go(entry);  // ranks may have come to different units
}

bool Engine::in_pass(Pass kind) const {
  const std::lock_guard lock(mutex_);
  return pass_open_ && kind_ == kind;
}

void Engine::prefetch(int units) {
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  for (const int index : next_units(units)) {
    Entry& ahead = entries_[static_cast<std::size_t>(index)];
    if (ahead.state == State::absent) start(ahead, /*ahead=*/true);
  }
}

void Engine::refresh() {
  for (const auto& unit : units_)
    refresh(*unit, std::vector<bool>(unit->parameters().size(), true));
}

void Engine::refresh(const Unit& unit, const std::vector<bool>& changed) {
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  outdate(entries_[static_cast<std::size_t>(unit.index())]);
  for (std::size_t p = 0; p < changed.size(); ++p) {
    if (changed[p]) unit.parameters()[p].parameter.unsafeGetTensorImpl()->bump_version();
  }
}

void Engine::restore() {
  if (restored_) return;
  end_pass();
  take_assigned();
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  for (const auto& unit : units_) unit->untag(residency_.bring_full(*unit));
  restored_ = true;
}

void Engine::take_assigned() {
  if (full_scopes_ > 0 || restored_) return;
  for (const auto& unit : units_) {
    if (!unit->is_tagged()) take_assigned(*unit);
  }
}

void Engine::take_assigned(Unit& unit) {
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  unit.take_assigned([&](const UnitParameter& parameter, const at::Tensor& flat) {
    const std::int64_t end = parameter.offset + parameter.elements;
    residency_.write_back(unit, parameter, {parameter.offset, end, /*all=*/true}, flat);
    outdate(entries_[static_cast<std::size_t>(unit.index())]);
  });
}

void Engine::check_tagged() {
  if (full_scopes_ > 0) return;
  for (const auto& unit : units_) {
    if (unit->is_tagged()) continue;
    take_assigned(*unit);
    unit->check_tagged();
  }
}

Engine::FullParameters::FullParameters(Engine& engine, bool write_back)
    : engine_(engine), write_back_(write_back) {
  if (engine_.full_scopes_ > 0)
    throw StateError("A scope of full parameters is open already; they do not nest.");
  engine_.take_assigned();
  const std::lock_guard lock(engine_.mutex_);
  const InternalOpsGuard internal;
  for (const auto& unit : engine_.units_) flats_.push_back(engine_.residency_.bring_full(*unit));
  for (std::size_t i = 0; i < flats_.size(); ++i) {
    accumulators_.push_back(engine_.units_[i]->accumulators());
    engine_.units_[i]->untag(flats_[i]);
  }
  ++engine_.full_scopes_;
}

Engine::FullParameters::~FullParameters() {
  const std::lock_guard lock(engine_.mutex_);
  const InternalOpsGuard internal;
  --engine_.full_scopes_;
  for (std::size_t i = 0; i < flats_.size(); ++i) {
    // Whoever wrote to a parameter has raised its version.
    if (write_back_) {
      engine_.outdate(engine_.entries_[i]);
      engine_.residency_.write_back_full(*engine_.units_[i], flats_[i]);
    }
    engine_.units_[i]->tag();
    engine_.units_[i]->set_accumulators(accumulators_[i]);
  }
}

std::vector<int> Engine::first_demands() const {
  const std::lock_guard lock(mutex_);
  std::vector<int> order;
  const auto add = [&](int index) {
    if (std::find(order.begin(), order.end(), index) == order.end()) order.push_back(index);
  };
  if (!options_.all_every_pass) {
    for (const int index : trace().visited()) add(index);
  }
  for (const auto& unit : units_) add(unit->index());
  return order;
}

std::uint64_t Engine::fingerprint() const {
  const std::lock_guard lock(mutex_);
  return trace().fingerprint();
}

EngineStatistics Engine::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

void Engine::reset_statistics() {
  const std::lock_guard lock(mutex_);
  statistics_ = {};
  statistics_.peak_resident_bytes = resident_bytes_;
}

}  // namespace accelerate::intercept
