#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <intercept/internal_ops.hpp>
#include <intercept/policies.hpp>
#include <intercept/tagged_storage.hpp>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/runtime/interpreter.h>

#include <algorithm>
#include <mutex>
#include <typeinfo>
#include <unordered_map>
#include <utility>

namespace accelerate::intercept {
namespace {

using torch::autograd::Node;

// A policy that runs on this thread: what it calls goes to those below it.
struct Frame {
  const PolicyRecord* record;
  const PolicyLayer* layer;
  const Node* node;  // of the backward pass that it runs in
  const Frame* outer;
};
thread_local const Frame* innermost_frame = nullptr;
thread_local int without_policies = 0;
thread_local const Node* forward_node = nullptr;  // of ForwardScope

class Entered {
 public:
  Entered(const PolicyRecord& record, const PolicyLayer& layer)
      : frame_{&record, &layer, torch::autograd::get_current_node().get(), innermost_frame} {
    innermost_frame = &frame_;
  }
  ~Entered() { innermost_frame = frame_.outer; }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

 private:
  Frame frame_;
};

// Whether this node of a backward pass computes gradients now, or calls a forward: in a scope that
// says so, in a hook on a leaf, or in a function of a program's own that switched gradients on.
bool is_formula(Node* node) {
  if (node == nullptr || node == forward_node) return false;
  if (typeid(*node) == typeid(torch::autograd::AccumulateGrad)) return false;
  return node->is_traceable() || !at::GradMode::is_enabled();
}

template <class Act>
void for_each_tensor(const c10::IValue& value, const Act& act) {
  if (value.isTensor()) {
    act(value.toTensor());
  } else if (value.isList() || value.isOptionalTensorList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor()) act(element.toTensor());
    }
  }
}

PolicyMarks* marks_of(const c10::StorageImpl& storage) {
  auto* const allocator = const_cast<c10::Allocator*>(storage.allocator());
  if (allocator == nullptr) return nullptr;
  const std::type_info& type = typeid(*allocator);
  if (type == typeid(TaggedStorage)) return &static_cast<TaggedStorage*>(allocator)->marks();
  if (type == typeid(MarkedStorage)) return &static_cast<MarkedStorage*>(allocator)->marks;
  return nullptr;
}

// Ordinary memory, in which parameters with policies lie.
bool is_ordinary(const c10::StorageImpl& storage) {
  const c10::Allocator* allocator = storage.allocator();
  return allocator != nullptr && typeid(*allocator) == typeid(MarkedStorage);
}

const c10::StorageImpl* storage_of(const at::TensorBase& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->has_storage() ? impl->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

bool can_be_marked(const at::Tensor& tensor) {
  return tensor.layout() == c10::Layout::Strided && tensor.has_storage() &&
         !tensor.is_quantized() && !tensor.is_inference();
}

// All records, by parameter.
struct Registry {
  std::mutex mutex;
  std::unordered_map<const void*, PolicyRecord*> records;
  // Never destroyed: attachments may outlive static destruction.
  static Registry& instance() {
    static auto* const one = new Registry;
    return *one;
  }
};

// What autograd takes a tensor for a view of.
const void* root_of(const at::Tensor& tensor) {
  return (tensor.is_view() ? tensor._base() : tensor).unsafeGetTensorImpl();
}

// TorchScript's own gradient formulas run the operators of a forward on detached tensors.
void refuse_torchscript_gradients(const PolicyRecord& record, const c10::OperatorHandle& op,
                                  const std::vector<c10::IValue>& arguments) {
  if (!at::GradMode::is_enabled()) return;
  bool detached = false;
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (record_of(tensor) != &record) return;
      detached = detached || root_of(tensor) != root_of(record.parameter);
    });
  }
  for (const c10::IValue& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.requires_grad()) detached = false;
    });
  }
  if (!detached || torch::jit::currentCallstack().empty()) return;
  throw UnsupportedError(text::concat(
      "A parameter of shape [", text::join(record.parameter.sizes()), "] entered '",
      op.schema().name(),
      "' in a TorchScript module that computes gradients by formulas of its own, which know "
      "nothing "
      "of the parameter's policy. Call accelerate::intercept::run_without_optimization(module) "
      "before the module is used."));
}

