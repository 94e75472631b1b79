#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/memory_kind.hpp>
#include <intercept/backward_end.hpp>
#include <intercept/gradients.hpp>
#include <intercept/internal_ops.hpp>
#include <intercept/policies.hpp>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace accelerate::intercept {
namespace {

constexpr const char* kStandsFor =
    "The gradient of a sharded parameter was used through the parameter. It was reduced over the "
    "processes and lies in parts on them; the parameter's own .grad only says that there is one. "
    "To clip, call accelerator.clip_grad_norm_(model, max_norm) or clip_grad_value_(model, limit) "
    "with the prepared module; to clear, zero_grad() of the prepared optimizer; to step, an "
    "optimizer that was given to prepare(). This process's part is the gradient of the prepared "
    "optimizer's parameters.";

// autograd::grad captures gradients on their way and accumulates none.
bool accumulates(const at::Tensor& parameter) {
  const auto* tasks = torch::autograd::get_current_graph_task_exec_info();
  if (tasks == nullptr || tasks->empty()) return true;
  const auto found = tasks->find(torch::autograd::impl::try_get_grad_accumulator(parameter).get());
  return found != tasks->end() && found->second.needed_;
}

bool is_alias(const at::Tensor& gradient, const at::Tensor& stand_in) {
  return gradient.defined() && gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() == stand_in.storage().unsafeGetStorageImpl();
}

// A gradient as one dimension, in the order in which its parameter lies in memory.
at::Tensor in_memory_order(const at::Tensor& gradient, const UnitParameter& parameter) {
  at::Tensor ordered = gradient;
  if (gradient.layout() != c10::Layout::Strided) ordered = gradient.to_dense();
  if (ordered.strides() != at::IntArrayRef(parameter.strides)) {
    ordered =
        at::empty_strided(parameter.sizes, parameter.strides, ordered.options()).copy_(ordered);
  }
  return ordered.as_strided({parameter.elements}, {1}, ordered.storage_offset());
}

}  // namespace

struct Gradients::Hook final : torch::autograd::PostAccumulateGradHook {
  Gradients* gradients = nullptr;
  std::size_t unit = 0;
  std::size_t parameter = 0;
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> before;  // the user's own

  void operator()(const at::Tensor& variable) override {
    if (before) (*before)(variable);
    gradients->receive(unit, parameter);
  }
};

// How a graph task finds the gradients, if they are still there.
struct Gradients::Link {
  std::mutex mutex;
  Gradients* gradients = nullptr;

  void over(int task, bool failed) {
    const std::lock_guard lock(mutex);
    if (gradients != nullptr) gradients->task_over(task, failed);
  }
};

Gradients::Gradients(Engine& engine, GradientSink& sink)
    : engine_(engine),
      sink_(sink),
      link_(std::make_shared<Link>()),
      collected_(engine.units().size()) {
  link_->gradients = this;
  for (std::size_t u = 0; u < collected_.size(); ++u) {
    const auto& parameters = engine.units()[u]->parameters();
    collected_[u].partial.assign(parameters.size(), false);
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      auto hook = std::make_unique<Hook>();
      hook->gradients = this;
      hook->unit = u;
      hook->parameter = p;
      // A frozen parameter may never have met autograd.
      torch::autograd::impl::materialize_autograd_meta(parameters[p].parameter);
      hook->before = std::move(torch::autograd::impl::post_acc_grad_hooks(parameters[p].parameter));
      torch::autograd::impl::set_post_acc_grad_hooks(parameters[p].parameter, std::move(hook));
      auto& before =
          torch::autograd::impl::get_autograd_meta(parameters[p].parameter)->cpp_hooks_list_;
      if (!before) torch::autograd::impl::create_cpp_hook(parameters[p].parameter);
      collected_[u].hooks.push_back(before->size());
      before->emplace_back([this, u, p](const at::TensorBase&) {
        make_way(u, p);
        return at::TensorBase();
      });
      collected_[u].stand_ins.push_back(given_up(parameters[p].parameter, kStandsFor));
    }
    collected_[u].standing.assign(parameters.size(), false);
  }
}

