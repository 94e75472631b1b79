#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <intercept/internal_ops.hpp>
#include <parallel/fsdp_impl.hpp>

#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

namespace accelerate::parallel {

using intercept::Engine;
using intercept::InternalOpsGuard;
using intercept::UnitParameter;

Fsdp::Fsdp(ModuleRecord module, FsdpOptions options, const comm::Group& group, std::string name)
    : Strategy(std::move(module)),
      impl_(std::make_unique<Impl>(std::move(name), module_, std::move(options), group)) {
  if (log::enabled(log::Level::debug))
    log::debug(text::concat(impl_->name, " units:\n", describe_units()));
}

Fsdp::~Fsdp() {
  // Alone there is nobody to ask for the parameters, so they can be given back.
  if (impl_->gather_group.size() == 1) {
    try {
      impl_->gradients.reset();
      impl_->engine->restore();
    } catch (const std::exception& error) {
      log::error(
          text::concat("The parameters could not be given back to the module: ", describe(error)));
    }
  }
}

std::string_view Fsdp::name() const noexcept { return impl_->name; }

int Fsdp::rank() const noexcept { return impl_->world_rank; }

const FsdpOptions& Fsdp::options() const noexcept { return impl_->options; }

void Fsdp::follow_module() {
  if (module_.is_current()) return;
  ModuleRecord now = module_;
  now.refresh();
  const auto lacks = [](const ModuleRecord& record) {
    return [&record](const NamedTensor& entry) {
      return std::none_of(
          record.parameters().begin(), record.parameters().end(),
          [&](const NamedTensor& other) { return other.tensor.is_same(entry.tensor); });
    };
  };
  for (const auto& [one, other, what] :
       {std::tuple(&now, &module_, "was registered"),
        std::tuple(static_cast<ModuleRecord*>(&module_), &now, "was replaced or taken away")}) {
    const auto found =
        std::find_if(one->parameters().begin(), one->parameters().end(), lacks(*other));
    if (found == one->parameters().end()) continue;
    throw StateError(text::concat(
        "The module's parameter '", found->name, "' ", what,
        " after prepare(). Under the strategy \"", name(),
        "\" a module's parameters are cut once, in prepare(), so it would not be trained. "
        "Register parameters before prepare(); or call restore() on the prepared module, and "
        "prepare the module and an optimizer of its parameters anew."));
  }
  module_ = std::move(now);  // buffers
}

void Fsdp::before_forward(const ForwardContext& context) {
  impl_->require_sharded();
  impl_->begin_pass();
  impl_->gradients->settle();
  Strategy::before_forward(context);
  impl_->engine->check_tagged();
  impl_->refresh_if_stepped();
  impl_->reduces = context.sync || impl_->options.reduce_every_backward();
  impl_->gradients->set_reduce(impl_->reduces);
  if (context.grad_enabled) {
    impl_->expects_backward = true;
    impl_->control_flow->begin_forward();
  }
  impl_->engine->begin_pass(context.grad_enabled ? Engine::Pass::training
                                                 : Engine::Pass::inference);
}

void Fsdp::after_forward(const ForwardContext& context, const std::vector<at::Tensor>&) {
  if (!context.grad_enabled && impl_->engine->in_pass(Engine::Pass::inference))
    impl_->engine->end_pass();
}

void Fsdp::sync_in_next_backward() {
  impl_->require_sharded();
  impl_->reduces = true;
  impl_->gradients->set_reduce(true);
}

at::Tensor Fsdp::optimizer_leaf(const at::Tensor& parameter) const {
  const auto found = impl_->leaf_of.find(parameter.unsafeGetTensorImpl());
  return found != impl_->leaf_of.end() ? found->second : Strategy::optimizer_leaf(parameter);
}

void Fsdp::before_backward() {
  if (!is_restored()) impl_->gradients->begin();
}

void Fsdp::after_backward() {
  if (is_restored()) return;
  impl_->gradients->end(/*failed=*/false);
  if (impl_->expects_backward) impl_->join_backward();
}

void Fsdp::backward_failed() noexcept {
  if (!is_restored()) impl_->gradients->end(/*failed=*/true);
}

void Fsdp::check_gradients(const std::vector<at::Tensor>& leaves) {
  impl_->require_sharded();
  impl_->gradients->notice_cleared();
  Strategy::check_gradients(leaves);
  impl_->engine->check_tagged();
  for (const auto& unit : impl_->engine->units()) {
    for (const UnitParameter& parameter : unit->parameters()) {
      const at::Tensor& own = parameter.parameter.grad();
      if (!own.defined() || intercept::is_tagged(own)) continue;  // what stands for the leaf's
      throw StateError(text::concat("The sharded parameter '", parameter.name,
                                    "' has a gradient of its own, which was not reduced over the "
                                    "ranks and would not be used. A hook set after prepare() took "
                                    "the place of the one that reduces it: "
                                    "set hooks before prepare()."));
    }
  }
  const intercept::ParameterSet owned = impl_->of(leaves);
  if (const UnitParameter* partial = impl_->gradients->partial(owned)) {
    throw StateError(text::concat(
        "The optimizer was asked to step after a backward that ended with an exception: the "
        "gradient of '",
        partial->name,
        "' is only a part of one. Clear the gradients with the prepared optimizer's zero_grad() "
        "before the next backward."));
  }
  impl_->control_flow->check();
  // A forward after the backward, to evaluate, has none to wait for.
  if (impl_->expects_backward && !impl_->has_reduced) impl_->join_backward();
  if (impl_->gradients->keeps(owned)) {
    throw StateError(
        "The optimizer was asked to step while gradients of micro-batches without synchronisation "
        "wait to be reduced. Run the "
        "last micro-batch with synchronisation (outside no_sync), or clear the gradients.");
  }
  impl_->wait_for_copies();
}

void Fsdp::after_step(const std::vector<at::Tensor>& leaves) {
  impl_->require_sharded();
  impl_->has_reduced = false;
  const intercept::ParameterSet owned = impl_->of(leaves);
  for (std::size_t u = 0; u < owned.size(); ++u) {
    Impl::Part& part = impl_->parts[u];
    if (std::find(owned[u].begin(), owned[u].end(), true) == owned[u].end()) continue;
    std::vector<bool> changed(owned[u].size(), false);
    for (std::size_t p = 0; p < changed.size(); ++p) {
      const auto version = static_cast<std::int64_t>(part.leaves[p]._version());
      // Not every optimizer that writes to a leaf tells autograd: LibTorch's fused ones do not.
      changed[p] = std::exchange(part.leaf_versions[p], version) != version ||
                   (owned[u][p] && part.leaves[p].grad().defined());
    }
    impl_->engine->refresh(*impl_->engine->units()[u], changed);
    part.reshard.reset();
  }
}

void Fsdp::before_zero_grad(const std::vector<at::Tensor>& leaves) {
  impl_->require_sharded();
  impl_->has_reduced = false;
  const intercept::ParameterSet owned = impl_->of(leaves);
  impl_->gradients->clear(owned);
  for (std::size_t u = 0; u < owned.size(); ++u) {
    for (std::size_t p = 0; p < owned[u].size(); ++p) {
      if (owned[u][p]) impl_->gradients->stand_for(*impl_->engine->units()[u], p, false);
    }
  }
}

at::Tensor Fsdp::grad_norm(double p) const {
  impl_->require_sharded();
  impl_->gradients->notice_cleared();
  const InternalOpsGuard internal;
  const auto all = impl_->local_gradients();
  const at::Device device = impl_->parts.front().shard.device();
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const at::Tensor& gradient : all) by_dtype[gradient.scalar_type()].push_back(gradient);
  std::vector<at::Tensor> norms;
  at::ScalarType dtype = at::kFloat;
  for (const Impl::Part& part : impl_->parts) {
    // The eight-bit types promote to nothing.
    if (part.shard.element_size() > 1)
      dtype = c10::promoteTypes(dtype, c10::toRealValueType(part.shard.scalar_type()));
  }
  for (const auto& [kind, gradients] : by_dtype) {
    for (const at::Tensor& norm : at::_foreach_norm(gradients, p)) norms.push_back(norm.to(dtype));
  }
  at::Tensor total = norms.empty() ? at::zeros({}, at::TensorOptions(device).dtype(dtype))
                                   : at::linalg_vector_norm(at::stack(norms), p);
  if (impl_->reduce_group.size() == 1) return total;
  const auto reduce = [&](comm::ReduceOp op) {
    Impl::saying([] { return std::string("Taking the norm of the sharded gradients"); },
                 [&] {
                   const auto collective = impl_->control_flow->start(
                       {ControlFlow::Event::reduce, ControlFlow::kNorm}, total,
                       [&] { return impl_->reduce_group.all_reduce(total, op); });
                   impl_->control_flow->wait(collective).wait();
                 });
  };
  if (std::isinf(p)) {
    reduce(p > 0 ? comm::ReduceOp::max : comm::ReduceOp::min);
    return total;
  }
  total = total.pow(p);
  reduce(comm::ReduceOp::sum);
  return total.pow(1 / p);
}