bool gives_one_new_tensor(const c10::FunctionSchema& schema) {
  const auto has_alias = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr;
  };
  return schema.returns().size() == 1 &&
         schema.returns()[0].type()->kind() == c10::TypeKind::TensorType &&
         std::none_of(schema.arguments().begin(), schema.arguments().end(), has_alias) &&
         std::none_of(schema.returns().begin(), schema.returns().end(), has_alias);
}

std::vector<c10::OperatorHandle> operators_of(const OperatorPolicy& policy) {
  std::vector<c10::OperatorHandle> all;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const std::string& asked : policy.operators()) {
    const std::size_t dot = asked.find('.');
    const std::size_t before = all.size();
    bool exists = false;
    const auto add = [&](const c10::OperatorName& name) {
      const auto op = dispatcher.findSchema(name);
      exists = exists || op.has_value();
      if (op && gives_one_new_tensor(op->schema()) && !needs_no_memory(name)) all.push_back(*op);
    };
    if (dot != std::string::npos) {
      add({asked.substr(0, dot), asked.substr(dot + 1)});
    } else {
      for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
        if (name.name == asked) add(name);
      }
    }
    if (!exists) {
      throw ConfigError(text::concat("A policy names the operator '", asked,
                                     "', which LibTorch does not have. Names are like "
                                     "'aten::linear' or 'aten::add.Tensor'."));
    }
    if (all.size() == before) {
      throw ConfigError(text::concat(
          "A policy names the operator '", asked,
          "', which cannot be replaced: it makes a view, writes to an argument, asks for a shape, "
          "or does not give exactly one tensor."));
    }
  }
  if (all.empty()) throw ConfigError("The policy names no operators, so it would do nothing.");
  return all;
}

}  // namespace

const c10::OperatorHandle* PolicyLayer::find(const c10::OperatorHandle& op) const noexcept {
  const auto found = std::find(operators.begin(), operators.end(), op);
  return found == operators.end() ? nullptr : &*found;
}

PolicyMarks::~PolicyMarks() {
  for (const Span& span : spans_) span.record->marks_ = nullptr;
}

PolicyMarks::Span PolicyMarks::span(const at::TensorBase& tensor) {
  std::int64_t last = tensor.storage_offset();
  const at::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  for (std::size_t d = 0; d < sizes.size(); ++d)
    last += std::max<std::int64_t>(sizes[d] - 1, 0) * strides[d];
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  return {tensor.storage_offset() * size, (last + 1) * size, nullptr};
}

PolicyRecord* PolicyMarks::find(const at::TensorBase& view) const {
  const Span seen = span(view);
  for (const Span& each : spans_) {
    if (seen.begin >= each.begin && seen.end <= each.end) return each.record;
  }
  return nullptr;
}

void PolicyMarks::add(PolicyRecord& record, const at::TensorBase& tensor) {
  Span own = span(tensor);
  own.record = &record;
  for (const Span& each : spans_) {
    if (each.record != &record && own.begin < each.end && each.begin < own.end) {
      throw ConfigError(
          "Two parameters that share memory cannot have policies. Register one and the same tensor "
          "under both names, or give each memory of its own.");
    }
  }
  remove(record);
  spans_.push_back(own);
}

bool PolicyMarks::has(const PolicyRecord& record, const at::TensorBase& tensor) const {
  const Span own = span(tensor);
  return std::any_of(spans_.begin(), spans_.end(), [&](const Span& each) {
    return each.record == &record && each.begin == own.begin && each.end == own.end;
  });
}

void PolicyMarks::remove(const PolicyRecord& record) noexcept {
  std::erase_if(spans_, [&](const Span& each) { return each.record == &record; });
}

MarkedStorage::MarkedStorage(const c10::Storage& storage)
    : storage_(storage.getWeakStorageImpl()), former_(storage.unsafeGetStorageImpl()->allocator()) {
  storage.unsafeGetStorageImpl()->set_allocator(this);
}

MarkedStorage::~MarkedStorage() {
  const auto storage = storage_.lock();
  if (storage && storage->allocator() == this) storage->set_allocator(former_);
}

