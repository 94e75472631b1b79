#include <accelerate/accelerator/profile.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/Context.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <filesystem>
#include <set>

namespace accelerate {
namespace {

namespace kineto = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;

std::set<ActivityType> activities_of(const ProfileOptions& options) {
  std::set<ActivityType> activities;
  for (const auto activity : options.activities()) {
    activities.insert(activity == ProfileOptions::Activity::cpu ? ActivityType::CPU
                                                                : ActivityType::CUDA);
  }
  const bool cuda = at::globalContext().hasCUDA();
  if (activities.contains(ActivityType::CUDA) && !cuda) {
    throw UnsupportedError(
        "ProfileOptions asks for CUDA activities, and there is no CUDA device. Leave activities "
        "empty.");
  }
  if (activities.empty()) {
    activities.insert(ActivityType::CPU);
    if (cuda) activities.insert(ActivityType::CUDA);
  }
  return activities;
}

}  // namespace

Profiler::Profiler(const ProfileOptions& options, int rank) : options_(options), rank_(rank) {
  if (const auto& schedule = options_.schedule()) {
    if (schedule->active() < 1 || schedule->wait() < 0 || schedule->warmup() < 0 ||
        schedule->repeat() < 0 || schedule->skip_first() < 0) {
      throw ConfigError(
          text::concat("The profile's schedule has ", schedule->active(), " active steps, wait ",
                       schedule->wait(), ", warmup ", schedule->warmup(), ", repeat ",
                       schedule->repeat(), " and skip_first ", schedule->skip_first(),
                       ". At least 1 active step is needed, and nothing may be negative."));
    }
  }
  if (kineto::isProfilerEnabledInMainThread()) {
    throw StateError("A profile is being recorded in this process already. Finish it first.");
  }
  if (records(0)) start();
}

Profiler::~Profiler() {
  try {
    stop(false);
  } catch (const std::exception&) {
    // The recording was to be thrown away; an exception may be under way, and it says more.
  }
}

// A cycle's steps: wait, warm up, be active.
bool Profiler::records(int64_t step) const {
  if (!options_.schedule()) return true;
  const ProfileSchedule& schedule = *options_.schedule();
  const int64_t length = schedule.wait() + schedule.warmup() + schedule.active();
  step -= schedule.skip_first();
  if (step < 0 || (schedule.repeat() > 0 && step >= schedule.repeat() * length)) return false;
  return step % length >= schedule.wait();
}

bool Profiler::keeps(int64_t step) const {
  if (!options_.schedule()) return true;
  const ProfileSchedule& schedule = *options_.schedule();
  const int64_t length = schedule.wait() + schedule.warmup() + schedule.active();
  return records(step) &&
         (step - schedule.skip_first()) % length >= schedule.wait() + schedule.warmup();
}

void Profiler::start() {
  const torch::profiler::impl::ProfilerConfig config(
      torch::profiler::impl::ProfilerState::KINETO, options_.record_shapes(),
      options_.profile_memory(), options_.with_stack(), options_.with_flops(),
      options_.with_modules());
  const auto activities = activities_of(options_);
  kineto::prepareProfiler(config, activities);
  kineto::enableProfiler(config, activities);
  running_ = true;
}

void Profiler::stop(bool keep) {
  if (!running_) return;
  running_ = false;
  const auto result = kineto::disableProfiler();
  if (!keep || options_.output_trace_dir().empty()) return;
  const std::filesystem::path folder(options_.output_trace_dir());
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  const std::string name = options_.schedule()
                               ? text::concat("profile_", rank_, "_", cycle_, ".json")
                               : text::concat("profile_", rank_, ".json");
  const std::string path = (folder / name).string();
  if (!error) result->save(path);
  if (error || !std::filesystem::exists(path)) {
    throw ConfigError(text::concat("The profile cannot be written to ", path,
                                   error ? " (" + error.message() + ")" : "",
                                   ". Check ProfileOptions::output_trace_dir."));
  }
  files_.push_back(path);
  ++cycle_;
}

void Profiler::step() {
  if (finished_) throw StateError("Profiler::step() was called after finish().");
  const bool kept = keeps(step_);
  ++step_;
  if (!options_.schedule()) return;
  // Warm-up is recorded to have everything running when the active steps begin, then thrown away.
  if (running_ && (!records(step_) || kept != keeps(step_))) stop(kept);
  if (!running_ && records(step_)) start();
}

void Profiler::finish() {
  if (finished_) return;
  finished_ = true;
  stop(keeps(step_));
}

}  // namespace accelerate
