#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/tracking/memory_tracker.hpp>
#include <tracking/sample.hpp>

#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <condition_variable>
#include <ctime>
#include <map>
#include <mutex>
#include <thread>

namespace accelerate::tracking {
namespace {

using Clock = std::chrono::steady_clock;

std::string iso_time(std::chrono::system_clock::time_point time) {
  const std::time_t seconds = std::chrono::system_clock::to_time_t(time);
  std::tm parts{};
  gmtime_r(&seconds, &parts);
  char buffer[32];
  std::strftime(buffer, sizeof buffer, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return buffer;
}

/// Keeps at most `capacity` items of a stream of any length, evenly: one in `stride`, and when they
/// become too many, half of them.
template <class Item>
class Thinned {
 public:
  // Even, so that what is kept stays evenly spaced when every second item goes.
  explicit Thinned(std::int64_t capacity) : capacity_(static_cast<std::size_t>(capacity) & ~1ULL) {}

  /// `merge(into, item)` takes in an item that has no place of its own.
  template <class Merge>
  void add(Item item, const Merge& merge) {
    const bool own_place = seen_++ % stride_ == 0;
    if (!own_place) {
      merge(items_.back(), item);
      return;
    }
    if (items_.size() == capacity_) {
      for (std::size_t i = 0; 2 * i < items_.size(); ++i) {
        if (2 * i + 1 < items_.size()) merge(items_[2 * i], items_[2 * i + 1]);
        if (i > 0) items_[i] = std::move(items_[2 * i]);
      }
      items_.resize((items_.size() + 1) / 2);
      stride_ *= 2;
    }
    items_.push_back(std::move(item));
  }
  const std::vector<Item>& items() const noexcept { return items_; }
  std::int64_t stride() const noexcept { return stride_; }

 private:
  std::size_t capacity_;
  std::vector<Item> items_;
  std::int64_t seen_ = 0;
  std::int64_t stride_ = 1;
};

/// The peaks of a stretch of time.
struct Peaks {
  PeakBytes tensors;
  std::int64_t device = -1;
  void merge(const Peaks& other) {
    tensors.merge(other.tensors);
    device = std::max(device, other.device);
  }
};

struct RegionRecord {
  std::string path;
  int thread = 0;
  std::int64_t begin_ns = 0;
  std::int64_t end_ns = 0;
  Peaks peaks;
};

struct RegionTotal {
  std::int64_t count = 0;
  std::int64_t total_ns = 0;
  Peaks peaks;
};

Json kinds_json(const BytesByKind& bytes) {
  Json json = Json::object();
  for (const MemoryKind kind : kMemoryKinds) json[std::string(to_string(kind))] = bytes[kind];
  return json;
}

Json number_or_null(std::int64_t value) { return value < 0 ? Json(nullptr) : Json(value); }

Json peaks_json(const Peaks& peaks) {
  Json json = Json::object();
  json["tensors"] = counts_cpu_tensors() ? Json(peaks.tensors.total) : Json(nullptr);
  json["tensors_at_peak"] = kinds_json(peaks.tensors.at_peak);
  json["tensors_by_kind"] = kinds_json(peaks.tensors.by_kind);
  json["device"] = number_or_null(peaks.device);
  return json;
}

const MemoryTrackerOptions& checked(const MemoryTrackerOptions& options) {
  if (options.interval().count() <= 0) {
    throw ConfigError(text::concat("MemoryTrackerOptions::interval is ", options.interval().count(),
                                   " ms. Give at least 1 ms."));
  }
  if (options.pss_every() < 0) {
    throw ConfigError(text::concat("MemoryTrackerOptions::pss_every is ", options.pss_every(),
                                   ". Give a number of samples, 0 for never."));
  }
  if (options.capacity() < 16) {
    throw ConfigError(text::concat("MemoryTrackerOptions::capacity is ", options.capacity(),
                                   ". Give at least 16."));
  }
  return options;
}

}  // namespace

struct MemoryTracker::Region::State {
  MemoryTracker::Impl* tracker = nullptr;
  State* outer = nullptr;
  std::string path;
  std::int64_t begin_ns = 0;
  PeakWatch tensors;
  std::int64_t device_peak = -1;
};

struct MemoryTracker::Impl {
  explicit Impl(const MemoryTrackerOptions& given)
      : options(checked(given)),
        samples(options.capacity()),
        regions(options.capacity()),
        visits(options.capacity()) {}

  std::int64_t since_start(Clock::time_point time) const {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time - start).count();
  }
  std::int64_t now_ns() const { return since_start(Clock::now()); }

