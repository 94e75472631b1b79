#pragma once

#include <accelerate/base/text.hpp>

#include <ATen/core/Tensor.h>

#include <array>
#include <concepts>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace torch::data {
template <typename Data, typename Target>
struct Example;
}  // namespace torch::data

/// Trees of tensors: a tensor, or a pair, tuple, vector, array, map, optional or
/// torch::data::Example of trees, or a user's struct. Leaves that are not tensors (numbers,
/// strings) are carried along. Batches, model outputs and everything given to the collectives are
/// trees.
namespace accelerate {

/// Teaches the library a user's struct:
/// ```
/// struct Batch { at::Tensor tokens, mask; int64_t length; };
/// template <> struct accelerate::TreeTraits<Batch> {
///   template <class Self, class Visitor> static void visit(Self& self, Visitor&& visitor) {
///     visitor("tokens", self.tokens); visitor("mask", self.mask); visitor("length", self.length);
///   }
/// };
/// ```
template <class T>
struct TreeTraits;

namespace tree {

namespace detail {
template <class T>
concept HasTraits = requires {
  sizeof(TreeTraits<T>);
};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsTupleLike : std::false_type {};
template <class... T>
struct IsTupleLike<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct IsTupleLike<std::pair<A, B>> : std::true_type {};
template <class T>
struct IsSequence : std::false_type {};
template <class T, class A>
struct IsSequence<std::vector<T, A>> : std::true_type {};
template <class T, std::size_t N>
struct IsSequence<std::array<T, N>> : std::true_type {};
template <class T>
struct IsMap : std::false_type {};
template <class K, class V, class C, class A>
struct IsMap<std::map<K, V, C, A>> : std::true_type {};
template <class K, class V, class H, class E, class A>
struct IsMap<std::unordered_map<K, V, H, E, A>> : std::true_type {};
template <class T>
struct IsExample : std::false_type {};
template <class D, class T>
struct IsExample<torch::data::Example<D, T>> : std::true_type {};
// torch::data::example::NoTarget is void.
template <class T>
inline constexpr bool kIsNoTarget = std::is_void_v<T>;
template <class T>
concept Tensor = std::is_base_of_v<at::Tensor, T>;
template <class T>
concept PlainLeaf = std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string>;

template <class T>
constexpr bool is_tree();
}  // namespace detail

}  // namespace tree

/// A type the library can walk.
template <class T>
concept TensorTree = tree::detail::is_tree<std::remove_cvref_t<T>>();

namespace tree {

namespace detail {
template <class T>
struct TupleIsTree;
template <class... T>
struct TupleIsTree<std::tuple<T...>>
    : std::bool_constant<(is_tree<std::remove_cvref_t<T>>() && ...)> {};
template <class A, class B>
struct TupleIsTree<std::pair<A, B>>
    : std::bool_constant<is_tree<std::remove_cvref_t<A>>() && is_tree<std::remove_cvref_t<B>>()> {};
template <class T>
struct ExampleIsTree;
template <class D, class T>
struct ExampleIsTree<torch::data::Example<D, T>>
    : std::bool_constant<is_tree<D>() && is_tree<T>()> {};
template <class D>
struct ExampleIsTree<torch::data::Example<D, void>> : std::bool_constant<is_tree<D>()> {};

template <class T>
constexpr bool is_tree() {
  if constexpr (Tensor<T> || PlainLeaf<T> || HasTraits<T>) {
    return true;
  } else if constexpr (IsOptional<T>::value || IsSequence<T>::value) {
    return is_tree<std::remove_cvref_t<typename T::value_type>>();
  } else if constexpr (IsMap<T>::value) {
    return is_tree<typename T::mapped_type>() &&
           (std::is_same_v<typename T::key_type, std::string> ||
            std::is_integral_v<typename T::key_type>);
  } else if constexpr (IsTupleLike<T>::value) {
    return TupleIsTree<T>::value;
  } else if constexpr (IsExample<T>::value) {
    return ExampleIsTree<T>::value;
  } else {
    return false;
  }
}
}  // namespace detail

/// Calls `visitor(key, child)` for each direct child of an inner node: a field's name, an index, or
/// a map's key. Maps without an order of their own are visited in the order of their sorted keys,
/// so that every process visits alike. Leaves have no children.
template <class T, class Visitor>
void for_each_child(T& node, Visitor&& visitor) {
  using Node = std::remove_const_t<T>;
  if constexpr (detail::HasTraits<Node>) {
    TreeTraits<Node>::visit(node, visitor);
  } else if constexpr (detail::IsOptional<Node>::value) {
    if (node.has_value()) visitor(std::string("value"), *node);
  } else if constexpr (detail::IsSequence<Node>::value) {
    std::size_t index = 0;
    for (auto& child : node) visitor(std::to_string(index++), child);
  } else if constexpr (detail::IsMap<Node>::value) {
    std::map<typename Node::key_type, decltype(&node.begin()->second)> sorted;
    for (auto& [key, child] : node) sorted.emplace(key, &child);
    for (auto& [key, child] : sorted) visitor(text::concat(key), *child);
  } else if constexpr (detail::IsTupleLike<Node>::value) {
    std::apply(
        [&](auto&... child) {
          std::size_t index = 0;
          (visitor(std::to_string(index++), child), ...);
        },
        node);
  } else if constexpr (detail::IsExample<Node>::value) {
    visitor("data", node.data);
    if constexpr (!detail::kIsNoTarget<typename Node::TargetType>) visitor("target", node.target);
  }
}

/// Calls `visitor(tensor)` for each tensor, in a fixed order. Undefined tensors are visited too.
/// A non-const tree gives non-const references: assign to one to replace the tensor.
template <class T, class Visitor>
requires TensorTree<T>
void for_each_tensor(T& node, Visitor&& visitor) {
  using Node = std::remove_const_t<T>;
  if constexpr (detail::Tensor<Node>) {
    visitor(node);
  } else if constexpr (!detail::PlainLeaf<Node>) {
    for_each_child(node, [&](const auto&, auto& child) { for_each_tensor(child, visitor); });
  }
}

/// Calls `visitor(path, leaf)` for each leaf, tensor or not; a path is "data", "1.mask", "".
template <class T, class Visitor>
requires TensorTree<T>
void for_each_leaf(T& node, Visitor&& visitor, const std::string& path = {}) {
  using Node = std::remove_const_t<T>;
  if constexpr (detail::Tensor<Node> || detail::PlainLeaf<Node>) {
    visitor(path, node);
  } else {
    for_each_child(node, [&](const std::string& key, auto& child) {
      for_each_leaf(child, visitor, path.empty() ? key : path + "." + key);
    });
  }
}

/// The tensors of a tree, in the order of for_each_tensor.
template <class T>
requires TensorTree<T> std::vector<at::Tensor> tensors(const T& node) {
  std::vector<at::Tensor> found;
  for_each_tensor(node, [&](const at::Tensor& tensor) { found.push_back(tensor); });
  return found;
}

/// Where they lie, in the same order: "data", "1.mask", "".
template <class T>
requires TensorTree<T> std::vector<std::string> tensor_paths(const T& node) {
  std::vector<std::string> paths;
  for_each_leaf(node, [&](const std::string& path, const auto& leaf) {
    if constexpr (detail::Tensor<std::remove_cvref_t<decltype(leaf)>>) paths.push_back(path);
  });
  return paths;
}

/// The same tree with every defined tensor replaced by `function(tensor)`.
template <class T, class Function>
requires TensorTree<T> T map(T node, Function&& function) {
  for_each_tensor(node, [&](at::Tensor& tensor) {
    if (tensor.defined()) tensor = function(tensor);
  });
  return node;
}

}  // namespace tree
}  // namespace accelerate
