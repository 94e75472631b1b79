#include <accelerate/core/memory_kind.hpp>
#include <accelerate/parallel/ddp.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/comm/native.hpp>

#include "comm/world_impl.hpp"
#include "parallel/comm_hooks.hpp"
#include "parallel/consistency.hpp"
#include "parallel/ddp_reducer.hpp"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <algorithm>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace accelerate::parallel {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;
// Parameters and buffers travel to the other ranks in pieces of this size, PyTorch's own.
constexpr std::size_t kBroadcastBytes = 250 * 1024 * 1024;

struct QuietWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

bool is_running_statistic(const std::string& name) {
  return name.ends_with("running_mean") || name.ends_with("running_var") ||
         name.ends_with("num_batches_tracked");
}

}  // namespace

struct Ddp::Impl {
  comm::Group group;
  DdpOptions options;
  std::shared_ptr<GradientWatch> watch = std::make_shared<GradientWatch>();
  struct Parameter {
    NamedTensor entry;
    bool trained = false;    ///< it required a gradient when the reducer was made
    at::TensorOptions kind;  ///< its dtype and device when it was prepared
    std::vector<std::int64_t> sizes;
  };
  std::vector<Parameter> parameters;  ///< but for the ignored ones; `watch` has the same
  std::unordered_map<const void*, std::size_t> index_of;  ///< of these
  std::vector<NamedTensor> states;   ///< all parameters and buffers that must be equal
  std::vector<NamedTensor> buffers;  ///< broadcast ones
  c10::intrusive_ptr<c10d::ProcessGroup> process_group;
  std::unique_ptr<Buckets> reducer;  ///< of the trained parameters
  /// Every parameter is frozen for now.
  bool all_frozen = false;
  bool join = false;
  /// Static graph: the first backward's reduction is started by hand when it has ended.
  bool delayed_reduction = false;
  bool delayed_reduction_done = false;
  /// Rank 0's buffers changed since they were last broadcast.
  bool buffers_stale = true;
  /// A forward with gradients waits for its backward.
  bool forward_waits = false;

  // c10's errors become ours here: whatever fails below is the gradient reduction of this rank.
  template <class Function>
  auto translated(const char* operation, Function&& function) const {
    try {
      return function();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      std::throw_with_nested(
          DistributedError(text::concat("Data-parallel training failed in ", operation, " on rank ",
                                        group.rank(), " of ", group.size(), ". ", describe(error)),
                           operation, group.rank()));
    }
  }

  void broadcast(const std::vector<at::Tensor>& tensors, int source) {
    if (tensors.empty()) return;
    translated("broadcast", [&] {
      const at::NoGradGuard no_grad;
      c10d::broadcast_coalesced(process_group, tensors, kBroadcastBytes, source);
    });
  }

  // Of the module: everything that is not ignored.
  void collect(const ModuleRecord& module) {
    const std::unordered_set<std::string> ignored(options.ignored_parameters().begin(),
                                                  options.ignored_parameters().end());
    std::unordered_set<std::string> unknown = ignored;
    const auto keep = [&](const NamedTensor& entry) {
      unknown.erase(entry.name);
      return !ignored.contains(entry.name);
    };
    parameters.clear();
    index_of.clear();
    states.clear();
    buffers.clear();
    for (const NamedTensor& entry : module.parameters()) {
      if (!keep(entry)) continue;
      states.push_back(entry);
      index_of.emplace(entry.tensor.unsafeGetTensorImpl(), parameters.size());
      parameters.push_back({entry, false, entry.tensor.options(), entry.tensor.sizes().vec()});
    }
    for (const NamedTensor& entry : module.buffers()) {
      if (!keep(entry)) continue;
      states.push_back(entry);
      buffers.push_back(entry);
    }
    if (unknown.empty()) return;
    throw ConfigError(text::concat(
        "DdpOptions::ignored_parameters names ", text::join(unknown),
        ", and the module has no such parameter or buffer. Names are dotted paths, for "
        "example ",
        module.parameters().empty() ? "\"layer.weight\"" : module.parameters().front().name, "."));
  }