  // The allocator has one peak; it is read, added to all that are running, and begins anew. Called
  // with the lock held.
  std::optional<DeviceBytes> settle_device() {
    const auto bytes = read_device(options.device());
    if (!bytes) return bytes;
    run_device_peak = std::max(run_device_peak, bytes->peak);
    sample_device_peak = std::max(sample_device_peak, bytes->peak);
    for (Region::State* each : open) each->device_peak = std::max(each->device_peak, bytes->peak);
    return bytes;
  }

  void sample() {
    const bool with_pss = options.pss_every() > 0 && looks++ % options.pss_every() == 0;
    Sample sample;
    sample.rss = resident_bytes();
    if (with_pss) sample.pss = proportional_bytes();
    const std::lock_guard lock(mutex);
    sample.time_ns = now_ns();
    if (counts_cpu_tensors()) {
      const TensorBytes tensors = tensor_bytes();
      sample.tensors = tensors.current;
      sample.by_kind = tensors.by_kind;
      sample.tensors_peak = since_sample.restart().total;
    }
    if (const auto device = settle_device()) {
      sample.device_allocated = device->allocated;
      sample.device_reserved = device->reserved;
      sample.device_peak = std::exchange(sample_device_peak, -1);
    }
    rss_peak = std::max(rss_peak, sample.rss);
    pss_peak = std::max(pss_peak, sample.pss);
    samples.add(sample, [](Sample& into, const Sample& item) { into.merge(item); });
  }

  void run() {
    try {
      for (;;) {
        {
          std::unique_lock lock(mutex);
          if (wake.wait_for(lock, options.interval(), [&] { return stopping; })) return;
        }
        sample();
      }
    } catch (const std::exception& error) {
      // The program that is looked at must not suffer from it; the file says so.
      log::warning(text::concat("Memory is not sampled any more: ", describe(error)));
      const std::lock_guard lock(mutex);
      failure = describe(error);
    }
  }

  int thread_number() {
    return threads.try_emplace(std::this_thread::get_id(), static_cast<int>(threads.size()))
        .first->second;
  }

  const MemoryTrackerOptions options;
  const Clock::time_point start = Clock::now();
  const std::chrono::system_clock::time_point wall_start = std::chrono::system_clock::now();
  std::int64_t looks = 0;

