#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/intercept/gradients.hpp>
#include <accelerate/parallel/fsdp.hpp>
#include <intercept/quiet.hpp>
#include <parallel/unit_plan.hpp>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_clamp_max.h>
#include <ATen/ops/_foreach_clamp_min.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/jit/codegen/fuser/interface.h>
#include <torch/csrc/jit/passes/tensorexpr_fuser.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <unordered_map>

namespace accelerate::parallel {
namespace {

using intercept::Engine;
using intercept::Quiet;
using intercept::Stay;
using intercept::Unit;
using intercept::UnitGradients;
using intercept::UnitParameter;

// A view that autograd knows nothing of: an optimizer may detach it in place and own it as a leaf.
at::Tensor plain_view(const at::Tensor& flat, at::IntArrayRef sizes, std::int64_t offset) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return flat.narrow(0, offset, c10::multiply_integers(sizes)).view(sizes);
}

// Errors of communication say which unit they struck, and keep their type.
template <class Body>
void for_unit(const Unit& unit, const char* what, Body&& body) {
  const auto message = [&] { return text::concat(what, " the unit '", unit.name(), "' failed"); };
  try {
    body();
  } catch (const TimeoutError& error) {
    std::throw_with_nested(TimeoutError(message(), error.operation(), error.rank()));
  } catch (const PeerLostError& error) {
    std::throw_with_nested(
        PeerLostError(message(), error.operation(), error.rank(), error.lost_rank()));
  } catch (const DistributedError& error) {
    std::throw_with_nested(DistributedError(message(), error.operation(), error.rank()));
  }
}

// Ranks that shard different modules would gather nonsense.
void check_same_on_all_ranks(const std::vector<intercept::UnitPlan>& plans,
                             const comm::Group& group) {
  std::string mine;
  for (const auto& plan : plans) {
    for (const auto& [name, tensor] : plan.parameters) {
      mine += text::concat(name, " ", tensor.scalar_type(), " [",
                           text::join(tensor.sizes(), ", ", 64), "] in unit '", plan.name, "'\n");
    }
  }
  const auto all = group.all_gather_bytes(mine);
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto first = text::split(all[0], '\n');
    const auto other = text::split(all[rank], '\n');
    std::size_t at = 0;
    while (at < first.size() && at < other.size() && first[at] == other[at]) ++at;
    const auto line = [&](const std::vector<std::string>& lines) {
      return at < lines.size() && !lines[at].empty() ? lines[at]
                                                     : std::string("no more parameters");
    };
    throw ShardingError(text::concat("The module is not the same on all ranks: rank 0 has ",
                                     line(first), " where rank ", rank, " has ", line(other),
                                     ". Build the same module on every rank."));
  }
}

void from_rank_zero(const at::Tensor& tensor, const comm::Group& group) {
  if (group.size() == 1 || tensor.numel() == 0) return;
  const Quiet quiet;
  const at::Tensor contiguous = tensor.contiguous();
  group.broadcast(contiguous, 0).wait();
  if (!contiguous.is_same(tensor)) tensor.copy_(contiguous);
}

int ranks_of_this_machine(const comm::Group& group) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  const auto all = group.all_gather_bytes(host.data());
  return static_cast<int>(std::count(all.begin(), all.end(), std::string(host.data())));
}

}  // namespace

struct Fsdp::Impl final : intercept::Residency, intercept::GradientSink {
  // One unit as this rank has it.
  struct Part {
    at::Tensor shard;                        // flat, in the module's own dtype
    std::vector<at::Tensor> leaves;          // by parameter
    std::vector<std::int64_t> leaf_offsets;  // of each leaf in the shard
    comm::Work gather;
  };
  struct Reduction {
    const Unit* unit = nullptr;
    UnitGradients gradients;
    at::Tensor output;
    comm::Work work;
  };

  FsdpOptions options;
  // Gathers and reductions have a communicator each: reductions come in an order of their own,
  // which may fall differently between the gathers on ranks that use different parameters.
  comm::Group gather_group, reduce_group, replicate_group;
  std::vector<Part> parts;
  std::vector<ParameterShard> shards;
  std::unordered_map<const void*, at::Tensor> leaf_of;
  std::optional<Reduction> under_way;
  std::int64_t leaf_versions = 0;
  std::int64_t reductions = 0, gathered_bytes = 0, gathered_parameter_bytes = 0, reduced_bytes = 0,
               reduced_parameter_bytes = 0;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<intercept::Gradients> gradients;

  Impl(const ModuleRecord& module, FsdpOptions given, const comm::Group& group);

