#pragma once

#include <intercept/trace.hpp>
#include <intercept/unit.hpp>

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace accelerate::intercept {

/// How long a unit stays in memory.
enum class Stay {
  while_used,    ///< until nothing that comes soon uses it
  through_pass,  ///< from its first use to the end of the backward pass
  always         ///< its memory is never given back; its values are brought again after `refresh`
};

/// What is to become one unit: parameters of one dtype and device.
struct UnitPlan {
  std::string name;
  std::vector<NamedTensor> parameters;
  Stay stay = Stay::while_used;
  /// They are computed with, and their gradients reduced, in their own dtype whatever EngineOptions
  /// say.
  bool own_dtype = false;
};

struct EngineOptions {
  /// Ranks over which each unit is cut.
  int parts = 1;
  /// The dtype in which floating-point parameters are brought; their own unless set.
  std::optional<at::ScalarType> compute_dtype = {};
  /// The dtype in which gradients of floating-point parameters are collected and reduced; that in
  /// which the parameters are brought unless set.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Where the parameters are computed with; where they were unless set.
  std::optional<at::Device> compute_device = {};
  /// Units that are brought ahead of their use, once a pass has been recorded.
  int prefetch = 1;
  /// As `prefetch`, while a backward pass runs.
  int prefetch_in_backward = 1;
  /// The most bytes of units in memory or under way at one time; 0 for no limit. The unit in use is
  /// brought in any case.
  std::int64_t resident_limit = 0;
  /// Whether a pass brings every unit as it begins, in order, whatever it will use. Units that do
  /// not stay always are then to stay through the pass.
  bool all_every_pass = false;
  /// Whether a unit above the limit is brought all the same, with nothing ahead of it. Otherwise it
  /// is refused.
  bool oversized_alone = false;
  /// What a program is to do instead, where its use of a parameter's memory is refused: sentences
  /// that the refusal ends with.
  std::string advice = {};
};

/// Counts since the last reset.
struct EngineStatistics {
  std::int64_t brought = 0;
  /// Of these, how many were started before they were demanded.
  std::int64_t prefetched = 0;
  /// Units that stayed in memory although they were left, because they come again at once.
  std::int64_t kept = 0;
  std::int64_t demands = 0;
  std::int64_t peak_resident_bytes = 0;
};

/// Brings units when operators touch them, ahead of that along the recorded trace, and lets them go
/// when nothing that comes soon uses them. Thread safe: forwards, backward threads and loaders may
/// touch parameters at the same time.
///
/// In memory at any time are: the unit in use, the next `prefetch` distinct units of the trace, and
/// those that stay. A unit that is left but is among the next is kept, so nothing is brought twice
/// in a row.
class Engine final : public TaggedStorage::Owner {
 public:
  /// Tags all parameters; `adopt` is called for each unit with its flat values, in the user's
  /// dtype, while it still has them, so that the residency can take them over one unit at a time.
  /// Without `adopt` the residency has the values already; parameters may be of the meta device.
  Engine(std::vector<UnitPlan> plans, const EngineOptions& options, Residency& residency,
         const std::function<void(const Unit&, at::Tensor)>& adopt);
  /// The parameters are of no use any more, unless `restore` was called.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const std::vector<std::unique_ptr<Unit>>& units() const noexcept { return units_; }

  /// A forward (with gradients: and its backward) begins. Within a pass demands are recorded and
  /// followed; does nothing when one is open. `kind` tells passes apart that demand differently.
  enum class Pass { inference, training };
  void begin_pass(Pass kind);
  /// The pass is over: what need not stay is let go.
  void end_pass();
  /// This pass is not what the next is to be expected to do: the trace stays as it was before.
  void forget_pass();
  /// Ends a pass in which units are on their way that may never come, and forgets it.
  void abandon_pass();
  /// An open pass of this kind.
  bool in_pass(Pass kind) const;

  /// Starts to bring the next `units` of the trace now, beside those that EngineOptions asks for.
  void prefetch(int units);
  /// What is at home has changed: what is in memory is out of date. Raises the versions of all
  /// parameters, so that a graph that saved one says so instead of computing with other values than
  /// its forward had, as after an optimizer that steps in place.
  void refresh();
  /// The same for one unit, of which only these parameters changed.
  void refresh(const Unit& unit, const std::vector<bool>& changed);
  /// Ends interception: every parameter is again an ordinary tensor with its values whole, in the
  /// user's dtype.
  void restore();
  /// Parameters that `set_data` pointed at other data of the same kind (as
  /// `torch::nn::utils::vector_to_parameters` and `torch::load` do) come back with its values.
  /// Does nothing in a scope of full parameters.
  void take_assigned();
  /// After `take_assigned`: throws StateError when a parameter was moved or cast since it was
  /// tagged. In a scope of full parameters it has nothing to say.
  void check_tagged();
  bool has_full_parameters() const noexcept { return full_scopes_ > 0; }

  /// While one lives, the user's parameters are ordinary tensors, whole, in the user's own dtype.
  class FullParameters {
   public:
    ~FullParameters();
    FullParameters(FullParameters&&) = delete;

   private:
    friend class Engine;
    FullParameters(Engine& engine, bool write_back);
    Engine& engine_;
    bool write_back_;
    std::vector<at::Tensor> flats_;
    std::vector<Unit::Accumulators> accumulators_;
  };
  /// With `write_back`, values changed in the scope are kept.
  FullParameters full_parameters(bool write_back) { return {*this, write_back}; }

  /// The units in the order in which this pass first demanded them; the rest follow by index. All by
  /// index when every pass brings all.
  std::vector<int> first_demands() const;
  std::uint64_t fingerprint() const;
  EngineStatistics statistics() const;
  void reset_statistics();

  void demand(TaggedStorage& storage) override;
  void unheld(TaggedStorage& storage) noexcept override;
  void will_write(TaggedStorage& storage, const at::Tensor& view) override;
  void written(TaggedStorage& storage, const at::Tensor& view, const std::string& op) override;
  void repointed(TaggedStorage& storage) override;
  std::string advice() const override { return options_.advice; }

 private:
  enum class State { absent, arriving, resident };
  struct Entry {
    Unit* unit = nullptr;
    Stay stay = Stay::while_used;
    State state = State::absent;
    at::Tensor buffer;      // while arriving; the memory kept while absent when it stays always
    bool in_trace = false;  // this pass's trace has it and need not see it again
    bool stale = false;     // resident and out of date: an operator was using it
  };

  template <class Act>
  void for_parameters_in(const TaggedStorage& storage, const at::Tensor& view,
                         const Act& act) const;
  bool stays(const Entry& entry) const noexcept;
  void start(Entry& entry, bool ahead);
  void start_all();
  void finish(Entry& entry);
  void bring_anew(Entry& entry);
  void take_assigned(Unit& unit);
  void outdate(Entry& entry);
  void let_go(Entry& entry);
  void empty(Entry& entry);
  std::vector<int> next_units() const;
  std::vector<int> next_units(int most) const;
  void drop_all_but(const std::vector<int>& wanted);
  Trace& trace() noexcept { return traces_[static_cast<std::size_t>(kind_)]; }
  const Trace& trace() const noexcept { return traces_[static_cast<std::size_t>(kind_)]; }

  mutable std::mutex mutex_;
  Residency& residency_;
  EngineOptions options_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::vector<Entry> entries_;
  std::array<Trace, 2> traces_;
  Pass kind_ = Pass::inference;
  bool pass_open_ = false;
  bool pass_forgotten_ = false;
  int current_ = -1;
  std::int64_t resident_bytes_ = 0;
  EngineStatistics statistics_;
  bool restored_ = false;
  int full_scopes_ = 0;
};

}  // namespace accelerate::intercept
