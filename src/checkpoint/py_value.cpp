#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/py_value.hpp>

#include <array>

namespace accelerate::checkpoints {

namespace {
const PyValue* find_key(const std::vector<std::pair<PyValue, PyValue>>& items,
                        const auto& matches) {
  for (const auto& [key, value] : items) {
    if (matches(key)) return &value;
  }
  return nullptr;
}
}  // namespace

const PyValue* PyDict::find(std::string_view key) const {
  return find_key(items,
                  [&](const PyValue& k) { return k.is<std::string>() && k.as_string() == key; });
}

const PyValue* PyDict::find(std::int64_t key) const {
  return find_key(items,
                  [&](const PyValue& k) { return k.is<std::int64_t>() && k.as_int() == key; });
}

void PyDict::add(PyValue key, PyValue value) {
  items.emplace_back(std::move(key), std::move(value));
}

std::string_view PyValue::type_name() const noexcept {
  if (const auto* list = std::get_if<PyList>(&value_)) return list->tuple ? "tuple" : "list";
  static constexpr std::array<std::string_view, 9> kNames{"None",  "bool", "int",  "float", "str",
                                                          "bytes", "list", "dict", "Tensor"};
  return kNames[value_.index()];
}

template <class T>
const T& PyValue::as(const char* expected) const {
  if (const T* value = std::get_if<T>(&value_)) return *value;
  throw DataError(
      text::concat("A Python value is a ", type_name(), ", and a ", expected, " was expected."));
}

bool PyValue::as_bool() const { return as<bool>("bool"); }
std::int64_t PyValue::as_int() const { return as<std::int64_t>("int"); }
double PyValue::as_double() const {
  if (const auto* whole = std::get_if<std::int64_t>(&value_)) return static_cast<double>(*whole);
  return as<double>("float");
}
const std::string& PyValue::as_string() const& { return as<std::string>("str"); }
const PyBytes& PyValue::as_bytes() const& { return as<PyBytes>("bytes"); }
const std::vector<PyValue>& PyValue::as_list() const& { return as<PyList>("list or tuple").items; }
const PyDict& PyValue::as_dict() const& { return as<PyDict>("dict"); }
const at::Tensor& PyValue::as_tensor() const& { return as<at::Tensor>("Tensor"); }

const PyValue& PyValue::operator[](std::string_view key) const& {
  if (const PyValue* value = as_dict().find(key)) return *value;
  throw DataError(text::concat("A Python dict has no key '", key, "'."));
}

const PyValue& PyValue::operator[](std::int64_t key) const& {
  if (const PyValue* value = as_dict().find(key)) return *value;
  throw DataError(text::concat("A Python dict has no key ", key, "."));
}

std::vector<NamedTensor> named_tensors(const PyValue& state_dict) {
  std::vector<NamedTensor> tensors;
  for (const auto& [key, value] : state_dict.as_dict().items) {
    if (!key.is<std::string>()) {
      throw DataError(
          text::concat("A key of this dict is a ", key.type_name(),
                       ", and those of a state dict are names. Is it one of an optimizer?"));
    }
    if (!value.is<at::Tensor>()) {
      throw DataError(
          text::concat("'", key.as_string(), "' of this dict is a ", value.type_name(),
                       ", and a state dict has tensors. Name the part of it that is one."));
    }
    tensors.push_back({key.as_string(), value.as_tensor()});
  }
  return tensors;
}

PyValue state_dict(const std::vector<NamedTensor>& tensors) {
  PyDict dict;
  dict.ordered = true;
  for (const NamedTensor& named : tensors) dict.add(named.name, named.tensor);
  return dict;
}

}  // namespace accelerate::checkpoints
