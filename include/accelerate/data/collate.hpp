#pragma once

#include <accelerate/core/pad_values.hpp>
#include <accelerate/core/tree.hpp>

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

/// Ready-made ways to make one batch of a vector of examples, for `LoaderPlan::collate`.
///
/// The batch has the fields of an example: a tensor becomes a tensor with a new first dimension, a
/// number a 1-d tensor, a string a vector of strings; pairs, tuples, vectors, arrays, maps and
/// torch::data::Example are gone into. A user's struct (TreeTraits) must have only tensors and such
/// structs as fields, for it stays the same type.
namespace accelerate::data::collate {

/// Tensors of equal shape, one after another along a new first dimension.
/// Throws DataError naming the field and the shapes when they are not equal.
at::Tensor stack_tensors(const std::vector<at::Tensor>& tensors, const std::string& path);
/// The same after filling each tensor up with the value for `path`, at the end of `dims` (counted
/// without the new dimension, negative from the end; empty: all), to the largest size among them.
at::Tensor pad_tensors(const std::vector<at::Tensor>& tensors, const PadValues& values,
                       const std::vector<std::int64_t>& dims, const std::string& path);

namespace detail {

template <class T>
struct Collated {
  using type = T;  // tensors and users' structs
};
template <class T>
requires std::is_arithmetic_v<T>
struct Collated<T> {
  using type = at::Tensor;
};
template <>
struct Collated<std::string> {
  using type = std::vector<std::string>;
};
template <class T>
using collated_t = typename Collated<std::remove_cvref_t<T>>::type;
template <class A, class B>
struct Collated<std::pair<A, B>> {
  using type = std::pair<collated_t<A>, collated_t<B>>;
};
template <class... T>
struct Collated<std::tuple<T...>> {
  using type = std::tuple<collated_t<T>...>;
};
template <class T, class A>
struct Collated<std::vector<T, A>> {
  using type = std::vector<collated_t<T>>;
};
template <class T, std::size_t N>
struct Collated<std::array<T, N>> {
  using type = std::array<collated_t<T>, N>;
};
template <class K, class V, class C, class A>
struct Collated<std::map<K, V, C, A>> {
  using type = std::map<K, collated_t<V>, C>;
};
template <class K, class V, class H, class E, class A>
struct Collated<std::unordered_map<K, V, H, E, A>> {
  using type = std::unordered_map<K, collated_t<V>, H, E>;
};
template <class D, class T>
struct Collated<torch::data::Example<D, T>> {
  using type = torch::data::Example<collated_t<D>, collated_t<T>>;
};
template <class D>
struct Collated<torch::data::Example<D, void>> {
  using type = torch::data::Example<collated_t<D>, void>;
};

at::Tensor tensor_of(const std::vector<double>& numbers);
at::Tensor tensor_of(const std::vector<float>& numbers);
at::Tensor tensor_of(const std::vector<std::int64_t>& numbers);
at::Tensor tensor_of_bools(const std::vector<std::int64_t>& numbers);
[[noreturn]] void report_lengths(const std::string& path, std::size_t first, std::size_t other);
[[noreturn]] void report_key(const std::string& path, const std::string& key);

inline std::string join(const std::string& path, const std::string& key) {
  return path.empty() ? key : path + "." + key;
}

/// `join_tensors(tensors, path)` makes one tensor of the examples' tensors at a path.
template <class T, class Join>
collated_t<T> collate_nodes(const std::vector<T*>& nodes, const Join& join_tensors,
                            const std::string& path) {
  namespace kinds = tree::detail;
  static_assert(!kinds::IsOptional<T>::value,
                "An optional field cannot be collated: some examples may have it and some not. "
                "Collate with a function of your own.");
  static_assert(
      !std::is_enum_v<T>,
      "An enum cannot be collated. Give its number, or collate with a function of your own.");
  const auto child = [&](const std::string& key, const auto& pick) {
    using Child = std::remove_reference_t<decltype(pick(*nodes.front()))>;
    std::vector<Child*> children;
    children.reserve(nodes.size());
    for (T* node : nodes) children.push_back(&pick(*node));
    return collate_nodes<Child>(children, join_tensors, join(path, key));
  };
  if constexpr (kinds::Tensor<T>) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(nodes.size());
    for (T* node : nodes) tensors.push_back(*node);
    return T(join_tensors(tensors, path));
  } else if constexpr (std::is_arithmetic_v<T>) {
    using Number =
        std::conditional_t<std::is_same_v<T, float>, float,
                           std::conditional_t<std::is_floating_point_v<T>, double, std::int64_t>>;
    std::vector<Number> numbers;
    numbers.reserve(nodes.size());
    for (T* node : nodes) numbers.push_back(static_cast<Number>(*node));
    if constexpr (std::is_same_v<T, bool>) {
      return tensor_of_bools(numbers);
    } else {
      return tensor_of(numbers);
    }
  } else if constexpr (std::is_same_v<T, std::string>) {
    std::vector<std::string> texts;
    texts.reserve(nodes.size());
    for (T* node : nodes) texts.push_back(std::move(*node));
    return texts;
  } else if constexpr (kinds::IsExample<T>::value) {
    if constexpr (kinds::kIsNoTarget<typename T::TargetType>) {
      return child(
          "data", [](T & node) -> auto& { return node.data; });
    } else {
      return {child(
                  "data", [](T & node) -> auto& { return node.data; }),
              child(
                  "target", [](T & node) -> auto& { return node.target; })};
    }
  } else if constexpr (kinds::IsTupleLike<T>::value) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return collated_t<T>{child(
          std::to_string(I), [](T & node) -> auto& { return std::get<I>(node); })...};
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else if constexpr (kinds::IsMap<T>::value) {
    collated_t<T> batch;
    for (T* node : nodes) {
      if (node->size() != nodes.front()->size())
        report_lengths(path, nodes.front()->size(), node->size());
    }
    for (auto& entry : *nodes.front()) {
      const auto& key = entry.first;
      batch[key] = child(
          text::concat(key), [&](T & node) -> auto& {
            const auto found = node.find(key);
            if (found == node.end()) report_key(path, text::concat(key));
            return found->second;
          });
    }
    return batch;
  } else if constexpr (kinds::IsSequence<T>::value) {
    collated_t<T> batch{};
    const std::size_t size = nodes.front()->size();
    for (T* node : nodes) {
      if (node->size() != size) report_lengths(path, size, node->size());
    }
    if constexpr (requires { batch.resize(size); }) batch.resize(size);
    for (std::size_t i = 0; i < size; ++i)
      batch[i] = child(
          std::to_string(i), [i](T & node) -> auto& { return node[i]; });
    return batch;
  } else {
    // A user's struct keeps its type, so its tensors are joined in place, field after field.
    std::vector<std::vector<at::Tensor>> fields;
    for (T* node : nodes) {
      std::size_t field = 0;
      tree::for_each_leaf(*node, [&](const std::string&, auto& leaf) {
        static_assert(kinds::Tensor<std::remove_cvref_t<decltype(leaf)>>,
                      "A struct with fields other than tensors cannot be collated into the same "
                      "struct. Collate with a function of your own.");
        if (field == fields.size()) fields.emplace_back();
        fields[field++].push_back(leaf);
      });
      if (field != fields.size()) report_lengths(path, fields.size(), field);
    }
    T batch = *nodes.front();
    std::size_t field = 0;
    tree::for_each_leaf(batch, [&](const std::string& inner, auto& leaf) {
      leaf = join_tensors(fields[field++], join(path, inner));
    });
    return batch;
  }
}

template <class Example, class Join>
collated_t<Example> collate_examples(std::vector<Example>& examples, const Join& join_tensors) {
  static_assert(TensorTree<Example>,
                "These examples are no trees of tensors, numbers and strings. Describe the struct "
                "by a TreeTraits, or collate with a function of your own.");
  std::vector<Example*> nodes;
  nodes.reserve(examples.size());
  for (Example& example : examples) nodes.push_back(&example);
  return collate_nodes<Example>(nodes, join_tensors, {});
}

}  // namespace detail

