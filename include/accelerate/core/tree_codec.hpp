#pragma once

#include <accelerate/core/tree.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

/// Trees as bytes: how a batch travels to another process whole, with its strings, numbers,
/// optionals and maps, whatever the shapes of its tensors.
namespace accelerate::tree {

/// Writes values one after another.
class Writer {
 public:
  void integer(std::int64_t value);
  void real(double value);
  void text(std::string_view value);
  /// Undefined tensors too. Tensors of any device are written from the host. Throws
  /// UnsupportedError for layouts other than strided and for quantized dtypes.
  void tensor(const at::Tensor& value);
  std::string take() { return std::move(bytes_); }

 private:
  void raw(const void* data, std::size_t size) {
    bytes_.append(static_cast<const char*>(data), size);
  }
  std::string bytes_;
};

/// Reads what a Writer wrote, which must outlive it. Throws DataError when the bytes hold something
/// else.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  std::int64_t integer();
  double real();
  std::string text();
  /// A tensor on the CPU with memory of its own.
  at::Tensor tensor();
  /// A number of items, each of which takes at least one byte.
  std::size_t count();

 private:
  std::string_view raw(std::size_t size);
  void expect(char tag, const char* what);
  std::string_view bytes_;
};

template <class T>
requires TensorTree<T>
void write(Writer& out, const T& node) {
  if constexpr (detail::Tensor<T>) {
    out.tensor(node);
  } else if constexpr (std::is_floating_point_v<T>) {
    out.real(static_cast<double>(node));
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    out.integer(static_cast<std::int64_t>(node));
  } else if constexpr (std::is_same_v<T, std::string>) {
    out.text(node);
  } else {
    if constexpr (detail::IsOptional<T>::value) {
      out.integer(node.has_value());
    } else if constexpr (detail::IsSequence<T>::value || detail::IsMap<T>::value) {
      out.integer(static_cast<std::int64_t>(node.size()));
    }
    if constexpr (detail::IsMap<T>::value) {
      for (const auto& [key, child] : node) {
        write(out, key);
        write(out, child);
      }
    } else {
      for_each_child(node, [&](const auto&, const auto& child) { write(out, child); });
    }
  }
}

template <class T>
requires TensorTree<T>
void read(Reader& in, T& node) {
  if constexpr (detail::Tensor<T>) {
    static_cast<at::Tensor&>(node) = in.tensor();
  } else if constexpr (std::is_floating_point_v<T>) {
    node = static_cast<T>(in.real());
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    node = static_cast<T>(in.integer());
  } else if constexpr (std::is_same_v<T, std::string>) {
    node = in.text();
  } else if constexpr (detail::IsMap<T>::value) {
    node.clear();
    for (std::size_t left = in.count(); left > 0; --left) {
      typename T::key_type key{};
      read(in, key);
      read(in, node[std::move(key)]);
    }
  } else {
    if constexpr (detail::IsOptional<T>::value) {
      if (in.integer() != 0) {
        node.emplace();
      } else {
        node.reset();
      }
    } else if constexpr (requires { node.resize(std::size_t()); }) {
      node.resize(in.count());
    } else if constexpr (detail::IsSequence<T>::value) {
      in.integer();  // an array has its size
    }
    for_each_child(node, [&](const auto&, auto& child) { read(in, child); });
  }
}

/// The whole tree.
template <class T>
requires TensorTree<T> std::string encode(const T& node) {
  Writer out;
  write(out, node);
  return out.take();
}
template <class T>
requires TensorTree<T> && std::is_default_constructible_v<T> T decode(std::string_view bytes) {
  Reader in(bytes);
  T node{};
  read(in, node);
  return node;
}

}  // namespace accelerate::tree