void Fsdp::scale_gradients_(const at::Tensor& factor) {
  impl_->require_sharded();
  impl_->gradients->notice_cleared();
  const InternalOpsGuard internal;
  const auto all = impl_->local_gradients();
  if (!all.empty()) at::_foreach_mul_(all, factor.to(all.front().device()));
}

void Fsdp::clip_grad_value_(double limit) {
  impl_->require_sharded();
  impl_->gradients->notice_cleared();
  const InternalOpsGuard internal;
  const auto all = impl_->local_gradients();
  if (all.empty()) return;
  at::_foreach_clamp_min_(all, -limit);
  at::_foreach_clamp_max_(all, limit);
}

std::string Fsdp::describe_units() const {
  std::string lines;
  for (const auto& unit : impl_->engine->units()) {
    lines += text::concat(unit->name(), ": ", unit->layout().elements, " elements in ",
                          unit->parameters().size(), " parameters, ",
                          text::format_bytes(unit->storage().bytes()), " while whole\n");
  }
  return lines;
}

std::int64_t Fsdp::num_units() const noexcept {
  return static_cast<std::int64_t>(impl_->engine->units().size());
}

FsdpStatistics Fsdp::statistics() const {
  const auto engine = impl_->engine->statistics();
  return {engine.brought,
          engine.prefetched,
          impl_->reductions,
          impl_->gathered_bytes,
          impl_->gathered_parameter_bytes,
          impl_->reduced_bytes,
          impl_->reduced_parameter_bytes,
          engine.peak_resident_bytes};
}

void Fsdp::reset_statistics() {
  impl_->engine->reset_statistics();
  impl_->reductions = impl_->gathered_bytes = impl_->gathered_parameter_bytes = 0;
  impl_->reduced_bytes = impl_->reduced_parameter_bytes = 0;
}

}  // namespace accelerate::parallel
