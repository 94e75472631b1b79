#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <big_model/huge_pages.hpp>
#include <big_model/offload_residency.hpp>
#include <big_model/parts.hpp>
#include <intercept/internal_ops.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <exception>

namespace accelerate::big_model {

using intercept::Unit;
using intercept::UnitParameter;
using Clock = std::chrono::steady_clock;

// Small enough for two threads to end together, large enough to cost nothing.
constexpr std::int64_t kPieceBytes = std::int64_t{4} << 20;

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

std::vector<OffloadResidency::Piece> OffloadResidency::cut(const Unit& unit,
                                                           const at::Tensor& buffer,
                                                           std::int64_t most_bytes) const {
  std::vector<Piece> pieces;
  for (const UnitParameter& weight : unit.parameters()) {
    const Source& from = source(weight.parameter);
    for_parts(Unit::over(buffer, weight),
              most_bytes / static_cast<std::int64_t>(buffer.element_size()),
              [&](std::int64_t begin, const at::Tensor& part) {
                pieces.push_back({&from, begin, part});
              });
  }
  return pieces;
}

void OffloadResidency::fill(const Piece& piece, OpenFiles& files) {
  const auto& [from, begin, part] = piece;
  if (from->home.defined()) {
    part.copy_(same_part(from->home, begin, part), /*non_blocking=*/true);
    return;
  }
  const WeightStore::Entry& stored = *store_.find(from->stored_as);
  const io::File* file = nullptr;
  try {
    file = &files.at(stored.file);
  } catch (const CheckpointError&) {
    std::throw_with_nested(CheckpointError(
        text::concat("The offloaded weight '", from->stored_as, "' cannot be read: the file ",
                     stored.file,
                     " cannot be opened any more. It must stay where it is while the module is "
                     "used; put it back, or load the module again."),
        stored.file.string()));
  }
  stored.read(*file, from->stored_as, begin, part);
  const std::lock_guard lock(mutex_);
  counts_.read_bytes += part.numel() * static_cast<std::int64_t>(c10::elementSize(stored.dtype));
}

std::shared_ptr<Bringer::Job> OffloadResidency::start_job(const Unit& unit,
                                                          const at::Tensor& buffer) {
  // Opened anew for each unit, so that a file that is another by now is found out.
  auto files = std::make_shared<OpenFiles>();
  if (device_.is_cpu()) {
    auto pieces = cut(unit, buffer, kPieceBytes);
    const std::size_t count = pieces.size();
    return bringer_.start(count, [this, files, pieces = std::move(pieces)](std::size_t i) {
      fill(pieces[i], *files);
    });
  }
  auto pieces = cut(unit, buffer, unit.storage().bytes());
  return bringer_.start(1, [this, files, pieces = std::move(pieces)](std::size_t) {
    for (const Piece& piece : pieces) fill(piece, *files);
  });
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
  const auto asked = Clock::now();
  auto job = start_job(unit, buffer);
  const std::lock_guard lock(mutex_);
  jobs_[unit.index()] = std::move(job);
  counts_.brought_bytes += unit.storage().bytes();
  if (tracker_ != nullptr) {
    Visit& visit = visits_[unit.index()];
    report(visit);
    visit = {&unit, asked, {}, {}, false};
  }
  return buffer;
}

void OffloadResidency::finish_bring(const Unit& unit, const at::Tensor& contents) {
  std::shared_ptr<Bringer::Job> job;
  {
    const std::lock_guard lock(mutex_);
    job = std::move(jobs_.at(unit.index()));
    jobs_.erase(unit.index());
  }
  try {
    bringer_.finish(*job);
  } catch (const CheckpointError&) {
    // It may have been fetched ahead long ago: what counts is how the file is now.
    bringer_.finish(*start_job(unit, contents));
  }
  const std::lock_guard lock(mutex_);
  if (const auto visit = visits_.find(unit.index()); visit != visits_.end())
    visit->second.used = Clock::now();
}

void OffloadResidency::gone(const Unit& unit, at::Tensor contents) noexcept {
  const std::lock_guard lock(mutex_);
  if (const auto visit = visits_.find(unit.index()); visit != visits_.end()) {
    visit->second.gone = Clock::now();
    visit->second.over = true;
  }
  // Accelerators' allocators keep memory themselves.
  if (contents.is_cpu() && contents.use_count() == 1) spare_.push_back(std::move(contents));
}

void OffloadResidency::rest() {
  const std::lock_guard lock(mutex_);
  spare_.clear();
  for (auto& [unit, visit] : visits_) report(visit);
}

void OffloadResidency::repointed(const Unit& unit) {
  throw StateError(text::concat(
      "The module is dispatched: its weights come and go by the device map, so it cannot be moved "
      "or cast, nor a weight of '",
      unit.name(),
      "' be given other data. Call remove_offload() first, or dispatch it with another map."));
}

void OffloadResidency::will_write(const Unit&, const UnitParameter& parameter) {
  if (source(parameter.parameter).home.defined()) return;
  throw StateError(text::concat(
      "The weight '", parameter.name,
      "' was about to be written to, and it is offloaded to disk, where weights are only read. "
      "Keep it on the CPU or on a device, or call remove_offload() before it is changed."));
}

void OffloadResidency::write_back(const Unit&, const UnitParameter& parameter,
                                  const intercept::Written&, const at::Tensor& contents) {
  source(parameter.parameter).home.copy_(Unit::over(contents, parameter));
}

at::Tensor OffloadResidency::bring_full(const Unit& unit) {
  at::Tensor flat = at::empty({unit.layout().total()}, at::TensorOptions(unit.dtype()));
  for (const UnitParameter& parameter : unit.parameters())
    Unit::over(flat, parameter).copy_(whole(parameter.parameter));
  return flat;
}

void OffloadResidency::write_back_full(const Unit& unit, const at::Tensor& full) {
  for (const UnitParameter& parameter : unit.parameters())
    source(parameter.parameter).home.copy_(Unit::over(full, parameter));
}

OffloadResidency::Counts OffloadResidency::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void OffloadResidency::reset_counts() {
  const std::lock_guard lock(mutex_);
  counts_ = {};
}

void OffloadResidency::track(tracking::MemoryTracker* tracker) {
  const std::lock_guard lock(mutex_);
  tracker_ = tracker;
  visits_.clear();
}

void OffloadResidency::report(Visit& visit) {
  if (!visit.over) return;
  visit.over = false;
  const auto is_on_disk = [&](const UnitParameter& parameter) {
    return !source(parameter.parameter).home.defined();
  };
  const auto& parameters = visit.unit->parameters();
  const bool on_disk = std::any_of(parameters.begin(), parameters.end(), is_on_disk);
  tracker_->add({visit.unit->name(), on_disk ? "disk" : "cpu", device_.str(),
                 visit.unit->storage().bytes(), visit.asked, visit.used, visit.gone});
}

}  // namespace accelerate::big_model