  bool has_trained() const {
    return std::any_of(parameters.begin(), parameters.end(), [](const Parameter& parameter) {
      return parameter.entry.tensor.requires_grad();
    });
  }

  // Of the parameters that require a gradient now. Alike on all ranks.
  void make_reducer() {
    std::vector<at::Tensor> trained;
    std::unordered_map<std::size_t, std::string> names;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      Parameter& parameter = parameters[i];
      parameter.trained = parameter.entry.tensor.requires_grad();
      if (!parameter.trained) continue;
      names.emplace(trained.size(), parameter.entry.name);
      trained.push_back(parameter.entry.tensor);
    }
    const auto bucket_bytes = static_cast<std::int64_t>(options.bucket_cap_mb() * kMiB);
    const auto first_bytes = static_cast<std::int64_t>(options.first_bucket_mb() * kMiB);
    if (bucket_bytes <= 0 || first_bytes <= 0) {
      throw ConfigError(text::concat("DdpOptions has bucket_cap_mb ", options.bucket_cap_mb(),
                                     " and first_bucket_mb ", options.first_bucket_mb(),
                                     ", and both must be greater than 0."));
    }
    // The order in which gradients arrive is known only after the first step; until then one bucket
    // cannot be launched too early.
    std::vector<std::size_t> limits{std::numeric_limits<std::size_t>::max()};
    if (options.find_unused_parameters()) {
      limits = {static_cast<std::size_t>(first_bytes), static_cast<std::size_t>(bucket_bytes)};
    }
    translated("the set-up of gradient buckets", [&] {
      auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(trained, limits));
      std::reverse(buckets.begin(), buckets.end());
      const MemoryKindScope kind(MemoryKind::gradients);
      auto made = std::make_unique<Buckets>(
          trained, std::move(buckets), process_group,
          /*expect_sparse_gradients=*/std::vector<bool>(trained.size(), false), bucket_bytes,
          options.find_unused_parameters(), options.gradient_as_bucket_view(), std::move(names),
          first_bytes,
          /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
          /*bucket_bytes_cap_list=*/std::vector<std::int64_t>{});
      if (options.static_graph()) made->set_static_graph();
      if (auto hook = make_comm_hook(options, group, process_group))
        made->register_comm_hook(std::move(hook));
      {
        const std::lock_guard lock(watch->mutex);
        watch->reducer = made.get();
        watch->once = !options.static_graph();
        watch->awaits_first = false;
        if (watch->reduced.size() != parameters.size()) watch->resize(parameters.size());
        watch->arrived.assign(parameters.size(), false);
        watch->unused.assign(parameters.size(), false);
        for (std::size_t i = 0; i < parameters.size(); ++i)
          watch->reduced[i] = parameters[i].trained;
      }
      reducer = std::move(made);
    });
    delayed_reduction = delayed_reduction_done = false;
    for (std::size_t i = 0; i < parameters.size(); ++i)
      ArrivalHook::put(parameters[i].entry.tensor, watch, i, parameters[i].entry.name);
  }

  // Throws unless every trained parameter lies as it did; sees to it that the hooks are in place.
  // Returns whether the reducer has the parameters that require a gradient now.
  bool check_parameters() const {
    bool same = true;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& [entry, trained, kind, sizes] = parameters[i];
      const at::Tensor& tensor = entry.tensor;
      same &= tensor.requires_grad() == trained;
      if (tensor.scalar_type() != kind.dtype() || tensor.device() != kind.device()) {
        throw StateError(text::concat(
            "The parameter '", entry.name, "' was ",
            c10::toString(c10::typeMetaToScalarType(kind.dtype())), " on ", kind.device().str(),
            " when its module was prepared, and is ", c10::toString(tensor.scalar_type()), " on ",
            tensor.device().str(),
            " now: the module was moved or cast since, and its gradients would not be averaged "
            "over the ranks any more. Move and cast a module before prepare()."));
      }
      if (tensor.sizes() != sizes) {
        throw StateError(text::concat(
            "The parameter '", entry.name, "' had the shape [", text::join(sizes),
            "] when its module was prepared, and has the shape [", text::join(tensor.sizes()),
            "] now: its gradients would not be averaged over the ranks any more. Set and load "
            "parameters of the same shape, or prepare the module afterwards."));
      }
      ArrivalHook::put(tensor, watch, i, entry.name);
    }
    reducer->keep_accumulators();
    return same;
  }

  // Throws when the last reducing backward left a parameter out.
  void require_finished() const {
    if (!reducer->unfinished()) return;
    std::vector<std::string> missing;
    {
      const std::lock_guard lock(watch->mutex);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (watch->reduced[i] && !watch->arrived[i]) missing.push_back(parameters[i].entry.name);
      }
    }
    throw StateError(text::concat(
        "Some parameters got no gradient in the last backward on rank ", group.rank(), ": ",
        text::join(missing), ". So the averaging over the ranks did not end. ",
        options.find_unused_parameters()
            ? "DdpOptions::find_unused_parameters finds those that no output of the prepared "
              "forward depends on, and the loss left out an output that depends on these. Return "
              "from forward only what the loss uses."
            : "Set DdpOptions::find_unused_parameters if the module does not always use all of "
              "them, or static_graph if it uses the same ones in every step; or freeze them with "
              "requires_grad_(false)."));
  }

  // From one rank to all.
  void broadcast_buffers(int source) {
    std::vector<at::Tensor> tensors;
    for (const NamedTensor& buffer : buffers) tensors.push_back(buffer.tensor);
    if (!forward_waits) return broadcast(tensors, source);
    // A graph may have saved buffers. Those that do not change are left alone. Running statistics
    // are written as batch normalisation itself does between a forward and its backward: autograd
    // is not told, for backward uses the statistics of its own batch.
    const at::NoGradGuard no_grad;
    for (at::Tensor& tensor : tensors) tensor = tensor.clone();
    broadcast(tensors, source);
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const auto& [name, buffer] = buffers[i];
      if (at::equal(buffer, tensors[i])) continue;
      (is_running_statistic(name) ? buffer.variable_data() : buffer).copy_(tensors[i]);
    }
  }

  void prepare_for_backward(const std::vector<at::Tensor>& outputs) {
    require_finished();
    {
      // c10d's only warning here gives advice about Python's API.
      QuietWarnings quiet;
      const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
      translated("the preparation of backward", [&] { reducer->prepare_for_backward(outputs); });
    }
    delayed_reduction = options.static_graph() && !delayed_reduction_done;
    const std::lock_guard lock(watch->mutex);
    watch->awaits_first = true;
    if (!options.find_unused_parameters()) return;
    std::vector<std::size_t> trained;  // the reducer knows of no others
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].trained) trained.push_back(i);
    }
    watch->unused.assign(parameters.size(), false);
    for (const std::size_t i : reducer->unused()) watch->unused[trained[i]] = true;
  }

  void finish_delayed_reduction() {
    if (!delayed_reduction) return;
    delayed_reduction = false;
    delayed_reduction_done = true;
    translated("the gradient all-reduce", [&] { reducer->delay_all_reduce(); });
    const std::lock_guard lock(watch->mutex);
    watch->unreduced.assign(watch->unreduced.size(), false);
  }

  void abandon_if_failed() {
    if (!watch->failed) return;
    // What this rank began next would meet what others, whose pass goes on, still wait for.
    watch->group->wait_until_all_failed();
    const std::lock_guard lock(watch->mutex);
    watch->failed = watch->awaits_first = false;
    delayed_reduction = false;
    reducer->abandon();
  }

  /// Whether one of the leaves is marked in `marks`.
  const NamedTensor* first_marked(const std::vector<at::Tensor>& leaves,
                                  const std::vector<bool>& marks) const {
    const std::lock_guard lock(watch->mutex);
    for (const at::Tensor& leaf : leaves) {
      const auto found = index_of.find(leaf.unsafeGetTensorImpl());
      if (found != index_of.end() && marks[found->second]) return &parameters[found->second].entry;
    }
    return nullptr;
  }

  struct Announcement {
    int source = -1;  ///< the highest rank that still has a batch; -1 when none has
    bool sync = false;
  };
  /// Collective. Whether this rank has a batch and will reduce its gradients, and what the others
  /// say.
  Announcement announce(bool active, bool sync) {
    const at::Tensor flags = at::tensor({active ? group.rank() : -1, active && sync ? 1 : 0},
                                        at::TensorOptions().device(device()).dtype(at::kInt));
    group.all_reduce(flags, comm::ReduceOp::max).wait();
    const at::Tensor host = flags.cpu();
    return {host[0].item<int>(), host[1].item<int>() > 0};
  }

  at::Device device() const { return parameters.front().entry.tensor.device(); }
};