PolicyRecord* record_of(const at::TensorBase& tensor) {
  if (!is_tagged(tensor)) return nullptr;
  const c10::StorageImpl* storage = storage_of(tensor);
  const PolicyMarks* marks = storage == nullptr ? nullptr : marks_of(*storage);
  return marks == nullptr || marks->empty() ? nullptr : marks->find(tensor);
}

PolicyRecord::~PolicyRecord() {
  unmark();
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  const auto found = registry.records.find(parameter.unsafeGetTensorImpl());
  if (found != registry.records.end() && found->second == this) registry.records.erase(found);
}

const PolicyRecord::Layer* PolicyRecord::layer_for(const c10::OperatorHandle& op) const {
  auto found = layers.rbegin();
  while (found != layers.rend() && (*found)->find(op) == nullptr) ++found;
  if (found == layers.rend() || without_policies > 0) return nullptr;
  const std::shared_ptr<Node> node = torch::autograd::get_current_node();
  if (is_formula(node.get())) return nullptr;
  for (const Frame* frame = innermost_frame; frame != nullptr; frame = frame->outer) {
    if (frame->record != this || frame->node != node.get()) continue;
    found = std::find_if(layers.rbegin(), layers.rend(),
                         [&](const Layer& each) { return each.get() == frame->layer; });
    while (found != layers.rend() &&
           (found->get() == frame->layer || (*found)->find(op) == nullptr))
      ++found;
    return found == layers.rend() ? nullptr : &*found;
  }
  return &*found;
}

void PolicyRecord::run(Layer layer, const c10::OperatorHandle& op,
                       std::vector<c10::IValue>& stack) const {
  const auto first = stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  std::vector<c10::IValue> arguments(std::make_move_iterator(first),
                                     std::make_move_iterator(stack.end()));
  stack.erase(first, stack.end());
  refuse_torchscript_gradients(*this, op, arguments);
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    bool here = false;
    for_each_tensor(arguments[i],
                    [&](const at::Tensor& tensor) { here = here || record_of(tensor) == this; });
    if (here) positions.push_back(i);
  }
  // A policy may change the call's arguments, and the result must be none of these.
  std::vector<c10::IValue> given = arguments;
  OperatorCall call(*layer->find(op), shared_from_this(), layer, std::move(arguments),
                    std::move(positions));
  at::Tensor result;
  {
    const Entered entered(*this, *layer);
    result = layer->policy->apply(call);
  }
  if (!result.defined()) {
    throw StateError(text::concat("The policy of a parameter of shape [",
                                  text::join(parameter.sizes()), "] gave no tensor for '",
                                  op.schema().name(), "'."));
  }
  // Whoever calls such an operator may write to the result: in place, as linear layers add a bias.
  bool shared = false;
  for (const c10::IValue& argument : given) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      shared = shared || (tensor.defined() && tensor.has_storage() && result.has_storage() &&
                          storage_of(tensor) == storage_of(result));
    });
  }
  const auto* view = torch::autograd::impl::get_view_autograd_meta(result);
  if (view != nullptr && view->has_bw_view()) {
    using torch::autograd::CreationMeta;
    const CreationMeta made = view->get_creation_meta();
    shared = shared || (made != CreationMeta::DEFAULT && made != CreationMeta::NO_GRAD_MODE);
  }
  stack.emplace_back(shared ? result.clone() : std::move(result));
}

void PolicyRecord::mark(const at::Tensor& tensor) {
  if (!can_be_marked(tensor)) {
    throw StateError(
        "A parameter that carries a policy can only be given dense data, which was not made in "
        "inference mode. Detach the policy first.");
  }
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  PolicyMarks* marks = marks_of(storage);
  std::shared_ptr<MarkedStorage> ordinary;
  if (marks == nullptr) {
    if (is_given_up(tensor)) return unmark();
    ordinary = std::make_shared<MarkedStorage>(tensor.storage());
    marks = &ordinary->marks;
  } else if (is_ordinary(storage)) {
    ordinary = static_cast<MarkedStorage*>(storage.allocator())->shared_from_this();
  }
  // Threads that only read may be looking.
  if (marks != marks_ || !marks->has(*this, tensor)) {
    marks->add(*this, tensor);
    if (marks != marks_) unmark();
    marks_ = marks;
    ordinary_ = std::move(ordinary);
  }
  if (!is_tagged(tensor)) set_tag(tensor, true);
}

