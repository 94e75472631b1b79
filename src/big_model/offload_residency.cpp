#include <accelerate/base/error.hpp>
#include <accelerate/base/json.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/file.hpp>
#include <big_model/huge_pages.hpp>
#include <big_model/offload_residency.hpp>
#include <intercept/quiet.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <nlohmann/json.hpp>

namespace accelerate::big_model {

using intercept::Unit;
using intercept::UnitParameter;

namespace {
// A trace that nobody ends must not eat the memory.
constexpr std::size_t kMostTraced = 1 << 20;
}  // namespace

OffloadResidency::OffloadResidency(at::Device device, WeightStore store)
    : device_(device), store_(std::move(store)), bringer_(device) {}

void OffloadResidency::set_source(const at::Tensor& weight, Source source) {
  sources_[weight.unsafeGetTensorImpl()] = std::move(source);
}

const Source& OffloadResidency::source(const at::Tensor& weight) const {
  return sources_.at(weight.unsafeGetTensorImpl());
}

at::Tensor OffloadResidency::whole(const at::Tensor& weight) const {
  const Source& from = source(weight);
  if (from.home.defined()) return from.home;
  at::Tensor values =
      at::empty_strided(weight.sizes(), weight.strides(), at::TensorOptions(weight.scalar_type()));
  use_huge_pages(values);
  store_.read(from.stored_as, values);
  return values;
}

void OffloadResidency::fill(const Unit& unit, const at::Tensor& buffer) {
  std::int64_t read = 0;
  for (const UnitParameter& parameter : unit.parameters()) {
    const Source& from = source(parameter.parameter);
    const at::Tensor place = Unit::over(buffer, parameter);
    if (from.home.defined()) {
      place.copy_(from.home, /*non_blocking=*/true);
    } else {
      store_.read(from.stored_as, place);
      read += store_.find(from.stored_as)->bytes();
    }
  }
  const std::lock_guard lock(mutex_);
  counts_.read_bytes += read;
  counts_.brought_bytes += unit.storage().bytes();
}

at::Tensor OffloadResidency::start_bring(const Unit& unit, at::Tensor reuse) {
  at::Tensor buffer = std::move(reuse);
  {
    // New memory costs a fault for each page, so weights of equal size take turns in one buffer.
    const std::lock_guard lock(mutex_);
    for (at::Tensor& spare : spare_) {
      if (buffer.defined() || spare.numel() != unit.layout().total() ||
          spare.scalar_type() != unit.compute_dtype())
        continue;
      buffer = std::move(spare);
    }
    spare_.clear();
  }
  if (!buffer.defined()) {
    buffer =
        at::empty({unit.layout().total()}, at::TensorOptions(device_).dtype(unit.compute_dtype()));
    use_huge_pages(buffer);
  }
  note(unit, Event::begins);
  auto job = bringer_.start([this, &unit, buffer] { fill(unit, buffer); });
  const std::lock_guard lock(mutex_);
  jobs_[unit.index()] = std::move(job);
  return buffer;
}

void OffloadResidency::finish_bring(const Unit& unit, const at::Tensor&) {
  std::shared_ptr<Bringer::Job> job;
  {
    const std::lock_guard lock(mutex_);
    job = std::move(jobs_.at(unit.index()));
    jobs_.erase(unit.index());
  }
  bringer_.finish(*job);
  note(unit, Event::here);
}

void OffloadResidency::gone(const Unit& unit, at::Tensor contents) noexcept {
  note(unit, Event::gone);
  const std::lock_guard lock(mutex_);
  // Accelerators' allocators keep memory themselves.
  if (contents.is_cpu() && contents.use_count() == 1) spare_.push_back(std::move(contents));
}

void OffloadResidency::rest() {
  const std::lock_guard lock(mutex_);
  spare_.clear();
}

void OffloadResidency::repointed(const Unit& unit) {
  throw StateError(text::concat(
      "The module is dispatched: its weights come and go by the device map, so it cannot be moved "
      "or cast, nor a weight of '",
      unit.name(),
      "' be given other data. Call remove_offload() first, or dispatch it with another map."));
}

void OffloadResidency::write_back(const Unit& unit, const UnitParameter& parameter,
                                  const at::Tensor& contents) {
  const Source& from = source(parameter.parameter);
  if (!from.home.defined()) {
    throw StateError(
        text::concat("The weight '", parameter.name,
                     "' was written to, and it is offloaded to disk, where weights are only read. "
                     "Keep it on the "
                     "CPU or on a device, or call remove_offload() before it is changed."));
  }
  from.home.copy_(Unit::over(contents, parameter));
}

at::Tensor OffloadResidency::bring_full(const Unit& unit) {
  at::Tensor flat = at::empty({unit.layout().total()}, at::TensorOptions(unit.dtype()));
  for (const UnitParameter& parameter : unit.parameters())
    Unit::over(flat, parameter).copy_(whole(parameter.parameter));
  return flat;
}

void OffloadResidency::write_back_full(const Unit& unit, const at::Tensor& full) {
  for (const UnitParameter& parameter : unit.parameters()) write_back(unit, parameter, full);
}

OffloadResidency::Counts OffloadResidency::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void OffloadResidency::reset_counts() {
  const std::lock_guard lock(mutex_);
  counts_ = {};
}

void OffloadResidency::trace(std::filesystem::path file) {
  const std::lock_guard lock(mutex_);
  trace_file_ = std::move(file);
  trace_start_ = std::chrono::steady_clock::now();
  traced_.clear();
}

void OffloadResidency::note(const Unit& unit, Event event) noexcept {
  const std::lock_guard lock(mutex_);
  if (!trace_file_ || traced_.size() >= kMostTraced) return;
  const auto since = std::chrono::steady_clock::now() - trace_start_;
  traced_.push_back(
      {std::chrono::duration_cast<std::chrono::nanoseconds>(since).count(), unit.index(), event});
}

void OffloadResidency::write_trace(const std::vector<std::unique_ptr<Unit>>& units) const {
  const std::lock_guard lock(mutex_);
  if (!trace_file_) return;
  Json modules = Json::array();
  for (const auto& unit : units)
    modules.push_back({{"name", unit->name()}, {"bytes", unit->storage().bytes()}});
  Json events = Json::array();
  for (const Traced& traced : traced_) {
    const char* what = traced.event == Event::begins ? "begins"
                       : traced.event == Event::here ? "here"
                                                     : "gone";
    events.push_back({traced.nanoseconds, traced.unit, what});
  }
  const Json all{{"clock", "nanoseconds since the trace began"},
                 {"main_device", device_.str()},
                 {"modules", std::move(modules)},
                 {"events", std::move(events)}};
  io::write_file(*trace_file_, all.dump());
}

}  // namespace accelerate::big_model