  void make_groups(const comm::Group& group);
  void require_sharded() const;
  void adopt(const Unit& unit, at::Tensor flat);
  void finish_reduction();
  std::int64_t versions() const;
  void refresh_if_stepped();
  std::vector<at::Tensor> local_gradients() const;

  at::Tensor start_bring(const Unit& unit, at::Tensor reuse) override;
  void finish_bring(const Unit& unit, const at::Tensor& contents) override;
  void write_back(const Unit& unit, const UnitParameter& parameter,
                  const at::Tensor& contents) override;
  at::Tensor bring_full(const Unit& unit) override;
  void write_back_full(const Unit& unit, const at::Tensor& full) override;
  void reduce(const Unit& unit, UnitGradients given) override;
  void finish(bool reduced) override;
};

Fsdp::Impl::Impl(const ModuleRecord& module, FsdpOptions given, const comm::Group& group)
    : options(std::move(given)) {
  if (!options.reshard_after_forward()) {
    auto& strategy = options.sharding_strategy();
    if (strategy == ShardingStrategy::full_shard) strategy = ShardingStrategy::shard_grad_op;
    if (strategy == ShardingStrategy::hybrid_shard) strategy = ShardingStrategy::hybrid_shard_zero2;
  }
  auto plans = plan_units(module, options);
  check_same_on_all_ranks(plans, group);
  make_groups(group);
  for (auto& plan : plans) {
    switch (options.sharding_strategy()) {
      case ShardingStrategy::full_shard:
      case ShardingStrategy::hybrid_shard:
        break;  // as planned: the root stays, the rest comes and goes
      case ShardingStrategy::shard_grad_op:
      case ShardingStrategy::hybrid_shard_zero2:
        plan.stay = Stay::through_pass;
        break;
      case ShardingStrategy::shard_optimizer:
      case ShardingStrategy::no_shard:
        plan.stay = Stay::always;
        break;
    }
  }
  if (module.is_torchscript()) {
    // A fused kernel would read parameters past the dispatcher.
    torch::jit::setTensorExprFuserEnabled(false);
    torch::jit::overrideCanFuseOnCPU(false);
    torch::jit::overrideCanFuseOnGPU(false);
  }
  intercept::EngineOptions engine_options;
  engine_options.parts = gather_group.size();
  engine_options.compute_dtype = options.mixed_precision().param_dtype;
  engine_options.prefetch = options.forward_prefetch() ? options.prefetch_units() : 0;
  engine_options.prefetch_in_backward =
      options.backward_prefetch() == BackwardPrefetch::none ? 0 : options.prefetch_units();
  engine_options.resident_limit = options.resident_limit();
  parts.resize(plans.size());
  engine = std::make_unique<Engine>(std::move(plans), engine_options, *this,
                                    [&](const Unit& unit, at::Tensor flat) {
                                      if (options.sync_module_states()) from_rank_zero(flat, group);
                                      adopt(unit, std::move(flat));
                                    });
  gradients = std::make_unique<intercept::Gradients>(*engine, *this,
                                                     options.mixed_precision().reduce_dtype);
  leaf_versions = versions();
  for (const auto& [name, parameter] : module.parameters()) {
    for (std::size_t u = 0; u < parts.size(); ++u) {
      const Unit& unit = *engine->units()[u];
      for (std::size_t p = 0; p < unit.parameters().size(); ++p) {
        const UnitParameter& own = unit.parameters()[p];
        if (!own.parameter.is_same(parameter)) continue;
        const at::Tensor& leaf = parts[u].leaves[p];
        leaf_of[parameter.unsafeGetTensorImpl()] = leaf;
        const std::int64_t begin = gather_group.rank() * unit.layout().part;
        shards.push_back({name, own.sizes,
                          std::clamp<std::int64_t>(begin - own.offset, 0, own.elements),
                          leaf.numel(), leaf, own.strides});
      }
    }
  }
  if (options.sync_module_states()) {
    for (const auto& [name, buffer] : module.buffers()) from_rank_zero(buffer, group);
    for (const auto& [name, parameter] : module.parameters()) {
      if (!leaf_of.contains(parameter.unsafeGetTensorImpl()))
        from_rank_zero(parameter, group);  // ignored modules'
    }
  }
  if (const auto dtype = options.mixed_precision().buffer_dtype) {
    for (const auto& [name, buffer] : module.buffers()) {
      if (buffer.is_floating_point()) at::Tensor(buffer).set_data(buffer.detach().to(*dtype));
    }
  }
}

void Fsdp::Impl::require_sharded() const {
  if (gradients == nullptr) {
    throw StateError(
        "The module's sharding was ended by restore(), so it is not trained over the ranks any "
        "more. Prepare it again.");
  }
}

