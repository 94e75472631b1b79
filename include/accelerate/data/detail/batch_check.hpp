#pragma once

#include <accelerate/core/tree.hpp>

#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <string>
#include <vector>

namespace accelerate::data::detail {

// A tree whose leaves are known from its type alone, so that only tensors need comparing.
template <class T>
constexpr bool is_static_tree() {
  if constexpr (tree::detail::Tensor<T> || tree::detail::PlainLeaf<T>) {
    return true;
  } else if constexpr (tree::detail::IsExample<T>::value) {
    if constexpr (tree::detail::kIsNoTarget<typename T::TargetType>) {
      return is_static_tree<typename T::DataType>();
    } else {
      return is_static_tree<typename T::DataType>() && is_static_tree<typename T::TargetType>();
    }
  } else if constexpr (tree::detail::IsTupleLike<T>::value) {
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return (is_static_tree<std::remove_cvref_t<std::tuple_element_t<I, T>>>() && ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    return false;
  }
}

template <class T>
inline constexpr bool kIsVector = false;
template <class T, class A>
inline constexpr bool kIsVector<std::vector<T, A>> = true;

/// Remembers the structure of the first batch and compares every later one with it: fields, dtypes,
/// number of dimensions, and sizes beyond the first dimension unless shapes may vary. What is
/// inside an optional is not compared. Of a batch that is a vector of examples every example is
/// compared, and their shapes may vary.
class BatchCheck {
 public:
  template <class Batch>
  void check(const Batch& batch, bool varying_shapes, const std::string& loader) {
    if constexpr (kIsVector<Batch>) {
      for (const auto& example : batch) check_tree(example, true, loader);
    } else {
      check_tree(batch, varying_shapes, loader);
    }
  }

  /// "data float [*, 784], target long [*]"; empty before the first batch.
  const std::string& signature() const noexcept { return signature_; }

 private:
  struct Leaf {
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    c10::SmallVector<std::int64_t, 4> sizes;
    std::string path;
  };

  template <class Tree>
  void check_tree(const Tree& tree, bool varying_shapes, const std::string& loader) {
    const auto check = [&](std::size_t index, const at::Tensor& tensor) {
      const Leaf& leaf = leaves_[index];
      if (!matches(leaf, tensor, varying_shapes)) report(leaf, tensor, varying_shapes, loader);
    };
    if (!known_) {
      for_each_required(tree, [&](const std::string& path, const auto& leaf) {
        if constexpr (tree::detail::Tensor<std::remove_cvref_t<decltype(leaf)>>) {
          remember(path, leaf, varying_shapes);
        } else {
          remember(path);
        }
      });
      known_ = true;
    } else if constexpr (is_static_tree<Tree>()) {
      std::size_t index = 0;
      tree::for_each_tensor(tree, [&](const at::Tensor& tensor) { check(index++, tensor); });
    } else {
      std::vector<std::string> paths;
      std::vector<const at::Tensor*> tensors;
      for_each_required(tree, [&](const std::string& path, const auto& leaf) {
        paths.push_back(path);
        if constexpr (tree::detail::Tensor<std::remove_cvref_t<decltype(leaf)>>)
          tensors.push_back(&leaf);
      });
      if (paths != paths_) report_structure(paths, loader);
      for (std::size_t index = 0; index < tensors.size(); ++index) check(index, *tensors[index]);
    }
  }

  // The leaves that every batch has: not those inside optionals.
  template <class Node, class Visitor>
  static void for_each_required(const Node& node, const Visitor& visitor,
                                const std::string& path = {}) {
    if constexpr (tree::detail::Tensor<Node> || tree::detail::PlainLeaf<Node>) {
      visitor(path, node);
    } else if constexpr (!tree::detail::IsOptional<Node>::value) {
      tree::for_each_child(node, [&](const std::string& key, const auto& child) {
        for_each_required(child, visitor, path.empty() ? key : path + "." + key);
      });
    }
  }

  static bool matches(const Leaf& leaf, const at::Tensor& tensor, bool varying_shapes) {
    if (!tensor.defined()) return leaf.dtype == c10::ScalarType::Undefined;
    if (tensor.scalar_type() != leaf.dtype) return false;
    const auto sizes = tensor.sizes();
    if (sizes.size() != leaf.sizes.size()) return false;
    if (varying_shapes) return true;
    for (std::size_t i = 1; i < sizes.size(); ++i) {
      if (sizes[i] != leaf.sizes[i]) return false;
    }
    return true;
  }

  void remember(const std::string& path, const at::Tensor& tensor, bool varying_shapes);
  void remember(const std::string& path);
  [[noreturn]] void report(const Leaf& leaf, const at::Tensor& found, bool varying_shapes,
                           const std::string& loader) const;
  [[noreturn]] void report_structure(const std::vector<std::string>& found,
                                     const std::string& loader) const;

  bool known_ = false;
  std::vector<Leaf> leaves_;
  std::vector<std::string> paths_;
  std::string signature_;
};

}  // namespace accelerate::data::detail
