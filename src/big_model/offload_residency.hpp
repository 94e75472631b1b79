#pragma once

#include <accelerate/big_model/weight_store.hpp>
#include <accelerate/tracking/memory_tracker.hpp>
#include <big_model/bringer.hpp>
#include <big_model/open_files.hpp>
#include <intercept/engine.hpp>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace accelerate::big_model {

/// Where one offloaded weight is: in host memory, or in a store under a name.
struct Source {
  at::Tensor home;
  std::string stored_as;
};

/// Weights that are read out of host memory or files when they are wanted.
class OffloadResidency final : public intercept::Residency {
 public:
  OffloadResidency(at::Device device, WeightStore store);

  /// To be said of every weight before the engine that asks for it is made.
  void set_source(const at::Tensor& weight, Source source);
  const Source& source(const at::Tensor& weight) const;
  /// The weight as an ordinary tensor on the CPU, in this dtype.
  at::Tensor whole(const at::Tensor& weight) const;

  at::Tensor start_bring(const intercept::Unit& unit, at::Tensor reuse) override;
  void finish_bring(const intercept::Unit& unit, const at::Tensor& contents) override;
  void gone(const intercept::Unit& unit, at::Tensor contents) noexcept override;
  /// Gives back the memory that is kept for the next weights, and tells the tracker what is over.
  void rest();
  void repointed(const intercept::Unit& unit) override;
  void will_write(const intercept::Unit& unit, const intercept::UnitParameter& parameter) override;
  void write_back(const intercept::Unit& unit, const intercept::UnitParameter& parameter,
                  const intercept::Written& written, const at::Tensor& contents) override;
  at::Tensor bring_full(const intercept::Unit& unit) override;
  void write_back_full(const intercept::Unit& unit, const at::Tensor& full) override;

  /// Since the last reset.
  struct Counts {
    std::int64_t brought_bytes = 0, read_bytes = 0;
  };
  Counts counts() const;
  void reset_counts();

  /// Null for none.
  void track(tracking::MemoryTracker* tracker);

 private:
  // The latest of a unit.
  struct Visit {
    const intercept::Unit* unit = nullptr;
    std::chrono::steady_clock::time_point asked, used, gone;
    bool over = false;
  };
  // Elements of a weight from `begin` on, in the buffer they are brought to.
  struct Piece {
    const Source* from;
    std::int64_t begin;
    at::Tensor part;
  };
  std::vector<Piece> cut(const intercept::Unit& unit, const at::Tensor& buffer,
                         std::int64_t most_bytes) const;
  void fill(const Piece& piece, OpenFiles& files);
  std::shared_ptr<Bringer::Job> start_job(const intercept::Unit& unit, const at::Tensor& buffer);
  void report(Visit& visit);

  at::Device device_;
  WeightStore store_;
  std::unordered_map<const void*, Source> sources_;  // by TensorImpl
  mutable std::mutex mutex_;                         // of the rest
  Counts counts_;
  std::unordered_map<int, std::shared_ptr<Bringer::Job>> jobs_;  // by unit
  std::vector<at::Tensor> spare_;  // buffers of weights that just left
  tracking::MemoryTracker* tracker_ = nullptr;
  std::unordered_map<int, Visit> visits_;  // by unit
  Bringer bringer_;                        // last: its thread uses the above
};

}  // namespace accelerate::big_model