Gradients::~Gradients() {
  {
    const std::lock_guard lock(link_->mutex);
    link_->gradients = nullptr;
  }
  for (const auto& unit : engine_.units()) {
    Collected& collected = collected_[static_cast<std::size_t>(unit->index())];
    collected.gradients = {};
    for (std::size_t p = 0; p < unit->parameters().size(); ++p) {
      const UnitParameter& parameter = unit->parameters()[p];
      stand_for(*unit, p, false);
      torch::autograd::impl::get_autograd_meta(parameter.parameter)
          ->cpp_hooks_list_->at(collected.hooks[p]) = nullptr;
      auto& slot = torch::autograd::impl::post_acc_grad_hooks(parameter.parameter);
      if (auto* hook = dynamic_cast<Hook*>(slot.get());
          hook != nullptr && hook->gradients == this) {
        auto before = std::move(hook->before);
        slot = std::move(before);
      }
    }
  }
}

void Gradients::set_reduce(bool reduce) {
  const std::lock_guard lock(mutex_);
  reduce_ = reduce;
}

ParameterSet Gradients::none() const {
  ParameterSet none;
  for (const Collected& collected : collected_) none.emplace_back(collected.partial.size(), false);
  return none;
}

namespace {

// The first that both sets have; nothing when there is none.
template <class InOther>
std::optional<std::pair<std::size_t, std::size_t>> first_of(const ParameterSet& parameters,
                                                            const InOther& in_other) {
  for (std::size_t u = 0; u < parameters.size(); ++u) {
    for (std::size_t p = 0; p < parameters[u].size(); ++p) {
      if (parameters[u][p] && in_other(u, p)) return std::pair(u, p);
    }
  }
  return {};
}

}  // namespace

bool Gradients::keeps(const ParameterSet& parameters) const {
  const std::lock_guard lock(mutex_);
  return first_of(parameters,
                  [&](std::size_t u, std::size_t p) {
                    const UnitGradients& gradients = collected_[u].gradients;
                    return gradients.flat.defined() && gradients.used[p];
                  })
      .has_value();
}

const UnitParameter* Gradients::partial(const ParameterSet& parameters) const {
  const std::lock_guard lock(mutex_);
  const auto found =
      first_of(parameters, [&](std::size_t u, std::size_t p) { return collected_[u].partial[p]; });
  return found ? &engine_.units()[found->first]->parameters()[found->second] : nullptr;
}

namespace {

// Calls `act(at, in_flat, count)` for each piece of the parameter: where it lies in the parameter
// and in a buffer of UnitGradients.
template <class Act>
void for_pieces(const Unit& unit, const UnitParameter& parameter, const Act& act) {
  const Layout& layout = unit.layout();
  for (std::int64_t done = 0; done < parameter.elements;) {
    const std::int64_t at = parameter.offset + done;
    const std::int64_t part = at / layout.part;
    const std::int64_t count = std::min(parameter.elements - done, (part + 1) * layout.part - at);
    act(done, part * UnitGradients::part(unit) + at % layout.part, count);
    done += count;
  }
}

}  // namespace

void Gradients::clear(const ParameterSet& parameters) {
  settle();
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  for (std::size_t u = 0; u < parameters.size(); ++u) {
    Collected& collected = collected_[u];
    for (std::size_t p = 0; p < parameters[u].size(); ++p) {
      if (!parameters[u][p]) continue;
      collected.partial[p] = false;
      if (!collected.gradients.flat.defined() || !collected.gradients.used[p]) continue;
      collected.gradients.used[p] = false;
      const Unit& unit = *engine_.units()[u];
      for_pieces(unit, unit.parameters()[p],
                 [&](std::int64_t, std::int64_t in_flat, std::int64_t count) {
                   collected.gradients.flat.narrow(0, in_flat, count).zero_();
                 });
    }
    const auto& used = collected.gradients.used;
    if (std::find(used.begin(), used.end(), true) == used.end()) collected.gradients = {};
  }
}