Ddp::Ddp(ModuleRecord module, comm::Group group, DdpOptions options)
    : Strategy(std::move(module)), impl_(std::make_unique<Impl>()) {
  Impl& self = *impl_;
  self.group = std::move(group);
  self.options = std::move(options);
  if (self.group.size() < 2) {
    throw ConfigError(
        "Ddp was given a group of one process, which has nothing to average. Use the plain "
        "Strategy, as the Accelerator does.");
  }
  self.watch->group = self.group.impl()->watch;
  if (self.options.static_graph() && self.options.find_unused_parameters()) {
    throw ConfigError(
        "DdpOptions has both static_graph and find_unused_parameters. A static graph finds its "
        "unused parameters by "
        "itself in the first step; drop find_unused_parameters.");
  }

  self.collect(module_);
  if (!self.has_trained()) {
    throw StateError(
        "The module has no parameter that requires a gradient, so there is nothing to train in "
        "parallel. Prepare it with prepare_for_evaluation, or switch requires_grad on for what "
        "should "
        "be trained.");
  }

  require_same_structure(self.states, self.group);
  self.process_group = comm::process_group(self.group);
  std::vector<at::Tensor> states;
  for (const NamedTensor& entry : self.states) states.push_back(entry.tensor.detach());
  self.broadcast(states, 0);
  self.make_reducer();
}

