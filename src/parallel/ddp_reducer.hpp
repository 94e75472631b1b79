#pragma once

#include "comm/group_watch.hpp"
#include "intercept/backward_end.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

/// What Ddp puts around c10d's Reducer: buckets that a checkpoint can restore, and a watch over the
/// gradients that arrive.
namespace accelerate::parallel {

// The Reducer lays its buckets out anew once it knows in which order gradients arrive. A resumed
// run would find that out in its first step, and until then add in another order.
class Buckets final : public c10d::Reducer {
 public:
  template <class... Arguments>
  explicit Buckets(Arguments&&... arguments) : Reducer(std::forward<Arguments>(arguments)...) {
    // Otherwise it tells its logger when the set of unused parameters first changes. It has none,
    // and does not ask.
    ddp_graph_static_ = false;
  }

  /// The last reducing backward ended without a gradient for every parameter.
  bool unfinished() const {
    const std::lock_guard lock(mutex_);
    return require_finalize_;
  }
  /// Its hooks sit on the gradient accumulators of the parameters. torch::load and set_ give a
  /// parameter another one: back to those with the hooks.
  void keep_accumulators() const {
    for (std::size_t i = 0; i < params_.size(); ++i) {
      if (torch::autograd::impl::try_get_grad_accumulator(params_[i]) != grad_accumulators_[i])
        torch::autograd::impl::set_grad_accumulator(params_[i], grad_accumulators_[i]);
    }
  }

  std::vector<std::vector<std::int64_t>> layout() const {
    const std::lock_guard lock(mutex_);
    std::vector<std::vector<std::int64_t>> all;
    if (!has_rebuilt_bucket_) return all;
    for (const auto& bucket : buckets_)
      all.emplace_back(bucket.variable_indices.begin(), bucket.variable_indices.end());
    return all;
  }
  void set_layout(std::vector<std::vector<std::size_t>> layout) {
    const std::lock_guard lock(mutex_);
    initialize_buckets(std::move(layout));
    has_rebuilt_bucket_ = true;
  }

  /// The gradients that arrive now are to be reduced.
  bool listens() const {
    const std::lock_guard lock(mutex_);
    return expect_autograd_hooks_;
  }
  /// Those that no output of the forward depends on, as far as the graph shows
  /// (find_unused_parameters).
  std::vector<std::size_t> unused() const {
    const std::lock_guard lock(mutex_);
    return unused_parameters_;
  }
  /// Puts things back to where they were before a backward that did not end.
  void abandon() {
    const std::lock_guard lock(mutex_);
    // What has begun has begun on every rank, and writes to the buckets.
    for (const Bucket& bucket : buckets_) {
      if (bucket.future_work) bucket.future_work->wait();
    }
    if (local_used_work_) local_used_work_->wait();
    local_used_work_.reset();
    expect_autograd_hooks_ = false;
    require_finalize_ = false;
    if (std::exchange(first_autograd_hook_called_, false)) --num_bwd_calls_;
    if (static_graph_ && num_bwd_calls_ == 0) numGradHooksTriggeredMap_.clear();
    if (!has_rebuilt_bucket_) {
      rebuilt_params_.clear();
      rebuilt_param_indices_.clear();
    }
    if (local_used_map_.defined()) local_used_map_.zero_();
    local_used_map_reduced_ = false;
  }
};

/// What the hooks on the parameters share with the strategy. Backward may run on threads of its
/// own.
struct GradientWatch {
  std::shared_ptr<comm::GroupWatch> group;
  std::mutex mutex;
  /// Null when the strategy is gone.
  const Buckets* reducer = nullptr;
  /// The reducer takes one gradient of each parameter.
  bool once = false;
  /// By parameter: the reducer has it.
  std::vector<bool> reduced;
  /// By parameter: find_unused_parameters took it for unused in the last synchronising forward.
  std::vector<bool> unused;
  /// By parameter: it came since the last synchronising forward.
  std::vector<bool> arrived;
  /// By parameter: a gradient arrived that was not reduced since.
  std::vector<bool> unreduced;
  /// By parameter: a backward failed since its gradient was last cleared.
  std::vector<bool> partial;
  /// A synchronising forward ran, and no gradient has arrived since.
  bool awaits_first = false;
  /// A backward failed, and the reducer has not been told.
  std::atomic<bool> failed{false};
  /// The backward that the last gradient came from.
  int task = -1;