void Fsdp::Impl::make_groups(const comm::Group& group) {
  int size = group.size();
  switch (options.sharding_strategy()) {
    case ShardingStrategy::no_shard:
      size = 1;
      break;
    case ShardingStrategy::hybrid_shard:
    case ShardingStrategy::hybrid_shard_zero2:
      size = options.shard_group_size() > 0 ? options.shard_group_size()
                                            : ranks_of_this_machine(group);
      if (group.size() % size != 0) {
        throw ShardingError(text::concat("Hybrid sharding in groups of ", size,
                                         " ranks needs a number of ranks that is a multiple of it; "
                                         "there are ",
                                         group.size(),
                                         ". Set FsdpOptions::shard_group_size to a divisor."));
      }
      break;
    default:
      break;
  }
  gather_group = group.split(group.rank() / size, group.rank(), "fsdp_gather");
  reduce_group = group.split(group.rank() / size, group.rank(), "fsdp_reduce");
  replicate_group = group.split(group.rank() % size, group.rank(), "fsdp_replicate");
}

void Fsdp::Impl::adopt(const Unit& unit, at::Tensor flat) {
  const Quiet quiet;
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  const std::int64_t length = unit.layout().part;
  const std::int64_t begin = gather_group.rank() * length;
  at::Tensor mine = flat.narrow(0, begin, length);
  if (options.cpu_offload() && !mine.is_cpu()) {
    mine = mine.to(at::kCPU).pin_memory();
  } else if (gather_group.size() > 1) {
    mine = mine.clone();
  }
  part.shard = std::move(mine);
  for (const UnitParameter& parameter : unit.parameters()) {
    const std::int64_t from = std::clamp<std::int64_t>(parameter.offset, begin, begin + length);
    const std::int64_t to =
        std::clamp<std::int64_t>(parameter.offset + parameter.elements, begin, begin + length);
    std::vector<std::int64_t> sizes{to - from};
    // Whole rows keep their shape, for optimizers that look at rows and columns.
    if (parameter.row_aligned && parameter.parameter.is_contiguous() &&
        parameter.sizes.size() > 1) {
      sizes = parameter.sizes;
      sizes[0] = to > from ? (to - from) / (parameter.elements / parameter.sizes[0]) : 0;
    }
    part.leaf_offsets.push_back(from - begin);
    part.leaves.push_back(plain_view(part.shard, sizes, from - begin));
    part.leaves.back().set_requires_grad(parameter.parameter.requires_grad());
  }
}

at::Tensor Fsdp::Impl::start_bring(const Unit& unit, at::Tensor reuse) {
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  at::Tensor whole = reuse.defined()
                         ? std::move(reuse)
                         : at::empty({unit.layout().total()},
                                     at::TensorOptions(unit.device()).dtype(unit.compute_dtype()));
  at::Tensor mine = part.shard;
  if (mine.scalar_type() != whole.scalar_type() || mine.device() != whole.device()) {
    mine = whole.narrow(0, gather_group.rank() * unit.layout().part, unit.layout().part);
    mine.copy_(part.shard, /*non_blocking=*/true);
  }
  for_unit(unit, "Gathering", [&] { part.gather = gather_group.all_gather_into(whole, mine); });
  const auto item = static_cast<std::int64_t>(whole.element_size());
  gathered_bytes += unit.layout().total() * item;
  gathered_parameter_bytes += unit.layout().elements * item;
  return whole;
}

void Fsdp::Impl::finish_bring(const Unit& unit, const at::Tensor&) {
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  for_unit(unit, "Gathering", [&] { part.gather.wait(); });
  part.gather = {};
}

void Fsdp::Impl::write_back(const Unit& unit, const UnitParameter& parameter,
                            const at::Tensor& contents) {
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  const std::int64_t begin = gather_group.rank() * unit.layout().part;
  const std::int64_t from = std::max(parameter.offset, begin);
  const std::int64_t to =
      std::min(parameter.offset + parameter.elements, begin + unit.layout().part);
  if (from < to)
    part.shard.narrow(0, from - begin, to - from).copy_(contents.narrow(0, from, to - from));
}

at::Tensor Fsdp::Impl::bring_full(const Unit& unit) {
  const Part& part = parts[static_cast<std::size_t>(unit.index())];
  at::Tensor whole =
      at::empty({unit.layout().total()}, at::TensorOptions(unit.device()).dtype(unit.dtype()));
  for_unit(unit, "Gathering",
           [&] { gather_group.all_gather_into(whole, part.shard.to(unit.device())).wait(); });
  return whole;
}

