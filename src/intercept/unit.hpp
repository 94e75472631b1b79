#pragma once

#include <accelerate/core/module.hpp>
#include <intercept/layout.hpp>
#include <intercept/tagged_storage.hpp>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch::autograd {
struct Node;
}

namespace accelerate::intercept {

/// One parameter inside a unit.
struct UnitParameter {
  std::string name;
  /// The user's own handle.
  at::Tensor parameter;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  /// In elements of the unit's flat buffer.
  std::int64_t offset = 0;
  std::int64_t elements = 0;
  /// Cuts between ranks fall between rows of it.
  bool row_aligned = true;
};

/// What an operator wrote of a parameter.
struct Written {
  /// In elements of the unit's flat buffer; nothing outside of it has changed.
  std::int64_t begin = 0;
  std::int64_t end = 0;
  /// Every element in it has a new value. Otherwise some may be what they were.
  bool all = false;
};

/// Parameters that come and go together: they lie in one flat buffer of one dtype, which is cut
/// into equal parts.
class Unit {
 public:
  /// `parameters` are of one dtype and device; while they are tagged they have `compute_dtype`,
  /// and their gradients are collected and reduced in `reduce_dtype`. Throws ShardingError when
  /// that is not so, when one is tagged already, or is no leaf.
  Unit(int index, std::string name, std::vector<NamedTensor> parameters, int parts,
       at::ScalarType compute_dtype, at::ScalarType reduce_dtype, at::Device compute_device,
       TaggedStorage::Owner& owner);

  int index() const noexcept { return storage_.id(); }
  const std::string& name() const noexcept { return storage_.name(); }
  const std::vector<UnitParameter>& parameters() const noexcept { return parameters_; }
  const Layout& layout() const noexcept { return layout_; }
  /// The parameters' dtype as the user made them.
  at::ScalarType dtype() const noexcept { return dtype_; }
  at::ScalarType compute_dtype() const noexcept { return storage_.dtype(); }
  at::ScalarType reduce_dtype() const noexcept { return reduce_dtype_; }
  at::Device device() const noexcept { return storage_.device(); }
  TaggedStorage& storage() noexcept { return storage_; }
  const TaggedStorage& storage() const noexcept { return storage_; }

  /// A new flat tensor with the parameters' present values in the user's dtype, padding zero.
  at::Tensor flatten() const;
  /// A tensor shaped as `parameter` over its place in `flat`.
  static at::Tensor over(const at::Tensor& flat, const UnitParameter& parameter);
  /// Points the user's parameters at the tagged storage. Their gradients must be undefined.
  void tag();
  /// Points the user's parameters at their places in `flat`, an ordinary tensor.
  void untag(const at::Tensor& flat);
  /// No one has pointed a parameter elsewhere since `tag`.
  bool is_tagged() const;
  /// Throws StateError, naming the parameter, unless `is_tagged`.
  void check_tagged() const;
  /// Parameters that were pointed at other data of the same shape, device and dtype (the user's or
  /// the one they are computed in) are tagged again, after `take(parameter, flat)` with the new
  /// values at their place in a flat buffer.
  void take_assigned(const std::function<void(const UnitParameter&, const at::Tensor& flat)>& take);
  /// By parameter: the node of autograd's graphs where its gradient ends. `tag` and `untag` may
  /// have the next graph make another one; with these set again, graphs of before are good.
  using Accumulators = std::vector<std::weak_ptr<torch::autograd::Node>>;
  Accumulators accumulators() const;
  void set_accumulators(const Accumulators& accumulators);

 private:
  void tag(const UnitParameter& parameter);
  bool is_tagged(const UnitParameter& parameter) const;

  at::ScalarType dtype_;
  at::ScalarType reduce_dtype_;
  std::vector<UnitParameter> parameters_;
  Layout layout_;
  TaggedStorage storage_;
};

/// Where the parameters of units are while they are not in memory, and how they come back.
/// Called with the interceptor passed by, without gradients, one call at a time.
class Residency {
 public:
  virtual ~Residency() = default;
  /// Starts to fill a flat buffer with the unit's parameters in its compute dtype, and returns it.
  /// `reuse` is the unit's buffer of before when it kept its memory, else undefined. It is to be
  /// used: an operator may still read it.
  virtual at::Tensor start_bring(const Unit& unit, at::Tensor reuse) = 0;
  /// Returns when `contents`, which start_bring returned, is filled.
  virtual void finish_bring(const Unit& unit, const at::Tensor& contents) = 0;
  /// The unit is being let go in the middle of a training pass, which may want it again; `contents`
  /// is what it had.
  virtual void leaving(const Unit&, const at::Tensor& /*contents*/) {}
  /// The unit is not in memory any more; `contents`, its buffer, is the residency's to use again.
  virtual void gone(const Unit&, at::Tensor /*contents*/) noexcept {}
  /// Someone is about to point a parameter of the unit elsewhere, as `module->to()` does. May throw
  /// to refuse.
  virtual void repointed(const Unit&) {}
  /// An operator is about to write to a parameter. May throw to refuse; any thread may ask.
  virtual void will_write(const Unit&, const UnitParameter&) {}
  /// Takes the new values of one parameter out of `contents`, for good.
  virtual void write_back(const Unit& unit, const UnitParameter& parameter, const Written& written,
                          const at::Tensor& contents) = 0;
  /// A new flat buffer with all parameters in the user's dtype; a collective where ranks are
  /// involved.
  virtual at::Tensor bring_full(const Unit& unit) = 0;
  /// Takes the values of all parameters out of such a buffer, for good.
  virtual void write_back_full(const Unit& unit, const at::Tensor& full) = 0;
};

}  // namespace accelerate::intercept
