#include "checkpoint/pickle_heap.hpp"

#include <bit>
#include <set>

#include "checkpoint/torch_names.hpp"

namespace accelerate::checkpoints {

const std::vector<PickleHeap::Value>& PickleHeap::tuple_of(const Value& value, std::size_t least,
                                                           std::size_t most,
                                                           const char* what) const {
  if (value.tag != Tag::kTuple || lists_[value.data].size() < least ||
      lists_[value.data].size() > most)
    refuse(what, " are not as expected");
  return lists_[value.data];
}

std::string_view PickleHeap::text_of(const Value& value, const char* what) const {
  if (value.tag != Tag::kString && value.tag != Tag::kBytes) refuse(what, " is not text");
  return texts_[value.data];
}

std::int64_t PickleHeap::int_of(const Value& value, const char* what) const {
  if (value.tag != Tag::kInt) refuse(what, " is not an integer");
  return static_cast<std::int64_t>(value.data);
}

std::vector<std::int64_t> PickleHeap::ints_of(const Value& value, const char* what) const {
  if (value.tag != Tag::kTuple) refuse(what, " is not a tuple");
  constexpr std::size_t kMostDimensions = 64;  // as many as LibTorch's kernels take
  if (lists_[value.data].size() > kMostDimensions)
    refuse(what, " has ", lists_[value.data].size(), " numbers");
  std::vector<std::int64_t> numbers;
  for (const Value& item : lists_[value.data]) numbers.push_back(int_of(item, what));
  return numbers;
}

PyValue PickleHeap::value_of(const Value& value, int depth) {
  if (depth > kMostDepth)
    refuse("its values lie more than ", kMostDepth,
           " deep within each other, or one contains itself");
  spend(sizeof(PyValue));
  switch (value.tag) {
    case Tag::kNone:
      return {};
    case Tag::kBool:
      return value.data != 0;
    case Tag::kInt:
      return static_cast<std::int64_t>(value.data);
    case Tag::kFloat:
      return std::bit_cast<double>(value.data);
    case Tag::kString:
      spend(texts_[value.data].size());
      return std::string(texts_[value.data]);
    case Tag::kBytes:
      spend(texts_[value.data].size());
      return PyBytes{std::string(texts_[value.data])};
    case Tag::kList:
    case Tag::kTuple: {
      PyList list;
      list.tuple = value.tag == Tag::kTuple;
      for (const Value& item : lists_[value.data]) list.items.push_back(value_of(item, depth + 1));
      return list;
    }
    case Tag::kDict: {
      PyDict dict;
      dict.ordered = dicts_[value.data].ordered;
      dict.items = pairs_of(dicts_[value.data].items, depth);
      dict.attributes = pairs_of(dicts_[value.data].attributes, depth);
      return dict;
    }
    case Tag::kDtype:
      return "torch." + std::string(kTorchNames[value.data].name);
    case Tag::kTensor:
      return tensors_[value.data];
    case Tag::kFunction:
      break;
    case Tag::kStorageType:
      break;
    case Tag::kStorage:
      break;
  }
  refuse("a function or a storage stands in it as a value");
}

void PickleHeap::spend(std::uint64_t bytes) {
  if (bytes > budget_) {
    refuse(
        "its values refer to each other so often, or are so many, that they would be far larger "
        "than the file. Store large data as tensors");
  }
  budget_ -= bytes;
}

std::vector<std::pair<PyValue, PyValue>> PickleHeap::pairs_of(const std::vector<Value>& items,
                                                              int depth) {
  std::vector<std::pair<PyValue, PyValue>> pairs;
  pairs.reserve(items.size() / 2);
  std::set<std::string_view> names;
  std::set<std::uint64_t> numbers;
  for (std::size_t i = 0; i < items.size(); i += 2) {
    const Value& key = items[i];
    const bool fresh = key.tag == Tag::kString ? names.insert(texts_[key.data]).second
                       : key.tag == Tag::kInt  ? numbers.insert(key.data).second
                                               : true;
    if (!fresh) {
      refuse("a dict in it has the key ",
             key.tag == Tag::kString ? std::string(texts_[key.data].substr(0, 100))
                                     : std::to_string(static_cast<std::int64_t>(key.data)),
             " twice");
    }
    if (key.tag == Tag::kList || key.tag == Tag::kDict || key.tag == Tag::kTensor)
      refuse("a dict in it has a key that Python does not allow");
    PyValue name = value_of(key, depth + 1);
    pairs.emplace_back(std::move(name), value_of(items[i + 1], depth + 1));
  }
  return pairs;
}

}  // namespace accelerate::checkpoints