void Fsdp::Impl::write_back_full(const Unit& unit, const at::Tensor& full) {
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  part.shard.copy_(full.narrow(0, gather_group.rank() * unit.layout().part, unit.layout().part));
}

void Fsdp::Impl::reduce(const Unit& unit, UnitGradients given) {
  finish_reduction();  // one at a time: each needs a buffer of a whole unit
  Reduction reduction{&unit, std::move(given), {}, {}};
  at::Tensor& flat = reduction.gradients.flat;
  const int ranks = gather_group.size();
  if (ranks == 1) {
    reduction.output = flat;
  } else {
    reduction.output = at::empty({UnitGradients::part(unit)}, flat.options());
    // A sum of fp16 gradients overflows before a mean of them would.
    const bool divide_first = flat.scalar_type() == at::kHalf;
    if (divide_first) flat.div_(ranks);
    for_unit(unit, "Reducing the gradients of", [&] {
      reduction.work = reduce_group.reduce_scatter_into(
          reduction.output, flat, divide_first ? comm::ReduceOp::sum : comm::ReduceOp::avg);
    });
  }
  ++reductions;
  const auto item = static_cast<std::int64_t>(flat.element_size());
  reduced_bytes += flat.numel() * item;
  reduced_parameter_bytes += unit.layout().elements * item;
  under_way = std::move(reduction);
}

void Fsdp::Impl::finish_reduction() {
  if (!under_way) return;
  Reduction reduction = std::move(*under_way);
  under_way.reset();
  const Unit& unit = *reduction.unit;
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  for_unit(unit, "Reducing the gradients of", [&] {
    reduction.work.wait();
    if (replicate_group.size() > 1)
      replicate_group.all_reduce(reduction.output, comm::ReduceOp::avg).wait();
  });
  reduction.gradients.flat.reset();
  auto& used = reduction.gradients.used;
  if (std::find(used.begin(), used.end(), false) != used.end()) {
    // Unused here; another rank may have used it, and then every rank has its share of the mean.
    const at::Tensor flags = reduction.output.slice(0, unit.layout().part).to(at::kCPU, at::kFloat);
    for (std::size_t p = 0; p < used.size(); ++p) used[p] = flags.const_data_ptr<float>()[p] > 0;
  }
  const at::Tensor mine = reduction.output.to(part.shard.device(), part.shard.scalar_type());
  for (std::size_t p = 0; p < used.size(); ++p) {
    at::Tensor& leaf = part.leaves[p];
    if (!used[p] || !unit.parameters()[p].parameter.requires_grad()) continue;
    const at::Tensor gradient = plain_view(mine, leaf.sizes(), part.leaf_offsets[p]);
    if (leaf.grad().defined()) {
      leaf.mutable_grad().add_(gradient);
    } else {
      leaf.mutable_grad() = gradient;
    }
  }
}

void Fsdp::Impl::finish(bool reduced) {
  if (reduced) finish_reduction();
}

std::int64_t Fsdp::Impl::versions() const {
  std::int64_t sum = 0;
  for (const Part& part : parts) {
    for (const at::Tensor& leaf : part.leaves) sum += static_cast<std::int64_t>(leaf._version());
  }
  return sum;
}

// Whoever wrote to a leaf, an optimizer or a checkpoint: what was gathered before is out of date.
void Fsdp::Impl::refresh_if_stepped() {
  const std::int64_t now = versions();
  if (now == leaf_versions) return;
  leaf_versions = now;
  engine->refresh();
}

std::vector<at::Tensor> Fsdp::Impl::local_gradients() const {
  std::vector<at::Tensor> all;
  for (const Part& part : parts) {
    for (const at::Tensor& leaf : part.leaves) {
      if (leaf.grad().defined() && leaf.grad().numel() > 0) all.push_back(leaf.grad());
    }
  }
  return all;
}

Fsdp::Fsdp(ModuleRecord module, FsdpOptions options, const comm::Group& group)
    : Strategy(std::move(module)),
      impl_(std::make_unique<Impl>(module_, std::move(options), group)) {
  if (log::enabled(log::Level::debug)) log::debug(text::concat("fsdp units:\n", describe_units()));
}

Fsdp::~Fsdp() {
  // Alone there is nobody to ask for the parameters, so they can be given back.
  if (impl_->gather_group.size() == 1) {
    try {
      restore();
    } catch (const std::exception& error) {
      log::error(
          text::concat("The parameters could not be given back to the module: ", describe(error)));
    }
  }
}

const FsdpOptions& Fsdp::options() const noexcept { return impl_->options; }