  /// For that many parameters, of which nothing is known.
  void resize(std::size_t parameters) {
    for (auto* marks : {&reduced, &unused, &arrived, &unreduced, &partial})
      marks->assign(parameters, false);
  }

  void fail() {
    const std::lock_guard lock(mutex);
    if (!failed.exchange(true)) group->say_failed_pass();
    partial.assign(partial.size(), true);
  }
};

class ArrivalHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  ArrivalHook(std::shared_ptr<GradientWatch> watch, std::size_t index, std::string name,
              std::unique_ptr<PostAccumulateGradHook> next)
      : watch_(std::move(watch)), index_(index), name_(std::move(name)), next_(std::move(next)) {}

  void operator()(const torch::autograd::Variable& parameter) override {
    // The Reducer, whose hook comes after this one, adds up dense gradients only.
    if (parameter.grad().defined() && parameter.grad().layout() != c10::Layout::Strided)
      parameter.mutable_grad() = parameter.grad().to_dense();
    arrived();
    if (next_) (*next_)(parameter);
  }

  /// Has the hook of `watch` on the parameter, before the one that is there.
  static void put(const at::Tensor& parameter, const std::shared_ptr<GradientWatch>& watch,
                  std::size_t index, const std::string& name) {
    // A frozen parameter may never have met autograd.
    torch::autograd::impl::materialize_autograd_meta(parameter);
    auto& slot = torch::autograd::impl::post_acc_grad_hooks(parameter);
    if (const ArrivalHook* own = in(slot); own != nullptr && own->watch_ == watch) return;
    auto next = std::move(slot);
    torch::autograd::impl::set_post_acc_grad_hooks(
        parameter, std::make_unique<ArrivalHook>(watch, index, name, std::move(next)));
  }
  /// Takes it off again.
  static void take(const at::Tensor& parameter, const std::shared_ptr<GradientWatch>& watch) {
    auto* slot = &torch::autograd::impl::post_acc_grad_hooks(parameter);
    while (ArrivalHook* own = in(*slot)) {
      if (own->watch_ == watch) {
        auto next = std::move(own->next_);
        *slot = std::move(next);
        return;
      }
      slot = &own->next_;
    }
  }

 private:
  static ArrivalHook* in(const std::unique_ptr<PostAccumulateGradHook>& slot) {
    PostAccumulateGradHook* hook = slot.get();
    return hook != nullptr && typeid(*hook) == typeid(ArrivalHook) ? static_cast<ArrivalHook*>(hook)
                                                                   : nullptr;
  }

  void arrived() {
    const std::lock_guard lock(watch_->mutex);
    if (watch_->reducer == nullptr) return;
    const int task = torch::autograd::get_current_graph_task_id();
    if (std::exchange(watch_->task, task) != task) {
      intercept::when_backward_ends([watch = watch_](bool failed) {
        if (failed) watch->fail();
      });
    }
    if (!watch_->reducer->listens()) {
      watch_->unreduced[index_] = true;
      return;
    }
    if (std::exchange(watch_->awaits_first, false)) {
      // Reducer sums whole gradients, those of earlier micro-batches included.
      watch_->unreduced.assign(watch_->unreduced.size(), false);
      watch_->arrived.assign(watch_->arrived.size(), false);
    }
    if (watch_->once && watch_->arrived[index_]) {
      throw StateError(
          text::concat("The parameter '", name_,
                       "' got a gradient a second time in one backward, after the first was given "
                       "to be averaged "
                       "over the ranks: a function that runs a backward of its own in backward "
                       "(checkpointing of "
                       "the program's own) reached it again. Set DdpOptions::static_graph if the "
                       "same happens in "
                       "every step, use checkpoint() of this library, or a sharded strategy."));
    }
    if (watch_->unused[index_]) {
      throw StateError(text::concat(
          "The parameter '", name_,
          "' got a gradient, and DdpOptions::find_unused_parameters had found that no output of "
          "the "
          "forward depends on it: a function that runs a backward of its own in backward "
          "(checkpointing of the program's own) hides it. Set static_graph instead if every step "
          "uses the same parameters, use checkpoint() of this library, or a sharded strategy."));
    }
    watch_->arrived[index_] = true;
    if (!watch_->reduced[index_]) watch_->unreduced[index_] = true;
  }

  std::shared_ptr<GradientWatch> watch_;
  std::size_t index_;
  std::string name_;
  std::unique_ptr<PostAccumulateGradHook> next_;
};

}  // namespace accelerate::parallel
