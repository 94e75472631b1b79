#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <intercept/internal_ops.hpp>
#include <intercept/policies.hpp>
#include <intercept/replace.hpp>
#include <intercept/unit.hpp>

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace accelerate::intercept {
namespace {

constexpr std::int64_t kAlignmentBytes = 64;

const at::Tensor& first_of(const std::string& unit, const std::vector<NamedTensor>& parameters) {
  if (parameters.empty())
    throw ShardingError(text::concat("The unit '", unit, "' has no parameters."));
  return parameters.front().tensor;
}

std::vector<UnitParameter> checked(const std::string& unit,
                                   const std::vector<NamedTensor>& parameters) {
  const at::Tensor& first = first_of(unit, parameters);
  std::vector<UnitParameter> result;
  for (const auto& [name, tensor] : parameters) {
    if (is_claimed(tensor)) {
      throw ShardingError(
          text::concat("The memory of the parameter '", name,
                       "' comes and goes already. End that, with restore() or remove_offload(), "
                       "before it is sharded or offloaded in another way."));
    }
    if (!tensor.is_leaf()) {
      throw ShardingError(text::concat(
          "The parameter '", name,
          "' is not a leaf of the graph (it was computed from another "
          "tensor), so its memory cannot come and go. Register a leaf tensor as the parameter."));
    }
    if (tensor.layout() != c10::Layout::Strided) {
      throw UnsupportedError(text::concat(
          "The parameter '", name, "' has layout ", tensor.layout(),
          "; only the memory of dense parameters can come and go. Leave its module out."));
    }
    if (tensor.scalar_type() != first.scalar_type() || tensor.device() != first.device()) {
      throw ShardingError(text::concat("The unit '", unit, "' mixes ", first.scalar_type(), " on ",
                                       first.device(), " with '", name, "', which is ",
                                       tensor.scalar_type(), " on ", tensor.device(), "."));
    }
    const bool dense = tensor.is_non_overlapping_and_dense();
    const at::Tensor& like = dense ? tensor : tensor.contiguous();
    result.push_back(
        {name, tensor, like.sizes().vec(), like.strides().vec(), 0, tensor.numel(), true});
  }
  return result;
}

Layout lay_out(std::vector<UnitParameter>& parameters, int parts, at::ScalarType compute_dtype) {
  std::vector<Piece> pieces;
  for (const UnitParameter& parameter : parameters) {
    const bool rows = parameter.sizes.size() > 1 && parameter.sizes[0] > 0;
    pieces.push_back(
        {parameter.elements,
         rows ? std::max<std::int64_t>(1, parameter.elements / parameter.sizes[0]) : 1});
  }
  const auto item = static_cast<std::int64_t>(c10::elementSize(compute_dtype));
  Layout layout = lay_out(pieces, parts, std::max<std::int64_t>(1, kAlignmentBytes / item));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].offset = layout.offsets[i];
    parameters[i].row_aligned = layout.row_aligned[i];
  }
  return layout;
}

}  // namespace

Unit::Unit(int index, std::string name, std::vector<NamedTensor> parameters, int parts,
           at::ScalarType compute_dtype, at::ScalarType reduce_dtype, at::Device compute_device,
           TaggedStorage::Owner& owner)
    : dtype_(first_of(name, parameters).scalar_type()),
      reduce_dtype_(reduce_dtype),
      parameters_(checked(name, parameters)),
      layout_(lay_out(parameters_, parts, compute_dtype)),
      storage_(index, std::move(name), layout_.total(), compute_dtype, compute_device, owner) {}

at::Tensor Unit::over(const at::Tensor& flat, const UnitParameter& parameter) {
  return flat.as_strided(parameter.sizes, parameter.strides,
                         flat.storage_offset() + parameter.offset);
}

at::Tensor Unit::flatten() const {
  const InternalOpsGuard internal;
  at::Tensor flat = at::zeros({layout_.total()}, at::TensorOptions(device()).dtype(dtype_));
  for (const UnitParameter& parameter : parameters_)
    over(flat, parameter).copy_(parameter.parameter);
  return flat;
}

void Unit::tag() {
  const InternalOpsGuard internal;
  for (const UnitParameter& parameter : parameters_) tag(parameter);
}

void Unit::tag(const UnitParameter& parameter) {
  replace_data(parameter.parameter,
               storage_.view(parameter.sizes, parameter.strides, parameter.offset));
}

void Unit::untag(const at::Tensor& flat) {
  const InternalOpsGuard internal;
  for (UnitParameter& parameter : parameters_) {
    parameter.parameter.set_data(over(flat, parameter).detach());
    follow_with_policies(parameter.parameter);
  }
}

bool Unit::is_tagged(const UnitParameter& parameter) const {
  return intercept::is_tagged(parameter.parameter) &&
         TaggedStorage::of(parameter.parameter) == &storage_;
}

bool Unit::is_tagged() const {
  return std::all_of(parameters_.begin(), parameters_.end(),
                     [&](const UnitParameter& each) { return is_tagged(each); });
}

void Unit::take_assigned(
    const std::function<void(const UnitParameter&, const at::Tensor& flat)>& take) {
  const Accumulators before = accumulators();
  for (const UnitParameter& parameter : parameters_) {
    const at::Tensor& now = parameter.parameter;
    if (is_claimed(now) || now.sizes() != at::IntArrayRef(parameter.sizes) ||
        now.device() != device() ||
        (now.scalar_type() != dtype_ && now.scalar_type() != compute_dtype()))
      continue;
    const at::Tensor flat =
        at::zeros({layout_.total()}, at::TensorOptions(device()).dtype(now.scalar_type()));
    over(flat, parameter).copy_(now);
    take(parameter, flat);
    tag(parameter);
  }
  set_accumulators(before);
}

Unit::Accumulators Unit::accumulators() const {
  Accumulators all;
  for (const UnitParameter& parameter : parameters_) {
    const auto* meta = torch::autograd::impl::get_autograd_meta(parameter.parameter);
    all.push_back(meta != nullptr ? meta->grad_accumulator_
                                  : std::weak_ptr<torch::autograd::Node>());
  }
  return all;
}

void Unit::set_accumulators(const Accumulators& accumulators) {
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    if (auto* meta = torch::autograd::impl::get_autograd_meta(parameters_[p].parameter))
      meta->grad_accumulator_ = accumulators[p];
  }
}

void Unit::check_tagged() const {
  for (const UnitParameter& parameter : parameters_) {
    if (is_tagged(parameter)) continue;
    throw StateError(text::concat("The parameter '", parameter.name,
                                  "' no longer lies in its shard: it was moved or cast after "
                                  "prepare(), or given data of another shape, for example by "
                                  "module->to(). It is now ",
                                  parameter.parameter.scalar_type(), " on ",
                                  parameter.parameter.device(),
                                  " and would not be trained. Move or cast a module before "
                                  "prepare()."));
  }
}

}  // namespace accelerate::intercept
