#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "checkpoint/pickler.hpp"
#include "checkpoint/torch_names.hpp"

namespace accelerate::checkpoints {

namespace {

const TorchName& name_of(c10::ScalarType dtype) {
  for (const TorchName& row : kTorchNames) {
    if (row.dtype == dtype) return row;
  }
  throw UnsupportedError(
      text::concat("Tensors of ", c10::toString(dtype),
                   " cannot be written to a .pt file. Dequantize or convert them."));
}

class Pickler {
 public:
  Pickled run(const PyValue& value) {
    find_shared(value, 0);
    out_.pickle = std::string("\x80\x02", 2);
    write(value);
    out_.pickle += '.';
    return std::move(out_);
  }

 private:
  using StorageId = const void*;
  using ViewId = std::tuple<std::int64_t, c10::ScalarType, std::vector<std::int64_t>,
                            std::vector<std::int64_t>>;

  static StorageId storage_id(const at::Tensor& tensor) {
    return tensor.storage().unsafeGetStorageImpl();
  }
  static ViewId view_id(const at::Tensor& tensor) {
    return {tensor.storage_offset(), tensor.scalar_type(), tensor.sizes().vec(),
            tensor.strides().vec()};
  }

  // A storage that two different tensors use is written whole, so that they share it afterwards. Of
  // one that a single tensor uses, only that tensor is written: it may be a small part of something
  // large.
  void find_shared(const PyValue& value, int depth) {
    if (depth > kMostDepth)
      throw DataError(
          text::concat("The value to save lies more than ", kMostDepth, " deep within others."));
    if (const auto* list = std::get_if<PyList>(&value.variant())) {
      for (const PyValue& item : list->items) find_shared(item, depth + 1);
    } else if (const auto* dict = std::get_if<PyDict>(&value.variant())) {
      for (const auto* pairs : {&dict->items, &dict->attributes}) {
        for (const auto& [key, item] : *pairs) {
          find_shared(key, depth + 1);
          find_shared(item, depth + 1);
        }
      }
    } else if (const auto* tensor = std::get_if<at::Tensor>(&value.variant())) {
      const char* problem = nullptr;
      if (!tensor->defined()) {
        problem = "is undefined";
      } else if (tensor->layout() != at::kStrided) {
        problem = "is sparse; make it dense first";
      } else if (tensor->is_quantized()) {
        problem = "is quantized; dequantize it, or save its parts";
      } else if (tensor->is_meta()) {
        problem = "is on the meta device and has no data";
      }
      if (problem != nullptr)
        throw UnsupportedError(text::concat("A tensor to save ", problem, "."));
      const auto [at, fresh] =
          views_.emplace(storage_id(*tensor), std::pair(view_id(*tensor), false));
      if (!fresh && at->second.first != view_id(*tensor)) at->second.second = true;
    }
  }

  void write(const PyValue& value) {
    std::visit([this](const auto& item) { write_item(item); }, value.variant());
  }

  void write_item(std::monostate) { code('N'); }
  void write_item(bool value) { code(value ? '\x88' : '\x89'); }
  void write_item(std::int64_t value) {
    if (value >= std::numeric_limits<std::int32_t>::min() &&
        value <= std::numeric_limits<std::int32_t>::max()) {
      code('J');
      number(static_cast<std::uint64_t>(value), 4);
    } else {
      code('\x8a');
      number(8, 1);
      number(static_cast<std::uint64_t>(value), 8);
    }
  }
  void write_item(double value) {
    code('G');
    const auto bits = std::bit_cast<std::uint64_t>(value);
    for (int i = 7; i >= 0; --i) out_.pickle.push_back(static_cast<char>(bits >> (8 * i)));
  }
  void write_item(const std::string& value) {
    if (value.size() > 0xffffffff) throw DataError("A text to save has more than 4 GiB.");
    code('X');
    number(value.size(), 4);
    out_.pickle += value;
  }
  // Text whose code points are the bytes, as Python writes bytes in protocol 2.
  void write_item(const PyBytes& value) {
    std::string text;
    for (const char c : value.bytes) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte < 0x80) {
        text.push_back(c);
      } else {
        text.push_back(static_cast<char>(0xc0 | byte >> 6));
        text.push_back(static_cast<char>(0x80 | (byte & 0x3f)));
      }
    }
    global("_codecs", "encode");
    write_item(text);
    write_item(std::string("latin1"));
    code('\x86');
    code('R');
  }
  void write_item(const PyList& value) {
    if (!value.tuple) code(']');
    code('(');
    for (const PyValue& item : value.items) write(item);
    code(value.tuple ? 't' : 'e');
  }
  void write_item(const PyDict& value) {
    if (value.ordered) {
      ordered_dict();
    } else {
      code('}');
    }
    pairs(value.items);
    if (!value.attributes.empty()) {
      if (!value.ordered)
        throw DataError("A dict to save has attributes, and only an OrderedDict can have them.");
      code('}');
      pairs(value.attributes);
      code('b');
    }
  }
  void pairs(const std::vector<std::pair<PyValue, PyValue>>& items) {
    code('(');
    for (const auto& [key, item] : items) {
      write(key);
      write(item);
    }
    code('u');
  }