/// Stacks examples of equal shapes.
class Stack {
 public:
  template <class Example>
  detail::collated_t<Example> operator()(std::vector<Example> examples) const {
    return detail::collate_examples(examples, stack_tensors);
  }
};
inline Stack stack() { return {}; }

/// Fills tensors up to the largest of the batch and stacks them. Batches may then differ in shape.
class Pad {
 public:
  static constexpr bool kVaryingShapes = true;
  Pad(PadValues values, std::vector<std::int64_t> dims)
      : values_(std::move(values)), dims_(std::move(dims)) {}
  template <class Example>
  detail::collated_t<Example> operator()(std::vector<Example> examples) const {
    std::vector<std::string> paths;
    auto batch = detail::collate_examples(
        examples, [&](const std::vector<at::Tensor>& tensors, const std::string& path) {
          paths.push_back(path);
          return pad_tensors(tensors, values_, dims_, path);
        });
    values_.require_known(paths);
    return batch;
  }

 private:
  PadValues values_;
  std::vector<std::int64_t> dims_;
};
/// Pads along `dims` of an example's tensors, negative from the end; without dims along all in
/// which they differ. Sizes along other dims must be equal. With one value, or with
/// `PadValues(0).field("labels", -100)`. A batch throws ConfigError when a value does not fit a
/// tensor's dtype, or a field is named that the examples do not have.
template <class... Dims>
Pad pad(PadValues values = 0, Dims... dims) {
  return Pad(std::move(values), {static_cast<std::int64_t>(dims)...});
}

}  // namespace accelerate::data::collate