  mutable std::mutex mutex;
  std::condition_variable wake;
  bool stopping = false;
  std::string failure;
  PeakWatch whole_run;
  PeakWatch since_sample;
  std::int64_t run_device_peak = -1;
  std::int64_t sample_device_peak = -1;
  std::int64_t rss_peak = -1;
  std::int64_t pss_peak = -1;
  Thinned<Sample> samples;
  Thinned<RegionRecord> regions;
  Thinned<Visit> visits;
  std::map<std::string, RegionTotal> totals;
  std::vector<Region::State*> open;
  std::map<std::thread::id, int> threads;
  std::thread thread;
};

namespace {
// A region is entered and left on one thread.
thread_local void* innermost_region = nullptr;
}  // namespace

MemoryTracker::Region::Region(MemoryTracker& tracker, std::string name)
    : state_(std::make_unique<State>()) {
  state_->tracker = tracker.impl_.get();
  state_->outer = static_cast<State*>(innermost_region);
  const bool nested = state_->outer != nullptr && state_->outer->tracker == state_->tracker;
  state_->path = nested ? state_->outer->path + "/" + name : std::move(name);
  const std::lock_guard lock(state_->tracker->mutex);
  state_->tracker->settle_device();
  state_->tracker->open.push_back(state_.get());
  state_->begin_ns = state_->tracker->now_ns();
  innermost_region = state_.get();
}

MemoryTracker::Region::~Region() {
  innermost_region = state_->outer;
  Impl& tracker = *state_->tracker;
  const std::lock_guard lock(tracker.mutex);
  tracker.settle_device();
  std::erase(tracker.open, state_.get());
  RegionRecord record{state_->path,
                      tracker.thread_number(),
                      state_->begin_ns,
                      tracker.now_ns(),
                      {state_->tensors.peaks(), state_->device_peak}};
  // As with samples: names without end must not eat the memory that is measured.
  const bool room = tracker.totals.size() < static_cast<std::size_t>(tracker.options.capacity());
  const bool known = tracker.totals.contains(record.path);
  RegionTotal& total = tracker.totals[room || known ? record.path : "(other)"];
  ++total.count;
  total.total_ns += record.end_ns - record.begin_ns;
  total.peaks.merge(record.peaks);
  tracker.regions.add(std::move(record), [](RegionRecord&, const RegionRecord&) {});
}

MemoryTracker::MemoryTracker(const MemoryTrackerOptions& options)
    : impl_(std::make_unique<Impl>(options)) {
  impl_->sample();  // throws here, and not on the thread, where it cannot work at all
  impl_->thread = std::thread([impl = impl_.get()] { impl->run(); });
}

MemoryTracker::~MemoryTracker() { stop(); }

void MemoryTracker::add(Visit visit) {
  const std::lock_guard lock(impl_->mutex);
  impl_->visits.add(std::move(visit), [](Visit&, const Visit&) {});
}

void MemoryTracker::stop() {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->wake.notify_all();
  if (impl_->thread.joinable()) impl_->thread.join();
}

Json MemoryTracker::to_json() const {
  Impl& impl = *impl_;
  const std::lock_guard lock(impl.mutex);
  impl.settle_device();
  const auto column = [&](const auto& value) {
    Json values = Json::array();
    for (const Sample& sample : impl.samples.items()) values.push_back(value(sample));
    return values;
  };
  const auto field = [&](std::int64_t Sample::*member) {
    return column([&](const Sample& sample) { return number_or_null(sample.*member); });
  };
  const auto wall = impl.wall_start.time_since_epoch();
  Json json;
  json["label"] = impl.options.label();
  json["rank"] = impl.options.rank();
  json["pid"] = getpid();
  json["device"] = impl.options.device() ? Json(impl.options.device()->str()) : Json(nullptr);
  json["clock"] = {
      {"kind", "monotonic"},
      {"unit", "ns"},
      {"zero", "the tracker's start"},
      {"start_wall", iso_time(impl.wall_start)},
      {"start_unix_ns", std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count()},
      {"start_monotonic_ns",
       std::chrono::duration_cast<std::chrono::nanoseconds>(impl.start.time_since_epoch()).count()},
      {"length_ns", impl.now_ns()}};
  json["sampling"] = {{"interval_ms", impl.options.interval().count()},
                      {"samples_in_one", impl.samples.stride()},
                      {"regions_kept_one_in", impl.regions.stride()},
                      {"visits_kept_one_in", impl.visits.stride()},
                      {"pss_every", impl.options.pss_every()},
                      {"failure", impl.failure.empty() ? Json(nullptr) : Json(impl.failure)}};
  Json& samples = json["samples"];
  samples["time_ns"] = field(&Sample::time_ns);
  samples["rss"] = field(&Sample::rss);
  samples["pss"] = field(&Sample::pss);
  samples["tensors"] = field(&Sample::tensors);
  samples["tensors_peak"] = field(&Sample::tensors_peak);
  for (const MemoryKind kind : kMemoryKinds) {
    samples["tensors_by_kind"][std::string(to_string(kind))] =
        column([&](const Sample& sample) { return sample.by_kind[kind]; });
  }
  samples["device_allocated"] = field(&Sample::device_allocated);
  samples["device_reserved"] = field(&Sample::device_reserved);
  samples["device_peak"] = field(&Sample::device_peak);
  Json& peaks = json["peaks"] = peaks_json({impl.whole_run.peaks(), impl.run_device_peak});
  peaks["rss"] = number_or_null(impl.rss_peak);
  peaks["pss"] = number_or_null(impl.pss_peak);
  json["region_totals"] = Json::object();
  for (const auto& [path, total] : impl.totals) {
    json["region_totals"][path] = {
        {"count", total.count}, {"total_ns", total.total_ns}, {"peaks", peaks_json(total.peaks)}};
  }
  json["regions"] = Json::array();
  for (const RegionRecord& record : impl.regions.items()) {
    json["regions"].push_back({{"path", record.path},
                               {"thread", record.thread},
                               {"begin_ns", record.begin_ns},
                               {"end_ns", record.end_ns},
                               {"tensors_peak", record.peaks.tensors.total},
                               {"device_peak", number_or_null(record.peaks.device)}});
  }
  json["visits"] = Json::array();
  for (const Visit& visit : impl.visits.items()) {
    json["visits"].push_back({{"name", visit.name},
                              {"from", visit.from},
                              {"place", visit.place},
                              {"bytes", visit.bytes},
                              {"begin_ns", impl.since_start(visit.asked)},
                              {"used_ns", impl.since_start(visit.used)},
                              {"end_ns", impl.since_start(visit.gone)}});
  }
  return json;
}

void MemoryTracker::write(const std::string& path) const { write_memory_file(path, {to_json()}); }

void write_memory_file(const std::string& path, const std::vector<Json>& processes) {
  const Json file{{"format", "accelerate-cpp memory"},
                  {"version", 1},
                  {"units", "bytes"},
                  {"processes", processes}};
  write_file(path, file.dump() + '\n');
}

}  // namespace accelerate::tracking