void PolicyRecord::unmark() noexcept {
  if (marks_ != nullptr) marks_->remove(*this);
  marks_ = nullptr;
  ordinary_.reset();
}

void follow_with_policies(const at::Tensor& parameter) {
  if (!policies_exist()) return;
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  const auto found = registry.records.find(parameter.unsafeGetTensorImpl());
  if (found != registry.records.end()) found->second->mark(parameter);
}

bool is_claimed(const at::TensorBase& tensor) {
  if (!is_tagged(tensor)) return false;
  const c10::StorageImpl* storage = storage_of(tensor);
  if (storage == nullptr || !is_ordinary(*storage)) return true;
  const PolicyRecord* record = record_of(tensor);
  return record == nullptr || record->guarded;
}

bool replace_operator(const c10::OperatorHandle& op, std::vector<c10::IValue>& stack) {
  const std::size_t count = op.schema().arguments().size();
  for (std::size_t i = stack.size() - count; i < stack.size(); ++i) {
    const PolicyRecord* record = nullptr;
    const PolicyRecord::Layer* layer = nullptr;
    for_each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (layer != nullptr) return;
      record = record_of(tensor);
      if (record != nullptr) layer = record->layer_for(op);
    });
    if (layer == nullptr) continue;
    record->run(*layer, op, stack);
    return true;
  }
  return false;
}

OperatorCall::OperatorCall(const c10::OperatorHandle& op,
                           std::shared_ptr<const PolicyRecord> record,
                           std::shared_ptr<const PolicyLayer> layer,
                           std::vector<c10::IValue> arguments, std::vector<std::size_t> positions)
    : op_(&op),
      record_(std::move(record)),
      layer_(std::move(layer)),
      arguments_(std::move(arguments)),
      positions_(std::move(positions)) {}

const std::string& OperatorCall::name() const noexcept { return op_->schema().name(); }
const at::Tensor& OperatorCall::parameter() const noexcept { return record_->parameter; }

at::Tensor OperatorCall::proceed() const {
  const Entered entered(*record_, *layer_);
  torch::jit::Stack stack(arguments_);
  op_->callBoxed(stack);
  return stack.back().toTensor();
}

at::Tensor OperatorCall::same_view(const at::Tensor& other, std::size_t position) const {
  const at::Tensor& whole = parameter();
  if (position >= arguments_.size() || !arguments_[position].isTensor() ||
      record_of(arguments_[position].toTensor()) != record_.get()) {
    throw ConfigError(text::concat("Argument ", position, " of '", name(),
                                   "' is not the parameter or a view of it."));
  }
  const at::Tensor& view = arguments_[position].toTensor();
  if (other.sizes() != whole.sizes() || view.scalar_type() != whole.scalar_type()) {
    throw ConfigError(text::concat("A view of [", text::join(whole.sizes()), "] in ",
                                   whole.scalar_type(), " cannot be taken of [",
                                   text::join(other.sizes()), "]: as it is, it is ",
                                   view.scalar_type(), "."));
  }
  const std::int64_t offset = view.storage_offset() - whole.storage_offset();
  if (offset == 0 && view.sizes() == whole.sizes() && view.strides() == whole.strides())
    return other;
  if (offset == 0 && whole.dim() == 2 && view.sizes() == whole.t().sizes() &&
      view.strides() == whole.t().strides())
    return other.t();
  // As the parameter lies in memory: its dimensions by falling stride.
  std::vector<std::int64_t> order(static_cast<std::size_t>(whole.dim())), back(order.size());
  for (std::size_t d = 0; d < order.size(); ++d) order[d] = static_cast<std::int64_t>(d);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t one, std::int64_t two) {
    return whole.stride(one) > whole.stride(two);
  });
  for (std::size_t d = 0; d < order.size(); ++d)
    back[static_cast<std::size_t>(order[d])] = static_cast<std::int64_t>(d);
  const at::Tensor laid = other.permute(order).contiguous().permute(back);
  if (laid.strides() != whole.strides()) {
    throw ConfigError("The parameter has gaps in memory, so a view of it has no counterpart.");
  }
  return laid.as_strided(view.sizes(), view.strides(), laid.storage_offset() + offset);
}