void Fsdp::before_forward(const ForwardContext& context) {
  impl_->require_sharded();
  impl_->engine->check_tagged();
  impl_->refresh_if_stepped();
  impl_->gradients->set_reduce(context.sync || impl_->options.reduce_every_backward());
  impl_->engine->begin_pass(context.grad_enabled ? Engine::Pass::training
                                                 : Engine::Pass::inference);
}

void Fsdp::after_forward(const ForwardContext& context, const std::vector<at::Tensor>&) {
  if (!context.grad_enabled && impl_->engine->in_pass(Engine::Pass::inference))
    impl_->engine->end_pass();
}

void Fsdp::sync_in_next_backward() {
  impl_->require_sharded();
  impl_->gradients->set_reduce(true);
}

at::Tensor Fsdp::optimizer_leaf(const at::Tensor& parameter) const {
  const auto found = impl_->leaf_of.find(parameter.unsafeGetTensorImpl());
  return found != impl_->leaf_of.end() ? found->second : Strategy::optimizer_leaf(parameter);
}

void Fsdp::check_gradients() {
  impl_->require_sharded();
  impl_->engine->check_tagged();
  for (const auto& unit : impl_->engine->units()) {
    for (const UnitParameter& parameter : unit->parameters()) {
      if (!parameter.parameter.grad().defined()) continue;
      throw StateError(text::concat("The sharded parameter '", parameter.name,
                                    "' has a gradient of its own, which was not reduced over the "
                                    "ranks and would not be used. A hook set after prepare() took "
                                    "the place of the one that reduces it: "
                                    "set hooks before prepare()."));
    }
  }
  if (impl_->gradients->keeps_gradients()) {
    throw StateError(
        "The optimizer was asked to step while gradients of micro-batches without synchronisation "
        "wait to be reduced. Run the "
        "last micro-batch with synchronisation (outside no_sync), or clear the gradients.");
  }
}

void Fsdp::after_step() {
  impl_->require_sharded();
  impl_->gradients->clear();
  impl_->refresh_if_stepped();
}

at::Tensor Fsdp::grad_norm(double p) const {
  const Quiet quiet;
  const auto all = impl_->local_gradients();
  const at::Device device = impl_->parts.front().shard.device();
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const at::Tensor& gradient : all) by_dtype[gradient.scalar_type()].push_back(gradient);
  std::vector<at::Tensor> norms;
  at::ScalarType dtype = at::kFloat;
  for (const Impl::Part& part : impl_->parts)
    dtype = c10::promoteTypes(dtype, c10::toRealValueType(part.shard.scalar_type()));
  for (const auto& [kind, gradients] : by_dtype) {
    for (const at::Tensor& norm : at::_foreach_norm(gradients, p)) norms.push_back(norm.to(dtype));
  }
  at::Tensor total = norms.empty() ? at::zeros({}, at::TensorOptions(device).dtype(dtype))
                                   : at::linalg_vector_norm(at::stack(norms), p);
  if (impl_->reduce_group.size() == 1) return total;
  if (std::isinf(p)) {
    impl_->reduce_group.all_reduce(total, p > 0 ? comm::ReduceOp::max : comm::ReduceOp::min).wait();
    return total;
  }
  total = total.pow(p);
  impl_->reduce_group.all_reduce(total).wait();
  return total.pow(1 / p);
}

void Fsdp::scale_gradients_(const at::Tensor& factor) {
  const Quiet quiet;
  const auto all = impl_->local_gradients();
  if (!all.empty()) at::_foreach_mul_(all, factor.to(all.front().device()));
}

void Fsdp::clip_grad_value_(double limit) {
  const Quiet quiet;
  const auto all = impl_->local_gradients();
  if (all.empty()) return;
  at::_foreach_clamp_min_(all, -limit);
  at::_foreach_clamp_max_(all, limit);
}

struct Fsdp::FullParameters::Impl {
  Fsdp::Impl& fsdp;
  Engine::FullParameters scope;
};

Fsdp::FullParameters::FullParameters(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Fsdp::FullParameters::FullParameters(FullParameters&&) noexcept = default;
Fsdp::FullParameters::~FullParameters() = default;

Fsdp::FullParameters Fsdp::summon_full_params(bool write_back) {
  impl_->require_sharded();
  impl_->refresh_if_stepped();
  return FullParameters(std::unique_ptr<FullParameters::Impl>(
      new FullParameters::Impl{*impl_, impl_->engine->full_parameters(write_back)}));
}

void Fsdp::restore() {
  impl_->gradients.reset();
  impl_->engine->restore();
}

const std::vector<ParameterShard>& Fsdp::shards() const noexcept { return impl_->shards; }

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
