#include <accelerate/base/text.hpp>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <optional>
#include <unordered_map>
#include <utility>

#include "checkpoint/pickle_heap.hpp"
#include "checkpoint/torch_names.hpp"
#include "checkpoint/unpickler.hpp"

namespace accelerate::checkpoints {

namespace {

// Calls `each` with the code points of UTF-8 text; false when it is not that.
template <class Each>
bool for_each_point(std::string_view text, Each&& each) {
  for (std::size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i++]);
    const int more = first < 0x80                    ? 0
                     : first >= 0xc2 && first < 0xe0 ? 1
                     : first >= 0xe0 && first < 0xf0 ? 2
                     : first >= 0xf0 && first < 0xf5 ? 3
                                                     : -1;
    if (more < 0 || text.size() - i < static_cast<std::size_t>(more)) return false;
    char32_t point = more == 0 ? first : first & (0x3f >> more);
    for (int j = 0; j < more; ++j) {
      const auto next = static_cast<unsigned char>(text[i++]);
      if ((next & 0xc0) != 0x80) return false;
      point = point << 6 | (next & 0x3f);
    }
    constexpr char32_t kLeast[] = {0, 0x80, 0x800, 0x10000};
    if (point < kLeast[more] || point > 0x10ffff) return false;
    each(point);
  }
  return true;
}

bool is_utf8(std::string_view text) {
  return for_each_point(text, [](char32_t) {});
}

class Machine : PickleHeap {
 public:
  Machine(std::string_view pickle, const StorageOf& storage_of, const std::filesystem::path& path)
      : PickleHeap(pickle.size(), path), in_(pickle), storage_of_(storage_of) {}

  PyValue run() {
    while (step()) {
    }
    return value_of(pop());
  }

 private:
  enum class Function {
    kOrderedDict,
    kTensor,
    kTensorV2,
    kTensorV3,
    kParameter,
    kParameterWithState,
    kSize,
    kDevice,
    kEncode,
    kBytes
  };

  struct StorageRef {
    c10::Storage storage;
    std::uint64_t bytes;
    std::optional<c10::ScalarType> dtype;  // none: untyped
  };

  // ------------------------------------------------------------------------------- the stream