std::vector<std::string> linear_operators() {
  return {"aten::linear", "aten::addmm", "aten::mm", "aten::matmul"};
}

std::optional<LinearCall> as_linear(const OperatorCall& call) {
  const auto& arguments = call.arguments();
  if (call.positions().size() != 1) return {};
  const std::size_t at = call.positions()[0];
  LinearCall linear;
  const at::Tensor& factor = arguments[at].toTensor();
  if (factor.dim() != 2) return {};
  if (call.name() == "aten::linear") {
    if (at != 1) return {};
    linear = {arguments[0].toTensor(), factor, {}};
    if (arguments[2].isTensor()) linear.bias = arguments[2].toTensor();
  } else if (call.name() == "aten::addmm") {
    if (at != 2 || arguments.size() != 5 || arguments[3].toScalar().toDouble() != 1 ||
        arguments[4].toScalar().toDouble() != 1)
      return {};
    linear = {arguments[1].toTensor(), factor.t(), arguments[0].toTensor()};
  } else if (call.name() == "aten::mm" || call.name() == "aten::matmul") {
    if (at != 1 || arguments.size() != 2) return {};
    linear = {arguments[0].toTensor(), factor.t(), {}};
  } else {
    return {};
  }
  const at::Tensor& parameter = call.parameter();
  linear.whole = linear.weight.sizes() == parameter.sizes() &&
                 linear.weight.strides() == parameter.strides() &&
                 linear.weight.storage_offset() == parameter.storage_offset();
  return linear;
}

PolicyAttachment attach(const at::Tensor& parameter, std::shared_ptr<OperatorPolicy> policy) {
  if (policy == nullptr) throw ConfigError("The policy to be attached is null.");
  if (!parameter.defined() || !parameter.is_leaf() || !can_be_marked(parameter) ||
      parameter.numel() == 0) {
    throw ConfigError(
        "A policy can be attached to a dense leaf tensor with elements, as a module's parameters "
        "are, and this is none.");
  }
  auto layer = std::make_shared<PolicyLayer>();
  layer->operators = operators_of(*policy);
  layer->policy = std::move(policy);
  install();
  const InternalOpsGuard internal;
  Registry& registry = Registry::instance();
  std::shared_ptr<PolicyRecord> record;
  {
    const std::lock_guard lock(registry.mutex);
    const auto found = registry.records.find(parameter.unsafeGetTensorImpl());
    if (found != registry.records.end()) record = found->second->weak_from_this().lock();
  }
  if (record == nullptr) {
    record = std::make_shared<PolicyRecord>(parameter);
    record->guarded = is_tagged(parameter) && TaggedStorage::of(parameter) == nullptr;
    const std::lock_guard lock(registry.mutex);
    registry.records[parameter.unsafeGetTensorImpl()] = record.get();
  }
  record->mark(parameter);
  record->layers.push_back(layer);
  ++detail::policies_attached;
  PolicyAttachment attachment;
  attachment.record_ = std::move(record);
  attachment.layer_ = std::move(layer);
  return attachment;
}

PolicyAttachment& PolicyAttachment::operator=(PolicyAttachment&& other) noexcept {
  if (this != &other) {
    detach();
    record_ = std::move(other.record_);
    layer_ = std::move(other.layer_);
  }
  return *this;
}

void PolicyAttachment::detach() noexcept {
  if (record_ == nullptr) return;
  std::erase(record_->layers, layer_);
  --detail::policies_attached;
  layer_.reset();
  const at::Tensor parameter = record_->parameter;
  const bool last = record_->layers.empty() && !is_claimed(parameter);
  record_.reset();
  if (last) set_tag(parameter, false);
}

WithoutPolicies::WithoutPolicies() { ++without_policies; }
WithoutPolicies::~WithoutPolicies() { --without_policies; }

ForwardScope::ForwardScope()
    : outer_(forward_node), without_policies_(std::exchange(without_policies, 0)) {
  forward_node = torch::autograd::get_current_node().get();
}
ForwardScope::~ForwardScope() {
  forward_node = outer_;
  without_policies = without_policies_;
}

}  // namespace accelerate::intercept
