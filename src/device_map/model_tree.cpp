#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/device_map/model_tree.hpp>

#include <algorithm>
#include <array>
#include <limits>
#include <unordered_set>

namespace accelerate {
namespace {

struct Known {
  const char* torch;
  const char* safetensors;
  int bits;
  bool integral;
};
constexpr std::array kKnown{
    Known{"float64", "F64", 64, false},
    Known{"float32", "F32", 32, false},
    Known{"float16", "F16", 16, false},
    Known{"bfloat16", "BF16", 16, false},
    Known{"float8_e4m3fn", "F8_E4M3", 8, false},
    Known{"float8_e5m2", "F8_E5M2", 8, false},
    Known{"float8_e8m0fnu", "F8_E8M0", 8, false},
    Known{"float8_e4m3fnuz", "F8_E4M3FNUZ", 8, false},
    Known{"float8_e5m2fnuz", "F8_E5M2FNUZ", 8, false},
    Known{"fp8", "FP8", 8, false},
    Known{"float6_e2m3fn", "F6_E2M3", 6, false},
    Known{"float6_e3m2fn", "F6_E3M2", 6, false},
    Known{"float4_e2m1fn", "F4", 4, false},
    Known{"complex64", "C64", 64, false},
    Known{"complex128", "C128", 128, false},
    Known{"complex32", "C32", 32, false},
    Known{"int64", "I64", 64, true},
    Known{"int32", "I32", 32, true},
    Known{"int16", "I16", 16, true},
    Known{"int8", "I8", 8, true},
    Known{"uint64", "U64", 64, true},
    Known{"uint32", "U32", 32, true},
    Known{"uint16", "U16", 16, true},
    Known{"uint8", "U8", 8, true},
    Known{"bool", "BOOL", 8, true},
    Known{"int4", "I4", 4, true},
    Known{"int2", "I2", 2, true},
};

std::pair<std::string_view, std::string_view> split_last(std::string_view path) {
  const auto dot = path.rfind('.');
  if (dot == std::string_view::npos) return {{}, path};
  return {path.substr(0, dot), path.substr(dot + 1)};
}

}  // namespace

ElementType ElementType::of(std::string_view name) {
  std::string_view bare = name;
  if (bare.starts_with("torch.")) bare.remove_prefix(6);
  for (const Known& known : kKnown) {
    if (bare == known.torch || bare == known.safetensors)
      return {known.torch, known.bits, known.integral};
  }
  std::vector<std::string> names;
  for (const Known& known : kKnown) names.emplace_back(known.torch);
  throw ConfigError(text::concat("There is no element type '", name, "'. Those there are: ",
                                 text::join(names, ", ", names.size()), "."));
}

ModelTree::ModelTree(std::string root_type) {
  modules_.push_back({{}, std::move(root_type), -1, {}, {}, {}});
  module_at_.emplace(std::string(), 0);
}

int ModelTree::find_module(std::string_view path) const {
  const auto found = module_at_.find(std::string(path));
  return found == module_at_.end() ? -1 : found->second;
}

int ModelTree::find_tensor(std::string_view path) const {
  const auto found = tensor_at_.find(std::string(path));
  return found == tensor_at_.end() ? -1 : found->second;
}

int ModelTree::add_module(std::string_view path, std::string type) {
  int at = find_module(path);
  if (at < 0) {
    if (find_tensor(path) >= 0)
      throw ConfigError(text::concat("'", path, "' cannot be a module: it is a tensor."));
    const int parent = add_module(split_last(path).first);
    at = static_cast<int>(modules_.size());
    modules_.push_back({std::string(path), {}, parent, {}, {}, {}});
    modules_[static_cast<std::size_t>(parent)].children.push_back(at);
    module_at_.emplace(std::string(path), at);
  }
  if (!type.empty()) modules_[static_cast<std::size_t>(at)].type = std::move(type);
  return at;
}

void ModelTree::add_parameter(std::string_view path, std::vector<std::int64_t> shape,
                              ElementType type, std::string_view same_as) {
  add_tensor(path, std::move(shape), std::move(type), same_as, false);
}

void ModelTree::add_buffer(std::string_view path, std::vector<std::int64_t> shape, ElementType type,
                           std::string_view same_as) {
  add_tensor(path, std::move(shape), std::move(type), same_as, true);
}

void ModelTree::add_tensor(std::string_view path, std::vector<std::int64_t> shape, ElementType type,
                           std::string_view same_as, bool is_buffer) {
  if (find_tensor(path) >= 0 || find_module(path) >= 0)
    throw ConfigError(text::concat("There are two things of the name '", path, "'."));
  std::int64_t elements = 1;
  for (const std::int64_t size : shape) {
    // 128 bits for one element is the most, so that bytes fit too.
    if (size < 0 ||
        (size > 0 && elements > std::numeric_limits<std::int64_t>::max() / 128 / size)) {
      throw ConfigError(
          text::concat("The tensor '", path, "' cannot have the shape [", text::join(shape), "]."));
    }
    elements *= size;
  }
  Tensor tensor{std::string(path),
                std::move(shape),
                std::move(type),
                elements,
                static_cast<int>(tensors_.size()),
                is_buffer,
                add_module(split_last(path).first)};
  if (!same_as.empty()) {
    const int other = find_tensor(same_as);
    if (other < 0) {
      throw ConfigError(
          text::concat("'", path, "' cannot be tied to '", same_as, "', which is not there."));
    }
    tensor.identity = tensors_[static_cast<std::size_t>(other)].identity;
  }
  const int index = static_cast<int>(tensors_.size());
  Module& module = modules_[static_cast<std::size_t>(tensor.module)];
  (is_buffer ? module.buffers : module.parameters).push_back(index);
  tensor_at_.emplace(tensor.name, index);
  tensors_.push_back(std::move(tensor));
}

std::vector<int> ModelTree::unique_tensors(bool parameters, bool buffers) const {
  std::vector<int> result;
  std::vector<bool> seen(tensors_.size(), false);
  const auto collect = [&](bool of_buffers) {
    const auto walk = [&](const auto& self, int at) -> void {
      const Module& module = modules_[static_cast<std::size_t>(at)];
      for (const int index : of_buffers ? module.buffers : module.parameters) {
        const auto identity =
            static_cast<std::size_t>(tensors_[static_cast<std::size_t>(index)].identity);
        if (seen[identity]) continue;
        seen[identity] = true;
        result.push_back(index);
      }
      for (const int child : module.children) self(self, child);
    };
    walk(walk, 0);
  };
  if (parameters) collect(false);
  if (buffers) collect(true);
  return result;
}

bool is_module_type(std::string_view type, std::string_view wanted) {
  if (wanted.empty()) return false;
  const auto ends_with = [&](std::string_view whole) {
    if (whole == wanted) return true;
    if (!whole.ends_with(wanted)) return false;
    const char before = whole[whole.size() - wanted.size() - 1];
    return before == ':' || before == '.';
  };
  if (ends_with(type)) return true;
  return type.ends_with("Impl") && ends_with(type.substr(0, type.size() - 4));
}

}  // namespace accelerate
