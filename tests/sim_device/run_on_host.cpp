#include "sim_device/run_on_host.hpp"

#include "sim_device/checker.hpp"
#include "sim_device/generator.hpp"
#include "sim_device/passage.hpp"
#include "sim_device/settings.hpp"
#include "sim_device/streams.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace sim {
namespace {

// On a GPU a functional operator is one kernel. Here it is that of `out`, which warns when an
// output that was made for it is resized.
struct NoResizeWarnings final : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    if (warning.msg().find("was resized since it had shape") == std::string::npos)
      c10::WarningHandler::process(warning);
  }
};

// On a GPU these read a size back.
bool waits_for_a_size(const std::string& name) {
  static const std::set<std::string> names{
      "aten::nonzero",    "aten::masked_select",      "aten::_unique2",      "aten::bincount",
      "aten::unique_dim", "aten::unique_consecutive", "aten::nonzero_static"};
  return names.contains(name);
}

// Indices may lie in the memory of the host.
bool takes_host_tensors(const std::string& name) {
  return name.starts_with("aten::index") || name.starts_with("aten::_index_put_impl_") ||
         name.starts_with("aten::_unsafe_index");
}

// A call on its way to the CPU's kernel.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op),
        schema_(op.schema()),
        stack_(*stack),
        name_(kept_name(c10::toString(schema_.operator_name()))),
        passage_(*name_) {}

  void run() {
    take_arguments();
    check_devices();
    const at::Generator& own = default_generator(passage_.device()->index());
    take_generators(own);
    const c10::DeviceGuard device_guard(*passage_.device());
    Stream& stream = stream_of(current_stream(passage_.device()->index()));
    const std::lock_guard busy(stream.busy);
    const std::uint64_t number = start(stream, name_, uses_);
    compute(own);
    passage_.bring_changes_back();
    const bool gives_a_number = bring_results_back();
    for (const Use& made : passage_.made()) wrote(stream, number, name_, made);
    if (gives_a_number || waits_for_a_size(schema_.name())) synchronize(stream);
  }

 private:
  at::Tensor take(const at::Tensor& tensor, const c10::Argument& argument) {
    const auto* alias = argument.alias_info();
    bool writes = alias != nullptr && alias->isWrite();
    const bool only_a_view = alias != nullptr && !writes;
    at::Tensor host = passage_.to_host(tensor, only_a_view);
    // Its schema does not say that running statistics are written.
    if (schema_.name() == "aten::native_batch_norm" && argument.name().starts_with("running_"))
      writes = true;
    if (is_ours(tensor) && !only_a_view) uses_.push_back(use_of(tensor, writes));
    return host;
  }

  void take_arguments() {
    const auto& arguments = schema_.arguments();
    const std::size_t first = stack_.size() - arguments.size();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const c10::Argument& argument = arguments[i];
      c10::IValue& value = stack_[first + i];
      if (argument.type()->str().find("Generator") != std::string::npos) {
        generators_.push_back(first + i);
      } else if (value.isTensor()) {
        value = take(value.toTensor(), argument);
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> hosts;
        for (const at::Tensor& each : value.toTensorVector()) hosts.push_back(take(each, argument));
        value = std::move(hosts);
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> hosts;
        for (const auto& each : value.toOptionalTensorVector())
          hosts.push_back(each ? std::optional(take(*each, argument)) : std::nullopt);
        value = std::move(hosts);
      } else if (value.isDevice() && value.toDevice().type() == kDevice) {
        passage_.set_device(c10::Device(kDevice, index_of(value.toDevice())));
        value = c10::Device(c10::kCPU);
      }
    }
  }

  void check_devices() {
    TORCH_CHECK(passage_.device(), *name_,
                " came to the simulated device without a tensor or device of it.");
    TORCH_CHECK(!passage_.host_tensor().defined() || takes_host_tensors(schema_.name()),
                "Expected all tensors of ", *name_,
                " to be on the same device, but found at least two devices, ", *passage_.device(),
                " and cpu!");
  }

  void take_generators(const at::Generator& own) {
    for (const std::size_t i : generators_) {
      c10::IValue& value = stack_[i];
      const at::Generator given = value.isNone() ? own : value.toGenerator();
      TORCH_CHECK(given.device().type() == kDevice, "Expected a '", kDevice,
                  "' device type for generator but found '", given.device().type(), "'");
      value = inner(given);
    }
  }

  void compute(const at::Generator& own) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    NoResizeWarnings quiet;
    const c10::WarningUtils::WarningHandlerGuard warnings(&quiet);
    // An operator that draws without being given a generator uses the CPU's.
    const bool draws_unasked = generators_.empty() && op_.hasTag(at::Tag::nondeterministic_seeded);
    at::Generator cpu = at::detail::getDefaultCPUGenerator();
    at::Tensor before;
    if (draws_unasked) {
      before = cpu.get_state();
      cpu.set_state(inner(own).get_state());
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    if (draws_unasked) {
      inner(own).set_state(cpu.get_state());
      cpu.set_state(before);
    }
  }

  // Whether a result is a number, for which the host waits.
  bool bring_results_back() {
    bool number = false;
    for (std::size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); ++i) {
      c10::IValue& value = stack_[i];
      if (value.isTensor()) {
        value = passage_.to_device(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> results;
        for (const at::Tensor& each : value.toTensorVector())
          results.push_back(passage_.to_device(each));
        value = std::move(results);
      } else {
        number = true;
      }
    }
    return number;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const std::string* name_;
  Passage passage_;
  std::vector<Use> uses_;
  std::vector<std::size_t> generators_;
};

}  // namespace

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

}  // namespace sim