  // _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, backward_hooks)
  void write_item(const at::Tensor& given) {
    at::Tensor tensor = given.detach();
    const bool shared = views_.at(storage_id(given)).second;
    const bool marked = tensor.is_conj() || tensor.is_neg();
    if (marked) tensor = tensor.resolve_conj().resolve_neg();
    const bool covers = tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense();
    if (!shared && !covers) tensor = tensor.contiguous();
    const TorchName& name = name_of(tensor.scalar_type());
    const bool whole = shared && !marked;
    const std::uint64_t bytes =
        whole ? tensor.storage().nbytes() / tensor.element_size() * tensor.element_size()
              : tensor.nbytes();
    const std::size_t key = storage_key(given, tensor, whole, bytes);
    const bool untyped = name.storage.empty();
    global("torch._utils", untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    code('(');
    code('(');
    write_item(std::string("storage"));
    global(untyped ? "torch.storage" : "torch", untyped ? "UntypedStorage" : name.storage);
    write_item(std::to_string(key));
    write_item(std::string("cpu"));
    write_item(static_cast<std::int64_t>(untyped ? bytes : bytes / tensor.element_size()));
    code('t');
    code('Q');
    write_item(whole ? tensor.storage_offset() : std::int64_t{0});
    integers(tensor.sizes());
    integers(tensor.strides());
    write_item(false);
    ordered_dict();
    if (untyped) global("torch", name.name);
    code('t');
    code('R');
  }

  // Where in the list of storages the tensor's memory is.
  std::size_t storage_key(const at::Tensor& given, const at::Tensor& tensor, bool whole,
                          std::uint64_t bytes) {
    // Python refuses a storage that is used with two dtypes, so each has its own.
    const bool alone = given.is_conj() || given.is_neg();
    const std::tuple id{storage_id(given), tensor.scalar_type()};
    if (const auto at = keys_.find(id); !alone && at != keys_.end()) return at->second;
    const std::int64_t from = whole ? 0 : tensor.storage_offset() * tensor.element_size();
    at::Tensor as_bytes = at::empty({0}, tensor.options().dtype(at::kByte));
    as_bytes.set_(tensor.storage(), from, {static_cast<std::int64_t>(bytes)}, {1});
    out_.storages.push_back(std::move(as_bytes));
    if (!alone) keys_.emplace(id, out_.storages.size() - 1);
    return out_.storages.size() - 1;
  }

  void integers(c10::IntArrayRef values) {
    code('(');
    for (const std::int64_t value : values) write_item(value);
    code('t');
  }
  void ordered_dict() {
    global("collections", "OrderedDict");
    code(')');
    code('R');
  }
  void global(std::string_view module, std::string_view name) {
    code('c');
    out_.pickle.append(module).append("\n").append(name).append("\n");
  }
  void code(char value) { out_.pickle.push_back(value); }
  void number(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out_.pickle.push_back(static_cast<char>(value >> (8 * i)));
  }

  Pickled out_;
  std::map<StorageId, std::pair<ViewId, bool>> views_;
  std::map<std::tuple<StorageId, c10::ScalarType>, std::size_t> keys_;
};

}  // namespace

Pickled pickle(const PyValue& value) { return Pickler().run(value); }

}  // namespace accelerate::checkpoints
