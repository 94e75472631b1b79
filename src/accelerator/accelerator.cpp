#include <accelerate/accelerator/accelerator.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/optim/offloaded.hpp>
#include <accelerate/parallel/ddp.hpp>
#include <accelerate/parallel/deepspeed.hpp>
#include <intercept/policies.hpp>
#include <intercept/tagged_storage.hpp>

#include "accelerator/make_strategy.hpp"
#include "accelerator/resolve.hpp"
#include "base/terminal_line.hpp"
#include "comm/user_call.hpp"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/lbfgs.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <iostream>

namespace accelerate {

NoSyncScope::NoSyncScope(std::vector<std::shared_ptr<detail::PreparedModuleCore>> modules,
                         bool no_sync) {
  before_.reserve(modules.size());
  for (auto& module : modules) {
    const bool before = module->no_sync;
    module->no_sync = before || no_sync;
    before_.emplace_back(std::move(module), before);
  }
}

NoSyncScope::~NoSyncScope() {
  for (auto& [module, before] : before_) module->no_sync = before;
}

namespace {

/// Gives the random number generators rank 0's state before each pass over a loader.
class SynchronizingObserver final : public LoaderObserver {
 public:
  SynchronizingObserver(std::shared_ptr<LoaderObserver> next, std::vector<RngType> types,
                        comm::Group group)
      : next_(std::move(next)), types_(std::move(types)), group_(std::move(group)) {}

  void loader_begins(const LoaderProgress& progress) override {
    synchronize_rng_states(types_, group_);
    next_->loader_begins(progress);
  }
  void loader_ends(const LoaderProgress& progress) noexcept override {
    next_->loader_ends(progress);
  }

 private:
  std::shared_ptr<LoaderObserver> next_;
  std::vector<RngType> types_;
  comm::Group group_;
};

}  // namespace

Accelerator::Accelerator(const AcceleratorOptions& options) : options_(options) {
  const Environment environment = Environment::process();
  const ResolvedOptions resolved =
      resolve(options, environment, read_config_file(options, environment));
  state_ = State::initialize(resolved.state, environment);
  mixed_precision_ = resolved.mixed_precision;
  check_supported(mixed_precision_, device());
  strategy_ = resolved.strategy;
  fsdp_ = resolved.fsdp;
  ddp_ = resolved.ddp;
  deepspeed_ = resolved.deepspeed;
  if (strategy_ == StrategyKind::automatic && num_processes() == 1)
    strategy_ = StrategyKind::single;
  if (strategy_ == StrategyKind::single && num_processes() > 1) {
    throw ConfigError(text::concat(
        "The strategy is single, and there are ", num_processes(),
        " processes, which would each train a module of their own. Use ddp, or start one "
        "process."));
  }
  gradient_state_ = std::make_shared<GradientState>(resolved.gradient_accumulation, world());
  if (mixed_precision_ == MixedPrecision::fp16 && resolved.grad_scaler.enabled()) {
    scaler_ = std::make_shared<GradScaler>(resolved.grad_scaler, world());
  }
  const Topology& topology = state_->topology();
  checkpointing_ = std::make_unique<detail::Checkpointing>(
      options_.project_config(),
      detail::Savers{world(), topology.node_rank, topology.num_nodes, topology.local_rank});
  loader_observer_ = gradient_state_;
  std::vector<RngType> types;
  for (const RngType type : options_.rng_types()) {
    // The order of samples is a function of seed and epoch: a sampler's generator is alike already.
    if (type != RngType::generator) types.push_back(type);
  }
  if (!types.empty() && world().size() > 1) {
    loader_observer_ =
        std::make_shared<SynchronizingObserver>(gradient_state_, std::move(types), world());
  }
}

Accelerator::~Accelerator() = default;

namespace {

template <class T>
std::vector<std::shared_ptr<T>> locked(const std::vector<std::weak_ptr<T>>& all) {
  std::vector<std::shared_ptr<T>> alive;
  for (const auto& each : all) {
    if (auto one = each.lock()) alive.push_back(std::move(one));
  }
  return alive;
}

// They have a parameter or buffer in common, or none. An address alone may be that of another
// module, which has come to lie where one was.
bool share_tensors(const ModuleRecord& a, const ModuleRecord& b) {
  const auto all = [](const ModuleRecord& record) {
    auto tensors = record.parameters();
    tensors.insert(tensors.end(), record.buffers().begin(), record.buffers().end());
    return tensors;
  };
  const auto first = all(a), second = all(b);
  return first.empty() == second.empty() &&
         (first.empty() || std::any_of(second.begin(), second.end(), [&](const NamedTensor& own) {
            return std::any_of(first.begin(), first.end(), [&](const NamedTensor& other) {
              return own.tensor.is_same(other.tensor);
            });
          }));
}

// For an optimizer, which keeps the whole of what was prepared.
std::shared_ptr<parallel::Strategy> whole(const std::shared_ptr<detail::PreparedModuleCore>& core) {
  return {core, core->strategy.get()};
}

// On several processes, of a module that was prepared where there was nothing to train.
class Evaluated final : public parallel::Strategy {
 public:
  using Strategy::Strategy;

