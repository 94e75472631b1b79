#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/big_model/init_empty.hpp>
#include <intercept/internal_ops.hpp>
#include <intercept/key.hpp>
#include <intercept/replace.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace accelerate {
namespace {

using Stack = std::vector<c10::IValue>;
using Storages = std::unordered_map<const void*, c10::Storage>;

// Where an operator is told a device, or nothing.
std::optional<std::size_t> device_argument(const c10::FunctionSchema& schema) {
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    if (schema.arguments()[i].name() == "device") return i;
  }
  return std::nullopt;
}

bool takes_tensors(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const c10::Argument& argument) {
                       const c10::TypePtr& type = argument.type();
                       return type->isSubtypeOf(*c10::OptionalType::ofTensor()) ||
                              type->isSubtypeOf(*c10::ListType::ofTensors()) ||
                              type->isSubtypeOf(*c10::ListType::ofOptionalTensors());
                     });
}

bool is_written(const c10::FunctionSchema& schema, std::size_t argument) {
  const c10::AliasInfo* alias = schema.arguments()[argument].alias_info();
  return alias != nullptr && alias->isWrite();
}

template <class Each>
void for_each_tensor(const c10::IValue& value, Each&& each) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) each(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& element : value.toListRef()) for_each_tensor(element, each);
  }
}

// `value` with each of its tensors exchanged for what `each` makes of it.
template <class Each>
c10::IValue exchanged(const c10::IValue& value, Each&& each) {
  if (value.isTensor()) return value.toTensor().defined() ? each(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector())
      list.push_back(tensor.defined() ? each(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional(each(*tensor)) : tensor);
    return list;
  }
  return value;
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

// A tensor of the shape, strides and dtype of `like`, in `storage`.
at::Tensor view_of(const c10::Storage& storage, const at::Tensor& like) {
  at::Tensor view = at::empty({0}, at::TensorOptions(storage.device()).dtype(like.dtype()));
  view.set_(storage, like.storage_offset(), like.sizes(), like.strides());
  view.unsafeGetTensorImpl()->_set_conj(like.is_conj());
  view.unsafeGetTensorImpl()->_set_neg(like.is_neg());
  return view;
}

// Random numbers are drawn when they are wanted, from where the generator stood when the program
// asked for them. A stream is what is asked for without the program's seeding or drawing between.
struct Stream {
  at::Generator generator;
  at::Tensor next;   // the state from which the next numbers are drawn
  at::Tensor stood;  // the state in which the generator was left after the last call
};

at::Tensor state_of(at::Generator& generator) {
  const std::scoped_lock lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  const std::scoped_lock lock(generator.mutex());
  generator.set_state(state);
}

// An operator that was called inside the scope, to be repeated where its result is wanted.
struct Call {
  c10::OperatorHandle op;
  Stack arguments;  // those with memory are copies: the program may free or change its own
  Stack results;
  caffe2::TypeMeta default_dtype;
  std::shared_ptr<Stream> stream;  // of random operators
  at::Tensor drawn_from;           // the generator's state, once it has drawn

  // Whatever it returned or wrote to.
  template <class Each>
  void for_each_made(Each&& each) const {
    for (const c10::IValue& result : results) for_each_tensor(result, each);
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (is_written(op.schema(), i)) for_each_tensor(arguments[i], each);
    }
  }
  template <class Each>
  void for_each_storage(Each&& each) const {
    const auto meet = [&](const at::Tensor& tensor) {
      if (tensor.is_meta()) each(storage_of(tensor));
    };
    for (const c10::IValue& argument : arguments) for_each_tensor(argument, meet);
    for (const c10::IValue& result : results) for_each_tensor(result, meet);
  }
};

// Runs `call` on arguments with memory, as it would have run when it was recorded.
void run(Call& call, Stack& stack) {
  const auto at = device_argument(call.op.schema());
  if (at && stack[*at].isDevice() && stack[*at].toDevice().is_meta())
    stack[*at] = at::Device(at::kCPU);

  struct DefaultDtype {
    explicit DefaultDtype(caffe2::TypeMeta dtype) { c10::set_default_dtype(dtype); }
    ~DefaultDtype() { c10::set_default_dtype(before); }
    caffe2::TypeMeta before = c10::get_default_dtype();
  } const default_dtype(call.default_dtype);

  if (!call.stream) {
    call.op.callBoxed(&stack);
    return;
  }
  at::Generator& generator = call.stream->generator;
  struct Position {
    explicit Position(at::Generator& of) : generator(of), before(state_of(of)) {}
    ~Position() { set_state(generator, before); }
    at::Generator& generator;
    at::Tensor before;
  } const position(generator);
  const bool again = call.drawn_from.defined();
  if (!again) call.drawn_from = call.stream->next;
  set_state(generator, call.drawn_from);
  call.op.callBoxed(&stack);
  if (!again) call.stream->next = state_of(generator);
}

