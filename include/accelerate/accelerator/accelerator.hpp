#pragma once

#include <accelerate/accelerator/checkpointing.hpp>
#include <accelerate/accelerator/collect.hpp>
#include <accelerate/accelerator/options.hpp>
#include <accelerate/accelerator/prepare.hpp>
#include <accelerate/accelerator/prepared_module.hpp>
#include <accelerate/accelerator/profile.hpp>
#include <accelerate/accelerator/split.hpp>
#include <accelerate/base/json.hpp>
#include <accelerate/base/signals.hpp>
#include <accelerate/comm/collectives.hpp>
#include <accelerate/core/tree.hpp>
#include <accelerate/data/loader.hpp>
#include <accelerate/optim/gradient_state.hpp>
#include <accelerate/optim/optimizer.hpp>
#include <accelerate/optim/scheduler.hpp>
#include <accelerate/state/state.hpp>

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace accelerate {

/// Inside it, the given modules' gradients stay on their rank. Ends with its scope.
class [[nodiscard]] NoSyncScope {
 public:
  explicit NoSyncScope(std::vector<std::shared_ptr<detail::PreparedModuleCore>> modules,
                       bool no_sync = true);
  ~NoSyncScope();
  NoSyncScope(const NoSyncScope&) = delete;
  NoSyncScope& operator=(const NoSyncScope&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<detail::PreparedModuleCore>, bool>> before_;
};

/// Runs one training program on one process or many. It owns the process-wide State, and its
/// `prepare` adapts the program's modules, optimizers, loaders and schedulers.
///
/// Example:
/// ```
/// accelerate::Accelerator accelerator;
/// auto [model, optimizer, loader] = accelerator.prepare(net, adam,
/// accelerate::data::loader(dataset, options)); for (auto& batch : loader) {
///   auto scope = accelerator.accumulate(model);
///   auto loss = torch::cross_entropy_loss(model(batch.data), batch.target);
///   accelerator.backward(loss);
///   optimizer.step();
///   optimizer.zero_grad();
/// }
/// ```
class Accelerator {
 public:
  /// Collective over all processes. Throws ConfigError for unusable options or environment,
  /// DistributedError when the processes do not find each other, StateError when the process was
  /// set up before with other options, PrecisionError for a precision the device cannot compute in.
  explicit Accelerator(const AcceleratorOptions& options = {});
  ~Accelerator();
  Accelerator(const Accelerator&) = delete;
  Accelerator& operator=(const Accelerator&) = delete;

  /// Adapts modules, optimizers, loaders and schedulers, in any order and number, and returns what
  /// to use in their place, in the order given: one object for one argument, else a tuple.
  ///
  /// A module may be a holder (`TORCH_MODULE`), a shared_ptr, a torch::jit::Module or a plain
  /// object; an lvalue object is referenced and must outlive the result, everything else is owned,
  /// a module that a shared_ptr owns too. The Accelerator itself keeps nothing: what was prepared
  /// belongs to the results, and ends with the last of their copies.
  /// Throws DistributedError, on every rank, when the ranks do not hold the same module.
  template <class... T>
  auto prepare(T&&... objects);

  /// As `prepare`, for a module that will not be trained: device placement and precision only.
  template <class M>
  auto prepare_for_evaluation(M&& module);

  /// The gradients of `loss`, a tensor of one element: scaled for fp16, divided by the number of
  /// micro-batches, and averaged over the ranks when `sync_gradients()`. Throws StateError when the
  /// loss does not require gradients or the optimizer of its module was not prepared although
  /// training needs it to be.
  void backward(const at::Tensor& loss);
  /// The gradients of a sum over `count` samples or tokens. At the end of the accumulation window
  /// they are divided by the counts of all its micro-batches on all ranks, so the step is that of
  /// the mean over all of them, however unequal the counts. (The original takes the mean of means.)
  /// All backwards of one window are of the same kind.
  void backward(const at::Tensor& loss_sum, double count);

  /// To stand at the top of each micro-batch: decides whether its gradients are averaged and the
  /// optimizer steps, and keeps the given modules' gradients local if not.
  template <class... M>
  NoSyncScope accumulate(PreparedModule<M>&... modules) {
    const bool local = begin_micro_batch();
    return NoSyncScope({modules.core()...}, local);
  }
  /// Keeps the gradients of forwards made inside it on their rank.
  template <class... M>
  NoSyncScope no_sync(PreparedModule<M>&... modules) {
    return NoSyncScope({modules.core()...});
  }
  /// Has the next backward average the gradients although its forward ran inside no_sync.
  void trigger_sync_in_backward(PreparedModuleBase& module);
  /// True when this micro-batch is the last of its window, so that optimizers step.
  bool sync_gradients() const noexcept { return gradient_state_->sync_gradients(); }
  std::int64_t gradient_accumulation_steps() const noexcept { return gradient_state_->num_steps(); }
  void set_gradient_accumulation_steps(std::int64_t steps) {
    gradient_state_->set_num_steps(steps);
  }
  GradientState& gradient_state() const noexcept { return *gradient_state_; }
  /// A prepared optimizer left its last step out because gradients had overflowed.
  bool optimizer_step_was_skipped() const;

  /// Runs `loop`, in which ranks may have different numbers of batches: a rank that has run out
  /// takes part in the others' averaging with zeros. Collective. Modules are given first, the loop
  /// last: `accelerator.join_uneven_inputs(model, [&] { for (auto& batch : loader) ...; })`.
  /// Loaders need even_batches off to be uneven at all.
  template <class... Arguments>
  void join_uneven_inputs(Arguments&&... arguments);

  /// Undoes the loss scale and normalisation of the gradients of every prepared optimizer, once in
  /// a window. Clipping does so itself; call it to look at gradients.
  void unscale_gradients();
  /// Scales the gradients of `model` so that their p-norm, over all ranks and parameters, is at
  /// most `max_norm`, after `unscale_gradients`. Returns the norm before, a tensor without
  /// dimensions. Throws StateError inside an accumulation window, where the gradients are not yet
  /// whole: ask `sync_gradients()` first.
  at::Tensor clip_grad_norm_(PreparedModuleBase& model, double max_norm, double norm_type = 2.0);
  /// The same for some parameters of prepared modules.
  at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                             double norm_type = 2.0);
  /// Limits every element of the gradients to [-limit, limit], after `unscale_gradients`.
  void clip_grad_value_(PreparedModuleBase& model, double limit);

  /// Tensors of all ranks, concatenated along dim 0 in rank order; tensors without dimensions
  /// become vectors. Throws DistributedError on every rank when shapes differ.
  template <TensorTree T>
  T gather(const T& tree) const {
    return comm::gather(tree, world());
  }
  /// As `gather`, without the samples that were repeated to fill up the loader's last batch.
  template <TensorTree T>
  T gather_for_metrics(const T& tree) const;
  /// Collects an epoch's predictions on the host and gathers them once:
  /// `auto all = accelerator.collect_for_metrics<at::Tensor>(); ... all.add(predictions); ...
  /// all.gather();`
  template <TensorTree T>
  MetricsCollector<T> collect_for_metrics() const {
    return MetricsCollector<T>(world(), gradient_state_);
  }
  /// The sum, or the mean, over all ranks, times `scale`.
  template <TensorTree T>
  T reduce(const T& tree, comm::Reduction reduction = comm::Reduction::sum,
           double scale = 1.0) const {
    return comm::reduce(tree, world(), reduction, scale);
  }
  /// The tensors of rank `source`, on every rank.
  template <TensorTree T>
  T broadcast(const T& tree, int source = 0) const {
    return comm::broadcast(tree, world(), source);
  }
  /// Pads along `dim` to the largest size of any rank, so that the tensors can be gathered: with
  /// one value, or with `PadValues(0).field("labels", -100)`. Throws ConfigError when a value does
  /// not fit a tensor's dtype, or a field is named that the tree does not have.
  template <TensorTree T>
  T pad_across_processes(const T& tree, std::int64_t dim = 0, const PadValues& values = 0,
                         bool pad_first = false) const {
    return comm::pad_across_processes(tree, world(), dim, values, pad_first);
  }
  /// One JSON value of each rank, in rank order.
  std::vector<Json> gather_object(const Json& object) const;
  /// `objects` becomes that of rank `source`. All ranks give lists of one length.
  void broadcast_object_list(std::vector<Json>& objects, int source = 0) const;

  /// This rank's contiguous part of `inputs`: a vector, a string, a tensor (along dim 0), or a map
  /// of them, all of one length. The first ranks get the larger parts. With padding all parts are
  /// of one size: the last element of the whole input is repeated.
  template <class T>
  T split_between_processes(const T& inputs, bool apply_padding = false) const {
    return accelerate::split_between(inputs, process_index(), num_processes(), apply_padding);
  }

  /// Collective. Saves everything a resumed run needs to go on exactly: modules, optimizers,
  /// schedulers, the gradient scaler, where the loaders stand, the random number generators of
  /// every process, and registered objects. The folder (by default the next of automatic naming)
  /// gets its name when all of it is written and on the disk; a checkpoint that was there is
  /// replaced then, and stays when something fails. Returns the folder. Call it after
  /// `optimizer.step()`. Throws CheckpointError on every process when one could not save. See
  /// docs/checkpoints.md.
  std::filesystem::path save_state(const std::filesystem::path& folder = {},
                                   const SaveStateOptions& options = {}) {
    return checkpointing_->save(folder, options, prepared());
  }
  /// Collective. Loads what `save_state` saved, on any number of processes and with any strategy,
  /// by default the newest of automatic naming; and the model and optimizer of a folder that Python
  /// Accelerate saved. Call it after `prepare`. Throws CheckpointError on every process, before
  /// anything was changed, when the checkpoint is incomplete or damaged or that of another program.
  /// Returns the folder.
  std::filesystem::path load_state(const std::filesystem::path& folder = {},
                                   const LoadStateOptions& options = {}) {
    return checkpointing_->load(folder, options, prepared());
  }
  /// Collective. The complete checkpoint of automatic naming with the best metric (see
  /// SaveStateOptions and ProjectConfiguration::lower_is_better), the newest of equals; nothing
  /// when none has one. Throws ConfigError when the project has no folder.
  std::optional<std::filesystem::path> best_checkpoint() const { return checkpointing_->best(); }
  /// Waits for an asynchronous `save_state`, and throws if it failed; so do the next `save_state`
  /// and `load_state`.
  void wait_for_checkpoint() { checkpointing_->wait(); }
  /// How far an asynchronous `save_state` has come.
  SaveProgress save_progress() const { return checkpointing_->progress(); }
  /// Objects whose state is to be saved and loaded too. Lvalues are referenced and must outlive
  /// this Accelerator; shared_ptrs are held. In the same order in the program that loads.
  template <class... T>
  void register_for_checkpointing(T&&... objects);
  /// Called on every process before `save_state` writes, with the folder in which files can be put.
  HookHandle register_save_state_pre_hook(StateHook hook) {
    return checkpointing_->add_save_hook(std::move(hook));
  }
  /// Called on every process when `load_state` has verified a checkpoint and not yet used it.
  HookHandle register_load_state_pre_hook(StateHook hook) {
    return checkpointing_->add_load_hook(std::move(hook));
  }
  /// Collective. Writes the whole model, in its parameters' dtype, as safetensors files of at most
  /// `max_shard_size` that Python reads: `model.safetensors`, or several and an index. Files of an
  /// earlier save are replaced. `safe_serialization` off: one file `pytorch_model.bin`. Returns the
  /// names of the files, on every process.
  std::vector<std::string> save_model(PreparedModuleBase& model,
                                      const std::filesystem::path& folder,
                                      const std::string& max_shard_size = "10GB",
                                      bool safe_serialization = true) const;

  /// From now on these signals (SIGTERM, or what a batch system sends before the end) no longer end
  /// the process but make `stop_requested()` true.
  void stop_on_signals(const std::vector<int>& signals);
  /// Collective, once signals were named. True on every rank when any of them got one: save and end
  /// the program, with `kStoppedExitCode`.
  bool stop_requested() const;

  /// Mixed precision as in a prepared forward, for code outside of it.
  AutocastScope autocast() const;
  /// Runs `work` under LibTorch's profiler, writes each process' trace if a folder was named, and
  /// waits for all processes. With a schedule, `work` calls the profiler's `step()` at the end of
  /// each step.
  void profile(const ProfileOptions& options, const std::function<void(Profiler&)>& work) const;
  /// Raises a flag on this rank, for all to see in `check_trigger`.
  void set_trigger() { trigger_ = true; }
  /// Collective. True on every rank when any had raised its flag, which it then lowers.
  bool check_trigger();

  State& state() const noexcept { return *state_; }
  const comm::Group& world() const noexcept { return state_->world(); }
  at::Device device() const noexcept { return state_->device(); }
  int num_processes() const noexcept { return state_->num_processes(); }
  int process_index() const noexcept { return state_->process_index(); }
  int local_process_index() const noexcept { return state_->local_process_index(); }
  bool is_main_process() const noexcept { return state_->is_main_process(); }
  bool is_local_main_process() const noexcept { return state_->is_local_main_process(); }
  bool is_last_process() const noexcept { return state_->is_last_process(); }
  MixedPrecision mixed_precision() const noexcept { return mixed_precision_; }
  /// How modules are spread. `automatic` until the first module that is trained has been prepared.
  StrategyKind strategy() const noexcept { return strategy_; }
  const AcceleratorOptions& options() const noexcept { return options_; }
  /// The DeepSpeed configuration that is in force, for `optim::make_optimizer` and
  /// `optim::make_schedule`; null when there is none.
  const std::shared_ptr<const parallel::DeepSpeedConfig>& deepspeed() const noexcept {
    return deepspeed_;
  }
  /// The gradient scaler of fp16; null otherwise.
  const std::shared_ptr<GradScaler>& scaler() const noexcept { return scaler_; }

  /// Returns when every process has come. Throws TimeoutError when one does not.
  void wait_for_everyone() const { world().barrier(); }
  /// Runs `function` on the main process, then on the others; for work whose result the others
  /// reuse. Collective. When the main process throws, the others throw too.
  void main_process_first(const std::function<void()>& function) const;
  /// The same with the first process of each machine.
  void local_main_process_first(const std::function<void()>& function) const;
  template <class Function>
  void on_main_process(Function&& function) const {
    on_process(0, std::forward<Function>(function));
  }
  template <class Function>
  void on_last_process(Function&& function) const {
    on_process(num_processes() - 1, std::forward<Function>(function));
  }
  template <class Function>
  void on_process(int index, Function&& function) const {
    if (process_index() == index) std::forward<Function>(function)();
  }
  template <class Function>
  void on_local_main_process(Function&& function) const {
    on_local_process(0, std::forward<Function>(function));
  }
  template <class Function>
  void on_local_process(int index, Function&& function) const {
    if (local_process_index() == index) std::forward<Function>(function)();
  }
  /// A line on standard output, from the first process of each machine only.
  template <class... Parts>
  void print(const Parts&... parts) const {
    if (is_local_main_process()) print_line(text::concat(parts...));
  }

  /// Collective. Throws DistributedError on every rank, naming the first parameter or buffer that
  /// should be equal on all ranks and is not.
  void verify_parameters(PreparedModuleBase& module) const {
    module.strategy().verify_parameters();
  }
  /// Lets go of everything that was prepared (what the program itself still holds stays alive),
  /// starts the count of micro-batches anew, and returns cached device memory. A module that was
  /// sharded over several ranks stays unusable unless its `restore()` was called before.
  void free_memory();
  /// Waits for all processes and leaves the process group. The Accelerator cannot be used
  /// afterwards.
  void end_training();

  /// Keeps what checkpoints consist of.
  detail::Checkpointing& checkpointing() const noexcept { return *checkpointing_; }
  /// What `prepare` uses for one object of each kind; public for code that prepares by hand.
  std::shared_ptr<detail::PreparedModuleCore> adapt_module(ModuleRecord record,
                                                           const void* identity,
                                                           bool evaluation_mode);
  std::shared_ptr<OptimizerCore> adapt_optimizer(
      std::shared_ptr<torch::optim::Optimizer> optimizer);
  data::LoaderContext loader_context() const;
  /// `optimizer`: the one the scheduler drives, or null when it does not say.
  std::shared_ptr<SchedulerCore> adapt_scheduler(const torch::optim::Optimizer* optimizer,
                                                 std::shared_ptr<const void> scheduler);

 private:
  bool begin_micro_batch();
  void run_backward(const at::Tensor& loss);
  void require_prepared_optimizers();
  void require_whole_gradients(const char* operation) const;
  void link(const std::shared_ptr<OptimizerCore>& optimizer,
            const std::shared_ptr<detail::PreparedModuleCore>& module);
  void join(const std::vector<std::shared_ptr<detail::PreparedModuleCore>>& modules,
            const std::function<void()>& loop);
  detail::Prepared prepared();
  // Lets go of sharded modules that the program has let go of.
  void prune();
  std::vector<std::shared_ptr<detail::PreparedModuleCore>> modules() const;
  std::vector<std::shared_ptr<OptimizerCore>> optimizers() const;
  static void print_line(const std::string& line);

  AcceleratorOptions options_;
  std::shared_ptr<State> state_;
  MixedPrecision mixed_precision_ = MixedPrecision::no;
  StrategyKind strategy_ = StrategyKind::single;
  FsdpOptions fsdp_;
  DdpOptions ddp_;
  std::shared_ptr<const parallel::DeepSpeedConfig> deepspeed_;
  std::shared_ptr<GradientState> gradient_state_;
  std::shared_ptr<GradScaler> scaler_;
  std::shared_ptr<LoaderObserver> loader_observer_;
  std::unique_ptr<detail::Checkpointing> checkpointing_;
  std::unique_ptr<SignalWatch> signals_;
  bool trigger_ = false;

  // What the program holds handles of, in the order in which it was prepared.
  std::vector<std::weak_ptr<detail::PreparedModuleCore>> modules_;
  std::vector<std::weak_ptr<OptimizerCore>> optimizers_;
  std::vector<std::pair<const void*, std::weak_ptr<SchedulerCore>>> schedulers_;
  // Without its strategy a sharded module is of no use, nor is an optimizer over its shards, after
  // restore() too. So it stays while the program has the module.
  std::vector<std::shared_ptr<detail::PreparedModuleCore>> kept_;
};

template <class... T>
auto Accelerator::prepare(T&&... objects) {
  static_assert(sizeof...(T) > 0, "prepare() needs at least one object.");
  static_assert((detail::Preparable<T> && ...),
                "prepare() takes modules, optimizers, data loaders (accelerate::data::loader(...) "
                "or a torch::data "
                "loader) and schedulers. One of the arguments is none of these.");
  auto results = std::tuple<std::optional<detail::prepared_t<T>>...>();
  // Optimizers are linked to modules, schedulers to optimizers: prepared in this order whatever the
  // order of the arguments.
  const auto run = [&]<detail::Kind kind>(std::integral_constant<detail::Kind, kind>) {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      (
          [&] {
            using Object = std::tuple_element_t<I, std::tuple<T&&...>>;
            if constexpr (detail::kKind<Object> == kind) {
              std::get<I>(results).emplace(detail::Prepare<kind>::run(
                  *this, std::forward<Object>(
                             std::get<I>(std::forward_as_tuple(std::forward<T>(objects)...)))));
            }
          }(),
          ...);
    }
    (std::index_sequence_for<T...>());
  };
  run(std::integral_constant<detail::Kind, detail::Kind::module>());
  run(std::integral_constant<detail::Kind, detail::Kind::optimizer>());
  run(std::integral_constant<detail::Kind, detail::Kind::scheduler>());
  run(std::integral_constant<detail::Kind, detail::Kind::loader>());
  if constexpr (sizeof...(T) == 1) {
    return std::move(*std::get<0>(results));
  } else {
    return std::apply([](auto&... prepared) { return std::tuple(std::move(*prepared)...); },
                      results);
  }
}