  void check_gradients(const std::vector<at::Tensor>& leaves) override {
    for (const auto& [name, parameter] : module_.parameters()) {
      const auto is_it = [&own = parameter](const at::Tensor& leaf) { return leaf.is_same(own); };
      if (!parameter.grad().defined() || std::none_of(leaves.begin(), leaves.end(), is_it))
        continue;
      throw StateError(text::concat(
          "The optimizer was asked to step on a gradient of '", name,
          "', which is not averaged over the processes: its module was prepared for evaluation, or "
          "when all its parameters were frozen. Give it to prepare() once its parameters require "
          "gradients."));
    }
  }
};

}  // namespace

std::vector<std::shared_ptr<detail::PreparedModuleCore>> Accelerator::modules() const {
  return locked(modules_);
}

std::vector<std::shared_ptr<OptimizerCore>> Accelerator::optimizers() const {
  auto alive = locked(optimizers_);
  std::erase_if(alive, [](const auto& optimizer) { return !optimizer->is_alive(); });
  return alive;
}

void Accelerator::prune() {
  std::erase_if(kept_, [](const auto& core) {
    const std::size_t own = core->before != nullptr ? 2 : 1;
    return core.use_count() == 1 && core->strategy->module().owners() <= own;
  });
  std::erase_if(modules_, [](const auto& core) { return core.expired(); });
  std::erase_if(optimizers_, [](const auto& core) { return core.expired(); });
  std::erase_if(schedulers_, [](const auto& entry) { return entry.second.expired(); });
}

detail::Prepared Accelerator::prepared() {
  prune();
  detail::Prepared all;
  for (const auto& core : modules()) {
    if (core->strategy->is_restored()) continue;
    core->strategy->follow_module();
    all.modules.push_back(core->strategy);
  }
  all.optimizers = optimizers();
  for (const auto& optimizer : all.optimizers) optimizer->follow_groups();
  all.scaler = scaler_;
  all.gradients = gradient_state_.get();
  all.strategy = to_string(strategy_);
  return all;
}

std::shared_ptr<detail::PreparedModuleCore> Accelerator::adapt_module(ModuleRecord record,
                                                                      const void* identity,
                                                                      bool evaluation_mode) {
  const comm::UserCall call("prepare() of a module");
  const bool trained =
      !evaluation_mode &&
      std::any_of(record.parameters().begin(), record.parameters().end(),
                  [](const NamedTensor& entry) { return entry.tensor.requires_grad(); });
  std::shared_ptr<detail::PreparedModuleCore> core;
  std::shared_ptr<detail::PreparedModuleCore> ended;  // by restore()
  for (const auto& known : modules()) {
    if (known->identity != identity || !share_tensors(known->strategy->module(), record)) continue;
    if (known->strategy->is_restored()) {
      if (known->trained && trained) ended = known;
      continue;
    }
    if (known->trained || !trained) return known;
    core = known;  // for evaluation, and now to be trained too
  }
  if (ended != nullptr) {
    std::erase(kept_, ended);
    std::erase_if(modules_, [&](const auto& known) { return known.lock() == ended; });
  }
  prune();
  for (const auto* tensors : {&record.parameters(), &record.buffers()}) {
    for (const auto& [name, tensor] : *tensors) {
      if (!intercept::is_claimed(tensor)) continue;
      throw StateError(text::concat(
          "The module's ", name,
          " comes and goes already: the module was dispatched by a device map, or another "
          "Accelerator has sharded it. A dispatched module needs no prepare(): call what "
          "dispatch_model returned. To train it, call remove_offload() first and prepare it "
          "then."));
    }
  }
  const auto elsewhere = [&](const NamedTensor& entry) {
    return entry.tensor.device() != device();
  };
  for (const auto* tensors : {&record.parameters(), &record.buffers()}) {
    const auto found = std::find_if(tensors->begin(), tensors->end(), elsewhere);
    if (found == tensors->end()) continue;
    if (!options_.device_placement()) {
      throw StateError(
          text::concat("The module's ", found->name, " is on ", found->tensor.device().str(),
                       ", and this process trains on ", device().str(),
                       ". Move the module there before prepare(), or switch device_placement on."));
    }
    record.to(device());
    break;
  }

  if (trained && strategy_ == StrategyKind::automatic) {
    const StrategyChoice choice = choose_strategy(
        strategy_facts(record, device(), state_->topology().local_world_size, world()));
    log::info(choice.why);
    strategy_ = choice.kind;
    set_stage(strategy_, fsdp_);
  }
  std::shared_ptr<parallel::Strategy> strategy;
  if (trained) {
    strategy = make_strategy(strategy_, std::move(record), world(), ddp_, fsdp_);
  } else if (num_processes() > 1) {
    strategy = std::make_shared<Evaluated>(std::move(record));
  } else {
    strategy = std::make_shared<parallel::Strategy>(std::move(record));
  }
  if (core == nullptr) {
    core = std::make_shared<detail::PreparedModuleCore>();
    core->identity = identity;
    core->gradient_state = gradient_state_;
    core->device = device();
    core->mixed_precision = mixed_precision_;
    core->autocast = options_.autocast();
    modules_.push_back(core);
  } else {
    for (const auto& optimizer : optimizers()) optimizer->unlink(*core->strategy);
  }
  core->strategy = std::move(strategy);
  core->trained = trained;
  core->before = ended != nullptr ? ended->strategy : nullptr;
  if (trained) core->output_dtype = fsdp_.mixed_precision().output_dtype;
  if (core->strategy->owns_leaves()) kept_.push_back(core);
  for (const auto& optimizer : optimizers()) {
    for (const auto& other : modules()) {
      if (trained && !other->trained &&
          share_tensors(other->strategy->module(), core->strategy->module()))
        optimizer->unlink(*other->strategy);
    }
    link(optimizer, core);
  }
  return core;
}

std::shared_ptr<OptimizerCore> Accelerator::adapt_optimizer(
    std::shared_ptr<torch::optim::Optimizer> optimizer) {
  prune();
  if (optimizer != nullptr) {
    for (const auto& known : optimizers()) {
      if (known->is_of(*optimizer)) return known;
    }
  }
  if (deepspeed_ &&
      deepspeed_->optimizer_offload.device == parallel::DeepSpeedOffload::Device::nvme) {
    const auto* offloaded = dynamic_cast<const optim::OffloadedAdamW*>(optimizer.get());
    if (offloaded == nullptr || offloaded->offload().place() != optim::StatePlace::disk) {
      throw ConfigError(text::concat(
          "The DeepSpeed configuration keeps the optimizer's state on disk, in ",
          deepspeed_->optimizer_offload.nvme_path,
          ", and prepare() was given an optimizer that does not. Give it an optim::OffloadedAdamW "
          "with OffloadOptions().place(StatePlace::disk).folder(...)."));
    }
  }
  auto core = std::make_shared<OptimizerCore>(std::move(optimizer), gradient_state_, scaler_);
  if (deepspeed_) core->set_max_norm(deepspeed_->gradient_clipping);
  optimizers_.push_back(core);
  for (const auto& module : modules()) link(core, module);
  return core;
}

void Accelerator::link(const std::shared_ptr<OptimizerCore>& optimizer,
                       const std::shared_ptr<detail::PreparedModuleCore>& module) {
  if (module->strategy->is_restored()) return;
  if (!module->trained) {
    // To be watched over, unless there is nothing to average, or a module that has it as a part is
    // trained.
    if (num_processes() == 1) return;
    for (const auto& other : modules()) {
      if (other->trained && share_tensors(other->strategy->module(), module->strategy->module()))
        return;
    }
  }
  const bool cut = num_processes() > 1 && module->strategy->owns_leaves() &&
                   fsdp_.sharding_strategy() != ShardingStrategy::no_shard;
  if (cut && dynamic_cast<torch::optim::LBFGS*>(&optimizer->optimizer()) != nullptr) {
    for (const at::Tensor& parameter : optimizer->parameters()) {
      if (!module->strategy->optimizer_leaf(parameter).defined()) continue;
      throw UnsupportedError(text::concat(
          "LBFGS was given parameters of a module under the strategy \"", module->strategy->name(),
          "\", which cuts each of them over the processes: its line search and its products of "
          "vectors would see another part on each process. Use the strategy ddp or one process "
          "with "
          "it, or another optimizer."));
    }
  }
  if (module->before != nullptr && optimizer->relink(*module->before, whole(module))) return;
  optimizer->link(whole(module));
}

std::shared_ptr<SchedulerCore> Accelerator::adapt_scheduler(
    const torch::optim::Optimizer* optimizer, std::shared_ptr<const void> scheduler) {
  // LibTorch's schedulers do not say which optimizer they drive; those follow all of them.
  std::vector<std::shared_ptr<OptimizerCore>> followed;
  for (const auto& known : optimizers()) {
    if (optimizer == nullptr || known->is_of(*optimizer)) followed.push_back(known);
  }
  if (followed.empty()) {
    throw StateError(text::concat(
        "prepare() was given a scheduler ",
        optimizer == nullptr ? "and no optimizer has been prepared"
                             : "whose optimizer has not been prepared",
        ", so the scheduler cannot follow its steps. Give the optimizer to prepare() too, before "
        "or together with the scheduler."));
  }
  prune();
  for (const auto& [identity, known] : schedulers_) {
    // At the address of one that is gone another drives another optimizer.
    const auto core = known.lock();
    if (identity == scheduler.get() && core->optimizers() == followed) return core;
  }
  const auto options = SchedulerOptions()
                           .step_with_optimizer(options_.step_scheduler_with_optimizer())
                           .split_batches(options_.dataloader().split_batches())
                           .per_process_steps(options_.per_process_scheduler_steps())
                           .num_processes(num_processes());
  if (options.step_with_optimizer() && options.per_process_steps() && !options.split_batches() &&
      num_processes() > 1) {
    log::info(text::concat(
        "The scheduler advances by ", num_processes(),
        " steps for each optimizer step, one for each process, as in Python Accelerate: its length "
        "is to be counted in batches of one process. To count optimizer steps, set "
        "AcceleratorOptions::per_process_scheduler_steps(false)."));
  }
  auto core = std::make_shared<SchedulerCore>(gradient_state_, std::move(followed), options);
  schedulers_.emplace_back(scheduler.get(), core);
  core->keep(std::move(scheduler));
  return core;
}

void Accelerator::backward(const at::Tensor& loss) {
  const std::int64_t steps = gradient_state_->num_steps();
  require_prepared_optimizers();
  gradient_state_->add_backward();
  run_backward(steps == 1 ? loss : loss / steps);
}

void Accelerator::backward(const at::Tensor& loss_sum, double count) {
  require_prepared_optimizers();
  gradient_state_->add_backward(count);
  run_backward(loss_sum);
}

namespace {

// Tells the strategies that a backward pass runs, and how it ended.
class BackwardScope {
 public:
  BackwardScope() = default;
  BackwardScope(const BackwardScope&) = delete;
  BackwardScope& operator=(const BackwardScope&) = delete;
  ~BackwardScope() {
    for (; ended_ < begun_.size(); ++ended_) begun_[ended_]->strategy->backward_failed();
  }
  void begin(const std::shared_ptr<detail::PreparedModuleCore>& module) {
    module->strategy->before_backward();
    begun_.push_back(module);
  }
  void end() {
    while (ended_ < begun_.size()) {
      detail::PreparedModuleCore& module = *begun_[ended_++];
      module.strategy->after_backward();
      module.used_since_backward = false;
    }
  }