// What was called, and the values that it leads to.
class Recording {
 public:
  Recording() = default;
  // Leaves generators as far on as was drawn from them.
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  Call begin(const c10::OperatorHandle& op, const Stack& arguments);
  void keep(Call call, const c10::IValue* results);

  // The memory of `wanted`, by repeating the calls of which it is the result. Other memory that
  // this takes is given back on the way.
  Storages values(const std::unordered_set<const void*>& wanted);

  // Runs on the CPU what cannot run without memory. Its results have no memory again, unless the
  // program named a device for them.
  Stack run_for_real(Call& call, const Stack& given, bool keep_real);

 private:
  std::vector<Call> calls_;
  std::unordered_map<const void*, std::vector<std::size_t>> makers_;  // calls, by storage
  std::unordered_map<const void*, std::shared_ptr<Stream>> streams_;  // the latest, by generator
};

Call Recording::begin(const c10::OperatorHandle& op, const Stack& arguments) {
  Call call{op, {}, {}, c10::get_default_dtype(), nullptr, {}};
  std::optional<at::Generator> generator;
  for (const c10::IValue& argument : arguments) {
    // What the program points elsewhere afterwards, by module->to() for example, stays here.
    call.arguments.push_back(exchanged(argument, [](const at::Tensor& tensor) {
      return tensor.is_meta() ? tensor.detach() : tensor.detach().clone();
    }));
    if (argument.isGenerator()) generator = argument.toGenerator();
  }
  if (!generator && op.hasTag(at::Tag::nondeterministic_seeded))
    generator = at::detail::getDefaultCPUGenerator();
  if (generator) {
    const at::Tensor state = state_of(*generator);
    std::shared_ptr<Stream>& stream = streams_[generator->unsafeGetGeneratorImpl()];
    if (!stream || !at::equal(state, stream->stood))
      stream = std::make_shared<Stream>(Stream{*generator, state, {}});
    // Moved on, so that it is seen when the program sets it back to where it was.
    at::empty({1}, generator->device()).uniform_(0, 1, generator);
    stream->stood = state_of(*generator);
    call.stream = stream;
  }
  return call;
}

void Recording::keep(Call call, const c10::IValue* results) {
  for (std::size_t i = 0; i < call.op.schema().returns().size(); ++i) {
    call.results.push_back(
        exchanged(results[i], [](const at::Tensor& tensor) { return tensor.detach(); }));
  }
  bool without_memory = false;
  call.for_each_made([&](const at::Tensor& tensor) {
    if (!tensor.is_meta()) return;
    without_memory = true;
    std::vector<std::size_t>& makers = makers_[storage_of(tensor)];
    if (makers.empty() || makers.back() != calls_.size()) makers.push_back(calls_.size());
    // So that data_ptr() throws where it would return nothing.
    if (tensor.has_storage())
      tensor.storage().unsafeGetStorageImpl()->set_throw_on_mutable_data_ptr();
  });
  if (without_memory) calls_.push_back(std::move(call));
}

at::Tensor value_for(const c10::OperatorHandle& op, const at::Tensor& tensor,
                     const Storages& storages) {
  const auto found = storages.find(storage_of(tensor));
  if (found == storages.end()) {
    throw UnsupportedError(text::concat(
        "'", op.schema().name(),
        "' needs the values of a tensor that has no memory and was not made by this scope of "
        "init_empty_weights, so they are not known. Make inside the scope whatever is computed "
        "with there, or name a device with memory for it (torch::kCPU)."));
  }
  return view_of(found->second, tensor);
}