template <class M>
auto Accelerator::prepare_for_evaluation(M&& module) {
  static_assert(detail::kKind<M&&> == detail::Kind::module,
                "prepare_for_evaluation() takes a module.");
  return detail::Prepare<detail::Kind::module>::run(*this, std::forward<M>(module),
                                                    /*evaluation_mode=*/true);
}

template <class... T>
void Accelerator::register_for_checkpointing(T&&... objects) {
  static_assert(
      (Checkpointable<detail::held_t<T>> && ...),
      "register_for_checkpointing() takes objects with state_dict() and load_state_dict(), "
      "of JSON or of named tensors.");
  (checkpointing_->add_object(detail::stateful(detail::hold(std::forward<T>(objects)))), ...);
}

template <class... Arguments>
void Accelerator::join_uneven_inputs(Arguments&&... arguments) {
  std::vector<std::shared_ptr<detail::PreparedModuleCore>> modules;
  std::function<void()> loop;
  const auto take = [&](auto&& argument) {
    if constexpr (std::is_base_of_v<PreparedModuleBase, std::remove_cvref_t<decltype(argument)>>) {
      modules.push_back(argument.core());
    } else {
      loop = argument;
    }
  };
  (take(arguments), ...);
  join(modules, loop);
}

template <TensorTree T>
T Accelerator::gather_for_metrics(const T& tree) const {
  std::vector<at::Tensor> gathered =
      detail::gather_real_rows(tree::tensors(tree), gradient_state_->progress(), world());
  T result = tree;
  std::size_t next = 0;
  tree::for_each_tensor(result, [&](at::Tensor& tensor) { tensor = std::move(gathered[next++]); });
  return result;
}

}  // namespace accelerate