Ddp::~Ddp() {
  {
    const std::lock_guard lock(impl_->watch->mutex);
    impl_->watch->reducer = nullptr;
  }
  for (const auto& parameter : impl_->parameters)
    ArrivalHook::take(parameter.entry.tensor, impl_->watch);
}

// Collective where something changed: every rank must change the same.
void Ddp::follow_module() {
  Impl& self = *impl_;
  const bool current = module_.is_current();
  if (!current) {
    self.require_finished();
    const std::vector<NamedTensor> before = self.states;
    const auto is_new = [&](const NamedTensor& entry) {
      return std::none_of(before.begin(), before.end(), [&](const NamedTensor& known) {
        return known.tensor.is_same(entry.tensor);
      });
    };
    for (const auto& parameter : self.parameters)
      ArrivalHook::take(parameter.entry.tensor, self.watch);
    module_.refresh();
    self.collect(module_);
    require_same_structure(self.states, self.group);
    std::vector<at::Tensor> added;
    for (const NamedTensor& entry : self.states) {
      if (is_new(entry)) added.push_back(entry.tensor.detach());
    }
    self.broadcast(added, 0);
  } else if (self.check_parameters()) {
    self.all_frozen = false;
    return;
  }
  // What trains one part and then another in one step, as adversarial networks do, freezes all of
  // the module: it is left as it is, with nothing to reduce.
  self.all_frozen = !self.has_trained();
  if (self.all_frozen) return;
  self.require_finished();
  if (current) require_same_structure(self.states, self.group);
  self.make_reducer();
}

const DdpOptions& Ddp::options() const noexcept { return impl_->options; }

bool Ddp::wants_outputs() const noexcept { return impl_->options.find_unused_parameters(); }

