#pragma once

#include "parallel/control_flow.hpp"

#include <accelerate/parallel/fsdp.hpp>
#include <intercept/gradients.hpp>

#include <c10/core/Event.h>

#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace accelerate::parallel {

// What Fsdp has and does. fsdp_impl.cpp brings units and reduces gradients, fsdp.cpp is the
// strategy that the prepared module sees, fsdp_state.cpp reads and writes parameters from outside.
struct Fsdp::Impl final : intercept::Residency, intercept::GradientSink {
  // One unit as this rank has it.
  struct Part {
    at::Tensor shard;                        // flat, in the module's own dtype
    std::vector<at::Tensor> leaves;          // by parameter
    std::vector<Placement> placements;       // of each leaf
    std::vector<std::int64_t> leaf_offsets;  // of each leaf in the shard
    ControlFlow::Handle gather;              // that is under way
    // Where the unit stays in memory for good in the shard's own dtype: its memory, of which the
    // shard is a piece.
    at::Tensor whole;
    // Between forward and backward, when reshard_after_forward names a number of ranks: this rank's
    // part of the unit over that group, in the compute dtype.
    at::Tensor reshard;
    // The last copy of the shard to the device that the host did not wait for. Whoever writes to a
    // shard in host memory waits for it first.
    std::optional<c10::Event> copied;
    std::vector<std::int64_t> leaf_versions;  // when the unit was last known to be what they are
  };
  struct Reduction {
    const intercept::Unit* unit = nullptr;
    intercept::UnitGradients gradients;
    at::Tensor output;
    ControlFlow::Handle scatter;  // null once it was waited for
    comm::Work mean = {};         // over the replicas, after the scatter
  };

  std::string name;
  const ModuleRecord& module;
  FsdpOptions options;
  int world_rank = 0;
  // Gathers and reductions have a communicator each: reductions come in an order of their own,
  // which may fall differently between the gathers on ranks that use different parameters.
  comm::Group gather_group, reduce_group, replicate_group, reshard_group;
  std::optional<ControlFlow> control_flow;
  std::vector<Part> parts;
  std::unordered_map<const void*, at::Tensor> leaf_of;
  std::unordered_map<const void*, std::pair<std::size_t, std::size_t>> place_of;  // by leaf
  std::optional<Reduction> under_way;
  // Gathers that this rank joined in without a backward of its own, the oldest first, and how many
  // of them may be under way.
  std::deque<std::pair<const intercept::Unit*, ControlFlow::Handle>> served;
  std::size_t gathers_announced = 0;
  bool reduces = true;            // the backward of the last forward
  bool expects_backward = false;  // since a forward with gradients none has ended
  bool has_reduced = false;       // a backward since the last step
  std::int64_t reductions = 0, gathered_bytes = 0, gathered_parameter_bytes = 0, reduced_bytes = 0,
               reduced_parameter_bytes = 0;
  std::unique_ptr<intercept::Engine> engine;
  std::unique_ptr<intercept::Gradients> gradients;

  Impl(std::string name, const ModuleRecord& module, FsdpOptions given, const comm::Group& group);

  void make_groups(const comm::Group& group);
  void require_sharded() const;
  void adopt(const intercept::Unit& unit, at::Tensor flat);
  // Errors of communication say what was being done, and keep their type.
  static void saying(const std::function<std::string()>& what, const std::function<void()>& body);
  static void for_unit(const intercept::Unit& unit, const char* what,
                       const std::function<void()>& body);
  // Gathers a unit into `whole`, from the ranks' shards or from what their group kept of it.
  ControlFlow::Handle gather(const intercept::Unit& unit, const at::Tensor& whole, bool in_group);
  // Waits for a collective that was announced.
  void wait_for(const intercept::Unit& unit, const char* what,
                const ControlFlow::Handle& collective);
  // A pass begins; after one that failed, what it left is forgotten.
  void begin_pass();
  // Takes part in the backward pass of other ranks, where this rank's met no unit.
  void join_backward();
  void serve(const ControlFlow::Step& step);
  void wait_for_served(std::size_t most_left);
  intercept::ParameterSet all_parameters() const;
  // Ends the scatter and starts the mean over the replicas, for which the others wait.
  Reduction average_replicas(Reduction reduction);
  void finish_reduction();
  void wait_for_copies() const;
  void refresh();
  void refresh_if_stepped();
  // The parameters that these leaves belong to.
  intercept::ParameterSet of(const std::vector<at::Tensor>& leaves) const;
  std::vector<at::Tensor> local_gradients() const;

  at::Tensor start_bring(const intercept::Unit& unit, at::Tensor reuse) override;
  void finish_bring(const intercept::Unit& unit, const at::Tensor& contents) override;
  void write_back(const intercept::Unit& unit, const intercept::UnitParameter& parameter,
                  const intercept::Written& written, const at::Tensor& contents) override;
  void leaving(const intercept::Unit& unit, const at::Tensor& contents) override;
  at::Tensor bring_full(const intercept::Unit& unit) override;
  void write_back_full(const intercept::Unit& unit, const at::Tensor& full) override;
  void reduce(const intercept::Unit& unit, intercept::UnitGradients given) override;
  void finish(bool reduced) override;
  void abandon() override;
  void failed() noexcept override;
  bool has_gradient(const intercept::Unit& unit, std::size_t parameter) const override;
  void cleared(const intercept::Unit& unit, std::size_t parameter) override;
};

}  // namespace accelerate::parallel