 private:
  std::vector<std::shared_ptr<detail::PreparedModuleCore>> begun_;
  std::size_t ended_ = 0;
};

}  // namespace

void Accelerator::run_backward(const at::Tensor& loss) {
  const comm::UserCall call("backward()");
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
    std::string found = "an undefined tensor";
    if (loss.defined()) {
      found = text::concat("a tensor of shape [", text::join(loss.sizes()), "]",
                           loss.requires_grad() ? "" : " that does not require gradients");
    }
    throw StateError(text::concat(
        "backward() was given ", found,
        ", and a loss of one element that requires gradients was expected. Reduce it with "
        "mean() or sum(), and compute it from the output of a prepared module outside of "
        "NoGradGuard."));
  }
  BackwardScope scope;
  for (const auto& module : modules()) scope.begin(module);
  try {
    (scaler_ ? scaler_->scale(loss) : loss).backward();
    scope.end();
  } catch (...) {
    for (const auto& optimizer : optimizers()) optimizer->note_failed_backward();
    throw;
  }
  if (gradient_state_->sync_gradients()) return;
  for (const auto& optimizer : optimizers()) optimizer->note_own_step();
}

void Accelerator::require_prepared_optimizers() {
  const auto present = optimizers();
  for (const auto& optimizer : present) {
    optimizer->check_own_step();
    optimizer->follow_groups();
  }
  // A bare optimizer would step on scaled or partial gradients, or on none where the parameters are
  // sharded. In the plain case it is harmless.
  const bool partial = scaler_ || gradient_state_->num_steps() > 1;
  const bool stranger = std::any_of(present.begin(), present.end(), [](const auto& optimizer) {
    return optimizer->strategies().empty();
  });
  for (const auto& module : modules()) {
    if (!module->used_since_backward || !module->trained) continue;
    const auto steps_it = [&](const auto& optimizer) {
      const auto& all = optimizer->strategies();
      return std::any_of(all.begin(), all.end(), [&](const auto& strategy) {
        return strategy.get() == module->strategy.get();
      });
    };
    if (std::any_of(present.begin(), present.end(), steps_it)) continue;
    for (const auto& optimizer : locked(optimizers_)) {
      if (steps_it(optimizer)) optimizer->require_alive();
    }
    if (stranger) {
      throw StateError(
          "A prepared optimizer holds no parameter of any prepared module, and a prepared module "
          "that is trained has no optimizer: the optimizer was made of other parameters, such as "
          "those of a copy, or of a module before it was replaced. Make it of the parameters of "
          "the module that is given to prepare().");
    }
    if (!partial && !module->strategy->owns_leaves()) continue;
    throw StateError(
        text::concat("No prepared optimizer holds the parameters of a prepared module, and ",
                     module->strategy->owns_leaves() ? "those parameters are sharded"
                     : scaler_                       ? "fp16 gradients are scaled"
                               : "gradients are accumulated over several micro-batches",
                     ", which an optimizer that was not prepared knows nothing of. Give the "
                     "optimizer to prepare() and use what it "
                     "returns."));
  }
}