void Ddp::before_forward(const ForwardContext& context) {
  Impl& self = *impl_;
  self.abandon_if_failed();
  if (context.grad_enabled) follow_module();
  const bool listens = context.grad_enabled && !self.all_frozen;
  const bool reduces = listens && context.sync;
  if (reduces) self.reducer->prepare_for_forward();
  int buffer_source = 0;
  if (self.join && context.grad_enabled) buffer_source = self.announce(true, context.sync).source;
  if (listens && self.reducer->should_rebuild_buckets()) {
    self.require_finished();
    const MemoryKindScope kind(MemoryKind::gradients);
    self.translated("the rebuilding of gradient buckets", [&] { self.reducer->rebuild_buckets(); });
  }
  if (!self.options.broadcast_buffers() || self.buffers.empty()) return;
  const bool training = module_.is_training();
  // In evaluation buffers stand still, so once after training is enough; ranks may then run
  // different numbers of evaluation batches.
  const bool due =
      self.join ? reduces : (training && context.sync) || (!training && self.buffers_stale);
  if (due) {
    self.broadcast_buffers(buffer_source);
    self.buffers_stale = training;
  }
}

void Ddp::after_forward(const ForwardContext& context, const std::vector<at::Tensor>& outputs) {
  Impl& self = *impl_;
  if (!context.grad_enabled) return;
  self.forward_waits = true;
  if (context.sync && !self.all_frozen) self.prepare_for_backward(outputs);
}

void Ddp::after_backward() {
  impl_->forward_waits = false;
  impl_->finish_delayed_reduction();
}

void Ddp::backward_failed() noexcept { impl_->watch->fail(); }

void Ddp::sync_in_next_backward() {
  if (!impl_->all_frozen) impl_->prepare_for_backward({});
}

void Ddp::check_gradients(const std::vector<at::Tensor>& leaves) {
  Impl& self = *impl_;
  self.abandon_if_failed();
  if (const NamedTensor* partial = self.first_marked(leaves, self.watch->partial)) {
    throw StateError(text::concat(
        "The optimizer was asked to step after a backward that ended with an exception: the "
        "gradient of '",
        partial->name,
        "' is only a part of one. Clear the gradients with the prepared optimizer's zero_grad() "
        "before the next backward."));
  }
  self.finish_delayed_reduction();
  if (self.first_marked(leaves, self.watch->unreduced) != nullptr) {
    throw StateError(
        "Gradients arrived on this rank that were never averaged over the ranks, and a step on "
        "them would let the ranks "
        "drift apart. Either the module itself was called instead of the prepared one, or one "
        "synchronising forward was "
        "followed by two backwards. Call the module that prepare() returned, put accumulated "
        "micro-batches inside "
        "accumulate() or no_sync(), or clear the gradients first.");
  }
  self.require_finished();
}

std::vector<std::vector<std::int64_t>> Ddp::reduction_layout() {
  if (impl_->reducer->should_rebuild_buckets()) {
    impl_->translated("the rebuilding of gradient buckets",
                      [&] { impl_->reducer->rebuild_buckets(); });
  }
  return impl_->reducer->layout();
}

void Ddp::check_reduction_layout(const std::vector<std::vector<std::int64_t>>& layout) const {
  if (layout.empty()) return;
  std::vector<std::int64_t> all;
  for (const auto& bucket : layout) all.insert(all.end(), bucket.begin(), bucket.end());
  std::sort(all.begin(), all.end());
  // Of the parameters that were trained; others were frozen when it was saved if there are not as
  // many of them now.
  std::vector<at::Tensor> trained;
  for (const auto& parameter : impl_->parameters) {
    if (parameter.trained) trained.push_back(parameter.entry.tensor);
  }
  bool fits = all.size() <= impl_->parameters.size();
  for (std::size_t i = 0; fits && i < all.size(); ++i)
    fits = all[i] == static_cast<std::int64_t>(i);
  if (fits && all.size() != trained.size()) return;
  for (std::size_t b = 0; fits && b < layout.size(); ++b) {
    // One bucket is one tensor.
    const auto& bucket = layout[b];
    const auto parameter = [&](std::int64_t i) -> const at::Tensor& {
      return trained[static_cast<std::size_t>(i)];
    };
    fits = !bucket.empty() && std::all_of(bucket.begin(), bucket.end(), [&](std::int64_t i) {
      return parameter(i).scalar_type() == parameter(bucket.front()).scalar_type() &&
             parameter(i).device() == parameter(bucket.front()).device();
    });
  }
  if (fits) return;
  throw CheckpointError(
      "The layout of gradient buckets in the checkpoint is that of another module.",
      /*path=*/"");
}