// Kernels for no memory may lay out what they make in another order than others.
at::Tensor laid_out_like(const c10::OperatorHandle& op, const at::Tensor& value,
                         const at::Tensor& like, const Storages& storages) {
  if (value.sizes() != like.sizes() || value.dtype() != like.dtype() ||
      like.storage_offset() != 0 || storages.contains(storage_of(like))) {
    throw UnsupportedError(text::concat(
        "'", op.schema().name(),
        "' gives another tensor with memory than without, so init_empty_weights cannot tell what "
        "the module's buffers are. Name a device with memory for its arguments (torch::kCPU)."));
  }
  const at::Tensor copy = at::empty_strided(like.sizes(), like.strides(), like.dtype());
  return copy.copy_(value);
}

Storages Recording::values(const std::unordered_set<const void*>& wanted) {
  // Back through what was called: whatever made a wanted storage, and what that was made from.
  std::unordered_set<const void*> sources;
  std::set<std::size_t> ahead;
  const auto add = [&](const void* storage, std::size_t end) {
    const auto makers = makers_.find(storage);
    if (makers == makers_.end() || !sources.insert(storage).second) return;
    for (const std::size_t maker : makers->second) {
      if (maker < end) ahead.insert(maker);
    }
  };
  for (const void* storage : wanted) add(storage, calls_.size());
  std::vector<Call*> needed;
  while (!ahead.empty()) {
    const std::size_t latest = *ahead.rbegin();
    ahead.erase(latest);
    needed.push_back(&calls_[latest]);
    calls_[latest].for_each_storage([&](const void* storage) { add(storage, latest); });
  }
  std::reverse(needed.begin(), needed.end());
  std::unordered_map<const void*, Call*> last_use;
  for (Call* call : needed)
    call->for_each_storage([&](const void* storage) { last_use[storage] = call; });

  Storages storages;
  for (Call* call : needed) {
    Stack stack;
    for (std::size_t i = 0; i < call->arguments.size(); ++i) {
      stack.push_back(exchanged(call->arguments[i], [&](const at::Tensor& tensor) {
        if (tensor.is_meta()) return value_for(call->op, tensor, storages);
        return is_written(call->op.schema(), i) ? tensor.clone() : tensor;
      }));
    }
    run(*call, stack);
    for (std::size_t i = 0; i < stack.size(); ++i) {
      std::vector<at::Tensor> before, now;
      for_each_tensor(call->results[i], [&](const at::Tensor& t) { before.push_back(t); });
      for_each_tensor(stack[i], [&](const at::Tensor& t) { now.push_back(t); });
      for (std::size_t t = 0; t < before.size(); ++t) {
        if (!before[t].is_meta()) continue;
        at::Tensor value = now.at(t);
        if (value.sizes() != before[t].sizes() || value.dtype() != before[t].dtype() ||
            value.strides() != before[t].strides()) {
          value = laid_out_like(call->op, value, before[t], storages);
        }
        storages[storage_of(before[t])] = value.storage();
      }
    }
    call->for_each_storage([&](const void* storage) {
      if (last_use[storage] == call && !wanted.contains(storage)) storages.erase(storage);
    });
  }
  return storages;
}

Stack Recording::run_for_real(Call& call, const Stack& given, bool keep_real) {
  std::unordered_set<const void*> wanted, users;
  for (const c10::IValue& argument : given) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      (tensor.is_meta() ? wanted : users).insert(storage_of(tensor));
    });
  }
  const Storages storages = values(wanted);
  Stack stack;
  std::vector<std::pair<at::Tensor, at::Tensor>> exchanges;  // with memory, without
  Storages empty;                                            // by that with memory
  for (const c10::IValue& argument : given) {
    stack.push_back(exchanged(argument, [&](const at::Tensor& tensor) {
      if (!tensor.is_meta()) return tensor;
      at::Tensor value = value_for(call.op, tensor, storages);
      exchanges.emplace_back(value, tensor);
      empty[storage_of(value)] = tensor.storage();
      return value;
    }));
  }
  run(call, stack);
  for (const auto& [value, tensor] : exchanges) {
    if (value.sizes() == tensor.sizes() && value.strides() == tensor.strides()) continue;
    throw UnsupportedError(text::concat("'", call.op.schema().name(),
                                        "' changes the shape of a tensor that has no memory inside "
                                        "init_empty_weights. Use the operator that returns its "
                                        "result, or name a device for the tensor (torch::kCPU)."));
  }
  if (keep_real) return stack;
  for (c10::IValue& result : stack) {
    result = exchanged(result, [&](const at::Tensor& tensor) {
      for (const auto& [value, without] : exchanges) {
        if (tensor.is_same(value)) return without;
      }
      if (!tensor.has_storage() || users.contains(storage_of(tensor))) return tensor;
      c10::Storage& storage = empty[storage_of(tensor)];
      if (!storage) {
        const auto bytes = static_cast<std::int64_t>(tensor.storage().nbytes());
        storage = at::empty({bytes}, at::TensorOptions(at::kMeta).dtype(at::kByte)).storage();
      }
      return view_of(storage, tensor);
    });
  }
  return stack;
}