bool Accelerator::begin_micro_batch() {
  for (const auto& optimizer : optimizers()) optimizer->check_own_step();
  gradient_state_->begin_micro_batch();
  return !gradient_state_->reduces_gradients();
}

void Accelerator::trigger_sync_in_backward(PreparedModuleBase& module) {
  module.strategy().sync_in_next_backward();
}

bool Accelerator::optimizer_step_was_skipped() const {
  const auto present = optimizers();
  return std::any_of(present.begin(), present.end(),
                     [](const auto& optimizer) { return optimizer->step_was_skipped(); });
}

void Accelerator::join(const std::vector<std::shared_ptr<detail::PreparedModuleCore>>& modules,
                       const std::function<void()>& loop) {
  std::vector<parallel::Ddp*> joined;
  for (const auto& module : modules) {
    if (auto* ddp = dynamic_cast<parallel::Ddp*>(module->strategy.get())) {
      joined.push_back(ddp);
    } else if (num_processes() > 1) {
      throw UnsupportedError(text::concat(
          "join_uneven_inputs() was given a module under the strategy \"", module->strategy->name(),
          "\", and only ddp can go on without a rank. Use even_batches."));
    }
  }
  if (joined.size() > 1) {
    throw UnsupportedError(
        "join_uneven_inputs() takes one data-parallel module: with several, a rank that has run "
        "out cannot know whose "
        "turn it is. Put them into one module.");
  }
  if (!loop)
    throw ConfigError(
        "join_uneven_inputs() was given no loop. Give a function as its last argument.");
  for (auto* ddp : joined) ddp->set_join(true);
  try {
    loop();
    for (auto* ddp : joined) ddp->shadow_until_all_joined();
  } catch (...) {
    for (auto* ddp : joined) ddp->set_join(false);
    throw;
  }
  for (auto* ddp : joined) ddp->set_join(false);
}

