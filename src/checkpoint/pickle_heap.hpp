#pragma once

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/py_value.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace accelerate::checkpoints {

// What a pickle has made so far, and the value for the caller that it becomes in the end.
class PickleHeap {
 public:
  enum class Tag : std::uint8_t {
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,
    kBytes,
    kList,
    kTuple,
    kDict,
    kFunction,
    kDtype,
    kStorageType,
    kStorage,
    kTensor
  };
  // Lists and dicts can be changed after they were remembered or put into another, so values refer
  // to them by their number.
  struct Value {
    Tag tag = Tag::kNone;
    std::uint64_t data = 0;
  };
  struct Dict {
    std::vector<Value> items;       // key, value, key, value
    std::vector<Value> attributes;  // likewise
    bool ordered = false;
  };
  // `pickle_bytes` bounds how much memory what it makes may take. `path` is for the messages.
  PickleHeap(std::size_t pickle_bytes, const std::filesystem::path& path)
      : path_(path), budget_(kLeastBudget + kBudgetPerByte * pickle_bytes) {}

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... why) const {
    throw CheckpointError(text::concat(path_.string(), " cannot be read: ", why..., "."),
                          path_.string());
  }

  // What an argument is; refused when it is something else, as `what` in the message.
  const std::vector<Value>& tuple_of(const Value& value, std::size_t least, std::size_t most,
                                     const char* what) const;
  std::string_view text_of(const Value& value, const char* what) const;
  std::int64_t int_of(const Value& value, const char* what) const;
  std::vector<std::int64_t> ints_of(const Value& value, const char* what) const;

  // Each operation says how many bytes what it makes will take. Most have operands of their own
  // size; those that copy what was remembered, or make an object of one byte, would let a small
  // file fill the memory or take for ever.
  void spend(std::uint64_t bytes);

  // Values that are referred to several times are copied each time, within the budget. A value that
  // contains itself ends at the depth.
  PyValue value_of(const Value& value) { return value_of(value, 0); }

  std::vector<std::string_view> texts_;  // of the pickle, or of owned_
  std::deque<std::string> owned_;
  std::vector<std::vector<Value>> lists_;  // and tuples
  std::vector<Dict> dicts_;
  std::vector<at::Tensor> tensors_;

 private:
  // A list of None, True and False, the densest thing that Python writes, needs 80 bytes for each
  // of its values, of one byte; a list of small numbers half of that, a state dict some 20 for each
  // byte.
  static constexpr std::uint64_t kBudgetPerByte = 96;
  static constexpr std::uint64_t kLeastBudget = std::uint64_t{8} << 20;

  PyValue value_of(const Value& value, int depth);
  std::vector<std::pair<PyValue, PyValue>> pairs_of(const std::vector<Value>& items, int depth);

  const std::filesystem::path& path_;
  std::uint64_t budget_;
};

}  // namespace accelerate::checkpoints
