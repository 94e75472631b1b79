#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <intercept/internal_ops.hpp>
#include <intercept/torchscript.hpp>
#include <parallel/fsdp_impl.hpp>
#include <parallel/shared_memory.hpp>
#include <parallel/unit_plan.hpp>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

namespace accelerate::parallel {
namespace {

using intercept::Engine;
using intercept::InternalOpsGuard;
using intercept::Stay;
using intercept::Unit;
using intercept::UnitGradients;
using intercept::UnitParameter;

// A view that autograd knows nothing of: an optimizer may detach it in place and own it as a leaf.
at::Tensor plain_view(const at::Tensor& flat, at::IntArrayRef sizes, std::int64_t offset) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return flat.narrow(0, offset, c10::multiply_integers(sizes)).view(sizes);
}

// The threads of a rank would demand units in an order of their own.
void refuse_forks(const ModuleRecord& module) {
  const std::string method = module.forking_method();
  if (method.empty()) return;
  throw ShardingError(text::concat(
      "The TorchScript module's method '", method,
      "' runs parts of the module on other threads (torch.jit.fork). Their units would be gathered "
      "in an order that differs between ranks. Set FsdpOptions::all_units_every_pass, which "
      "gathers all units as a pass begins; or export the module without fork, or train it under "
      "ddp."));
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
  const InternalOpsGuard internal;
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

void Fsdp::Impl::saying(const std::function<std::string()>& what,
                        const std::function<void()>& body) {
  const auto message = [&] { return what() + " failed"; };
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

void Fsdp::Impl::for_unit(const Unit& unit, const char* what, const std::function<void()>& body) {
  saying([&] { return text::concat(what, " the unit '", unit.name(), "'"); }, body);
}

Fsdp::Impl::Impl(std::string strategy_name, const ModuleRecord& record, FsdpOptions given,
                 const comm::Group& group)
    : name(std::move(strategy_name)),
      module(record),
      options(std::move(given)),
      world_rank(group.rank()) {
  if (!options.reshard_after_forward().enabled || options.reshard_after_forward().group_size == 1 ||
      options.all_units_every_pass()) {
    auto& strategy = options.sharding_strategy();
    if (strategy == ShardingStrategy::full_shard) strategy = ShardingStrategy::shard_grad_op;
    if (strategy == ShardingStrategy::hybrid_shard) strategy = ShardingStrategy::hybrid_shard_zero2;
  }
  if (group.size() > 1 && options.sharding_strategy() != ShardingStrategy::no_shard &&
      !options.all_units_every_pass())
    refuse_forks(module);
  auto plans = plan_units(module, options);
  check_same_on_all_ranks(plans, group);
  // References that somebody else has may differ between ranks, and the refusal must not.
  for (const std::string& shared : group.all_gather_bytes(shared_memory(module, plans))) {
    if (!shared.empty()) throw ShardingError(shared);
  }
  make_groups(group);
  std::vector<std::string> names;
  for (auto& plan : plans) {
    names.push_back(plan.name);
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
  if (module.is_torchscript()) intercept::switch_off_fusers();
  const int units = static_cast<int>(plans.size());
  ControlFlow::Options agreement;
  agreement.gather_ranks = gather_group.size();
  agreement.window =
      options.all_units_every_pass() ? units : std::min(units, options.prefetch_units() + 3);
  gathers_announced = static_cast<std::size_t>(agreement.window);
  control_flow.emplace(group, std::move(names), agreement);
  intercept::EngineOptions engine_options;
  engine_options.all_every_pass = options.all_units_every_pass();
  engine_options.parts = gather_group.size();
  engine_options.compute_dtype = options.mixed_precision().param_dtype;
  engine_options.reduce_dtype = options.mixed_precision().reduce_dtype;
  engine_options.prefetch = options.forward_prefetch() ? options.prefetch_units() : 0;
  engine_options.prefetch_in_backward =
      options.backward_prefetch() == BackwardPrefetch::backward_pre ? options.prefetch_units() : 0;
  engine_options.resident_limit = options.resident_limit();
  engine_options.advice =
      "Change a parameter's shape or memory before prepare(). Before code that reads raw memory, "
      "such as torch::save() or data_ptr(), open summon_full_params(). To save a prepared module, "
      "call accelerator.save_model(), or save what its state_dict() returns.";
  parts.resize(plans.size());
  engine = std::make_unique<Engine>(std::move(plans), engine_options, *this,
                                    [&](const Unit& unit, at::Tensor flat) {
                                      if (options.sync_module_states()) from_rank_zero(flat, group);
                                      adopt(unit, std::move(flat));
                                    });
  gradients = std::make_unique<intercept::Gradients>(*engine, *this);
  for (std::size_t u = 0; u < parts.size(); ++u) {
    for (std::size_t p = 0; p < parts[u].leaves.size(); ++p)
      place_of[parts[u].leaves[p].unsafeGetTensorImpl()] = {u, p};
  }
  for (const auto& [key, parameter] : module.parameters()) {
    for (std::size_t u = 0; u < parts.size(); ++u) {
      const Unit& unit = *engine->units()[u];
      for (std::size_t p = 0; p < unit.parameters().size(); ++p) {
        const UnitParameter& own = unit.parameters()[p];
        if (!own.parameter.is_same(parameter)) continue;
        leaf_of[parameter.unsafeGetTensorImpl()] = parts[u].leaves[p];
        // An optimizer that is prepared once more has it already.
        leaf_of[parts[u].leaves[p].unsafeGetTensorImpl()] = parts[u].leaves[p];
      }
    }
  }
  if (options.sync_module_states()) {
    for (const auto& [key, buffer] : module.buffers()) from_rank_zero(buffer, group);
    for (const auto& [key, parameter] : module.parameters()) {
      if (!leaf_of.contains(parameter.unsafeGetTensorImpl()))
        from_rank_zero(parameter, group);  // ignored modules'
    }
  }
  if (const auto dtype = options.mixed_precision().buffer_dtype) {
    const auto kept = options.mixed_precision().param_dtype ? norm_statistics(module)
                                                            : std::unordered_set<const void*>();
    for (const auto& [key, buffer] : module.buffers()) {
      if (buffer.is_floating_point() && !kept.contains(buffer.unsafeGetTensorImpl()))
        at::Tensor(buffer).set_data(buffer.detach().to(*dtype));
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

int shard_size(const FsdpOptions& options, const comm::Group& group) {
  if (options.sharding_strategy() == ShardingStrategy::no_shard) return 1;
  const bool hybrid = options.sharding_strategy() == ShardingStrategy::hybrid_shard ||
                      options.sharding_strategy() == ShardingStrategy::hybrid_shard_zero2;
  const bool divides = hybrid || options.sharding_strategy() == ShardingStrategy::shard_optimizer;
  int size = divides ? options.shard_group_size() : 0;
  if (size == 0) size = hybrid ? ranks_of_this_machine(group) : group.size();
  if (size < 1 || group.size() % size != 0) {
    throw ShardingError(text::concat("Hybrid sharding in groups of ", size,
                                     " ranks needs a number of ranks that is a multiple of it; "
                                     "there are ",
                                     group.size(),
                                     ". Set FsdpOptions::shard_group_size to a divisor."));
  }
  return size;
}

void Fsdp::Impl::make_groups(const comm::Group& group) {
  const int size = shard_size(options, group);
  // Modules that are prepared at the same time each have their own: nothing says in which order the
  // collectives of two modules come.
  const auto split = [&](int color, const char* of) {
    return group.split(color, group.rank(), of, comm::Sharing::in_turn);
  };
  gather_group = split(group.rank() / size, "fsdp_gather");
  reduce_group = split(group.rank() / size, "fsdp_reduce");
  replicate_group = split(group.rank() % size, "fsdp_replicate");
  const int share = options.reshard_after_forward().group_size;
  if (share < 0 || (share > 0 && share < size && size % share != 0)) {
    throw ShardingError(text::concat(
        "FsdpOptions::reshard_after_forward is ", share, " ranks, and it must divide the ", size,
        " ranks that a unit is sharded over. Use a divisor, true or false."));
  }
  if (share > 1 && share < size) reshard_group = split(group.rank() / share, "fsdp_reshard");
}

void Fsdp::Impl::adopt(const Unit& unit, at::Tensor flat) {
  const InternalOpsGuard internal;
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  const std::int64_t length = unit.layout().part;
  const std::int64_t begin = gather_group.rank() * length;
  at::Tensor mine = flat.narrow(0, begin, length);
  const bool stays = options.sharding_strategy() == ShardingStrategy::shard_optimizer ||
                     options.sharding_strategy() == ShardingStrategy::no_shard;
  if (stays && !options.cpu_offload() && unit.compute_dtype() == unit.dtype() &&
      flat.device() == unit.device()) {
    part.whole = std::move(flat);
  } else if (options.cpu_offload() && !mine.is_cpu()) {
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
    const auto order = memory_order(parameter.sizes, parameter.strides);
    part.placements.push_back(
        Placement(parameter.sizes, order)
            .run(std::clamp<std::int64_t>(begin - parameter.offset, 0, parameter.elements),
                 to - from));
    part.leaf_offsets.push_back(from - begin);
    part.leaves.push_back(plain_view(part.shard, sizes, from - begin));
    part.leaves.back().set_requires_grad(parameter.parameter.requires_grad());
    part.leaf_versions.push_back(static_cast<std::int64_t>(part.leaves.back()._version()));
  }
}

ControlFlow::Handle Fsdp::Impl::gather(const Unit& unit, const at::Tensor& whole, bool in_group) {
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  using Act = ControlFlow::Act;
  if (in_group) {
    return control_flow->start(
        {ControlFlow::Event::gather, unit.index(), Act::in_group}, whole,
        [this, whole, mine = part.reshard] { return reshard_group.all_gather_into(whole, mine); });
  }
  at::Tensor mine = part.shard;
  if (mine.scalar_type() != whole.scalar_type() || mine.device() != whole.device()) {
    mine = whole.narrow(0, gather_group.rank() * unit.layout().part, unit.layout().part);
    mine.copy_(part.shard, /*non_blocking=*/true);
    if (mine.device() != part.shard.device()) {
      if (!part.copied) part.copied.emplace(mine.device().type());
      part.copied->record(
          c10::impl::VirtualGuardImpl(mine.device().type()).getStream(mine.device()));
    }
  }
  const auto item = static_cast<std::int64_t>(whole.element_size());
  gathered_bytes += unit.layout().total() * item;
  gathered_parameter_bytes += unit.layout().elements * item;
  return control_flow->start(
      {ControlFlow::Event::gather, unit.index(), Act::in_pass}, whole,
      [this, whole, mine] { return gather_group.all_gather_into(whole, mine); });
}

void Fsdp::Impl::wait_for(const Unit& unit, const char* what,
                          const ControlFlow::Handle& collective) {
  for_unit(unit, what, [&] { control_flow->wait(collective).wait(); });
}

at::Tensor Fsdp::Impl::start_bring(const Unit& unit, at::Tensor reuse) {
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  at::Tensor whole = reuse.defined() ? std::move(reuse)
                     : part.whole.defined()
                         ? part.whole
                         : at::empty({unit.layout().total()},
                                     at::TensorOptions(unit.device()).dtype(unit.compute_dtype()));
  part.gather = gather(unit, whole, part.reshard.defined());
  return whole;
}

void Fsdp::Impl::finish_bring(const Unit& unit, const at::Tensor&) {
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  wait_for(unit, "Gathering", std::exchange(part.gather, nullptr));
}

void Fsdp::Impl::leaving(const Unit& unit, const at::Tensor& contents) {
  if (reshard_group.size() == 1) return;
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  if (part.reshard.defined()) return;
  const std::int64_t length = unit.layout().total() / reshard_group.size();
  part.reshard = contents.narrow(0, reshard_group.rank() * length, length).clone();
}

void Fsdp::Impl::write_back(const Unit& unit, const UnitParameter&,
                            const intercept::Written& written, const at::Tensor& contents) {
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  wait_for_copies();
  part.reshard.reset();
  const std::int64_t begin = gather_group.rank() * unit.layout().part;
  const std::int64_t from = std::max(written.begin, begin);
  const std::int64_t to = std::min(written.end, begin + unit.layout().part);
  if (from >= to) return;
  const at::Tensor home = part.shard.narrow(0, from - begin, to - from);
  const at::Tensor now = contents.narrow(0, from, to - from);
  if (written.all || unit.compute_dtype() == unit.dtype()) {
    home.copy_(now);
    return;
  }
  // What the operator left alone keeps the bits that the compute dtype has no place for.
  const at::Tensor changed = now.ne(home.to(now.device(), now.scalar_type()));
  home.copy_(at::where(changed.to(home.device()), now.to(home.device(), home.scalar_type()), home));
}

at::Tensor Fsdp::Impl::bring_full(const Unit& unit) {
  const Part& part = parts[static_cast<std::size_t>(unit.index())];
  at::Tensor whole =
      at::empty({unit.layout().total()}, at::TensorOptions(unit.device()).dtype(unit.dtype()));
  const at::Tensor mine = part.shard.to(unit.device());
  wait_for(unit, "Gathering",
           control_flow->start(
               {ControlFlow::Event::gather, unit.index(), ControlFlow::Act::whole}, whole,
               [this, whole, mine] { return gather_group.all_gather_into(whole, mine); }));
  return whole;
}

void Fsdp::Impl::write_back_full(const Unit& unit, const at::Tensor& full) {
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  wait_for_copies();
  part.shard.copy_(full.narrow(0, gather_group.rank() * unit.layout().part, unit.layout().part));
}

void Fsdp::Impl::reduce(const Unit& unit, UnitGradients given) {
  finish_reduction();  // one at a time: each needs a buffer of a whole unit
  const at::Tensor flat = given.flat;
  const int ranks = gather_group.size();
  at::Tensor output = flat;
  // A sum of fp16 gradients overflows before a mean of them would.
  const bool divide_first = ranks > 1 && flat.scalar_type() == at::kHalf;
  if (ranks > 1) output = at::empty({UnitGradients::part(unit)}, flat.options());
  if (divide_first) flat.div_(ranks);
  under_way.emplace(Reduction{
      &unit, std::move(given), output,
      control_flow->start(
          {ControlFlow::Event::reduce, unit.index()}, flat, [this, flat, output, divide_first] {
            return reduce_group.reduce_scatter_into(
                output, flat, divide_first ? comm::ReduceOp::sum : comm::ReduceOp::avg);
          })});
  ++reductions;
  const auto item = static_cast<std::int64_t>(flat.element_size());
  reduced_bytes += flat.numel() * item;
  reduced_parameter_bytes += unit.layout().elements * item;
  if (options.backward_prefetch() == BackwardPrefetch::backward_post) engine->prefetch(1);
}

Fsdp::Impl::Reduction Fsdp::Impl::average_replicas(Reduction reduction) {
  if (!reduction.scatter) return reduction;
  const Unit& unit = *reduction.unit;
  wait_for(unit, "Reducing the gradients of", std::exchange(reduction.scatter, nullptr));
  if (replicate_group.size() > 1) {
    for_unit(unit, "Reducing the gradients of", [&] {
      reduction.mean = replicate_group.all_reduce(reduction.output, comm::ReduceOp::avg);
    });
  }
  return reduction;
}

void Fsdp::Impl::finish_reduction() {
  if (!under_way) return;
  // Out of the way, should it fail.
  Reduction reduction = average_replicas(std::exchange(under_way, std::nullopt).value());
  const Unit& unit = *reduction.unit;
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  for_unit(unit, "Reducing the gradients of", [&] { reduction.mean.wait(); });
  reduction.gradients.flat.reset();
  auto& used = reduction.gradients.used;
  if (std::find(used.begin(), used.end(), false) != used.end()) {
    // Unused here; another rank may have used it, and then every rank has its share of the mean.
    const at::Tensor flags = reduction.output.slice(0, unit.layout().part).to(at::kCPU, at::kFloat);
    for (std::size_t p = 0; p < used.size(); ++p) used[p] = flags.const_data_ptr<float>()[p] > 0;
  }
  const at::Tensor mine = reduction.output.to(part.shard.device(), part.shard.scalar_type());
  const int ranks_of_a_unit = gather_group.size();
  for (std::size_t p = 0; p < used.size(); ++p) {
    at::Tensor& leaf = part.leaves[p];
    if (!used[p] || !unit.parameters()[p].parameter.requires_grad()) continue;
    const at::Tensor gradient =
        ranks_of_a_unit > 1 ? intercept::part_of_gradient(mine, leaf.sizes(), part.leaf_offsets[p])
                            : plain_view(mine, leaf.sizes(), part.leaf_offsets[p]);
    if (leaf.grad().defined()) {
      leaf.mutable_grad().add_(gradient);
    } else {
      leaf.mutable_grad() = gradient;
    }
  }
}

bool Fsdp::Impl::has_gradient(const Unit& unit, std::size_t parameter) const {
  return parts[static_cast<std::size_t>(unit.index())].leaves[parameter].grad().defined();
}

void Fsdp::Impl::cleared(const Unit& unit, std::size_t parameter) {
  parts[static_cast<std::size_t>(unit.index())].leaves[parameter].mutable_grad().reset();
}

void Fsdp::Impl::finish(bool reduced) {
  if (reduced) finish_reduction();
  for (Part& part : parts) part.reshard.reset();
  expects_backward = false;
  has_reduced = has_reduced || reduced;
  // Who joined in does not know what this backward demanded, and all are to expect the same.
  if (control_flow->end_backward()) engine->forget_pass();
}

intercept::ParameterSet Fsdp::Impl::all_parameters() const {
  intercept::ParameterSet all = gradients->none();
  for (auto& unit : all) unit.assign(unit.size(), true);
  return all;
}

void Fsdp::Impl::begin_pass() {
  if (!control_flow->begin_pass()) return;
  engine->abandon_pass();
  served.clear();
  under_way.reset();
  for (Part& part : parts) part.reshard.reset();
  expects_backward = has_reduced = false;
}

void Fsdp::Impl::serve(const ControlFlow::Step& step) {
  const Unit& unit = *engine->units()[static_cast<std::size_t>(step.unit)];
  if (step.event == ControlFlow::Event::reduce) {
    gradients->give_kept(unit);
    return;
  }
  Part& part = parts[static_cast<std::size_t>(unit.index())];
  const bool in_group = step.act == ControlFlow::Act::in_group;
  if (in_group && !part.reshard.defined() && unit.storage().contents().defined())
    leaving(unit, unit.storage().contents());
  const at::Tensor whole =
      part.whole.defined()
          ? part.whole
          : at::empty({unit.layout().total()},
                      at::TensorOptions(unit.device()).dtype(unit.compute_dtype()));
  served.emplace_back(&unit, gather(unit, whole, in_group && part.reshard.defined()));
  // A rank that waited here for one gather would keep those waiting that reduce first. Nobody
  // announces this one before the one that is waited for has begun everywhere.
  wait_for_served(gathers_announced);
}

void Fsdp::Impl::wait_for_served(std::size_t most_left) {
  while (served.size() > most_left) {
    const auto [unit, collective] = std::move(served.front());
    served.pop_front();
    wait_for(*unit, "Gathering", collective);
  }
}

void Fsdp::Impl::join_backward() {
  const InternalOpsGuard internal;
  using Others = ControlFlow::Others;
  const ControlFlow::Follower follower{
      .serve = [&](const ControlFlow::Step& step) { serve(step); },
      .can_finish =
          [&] {
            return under_way && under_way->scatter && ControlFlow::has_started(under_way->scatter);
          },
      // To wait for the mean would keep those waiting that gather first.
      .finish =
          [&] { under_way = average_replicas(std::exchange(under_way, std::nullopt).value()); }};
  const std::int64_t before = reductions;
  Others others;
  do {
    others = control_flow->join(reduces && gradients->keeps(all_parameters()), follower);
    wait_for_served(0);
    // Where the others reduced nothing, it was the backward pass of a micro-batch before.
  } while (others == Others::passed && reduces && reductions == before);
  if (others == Others::none) return;
  // No rank's backward met a unit, and gradients of micro-batches before wait on one.
  if (others == Others::keep) gradients->give_all_kept();
  if (reduces) finish_reduction();
  for (Part& part : parts) part.reshard.reset();
  expects_backward = false;
  has_reduced = has_reduced || reduces;
  engine->forget_pass();
  engine->end_pass();
}

void Fsdp::Impl::abandon() {
  for (Part& part : parts) part.reshard.reset();
  if (control_flow->has_failed()) {
    under_way.reset();  // the others may never begin it
  } else {
    finish_reduction();
  }
}

void Fsdp::Impl::failed() noexcept {
  control_flow->fail(text::concat("The backward pass of rank ", world_rank,
                                  " failed; the error is in its output. The other ranks cannot "
                                  "end theirs."));
}

void Fsdp::Impl::wait_for_copies() const {
  for (const Part& part : parts) {
    if (part.copied) part.copied->synchronize();
  }
}

void Fsdp::Impl::refresh() {
  engine->refresh();
  for (Part& part : parts) {
    part.reshard.reset();
    for (std::size_t p = 0; p < part.leaves.size(); ++p)
      part.leaf_versions[p] = static_cast<std::int64_t>(part.leaves[p]._version());
  }
}

// Whoever wrote to a leaf, an optimizer or a checkpoint: what was gathered before is out of date.
void Fsdp::Impl::refresh_if_stepped() {
  for (std::size_t u = 0; u < parts.size(); ++u) {
    Part& part = parts[u];
    std::vector<bool> changed(part.leaves.size(), false);
    bool any = false;
    for (std::size_t p = 0; p < part.leaves.size(); ++p) {
      const auto version = static_cast<std::int64_t>(part.leaves[p]._version());
      changed[p] = std::exchange(part.leaf_versions[p], version) != version;
      any |= changed[p];
    }
    if (!any) continue;
    engine->refresh(*engine->units()[u], changed);
    part.reshard.reset();
  }
}

intercept::ParameterSet Fsdp::Impl::of(const std::vector<at::Tensor>& leaves) const {
  intercept::ParameterSet parameters = gradients->none();
  for (const at::Tensor& leaf : leaves) {
    const auto found = place_of.find(leaf.unsafeGetTensorImpl());
    if (found != place_of.end()) parameters[found->second.first][found->second.second] = true;
  }
  return parameters;
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

}  // namespace accelerate::parallel