  std::string_view take(std::uint64_t bytes) {
    if (bytes > in_.size() - at_)
      refuse("its pickle ends at byte ", in_.size(), ", within a value");
    const std::string_view part = in_.substr(at_, bytes);
    at_ += bytes;
    return part;
  }
  std::uint64_t number(int bytes) {
    const std::string_view part = take(static_cast<std::uint64_t>(bytes));
    std::uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; --i)
      value = value << 8 | static_cast<unsigned char>(part[static_cast<std::size_t>(i)]);
    return value;
  }
  std::string_view line() {
    const auto end = in_.find('\n', at_);
    if (end == std::string_view::npos) refuse("its pickle ends within a name");
    const std::string_view part = take(end - at_);
    take(1);
    return part;
  }

  // -------------------------------------------------------------------------------- the stack

  void push(Tag tag, std::uint64_t data = 0) { stack_.push_back({tag, data}); }
  std::size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Value pop() {
    if (stack_.size() <= floor()) refuse("its pickle takes a value where there is none");
    const Value value = stack_.back();
    stack_.pop_back();
    return value;
  }
  Value& top() {
    if (stack_.size() <= floor()) refuse("its pickle takes a value where there is none");
    return stack_.back();
  }
  std::vector<Value> pop_to_mark() {
    if (marks_.empty()) refuse("its pickle ends a group that was not begun");
    const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Value> values(from, stack_.end());
    stack_.erase(from, stack_.end());
    marks_.pop_back();
    return values;
  }
  void push_text(std::string_view text) {
    if (!is_utf8(text)) refuse("text in its pickle is not UTF-8");
    spend(sizeof text);
    texts_.push_back(text);
    push(Tag::kString, texts_.size() - 1);
  }
  void push_bytes(std::string bytes) {
    spend(sizeof bytes + bytes.size());
    owned_.push_back(std::move(bytes));
    texts_.push_back(owned_.back());
    push(Tag::kBytes, texts_.size() - 1);
  }
  void push_list(Tag tag, std::vector<Value> items) {
    spend(sizeof items + items.size() * sizeof(Value));
    lists_.push_back(std::move(items));
    push(tag, lists_.size() - 1);
  }
  std::vector<Value> pop_some(std::size_t count) {
    std::vector<Value> items(count);
    for (std::size_t i = count; i-- > 0;) items[i] = pop();
    return items;
  }
  void push_dict(bool ordered) {
    spend(sizeof(Dict));
    dicts_.emplace_back().ordered = ordered;
    push(Tag::kDict, dicts_.size() - 1);
  }
  void remember(std::uint64_t index) {
    constexpr std::uint64_t kNode = 64;  // of the table, with the allocator's share
    if (memo_.insert_or_assign(index, top()).second) spend(kNode);
  }
  void recall(std::uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end())
      refuse("its pickle refers to value ", index, ", which it did not give");
    stack_.push_back(found->second);
  }
  void append(const std::vector<Value>& items) {
    if (top().tag != Tag::kList) refuse("its pickle appends to something that is not a list");
    spend(items.size() * sizeof(Value));
    auto& list = lists_[top().data];
    list.insert(list.end(), items.begin(), items.end());
  }
  void set_items(const std::vector<Value>& items) {
    if (top().tag != Tag::kDict) refuse("its pickle sets keys of something that is not a dict");
    if (items.size() % 2 != 0) refuse("its pickle has a key without a value");
    spend(items.size() * sizeof(Value));
    auto& dict = dicts_[top().data].items;
    dict.insert(dict.end(), items.begin(), items.end());
  }

  // ------------------------------------------------------------------------------- operations

  // False at the end. The names are those of Python's pickletools.
  bool step() {
    const auto code = static_cast<unsigned char>(take(1)[0]);
    // clang-format off
    switch (code) {
      case '.': return false;                                             // STOP
      case 0x80: protocol(); break;                                       // PROTO
      case 0x95: take(8); break;                                          // FRAME
      case '(': marks_.push_back(stack_.size()); break;                   // MARK
      case '0': pop(); break;                                             // POP
      case '1': pop_to_mark(); break;                                     // POP_MARK
      case '2': stack_.push_back(Value(top())); break;                    // DUP
      case 'N': push(Tag::kNone); break;                                  // NONE
      case 0x88: push(Tag::kBool, 1); break;                              // NEWTRUE
      case 0x89: push(Tag::kBool, 0); break;                              // NEWFALSE
      case 'J': small_integer(); break;                                   // BININT
      case 'K': push(Tag::kInt, number(1)); break;                        // BININT1
      case 'M': push(Tag::kInt, number(2)); break;                        // BININT2
      case 0x8a: long_integer(number(1)); break;                          // LONG1
      case 0x8b: long_integer(number(4)); break;                          // LONG4
      case 'G': real(); break;                                            // BINFLOAT
      case 'X': push_text(take(number(4))); break;                        // BINUNICODE
      case 0x8c: push_text(take(number(1))); break;                       // SHORT_BINUNICODE
      case 0x8d: push_text(take(number(8))); break;                       // BINUNICODE8
      case 'U': push_text(take(number(1))); break;                        // SHORT_BINSTRING, Python 2
      case 'B': push_bytes(std::string(take(number(4)))); break;          // BINBYTES
      case 'C': push_bytes(std::string(take(number(1)))); break;          // SHORT_BINBYTES
      case 0x8e: push_bytes(std::string(take(number(8)))); break;         // BINBYTES8
      case ')': push_list(Tag::kTuple, {}); break;                        // EMPTY_TUPLE
      case 0x85: push_list(Tag::kTuple, pop_some(1)); break;              // TUPLE1
      case 0x86: push_list(Tag::kTuple, pop_some(2)); break;              // TUPLE2
      case 0x87: push_list(Tag::kTuple, pop_some(3)); break;              // TUPLE3
      case 't': push_list(Tag::kTuple, pop_to_mark()); break;             // TUPLE
      case ']': push_list(Tag::kList, {}); break;                         // EMPTY_LIST
      case 'a': append(pop_some(1)); break;                               // APPEND
      case 'e': append(pop_to_mark()); break;                             // APPENDS
      case '}': push_dict(false); break;                                  // EMPTY_DICT
      case 's': set_items(pop_some(2)); break;                            // SETITEM
      case 'u': set_items(pop_to_mark()); break;                          // SETITEMS
      case 'q': remember(number(1)); break;                               // BINPUT
      case 'r': remember(number(4)); break;                               // LONG_BINPUT
      case 0x94: remember(memo_.size()); break;                           // MEMOIZE
      case 'h': recall(number(1)); break;                                 // BINGET
      case 'j': recall(number(4)); break;                                 // LONG_BINGET
      case 'c': global_of_lines(); break;                                 // GLOBAL
      case 0x93: global_of_stack(); break;                                // STACK_GLOBAL
      case 'Q': persistent(pop()); break;                                 // BINPERSID
      case 'R': { const auto parts = pop_some(2); call(parts[0], parts[1]); break; }  // REDUCE
      case 'b': build(pop()); break;                                      // BUILD
      default: refuse_operation(code);
    }
    // clang-format on
    return true;
  }

  [[noreturn]] void refuse_operation(int code) const {
    char text[8];
    std::snprintf(text, sizeof text, "0x%02x", code);
    refuse("its pickle has the operation ", text, " at byte ", at_ - 1,
           ", which torch.save does not write for numbers, text, lists, dicts and tensors");
  }
  void small_integer() {
    push(Tag::kInt, static_cast<std::uint64_t>(std::int64_t{static_cast<std::int32_t>(number(4))}));
  }
  void global_of_lines() {
    const std::string_view module = line();
    global(module, line());
  }
  void global_of_stack() {
    const auto parts = pop_some(2);
    global(text_of(parts[0], "a module's name"), text_of(parts[1], "a name"));
  }
  void protocol() {
    if (const auto version = number(1); version > 5)
      refuse("its pickle is of protocol ", version, ", and Python has 5");
  }
  void long_integer(std::uint64_t bytes) {
    const std::string_view digits = take(bytes);
    if (bytes > 8) refuse("an integer in it has ", bytes, " bytes, and at most 8 are read");
    std::uint64_t value = !digits.empty() && (digits.back() & 0x80) ? ~std::uint64_t{0} : 0;
    for (std::size_t i = digits.size(); i-- > 0;)
      value = value << 8 | static_cast<unsigned char>(digits[i]);
    push(Tag::kInt, value);
  }
  void real() {
    std::uint64_t bits = 0;
    for (const char c : take(8))
      bits = bits << 8 | static_cast<unsigned char>(c);  // big-endian, for once
    push(Tag::kFloat, bits);
  }

  // Whatever a file names must be here. Nothing is looked up or run.
  void global(std::string_view module, std::string_view name) {
    if (const auto function = function_of(module, name))
      return push(Tag::kFunction, static_cast<std::uint64_t>(*function));
    if (module == "torch.storage" && name == "UntypedStorage")
      return push(Tag::kStorageType, kTorchNames.size());
    for (std::size_t i = 0; i < kTorchNames.size(); ++i) {
      if (module == "torch" && name == kTorchNames[i].name) return push(Tag::kDtype, i);
      if ((module == "torch" || module == "torch.cuda") && name == kTorchNames[i].storage)
        return push(Tag::kStorageType, i);
    }
    refuse("it names ", module.substr(0, 100), ".", name.substr(0, 100),
           ", which is not on the list of what may be in it. Only data is read from .pt files, and "
           "nothing is ever run; in Python, save "
           "a state_dict() of tensors, numbers and text instead");
  }
  static std::optional<Function> function_of(std::string_view module, std::string_view name) {
    struct Row {
      std::string_view module, name;
      Function function;
    };
    static constexpr Row kRows[] = {
        {"collections", "OrderedDict", Function::kOrderedDict},
        {"torch._utils", "_rebuild_tensor", Function::kTensor},
        {"torch._utils", "_rebuild_tensor_v2", Function::kTensorV2},
        {"torch._utils", "_rebuild_tensor_v3", Function::kTensorV3},
        {"torch._utils", "_rebuild_parameter", Function::kParameter},
        {"torch._utils", "_rebuild_parameter_with_state", Function::kParameterWithState},
        {"torch", "Size", Function::kSize},
        {"torch", "device", Function::kDevice},
        {"_codecs", "encode", Function::kEncode},
        {"__builtin__", "bytes", Function::kBytes},  // b"" in protocol 2
        {"builtins", "bytes", Function::kBytes},
    };
    for (const Row& row : kRows) {
      if (row.module == module && row.name == name) return row.function;
    }
    return std::nullopt;
  }

  // ("storage", type, key, location, number of elements)
  void persistent(const Value& id) {
    const std::vector<Value>& parts = tuple_of(id, 5, 5, "what refers to a storage");
    if (text_of(parts[0], "what refers to a storage") != "storage")
      refuse("it refers to something outside of it that is not a storage");
    if (parts[1].tag != Tag::kStorageType) refuse("a storage in it has no type");
    const std::string_view key = text_of(parts[2], "a storage's key");
    const std::int64_t count = int_of(parts[4], "a storage's size");
    std::optional<c10::ScalarType> dtype;
    if (parts[1].data < kTorchNames.size()) dtype = kTorchNames[parts[1].data].dtype;
    std::uint64_t bytes = 0;
    if (count < 0 || __builtin_mul_overflow(static_cast<std::uint64_t>(count),
                                            dtype ? c10::elementSize(*dtype) : 1, &bytes)) {
      refuse("a storage in it would have ", count, " elements");
    }
    spend(sizeof(StorageRef));
    storages_.push_back({storage_of_(key, bytes), bytes, dtype});
    push(Tag::kStorage, storages_.size() - 1);
  }

  void call(const Value& function, const Value& arguments) {
    if (function.tag != Tag::kFunction) refuse("its pickle calls something that is not a function");
    switch (static_cast<Function>(function.data)) {
      case Function::kOrderedDict:
        tuple_of(arguments, 0, 0, "collections.OrderedDict's arguments");
        return push_dict(true);
      case Function::kTensor:
        return tensor(tuple_of(arguments, 4, 4, "a tensor's arguments"), std::nullopt, {});
      case Function::kTensorV2: {
        const auto& parts = tuple_of(arguments, 6, 7, "a tensor's arguments");
        return tensor(parts, std::nullopt, parts.size() > 6 ? parts[6] : Value());
      }
      case Function::kTensorV3: {
        const auto& parts = tuple_of(arguments, 7, 8, "a tensor's arguments");
        if (parts[6].tag != Tag::kDtype) refuse("a tensor in it has no dtype");
        return tensor(parts, kTorchNames[parts[6].data].dtype,
                      parts.size() > 7 ? parts[7] : Value());
      }
      case Function::kParameter:
      case Function::kParameterWithState: {
        const auto& parts = tuple_of(arguments, 3, 4, "a parameter's arguments");
        if (parts[0].tag != Tag::kTensor) refuse("a parameter in it has no tensor");
        stack_.push_back(Value(parts[0]));
        return;
      }
      case Function::kSize: {
        const auto& parts = tuple_of(arguments, 1, 1, "torch.Size's arguments");
        if (parts[0].tag != Tag::kTuple && parts[0].tag != Tag::kList)
          refuse("a torch.Size in it is not made of numbers");
        return push(Tag::kTuple, parts[0].data);
      }
      case Function::kDevice: {
        const auto& parts = tuple_of(arguments, 1, 2, "torch.device's arguments");
        std::string name(text_of(parts[0], "a device"));
        if (name.size() > 100) refuse("a device in it has a name of ", name.size(), " bytes");
        if (parts.size() > 1) name += ":" + std::to_string(int_of(parts[1], "a device's number"));
        spend(sizeof name + name.size());
        owned_.push_back(std::move(name));
        return push_text(owned_.back());
      }
      case Function::kEncode:
        return encode(tuple_of(arguments, 2, 2, "_codecs.encode's arguments"));
      case Function::kBytes:
        tuple_of(arguments, 0, 0, "the arguments of bytes");
        return push_bytes({});
    }
  }

  // Protocol 2 has no bytes: they are written as text whose code points they are.
  void encode(const std::vector<Value>& parts) {
    const std::string_view encoding = text_of(parts[1], "an encoding");
    if (encoding != "latin1" && encoding != "latin-1")
      refuse("bytes in it are encoded in ", encoding.substr(0, 40), " and not in latin1");
    std::string bytes;
    const std::string_view text = text_of(parts[0], "bytes");
    // That it is UTF-8 was checked when it was read; other bytes may be in a value of bytes.
    const bool valid = for_each_point(text, [&](char32_t point) {
      if (point > 0xff) refuse("bytes in it have a value of ", static_cast<std::uint32_t>(point));
      bytes.push_back(static_cast<char>(point));
    });
    if (!valid) refuse("bytes in it are encoded from what is not text");
    push_bytes(std::move(bytes));
  }

  // Attributes of an OrderedDict: a state dict has `_metadata`.
  void build(const Value& state) {
    if (top().tag != Tag::kDict || !dicts_[top().data].ordered)
      refuse("its pickle sets attributes of something that is not an OrderedDict");
    if (state.tag != Tag::kDict) refuse("its pickle sets attributes that are not in a dict");
    if (state.data == top().data) refuse("a dict in it contains itself");
    auto& attributes = dicts_[top().data].attributes;
    const auto& items = dicts_[state.data].items;
    spend(items.size() * sizeof(Value));
    attributes.insert(attributes.end(), items.begin(), items.end());
  }

  // (storage, offset, sizes, strides, ...), counted in elements
  void tensor(const std::vector<Value>& parts, std::optional<c10::ScalarType> dtype,
              const Value& metadata) {
    if (parts[0].tag != Tag::kStorage) refuse("a tensor in it has no storage");
    const StorageRef& storage = storages_[parts[0].data];
    if (!dtype) dtype = storage.dtype ? storage.dtype : c10::kByte;
    const std::int64_t offset = int_of(parts[1], "a tensor's offset");
    const std::vector<std::int64_t> sizes = ints_of(parts[2], "a tensor's shape");
    const std::vector<std::int64_t> strides = ints_of(parts[3], "a tensor's strides");
    if (sizes.size() != strides.size() || sizes.size() > 64)
      refuse("a tensor in it has ", sizes.size(), " dimensions and ", strides.size(), " strides");
    // The place of the last element, and the number of them, with every overflow noticed.
    std::int64_t last = offset, count = 1;
    bool overflow = offset < 0;
    bool empty = false;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      overflow |= sizes[i] < 0 || strides[i] < 0;
      if (overflow) break;
      empty |= sizes[i] == 0;
      std::int64_t reach = 0;
      const std::int64_t length = std::max<std::int64_t>(sizes[i], 1);
      overflow |= __builtin_mul_overflow(count, length, &count) ||
                  __builtin_mul_overflow(length - 1, strides[i], &reach) ||
                  __builtin_add_overflow(last, reach, &last);
    }
    const std::uint64_t elements = storage.bytes / c10::elementSize(*dtype);
    if (overflow || count > std::numeric_limits<std::int64_t>::max() / 16 ||
        (!empty && static_cast<std::uint64_t>(last) >= elements)) {
      refuse("a tensor of shape [", text::join(sizes), "], strides [", text::join(strides),
             "] and offset ", offset, " does not fit into its storage of ", elements, " elements");
    }
    constexpr std::uint64_t kTensor = 512;  // with its shape and strides, roughly
    spend(kTensor);
    const auto options = at::TensorOptions().dtype(*dtype);
    at::Tensor tensor = at::empty(empty ? c10::IntArrayRef(sizes) : c10::IntArrayRef({0}), options);
    if (!empty) tensor.set_(storage.storage, offset, sizes, strides);
    set_bits(tensor, metadata);
    tensors_.push_back(std::move(tensor));
    push(Tag::kTensor, tensors_.size() - 1);
  }

  // {"conj": True}: the elements are meant conjugated; {"neg": True}: negated.
  void set_bits(at::Tensor& tensor, const Value& metadata) {
    if (metadata.tag == Tag::kNone) return;
    if (metadata.tag != Tag::kDict) refuse("a tensor in it has a description that is not a dict");
    const auto& items = dicts_[metadata.data].items;
    spend(items.size() * sizeof(Value));
    for (std::size_t i = 0; i < items.size(); i += 2) {
      const std::string_view name = text_of(items[i], "a tensor's description");
      if (items[i + 1].tag != Tag::kBool || (name != "conj" && name != "neg"))
        refuse("a tensor in it is described by '", name.substr(0, 40), "', which is unknown here");
      const bool on = items[i + 1].data != 0;
      if (on && !tensor.is_complex() && (name == "conj" || !tensor.is_floating_point())) {
        refuse("a tensor in it is marked as '", name, "', and its dtype cannot be");
      }
      if (name == "conj") tensor._set_conj(on);
      if (name == "neg") tensor._set_neg(on);
    }
  }

  std::string_view in_;
  std::size_t at_ = 0;
  const StorageOf& storage_of_;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;
  std::unordered_map<std::uint64_t, Value> memo_;
  std::vector<StorageRef> storages_;
};

}  // namespace

PyValue unpickle(std::string_view pickle, const StorageOf& storage_of,
                 const std::filesystem::path& path) {
  return Machine(pickle, storage_of, path).run();
}

}  // namespace accelerate::checkpoints
