#pragma once

#include <accelerate/core/module.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace accelerate::checkpoints {

class PyValue;

/// What `dict` and `collections.OrderedDict` are in Python: pairs in the order they were put in.
struct PyDict {
  std::vector<std::pair<PyValue, PyValue>> items;
  /// An OrderedDict, as `state_dict` gives.
  bool ordered = false;
  /// Attributes of an OrderedDict: `_metadata` of a state dict.
  std::vector<std::pair<PyValue, PyValue>> attributes;

  /// Null when there is no such key.
  const PyValue* find(std::string_view key) const;
  const PyValue* find(std::int64_t key) const;
  /// Adds a pair at the end.
  void add(PyValue key, PyValue value);
};

/// A list or a tuple.
struct PyList {
  std::vector<PyValue> items;
  bool tuple = false;
};

/// Python's `bytes`, whereas a std::string is Python's `str`.
struct PyBytes {
  std::string bytes;
};

/// A value of a file that Python's `torch.save` wrote: None, bool, int, float, str, bytes, list,
/// tuple, dict or tensor.
class PyValue {
 public:
  using Variant = std::variant<std::monostate, bool, std::int64_t, double, std::string, PyBytes,
                               PyList, PyDict, at::Tensor>;

  /// None.
  PyValue() = default;
  PyValue(bool value) : value_(value) {}
  PyValue(int value) : value_(std::int64_t{value}) {}
  PyValue(std::int64_t value) : value_(value) {}
  PyValue(double value) : value_(value) {}
  PyValue(const char* value) : value_(std::string(value)) {}
  PyValue(std::string value) : value_(std::move(value)) {}
  PyValue(PyBytes value) : value_(std::move(value)) {}
  PyValue(PyList value) : value_(std::move(value)) {}
  PyValue(PyDict value) : value_(std::move(value)) {}
  PyValue(at::Tensor value) : value_(std::move(value)) {}

  bool is_none() const noexcept { return std::holds_alternative<std::monostate>(value_); }
  template <class T>
  bool is() const noexcept {
    return std::holds_alternative<T>(value_);
  }
  /// These throw DataError, saying what the value is instead.
  bool as_bool() const;
  std::int64_t as_int() const;
  /// An int too.
  double as_double() const;
  const std::string& as_string() const&;
  const PyBytes& as_bytes() const&;
  /// Of a list or a tuple.
  const std::vector<PyValue>& as_list() const&;
  const PyDict& as_dict() const&;
  const at::Tensor& as_tensor() const&;
  /// The value of a key of a dict. Throws DataError when there is none.
  const PyValue& operator[](std::string_view key) const&;
  const PyValue& operator[](std::int64_t key) const&;
  /// Of a value that is about to go, a copy: `load_pt(path).as_dict()`.
  std::string as_string() && { return std::as_const(*this).as_string(); }
  PyBytes as_bytes() && { return std::as_const(*this).as_bytes(); }
  std::vector<PyValue> as_list() && { return std::as_const(*this).as_list(); }
  PyDict as_dict() && { return std::as_const(*this).as_dict(); }
  at::Tensor as_tensor() && { return std::as_const(*this).as_tensor(); }
  PyValue operator[](std::string_view key) && { return std::as_const(*this)[key]; }
  PyValue operator[](std::int64_t key) && { return std::as_const(*this)[key]; }

  /// "dict", "float", as Python says.
  std::string_view type_name() const noexcept;
  const Variant& variant() const noexcept { return value_; }

 private:
  template <class T>
  const T& as(const char* expected) const;
  Variant value_;
};

/// A dict of tensors by name. Throws DataError naming the first thing that is something else.
std::vector<NamedTensor> named_tensors(const PyValue& state_dict);
/// An OrderedDict, as `Module.state_dict()` gives in Python.
PyValue state_dict(const std::vector<NamedTensor>& tensors);

}  // namespace accelerate::checkpoints