Recording::~Recording() {
  for (const auto& [address, stream] : streams_) {
    if (at::equal(state_of(stream->generator), stream->stood))
      set_state(stream->generator, stream->next);
  }
}

// The tensors without memory that operators gave this thread, to find at the end those that the
// program still has: members that are not registered, and views of them.
class Handles {
 public:
  Handles() : outer_(innermost) {
    innermost = this;
    at::RecordFunctionCallback callback(nullptr, [](const at::RecordFunction& function, auto*) {
      for (const c10::IValue& output : function.outputs())
        for_each_tensor(output, [](const at::Tensor& tensor) { innermost->note(tensor); });
    });
    callback_ =
        at::addThreadLocalCallback(callback.needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
  }
  ~Handles() {
    at::removeCallback(callback_);
    innermost = outer_;
  }
  Handles(const Handles&) = delete;
  Handles& operator=(const Handles&) = delete;

  std::vector<at::Tensor> alive() const {
    std::vector<at::Tensor> tensors;
    for (const auto& [address, handle] : handles_) {
      if (auto tensor = handle.lock()) tensors.emplace_back(std::move(tensor));
    }
    return tensors;
  }

 private:
  using Handle = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  void note(const at::Tensor& tensor) {
    if (!tensor.is_meta()) return;
    handles_.try_emplace(tensor.unsafeGetTensorImpl(), Handle(tensor.getIntrusivePtr()));
    if (handles_.size() < forget_at_) return;
    std::erase_if(handles_, [](const auto& entry) { return entry.second.expired(); });
    forget_at_ = 2 * handles_.size() + 1024;
  }

  static thread_local Handles* innermost;
  Handles* outer_;
  at::CallbackHandle callback_;
  at::RecordFunctionGuard enabled_;
  std::unordered_map<const void*, Handle> handles_;
  std::size_t forget_at_ = 1024;
};
thread_local Handles* Handles::innermost = nullptr;

}  // namespace

struct InitOnDevice::Impl final : intercept::RegionPolicy {
  Impl(at::Device wanted, bool with_buffers) : device(wanted), include_buffers(with_buffers) {
    if (device.is_meta()) {
      recording.emplace();
      handles.emplace();
    }
    region.emplace(*this);
  }

  void call(const c10::OperatorHandle& op, c10::DispatchKeySet below, Stack& stack) override {
    const at::DisableRecordFunctionGuard not_noted;
    const c10::FunctionSchema& schema = op.schema();
    const std::size_t first = stack.size() - schema.arguments().size();
    const Stack given(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());

    const auto at = device_argument(schema);
    const bool named = at && given[*at].isDevice();
    const bool redirected = at && given[*at].isNone() && !takes_tensors(schema);
    bool here = redirected || (named && given[*at].toDevice() == device);
    bool writes_elsewhere = false;
    for (std::size_t i = 0; i < given.size(); ++i) {
      for_each_tensor(given[i], [&](const at::Tensor& tensor) {
        if (tensor.device() == device) {
          here = true;
        } else if (is_written(schema, i)) {
          writes_elsewhere = true;
        }
      });
    }
    if (!here) return op.redispatchBoxed(below, &stack);

    const auto run_here = [&] {
      align(schema, stack, first);
      if (redirected) stack[first + *at] = device;
      op.redispatchBoxed(below, &stack);
    };
    if (!device.is_meta()) return run_here();

    std::optional<Call> call;
    {
      const intercept::InternalOpsGuard internal;
      call = recording->begin(op, given);
    }
    bool ran = false;
    if (!writes_elsewhere) {
      try {
        run_here();
        ran = true;
        for (std::size_t i = first; i < stack.size(); ++i) {
          // What has no storage, such as a sparse tensor, cannot be recorded by it.
          for_each_tensor(stack[i], [&](const at::Tensor& tensor) { ran &= tensor.has_storage(); });
        }
      } catch (const c10::Error&) {
        // No kernel, or one that needs values. What the program does wrong fails again below.
      }
    }
    const intercept::InternalOpsGuard internal;
    if (!ran) {
      const bool keep_real = named && given[*at].toDevice() != device;
      const Stack results = recording->run_for_real(*call, given, keep_real);
      stack.resize(first);
      stack.insert(stack.end(), results.begin(), results.end());
    }
    recording->keep(std::move(*call), stack.data() + first);
  }