void Ddp::set_reduction_layout(const std::vector<std::vector<std::int64_t>>& layout) {
  check_reduction_layout(layout);
  if (layout.empty() || !impl_->reducer->should_rebuild_buckets()) return;
  std::vector<std::vector<std::size_t>> buckets;
  std::size_t size = 0;
  for (const auto& bucket : layout) {
    buckets.emplace_back(bucket.begin(), bucket.end());
    size += bucket.size();
  }
  const auto is_trained = [](const Impl::Parameter& parameter) { return parameter.trained; };
  const auto trained =
      std::count_if(impl_->parameters.begin(), impl_->parameters.end(), is_trained);
  if (size != static_cast<std::size_t>(trained)) return;
  impl_->translated("the set-up of gradient buckets",
                    [&] { impl_->reducer->set_layout(std::move(buckets)); });
}

void Ddp::after_step(const std::vector<at::Tensor>&) { impl_->forward_waits = false; }

void Ddp::before_zero_grad(const std::vector<at::Tensor>& leaves) {
  Impl& self = *impl_;
  self.abandon_if_failed();
  const std::lock_guard lock(self.watch->mutex);
  for (const at::Tensor& leaf : leaves) {
    const auto found = self.index_of.find(leaf.unsafeGetTensorImpl());
    if (found == self.index_of.end()) continue;
    self.watch->unreduced[found->second] = false;
    self.watch->partial[found->second] = false;
  }
}

at::Tensor Ddp::grad_norm(double p) const {
  impl_->finish_delayed_reduction();
  return Strategy::grad_norm(p);
}

void Ddp::scale_gradients_(const at::Tensor& factor) {
  impl_->finish_delayed_reduction();
  Strategy::scale_gradients_(factor);
}

void Ddp::clip_grad_value_(double limit) {
  impl_->finish_delayed_reduction();
  Strategy::clip_grad_value_(limit);
}

void Ddp::verify_parameters() const { require_same_values(impl_->states, impl_->group); }

void Ddp::set_join(bool on) { impl_->join = on; }

void Ddp::shadow_until_all_joined() {
  Impl& self = *impl_;
  bool was_last = true;
  while (true) {
    const auto [source, sync] = self.announce(false, false);
    if (source < 0) break;
    // Whoever still runs while this rank only shadows has trained on more.
    was_last = false;
    const MemoryKindScope kind(MemoryKind::gradients);
    self.translated("the rebuilding of gradient buckets", [&] { self.reducer->rebuild_buckets(); });
    if (self.options.broadcast_buffers() && !self.buffers.empty() && sync)
      self.broadcast_buffers(source);
    if (!sync) continue;
    self.translated("the gradient all-reduce", [&] {
      std::vector<c10::intrusive_ptr<c10::ivalue::Future>> pending;
      for (auto& bucket : self.reducer->get_grad_buckets(/*return_zero_tensors=*/true)) {
        pending.push_back(self.reducer->run_comm_hook(bucket));
      }
      for (const auto& future : pending) future->waitAndThrow();
      if (self.options.find_unused_parameters()) {
        std::vector<at::Tensor> used{self.reducer->get_local_used_map_on_device()};
        self.process_group->allreduce(used)->wait();
      }
      self.reducer->push_rebuilt_params_for_all_indices();
    });
  }
  // The last to join is the rank whose module saw every step; the highest such rank, as all must
  // agree.
  const at::Tensor source = at::full({1}, was_last ? self.group.rank() : -1,
                                     at::TensorOptions().device(self.device()).dtype(at::kInt));
  self.group.all_reduce(source, comm::ReduceOp::max).wait();
  std::vector<at::Tensor> states;
  for (const NamedTensor& entry : self.states) states.push_back(entry.tensor.detach());
  self.broadcast(states, source.item<int>());
}

}  // namespace accelerate::parallel
