#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

/// Where the parts of a model go: sizes, limits, and the solver of device maps. Works on a plain
/// description of a model, so it needs neither LibTorch nor the weights.
namespace accelerate {

/// What one element of a tensor is, as far as sizes are concerned.
struct ElementType {
  /// "float32", "bfloat16", "int8", ...: as Python's torch prints it, without "torch.".
  std::string name;
  int bits = 0;
  /// Integers and booleans keep their type when a model is loaded in another.
  bool integral = false;

  /// The type of a name of torch ("float16", "torch.float16"), of safetensors ("F16") or of a
  /// quantised one ("int4", "int2", "fp8"). Throws ConfigError for others.
  static ElementType of(std::string_view name);
};

/// A model as names, shapes and types: its modules, their tensors, and which tensors are one and
/// the same.
class ModelTree {
 public:
  struct Tensor {
    /// Dotted path from the root.
    std::string name;
    std::vector<std::int64_t> shape;
    ElementType type;
    std::int64_t elements = 0;
    /// Equal for names of one and the same tensor.
    int identity = 0;
    bool is_buffer = false;
    /// The module that it belongs to, as an index into `modules()`.
    int module = 0;
  };
  struct Module {
    /// Dotted path from the root; empty for the root.
    std::string name;
    /// The class ("Block", "torch::nn::LinearImpl", "__torch__.net.Block"); may be empty.
    std::string type;
    int parent = -1;
    /// Indices into `modules()` and `tensors()`, in the order of registration.
    std::vector<int> children, parameters, buffers;
  };

  /// A tree with nothing but a root of this type.
  explicit ModelTree(std::string root_type = {});

  /// Adds the module at this path, and those above it that are not there. Sets the type of one that
  /// is. Returns its index.
  int add_module(std::string_view path, std::string type = {});
  /// Adds a parameter, and the modules above it that are not there. `same_as` is the path of a
  /// tensor that it is tied to, or empty. Throws ConfigError when the path is taken, a dimension is
  /// negative, or the number of elements does not fit 64 bits.
  void add_parameter(std::string_view path, std::vector<std::int64_t> shape, ElementType type,
                     std::string_view same_as = {});
  /// As add_parameter.
  void add_buffer(std::string_view path, std::vector<std::int64_t> shape, ElementType type,
                  std::string_view same_as = {});

  const std::vector<Module>& modules() const noexcept { return modules_; }
  const std::vector<Tensor>& tensors() const noexcept { return tensors_; }
  /// The index of a path, or -1.
  int find_module(std::string_view path) const;
  int find_tensor(std::string_view path) const;

  /// Each tensor once, under its first name: all parameters, then all buffers, depth first.
  std::vector<int> unique_tensors(bool parameters = true, bool buffers = true) const;

 private:
  void add_tensor(std::string_view path, std::vector<std::int64_t> shape, ElementType type,
                  std::string_view same_as, bool is_buffer);

  std::vector<Module> modules_;
  std::vector<Tensor> tensors_;
  std::unordered_map<std::string, int> module_at_;
  std::unordered_map<std::string, int> tensor_at_;
};

/// Whether a module of class `type` is what a user means by `wanted`: the whole name, its last part
/// ("Block" of "__torch__.net.Block"), or that without the "Impl" of LibTorch's classes.
bool is_module_type(std::string_view type, std::string_view wanted);

}  // namespace accelerate