  // Brings tensors on a named device, such as literals, to what they are computed with.
  void align(const c10::FunctionSchema& schema, Stack& stack, std::size_t first) const {
    for (std::size_t i = first; i < stack.size(); ++i) {
      if (is_written(schema, i - first)) continue;
      stack[i] = exchanged(stack[i], [&](const at::Tensor& tensor) { return tensor.to(device); });
    }
  }

  void make_real(const ModuleRecord& module);

  at::Device device;
  bool include_buffers;
  std::optional<Recording> recording;  // of the meta device, like the handles
  std::optional<Handles> handles;
  std::optional<intercept::Region> region;
};

void InitOnDevice::Impl::make_real(const ModuleRecord& module) {
  std::unordered_set<const void*> parameters, wanted;
  for (const auto& [name, parameter] : module.parameters())
    parameters.insert(storage_of(parameter));
  std::vector<NamedTensor> tensors;
  for (const NamedTensor& buffer : module.buffers()) {
    if (buffer.tensor.is_meta()) tensors.push_back(buffer);
  }
  for (const at::Tensor& tensor : handles->alive()) {
    // Leaves that require a gradient are parameters of something else.
    const bool is_parameter =
        parameters.contains(storage_of(tensor)) || (tensor.is_leaf() && tensor.requires_grad());
    if (tensor.is_meta() && !is_parameter) tensors.push_back({"", tensor});
  }
  for (const NamedTensor& tensor : tensors) wanted.insert(storage_of(tensor.tensor));
  const Storages storages = recording->values(wanted);
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.is_meta()) continue;  // a buffer that comes again as a handle
    const auto found = storages.find(storage_of(tensor));
    if (found != storages.end()) {
      intercept::replace_data(tensor, view_of(found->second, tensor));
    } else if (!name.empty()) {
      throw UnsupportedError(text::concat("The buffer '", name,
                                          "' was not made inside init_empty_weights but has no "
                                          "memory, so its values are not known. "
                                          "Construct the whole module inside."));
    }
  }
}

InitOnDevice::InitOnDevice(at::Device device, bool include_buffers)
    : impl_(std::make_unique<Impl>(device, include_buffers)) {}

InitOnDevice::~InitOnDevice() = default;

void InitOnDevice::explain_failure() const {
  if (!impl_->device.is_meta()) return;
  try {
    throw;
  } catch (const c10::Error& error) {
    const std::string_view what = error.what_without_backtrace();
    if (what.find("data is not allocated yet") == what.npos &&
        what.find("Cannot access data pointer") == what.npos)
      return;
    std::throw_with_nested(UnsupportedError(
        "The data of a tensor was asked for inside init_empty_weights, by accessor() or "
        "data_ptr(), but it has no memory there. Name a device with memory where the tensor is "
        "made (torch::zeros({n}, torch::kCPU)), or read from tensor.cpu()."));
  } catch (...) {
    return;
  }
}

void InitOnDevice::finish(const ModuleRecord& module) {
  if (!impl_->region) throw StateError("This scope of init_on_device has ended already.");
  impl_->region.reset();
  const intercept::InternalOpsGuard internal;
  const at::DisableRecordFunctionGuard not_noted;
  if (!impl_->include_buffers) {
    if (impl_->device.is_meta()) {
      impl_->make_real(module);
    } else {
      for (const auto& [name, buffer] : module.buffers()) {
        // By kind: "cuda" without an index names the current one.
        if (buffer.device().type() == impl_->device.type())
          intercept::replace_data(buffer, buffer.cpu());
      }
    }
  }
  impl_->handles.reset();
  impl_->recording.reset();
}

}  // namespace accelerate