void Gradients::begin() {
  const std::lock_guard lock(mutex_);
  ++scopes_;
}

void Gradients::end(bool failed) {
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    if (scopes_ == 0) return;
    --scopes_;
    if (failed) {
      spoil(reached_);
      note_failure();
      if (scopes_ == 0) {
        tasks_.clear();
        in_session_ = false;
      }
      return;
    }
    over = end_session_if_over();
  }
  if (over) engine_.end_pass();
}

void Gradients::settle() {
  {
    const std::lock_guard lock(mutex_);
    if (!failed_ || in_session_) return;
    failed_ = false;
    const InternalOpsGuard internal;
    const MemoryKindScope kind(MemoryKind::gradients);
    sink_.abandon();
  }
  engine_.abandon_pass();
}

void Gradients::stand_for(const Unit& unit, std::size_t p, bool there) {
  Collected& collected = collected_[static_cast<std::size_t>(unit.index())];
  at::Tensor& gradient = const_cast<at::Tensor&>(unit.parameters()[p].parameter).mutable_grad();
  if (!there && collected.gradients.flat.defined() && collected.gradients.used[p]) return;
  if (there && !gradient.defined()) {
    gradient = collected.stand_ins[p];
  } else if (!there && is_alias(gradient, collected.stand_ins[p])) {
    gradient.reset();
  }
  collected.standing[p] = there;
}

void Gradients::notice_cleared() {
  const std::lock_guard lock(mutex_);
  for (std::size_t u = 0; u < collected_.size(); ++u) {
    for (std::size_t p = 0; p < collected_[u].standing.size(); ++p) notice_cleared(u, p);
  }
}

void Gradients::notice_cleared(std::size_t u, std::size_t p) {
  Collected& collected = collected_[u];
  const Unit& unit = *engine_.units()[u];
  const UnitParameter& parameter = unit.parameters()[p];
  if (!collected.standing[p] || parameter.parameter.grad().defined()) return;
  collected.standing[p] = false;
  UnitGradients& kept = collected.gradients;
  if (kept.flat.defined() && kept.used[p]) {
    const InternalOpsGuard internal;
    for_pieces(unit, parameter, [&](std::int64_t, std::int64_t in_flat, std::int64_t count) {
      kept.flat.narrow(0, in_flat, count).zero_();
    });
    kept.used[p] = false;
    if (std::find(kept.used.begin(), kept.used.end(), true) == kept.used.end()) kept = {};
  }
  sink_.cleared(unit, p);
}

// Before a gradient is accumulated: into nothing, and not into what stands for the one of before.
void Gradients::make_way(std::size_t u, std::size_t p) {
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  const Unit& unit = *engine_.units()[u];
  if (!accumulates(unit.parameters()[p].parameter)) return;
  present_task();  // so that the session, at whose end stand-ins come back, lasts until it is over
  if (!collected_[u].standing[p]) return;
  at::Tensor& gradient = const_cast<at::Tensor&>(unit.parameters()[p].parameter).mutable_grad();
  if (is_alias(gradient, collected_[u].stand_ins[p])) gradient.reset();
  collected_[u].standing[p] = false;
}

void Gradients::receive(std::size_t u, std::size_t p) {
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  Task& task = present_task();
  task.awaited[u][p] = false;
  collect(u, p);
  // In the agreed order, as far as complete units reach.
  while (reduce_ && !several_ && !had_several_ && next_given_ < order_.size() &&
         complete(static_cast<std::size_t>(order_[next_given_]))) {
    give(static_cast<std::size_t>(order_[next_given_++]));
  }
}

