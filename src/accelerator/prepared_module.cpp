#include <accelerate/accelerator/prepared_module.hpp>
#include <accelerate/accelerator/prepared_script_module.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/optim/gradient_state.hpp>
#include <comm/user_call.hpp>
#include <core/map_value.hpp>

#include <ATen/core/grad_mode.h>

namespace accelerate {
namespace detail {

ForwardPass::ForwardPass(PreparedModuleCore& core) : core_(core) {
  const comm::UserCall call("forward of a prepared module");
  context_.grad_enabled = at::GradMode::is_enabled();
  context_.sync = !core.no_sync;
  core_.strategy->before_forward(context_);
  if (core_.mixed_precision != MixedPrecision::no) {
    autocast_.emplace(core_.device.type(), core_.mixed_precision, core_.autocast);
  }
}

at::Tensor ForwardPass::cast(const at::Tensor& output) const {
  if (!core_.output_dtype) return cast_to_fp32(output);
  return output.is_floating_point() ? output.to(*core_.output_dtype) : output;
}

bool ForwardPass::wants_outputs() const noexcept {
  return core_.strategy->wants_outputs() && context_.grad_enabled && context_.sync;
}

void ForwardPass::finish(const std::vector<at::Tensor>& outputs) {
  const comm::UserCall call("forward of a prepared module");
  core_.strategy->after_forward(context_, outputs);
  if (context_.grad_enabled) core_.used_since_backward = true;
}

void raise_outputs_unknown() {
  throw UnsupportedError(
      "The module's forward returns a type whose tensors the library cannot find, and they are "
      "needed: to cast half "
      "precision outputs back to fp32, or to find unused parameters. Specialise "
      "accelerate::TreeTraits for that type, or "
      "return tensors, pairs, tuples, vectors, maps or optionals of them.");
}

namespace {

void collect_tensors(const c10::IValue& value, std::vector<at::Tensor>& into) {
  value.visit([&](const c10::IValue& part) {
    if (part.isTensor() && part.toTensor().defined()) into.push_back(part.toTensor());
    return false;
  });
}

}  // namespace
}  // namespace detail

std::vector<at::Tensor> PreparedModuleBase::parameters() const {
  std::vector<at::Tensor> all;
  for (const auto& [name, tensor] : named_parameters()) all.push_back(tensor);
  return all;
}

c10::IValue PreparedModule<torch::jit::Module>::call(const std::string& method,
                                                     std::vector<c10::IValue> inputs) {
  detail::ForwardPass pass(*core_);
  c10::IValue result = module_->get_method(method)(std::move(inputs));
  const bool casts = pass.casts_outputs();
  pass.leave_autocast();
  if (casts) {
    result = tree::map_value(result, [&](const at::Tensor& output) { return pass.cast(output); });
  }
  std::vector<at::Tensor> outputs;
  if (pass.wants_outputs()) detail::collect_tensors(result, outputs);
  pass.finish(outputs);
  return result;
}

}  // namespace accelerate
