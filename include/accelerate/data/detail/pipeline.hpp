#pragma once

#include <accelerate/data/detail/prefetcher.hpp>
#include <accelerate/data/loader_core.hpp>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace accelerate::data::detail {

/// Runs plan and read for one step after another, ahead of use when there are workers. `plan` is
/// called in order; `read` by several workers at once if `concurrent`, else both by one worker.
template <class Item>
class Pipeline {
 public:
  struct Slot {
    Step step;
    std::optional<Item> item;
    bool end = false;
  };

  Pipeline(std::int64_t workers, std::int64_t max_jobs, bool concurrent,
           std::function<bool(Step&)> plan, std::function<Item(Step&)> read)
      : plan_(std::move(plan)), read_(std::move(read)), concurrent_(concurrent) {
    slots_.resize(workers > 0 ? static_cast<std::size_t>(std::max(max_jobs, workers)) : 1);
    if (workers > 0) {
      prefetcher_ = std::make_unique<Prefetcher>(concurrent ? workers : 1, slots_.size(),
                                                 [this](std::size_t i) {
                                                   Slot& slot = slots_[i];
                                                   if (!concurrent_ && !plan_(slot.step)) {
                                                     slot.end = true;
                                                   } else {
                                                     slot.item.emplace(read_(slot.step));
                                                   }
                                                 });
    }
  }

  /// Starts a pass.
  void begin() {
    stop();
    for (Slot& slot : slots_) slot.end = false;
    next_ = pending_ = 0;
    planned_all_ = false;
    if (prefetcher_) {
      while (pending_ < slots_.size()) {
        if (!submit()) break;
      }
    }
  }

  /// The next step with its item; null at the end. The slot is the caller's until `next` or `stop`.
  /// An exception leaves the slot of the step that failed in `failed()`.
  Slot* next(std::optional<std::chrono::milliseconds> timeout,
             const std::function<void()>& timed_out) {
    if (!prefetcher_) {
      Slot& slot = slots_.front();
      failed_ = &slot;
      if (!plan_(slot.step)) return nullptr;
      slot.item.emplace(read_(slot.step));
      return &slot;
    }
    if (taken_) {
      taken_ = false;
      --pending_;
      next_ = (next_ + 1) % slots_.size();
      submit();
    }
    if (pending_ == 0) return nullptr;
    Slot& slot = slots_[next_];
    failed_ = &slot;
    if (!prefetcher_->wait(next_, timeout)) timed_out();
    if (slot.end) return nullptr;
    taken_ = true;
    return &slot;
  }

  const Slot* failed() const noexcept { return failed_; }

  /// Leaves the pass: nothing is read any more when this returns.
  void stop() noexcept {
    if (prefetcher_) prefetcher_->drain();
    for (Slot& slot : slots_) slot.item.reset();
    taken_ = false;
    pending_ = 0;
  }

 private:
  bool submit() {
    if (planned_all_) return false;
    const std::size_t i = (next_ + pending_) % slots_.size();
    if (concurrent_ && !plan_(slots_[i].step)) {
      planned_all_ = true;
      return false;
    }
    ++pending_;
    prefetcher_->submit(i);
    return true;
  }

  std::function<bool(Step&)> plan_;
  std::function<Item(Step&)> read_;
  bool concurrent_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
  std::size_t pending_ = 0;
  bool taken_ = false;
  bool planned_all_ = false;
  const Slot* failed_ = nullptr;
  // Last, so that its threads end first.
  std::unique_ptr<Prefetcher> prefetcher_;
};

}  // namespace accelerate::data::detail