void Gradients::collect(std::size_t u, std::size_t p) {
  const Unit& unit = *engine_.units()[u];
  const UnitParameter& parameter = unit.parameters()[p];
  at::Tensor& gradient = const_cast<at::Tensor&>(parameter.parameter).mutable_grad();
  if (!gradient.defined()) return;  // the user's own hook took it
  if (engine_.has_full_parameters()) {
    gradient.reset();
    throw StateError(text::concat(
        "backward() reached the sharded parameter '", parameter.name,
        "' while summon_full_params() has the parameters whole. Let what it returned go out of "
        "scope before backward()."));
  }
  if (!is_claimed(parameter.parameter)) unit.check_tagged();
  if (torch::autograd::impl::try_get_grad_accumulator(parameter.parameter) !=
      torch::autograd::get_current_node()) {
    gradient.reset();
    throw StateError(text::concat(
        "A gradient of the sharded parameter '", parameter.name,
        "' came by way of a graph or a view (such as weight.t()) that was made before prepare() "
        "sharded it. Such a view has the values of then, and its gradients are not those of the "
        "shards. Call the prepared module and make views after prepare()."));
  }
  if (gradient.requires_grad()) {
    gradient.reset();
    throw ShardingError(text::concat("backward(create_graph=true) reached the sharded parameter '",
                                     parameter.name,
                                     "': its gradient is reduced over the ranks and has no graph "
                                     "of its own. Take gradients of gradients with "
                                     "torch::autograd::grad with respect to inputs or parameters, "
                                     "and call backward() on what you make of them."));
  }
  Collected& collected = collected_[u];
  if (collected.given) several_ = true;
  open(u);
  const at::Tensor source = in_memory_order(gradient, parameter);
  for_pieces(unit, parameter, [&](std::int64_t at, std::int64_t in_flat, std::int64_t count) {
    at::Tensor target = collected.gradients.flat.narrow(0, in_flat, count);
    const at::Tensor piece = source.narrow(0, at, count);
    if (collected.gradients.used[p]) {
      target.add_(piece);
    } else {
      target.copy_(piece);
    }
  });
  collected.gradients.used[p] = true;
  gradient.reset();
}

std::vector<int> Gradients::reduction_order() const {
  std::vector<int> order;
  const std::vector<int> forward = engine_.first_demands();
  for (auto index = forward.rbegin(); index != forward.rend(); ++index) {
    const auto& parameters = engine_.units()[static_cast<std::size_t>(*index)]->parameters();
    const bool trained =
        std::any_of(parameters.begin(), parameters.end(),
                    [](const UnitParameter& each) { return each.parameter.requires_grad(); });
    if (trained) order.push_back(*index);
  }
  return order;
}

void Gradients::give_kept(const Unit& unit) {
  const std::lock_guard lock(mutex_);
  const InternalOpsGuard internal;
  give(static_cast<std::size_t>(unit.index()));
}

void Gradients::give_all_kept() {
  for (const int index : reduction_order())
    give_kept(*engine_.units()[static_cast<std::size_t>(index)]);
}

Gradients::Task& Gradients::present_task() {
  const int id = torch::autograd::get_current_graph_task_id();
  for (Task& task : tasks_) {
    if (task.id == id) return task;
  }
  if (in_session_) {
    several_ = true;
  } else {
    begin_session();
  }
  // Where ranks use different parameters of a unit, none may keep the others waiting for what does
  // not come.
  Task task{id, none(), {}};
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  for (std::size_t u = 0; u < collected_.size(); ++u) {
    for (std::size_t p = 0; p < task.expected[u].size(); ++p) {
      const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(
          engine_.units()[u]->parameters()[p].parameter);
      if (!accumulator || (nodes != nullptr && !nodes->contains(accumulator.get()))) continue;
      task.expected[u][p] = true;
      reached_[u][p] = true;
    }
  }
  task.awaited = task.expected;
  when_backward_ends([link = link_, id](bool failed) { link->over(id, failed); });
  tasks_.push_back(std::move(task));
  return tasks_.back();
}