void Accelerator::unscale_gradients() {
  const comm::UserCall call("unscale_gradients()");
  for (const auto& optimizer : optimizers()) optimizer->finish_gradients();
}

void Accelerator::require_whole_gradients(const char* operation) const {
  if (sync_gradients()) return;
  throw StateError(text::concat(
      operation,
      " was called within an accumulation window, where gradients are partial sums and not yet "
      "averaged over the ranks. Call it only if accelerator.sync_gradients()."));
}

namespace {

void require_limit(const char* operation, double limit) {
  if (limit >= 0) return;
  throw ConfigError(
      text::concat(operation, " was given the limit ", limit,
                   ", and a number from 0 up was expected (infinity clips nothing)."));
}

}  // namespace

at::Tensor Accelerator::clip_grad_norm_(PreparedModuleBase& model, double max_norm,
                                        double norm_type) {
  const comm::UserCall call("clip_grad_norm_()");
  require_limit("clip_grad_norm_()", max_norm);
  require_whole_gradients("clip_grad_norm_()");
  unscale_gradients();
  const at::NoGradGuard no_grad;
  const at::Tensor norm = model.strategy().grad_norm(norm_type);
  if (std::isfinite(max_norm))
    model.strategy().scale_gradients_(parallel::clip_factor(norm, max_norm));
  return norm;
}

