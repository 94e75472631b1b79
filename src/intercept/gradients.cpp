#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/memory_kind.hpp>
#include <accelerate/intercept/gradients.hpp>
#include <intercept/quiet.hpp>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace accelerate::intercept {
namespace {

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

Gradients::Gradients(Engine& engine, GradientSink& sink, std::optional<at::ScalarType> dtype)
    : engine_(engine), sink_(sink), dtype_(dtype), collected_(engine.units().size()) {
  for (std::size_t u = 0; u < collected_.size(); ++u) {
    const auto& parameters = engine.units()[u]->parameters();
    collected_[u].arrived.assign(parameters.size(), false);
    collected_[u].expected.assign(parameters.size(), false);
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      auto hook = std::make_unique<Hook>();
      hook->gradients = this;
      hook->unit = u;
      hook->parameter = p;
      // A frozen parameter may never have met autograd.
      torch::autograd::impl::materialize_autograd_meta(parameters[p].parameter);
      hook->before = std::move(torch::autograd::impl::post_acc_grad_hooks(parameters[p].parameter));
      torch::autograd::impl::set_post_acc_grad_hooks(parameters[p].parameter, std::move(hook));
    }
  }
}

Gradients::~Gradients() {
  for (const auto& unit : engine_.units()) {
    for (const UnitParameter& parameter : unit->parameters()) {
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

bool Gradients::keeps_gradients() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(collected_.begin(), collected_.end(),
                     [](const Collected& each) { return each.gradients.flat.defined(); });
}

void Gradients::clear() {
  const std::lock_guard lock(mutex_);
  task_ = -1;
  for (Collected& collected : collected_) {
    collected.gradients = {};
    collected.arrived.assign(collected.arrived.size(), false);
  }
}

void Gradients::receive(std::size_t u, std::size_t p) {
  const std::lock_guard lock(mutex_);
  const Quiet quiet;
  const Unit& unit = *engine_.units()[u];
  const UnitParameter& parameter = unit.parameters()[p];
  at::Tensor& gradient = const_cast<at::Tensor&>(parameter.parameter).mutable_grad();
  if (!gradient.defined()) return;  // the user's own hook took it
  if (!is_tagged(parameter.parameter)) unit.check_tagged();
  if (gradient.requires_grad()) {
    gradient.reset();
    throw ShardingError(text::concat("backward(create_graph=true) reached the sharded parameter '",
                                     parameter.name,
                                     "': its gradient is reduced over the ranks and has no graph "
                                     "of its own. Take gradients of gradients with "
                                     "torch::autograd::grad with respect to inputs or parameters, "
                                     "and call backward() on what you make of them."));
  }
  if (const int task = torch::autograd::get_current_graph_task_id(); task != task_)
    begin_backward(task);
  Collected& collected = collected_[u];
  open(u);
  const at::Tensor source = in_memory_order(gradient, parameter);
  const Layout& layout = unit.layout();
  const std::int64_t stride = UnitGradients::part(unit);
  for (std::int64_t done = 0; done < parameter.elements;) {
    const std::int64_t at = parameter.offset + done;
    const std::int64_t part = at / layout.part;
    const std::int64_t count = std::min(parameter.elements - done, (part + 1) * layout.part - at);
    at::Tensor target = collected.gradients.flat.narrow(0, part * stride + at % layout.part, count);
    const at::Tensor piece = source.narrow(0, done, count);
    if (collected.gradients.used[p]) {
      target.add_(piece);
    } else {
      target.copy_(piece);
    }
    done += count;
  }
  collected.gradients.used[p] = true;
  collected.arrived[p] = true;
  gradient.reset();
  // In the agreed order, as far as complete units reach.
  while (reduce_ && next_given_ < order_.size() &&
         complete(static_cast<std::size_t>(order_[next_given_]))) {
    give(static_cast<std::size_t>(order_[next_given_++]));
  }
}

void Gradients::begin_backward(int task) {
  if (task_ != -1) {
    // The last one never ended: it failed. What it left is part of a gradient, good for nothing.
    for (Collected& collected : collected_) collected.gradients = {};
  }
  task_ = task;
  next_given_ = 0;
  order_.clear();
  const std::vector<int> forward = engine_.first_demands();
  for (auto index = forward.rbegin(); index != forward.rend(); ++index) {
    const auto& parameters = engine_.units()[static_cast<std::size_t>(*index)]->parameters();
    const bool trained =
        std::any_of(parameters.begin(), parameters.end(),
                    [](const UnitParameter& each) { return each.parameter.requires_grad(); });
    if (trained) order_.push_back(*index);
  }
  // Where ranks use different parameters of a unit, none may keep the others waiting for what does
  // not come.
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  for (std::size_t u = 0; u < collected_.size(); ++u) {
    Collected& collected = collected_[u];
    collected.arrived.assign(collected.arrived.size(), false);
    for (std::size_t p = 0; p < collected.expected.size(); ++p) {
      const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(
          engine_.units()[u]->parameters()[p].parameter);
      collected.expected[p] =
          accumulator && (nodes == nullptr || nodes->contains(accumulator.get()));
    }
  }
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this, task] { end_backward(task); });
}

void Gradients::end_backward(int task) {
  {
    const std::lock_guard lock(mutex_);
    if (task != task_) return;
    task_ = -1;
    const Quiet quiet;
    if (reduce_) {
      while (next_given_ < order_.size()) give(static_cast<std::size_t>(order_[next_given_++]));
    }
    const MemoryKindScope kind(MemoryKind::gradients);
    sink_.finish(reduce_);
  }
  engine_.end_pass();
}

void Gradients::open(std::size_t u) {
  UnitGradients& gradients = collected_[u].gradients;
  if (gradients.flat.defined()) return;
  const Unit& unit = *engine_.units()[u];
  const MemoryKindScope kind(MemoryKind::gradients);
  gradients.flat =
      at::zeros({UnitGradients::part(unit) * unit.layout().parts},
                at::TensorOptions(unit.device()).dtype(dtype_.value_or(unit.compute_dtype())));
  gradients.used.assign(unit.parameters().size(), false);
}

bool Gradients::complete(std::size_t u) const {
  const Collected& collected = collected_[u];
  for (std::size_t p = 0; p < collected.expected.size(); ++p) {
    if (collected.expected[p] && !collected.arrived[p]) return false;
  }
  return true;
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
  const MemoryKindScope kind(MemoryKind::gradients);
  sink_.reduce(unit, std::move(collected.gradients));
  collected.gradients = {};
}

}  // namespace accelerate::intercept