void Gradients::begin_session() {
  if (std::exchange(failed_, false)) sink_.abandon();
  in_session_ = true;
  several_ = false;
  reached_ = none();
  next_given_ = 0;
  order_ = reduction_order();
  for (Collected& collected : collected_) collected.given = false;
  for (std::size_t u = 0; u < collected_.size(); ++u) {
    for (std::size_t p = 0; p < collected_[u].standing.size(); ++p) notice_cleared(u, p);
  }
}

void Gradients::task_over(int id, bool failed) {
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    const auto task =
        std::find_if(tasks_.begin(), tasks_.end(), [&](const Task& each) { return each.id == id; });
    if (task == tasks_.end()) return;
    if (failed) {
      spoil(task->expected);
      note_failure();
    }
    tasks_.erase(task);
    // Whatever it was to have given, the gradients of others that go on are whole.
    if (failed && tasks_.empty() && scopes_ == 0) {
      in_session_ = false;
      return;
    }
    over = !failed && end_session_if_over();
  }
  if (over) engine_.end_pass();
}

bool Gradients::end_session_if_over() {
  if (!in_session_ || scopes_ > 0 || !tasks_.empty()) return false;
  in_session_ = false;
  const InternalOpsGuard internal;
  const MemoryKindScope kind(MemoryKind::gradients);
  try {
    if (reduce_) {
      while (next_given_ < order_.size()) give(static_cast<std::size_t>(order_[next_given_++]));
      // What came for units that had been given. Every rank gives them all, whichever came there.
      if (several_ && !had_several_) {
        for (const int index : order_) give(static_cast<std::size_t>(index));
      }
    }
    sink_.finish(reduce_);
    for (std::size_t u = 0; u < collected_.size(); ++u) {
      const Unit& unit = *engine_.units()[u];
      const UnitGradients& kept = collected_[u].gradients;
      for (std::size_t p = 0; p < unit.parameters().size(); ++p)
        stand_for(unit, p, (kept.flat.defined() && kept.used[p]) || sink_.has_gradient(unit, p));
    }
  } catch (...) {
    spoil(reached_);
    note_failure();
    throw;
  }
  had_several_ = several_;
  failed_ = false;
  return true;
}

void Gradients::note_failure() noexcept {
  if (!std::exchange(failed_, true)) sink_.failed();
}

void Gradients::spoil(const ParameterSet& parameters) {
  for (std::size_t u = 0; u < parameters.size(); ++u) {
    for (std::size_t p = 0; p < parameters[u].size(); ++p) {
      if (parameters[u][p]) collected_[u].partial[p] = true;
    }
  }
}

void Gradients::open(std::size_t u) {
  UnitGradients& gradients = collected_[u].gradients;
  if (gradients.flat.defined()) return;
  const Unit& unit = *engine_.units()[u];
  const MemoryKindScope kind(MemoryKind::gradients);
  gradients.flat = at::zeros({UnitGradients::part(unit) * unit.layout().parts},
                             at::TensorOptions(unit.device()).dtype(unit.reduce_dtype()));
  gradients.used.assign(unit.parameters().size(), false);
}

bool Gradients::complete(std::size_t u) const {
  return std::none_of(tasks_.begin(), tasks_.end(), [&](const Task& task) {
    const auto& awaited = task.awaited[u];
    return std::find(awaited.begin(), awaited.end(), true) != awaited.end();
  });
}

void Gradients::give(std::size_t u) {
  open(u);
  Collected& collected = collected_[u];
  const Unit& unit = *engine_.units()[u];
  std::vector<float> flags(collected.gradients.used.begin(), collected.gradients.used.end());
  const at::Tensor used =
      at::from_blob(flags.data(), {static_cast<std::int64_t>(flags.size())}, at::kFloat);
  collected.gradients.flat.view({unit.layout().parts, UnitGradients::part(unit)})
      .slice(1, unit.layout().part)
      .copy_(used);
  collected.given = true;
  const MemoryKindScope kind(MemoryKind::gradients);
  sink_.reduce(unit, std::exchange(collected.gradients, {}));
}

}  // namespace accelerate::intercept