at::Tensor Accelerator::clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                        double norm_type) {
  require_limit("clip_grad_norm_()", max_norm);
  require_whole_gradients("clip_grad_norm_()");
  for (const at::Tensor& parameter : parameters) {
    for (const auto& module : modules()) {
      const at::Tensor leaf = module->strategy->optimizer_leaf(parameter);
      if ((leaf.defined() && !leaf.is_same(parameter)) ||
          intercept::is_part_of_gradient(parameter.grad())) {
        throw StateError(text::concat(
            "clip_grad_norm_() was given parameters of a module under the strategy \"",
            module->strategy->name(),
            "\", whose gradients are spread over the ranks. Give it the prepared module instead."));
      }
    }
  }
  unscale_gradients();
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  if (gradients.empty()) return at::zeros({}, at::TensorOptions().device(device()));
  const at::Tensor norm =
      at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients, norm_type)), norm_type);
  at::_foreach_mul_(gradients, parallel::clip_factor(norm, max_norm));
  return norm;
}

void Accelerator::clip_grad_value_(PreparedModuleBase& model, double limit) {
  require_limit("clip_grad_value_()", limit);
  require_whole_gradients("clip_grad_value_()");
  unscale_gradients();
  model.strategy().clip_grad_value_(limit);
}

std::vector<Json> Accelerator::gather_object(const Json& object) const {
  return comm::gather_object(object, world());
}

void Accelerator::broadcast_object_list(std::vector<Json>& objects, int source) const {
  comm::broadcast_object_list(objects, world(), source);
}

AutocastScope Accelerator::autocast() const {
  return AutocastScope(device().type(), mixed_precision_, options_.autocast());
}

void Accelerator::profile(const ProfileOptions& options,
                          const std::function<void(Profiler&)>& work) const {
  Profiler profiler(options, process_index());
  work(profiler);
  profiler.finish();
  wait_for_everyone();
}

bool Accelerator::check_trigger() {
  const comm::UserCall call("check_trigger()");
  if (world().size() == 1) return std::exchange(trigger_, false);
  const at::Tensor raised =
      at::full({1}, trigger_ ? 1 : 0, at::TensorOptions().device(device()).dtype(at::kInt));
  world().all_reduce(raised, comm::ReduceOp::max).wait();
  trigger_ = false;
  return raised.item<int>() > 0;
}

data::LoaderContext Accelerator::loader_context() const {
  const comm::UserCall call("prepare() of a loader");
  const Topology& topology = state_->topology();
  data::LoaderContext context;
  context.group = world();
  context.node_rank = topology.node_rank;
  context.num_nodes = topology.num_nodes;
  context.local_rank = topology.local_rank;
  context.local_world_size = topology.local_world_size;
  context.device = device();
  context.device_placement = options_.device_placement();
  context.configuration = options_.dataloader();
  context.observer = loader_observer_;
  context.gradient_accumulation_steps = gradient_state_->num_steps();
  // The seed the program last set, as it is on rank 0.
  const auto seed = at::globalContext().defaultGenerator(at::kCPU).current_seed();
  context.seed =
      static_cast<std::int64_t>(std::stoull(world().broadcast_bytes(std::to_string(seed))));
  return context;
}

namespace {

// `first` runs the function before the others of its group do; whatever it throws reaches them all.
void run_first(const comm::Group& group, const char* operation,
               const std::function<void()>& function) {
  if (group.size() == 1) return function();
  const comm::UserCall call(operation);
  std::exception_ptr failure;
  std::string outcome;
  if (group.rank() == 0) {
    try {
      function();
    } catch (const std::exception& error) {
      failure = std::current_exception();
      outcome = describe(error);
      if (outcome.empty()) outcome = "an error without a message";
    }
  }
  outcome = group.broadcast_bytes(outcome, 0);
  if (failure) std::rethrow_exception(failure);
  if (!outcome.empty()) {
    throw DistributedError(text::concat("The first process failed in ", operation,
                                        "(), so this one did not start: ", outcome),
                           operation, group.rank());
  }
  if (group.rank() != 0) function();
}

}  // namespace

void Accelerator::main_process_first(const std::function<void()>& function) const {
  run_first(world(), "main_process_first", function);
}

void Accelerator::local_main_process_first(const std::function<void()>& function) const {
  const Topology& topology = state_->topology();
  if (topology.num_nodes <= 1) return run_first(world(), "local_main_process_first", function);
  run_first(world().split(topology.node_rank, topology.local_rank, "node"),
            "local_main_process_first", function);
}

void Accelerator::print_line(const std::string& line) {
  detail::clear_terminal_line();
  std::cout << line << std::endl;
}

void Accelerator::free_memory() {
  checkpointing_->forget_prepared();
  modules_.clear();
  optimizers_.clear();
  schedulers_.clear();
  kept_.clear();
  gradient_state_->set_step(0);
  if (!device().is_cpu()) at::accelerator::emptyCache();
}

void Accelerator::end_training() {
  const comm::UserCall call("end_training()");
  if (!State::is_initialized()) return;
  wait_for_everyone();
  free_memory();
  State::shutdown();
}

}  // namespace accelerate
