#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <tuple>

namespace accelerate::checkpoints {

namespace fs = std::filesystem;
namespace st = io::safetensors;

namespace {

struct DtypePair {
  c10::ScalarType tensor;
  st::Dtype file;
};
constexpr std::array<DtypePair, 20> kDtypes{{
    {at::kBool, st::Dtype::kBool},
    {at::kFloat4_e2m1fn_x2, st::Dtype::kF4},
    {at::kByte, st::Dtype::kU8},
    {at::kChar, st::Dtype::kI8},
    {at::kFloat8_e5m2, st::Dtype::kF8E5M2},
    {at::kFloat8_e4m3fn, st::Dtype::kF8E4M3},
    {at::kFloat8_e8m0fnu, st::Dtype::kF8E8M0},
    {at::kFloat8_e4m3fnuz, st::Dtype::kF8E4M3Fnuz},
    {at::kFloat8_e5m2fnuz, st::Dtype::kF8E5M2Fnuz},
    {at::kShort, st::Dtype::kI16},
    {at::kUInt16, st::Dtype::kU16},
    {at::kHalf, st::Dtype::kF16},
    {at::kBFloat16, st::Dtype::kBF16},
    {at::kInt, st::Dtype::kI32},
    {at::kUInt32, st::Dtype::kU32},
    {at::kFloat, st::Dtype::kF32},
    {at::kComplexFloat, st::Dtype::kC64},
    {at::kDouble, st::Dtype::kF64},
    {at::kLong, st::Dtype::kI64},
    {at::kUInt64, st::Dtype::kU64},
}};

std::optional<st::Dtype> dtype_of(c10::ScalarType dtype) {
  for (const DtypePair& pair : kDtypes) {
    if (pair.tensor == dtype) return pair.file;
  }
  return std::nullopt;
}

// What makes two tensors one and the same.
using Identity = std::tuple<const void*, const void*, c10::ScalarType, std::vector<std::int64_t>,
                            std::vector<std::int64_t>>;

Identity identity(const at::Tensor& tensor) {
  return {tensor.storage().unsafeGetStorageImpl(), tensor.const_data_ptr(), tensor.scalar_type(),
          tensor.sizes().vec(), tensor.strides().vec()};
}

// Throws unless the tensor has memory of its own that can be read and filled element by element.
void check_plain(const NamedTensor& named) {
  const at::Tensor& tensor = named.tensor;
  const char* problem = nullptr;
  if (!tensor.defined()) {
    problem = "is undefined";
  } else if (tensor.layout() != at::kStrided) {
    problem = "is sparse; make it dense first";
  } else if (tensor.is_quantized()) {
    problem = "is quantized; dequantize it, or save its parts";
  } else if (tensor.is_meta()) {
    problem = "is on the meta device and has no data";
  }
  if (problem != nullptr) {
    throw UnsupportedError(text::concat("The tensor '", named.name, "' ", problem,
                                        ". It can be neither saved nor loaded."));
  }
}

// The tensors that are stored, and for the others the name they are stored under.
struct Unique {
  std::vector<NamedTensor> tensors;
  std::vector<st::TensorInfo> infos;
  std::map<std::string, std::string> aliases;
};

Unique unique(const std::vector<NamedTensor>& tensors) {
  Unique found;
  std::set<std::string_view> names;
  std::map<Identity, std::string> first;
  for (const NamedTensor& named : tensors) {
    if (!names.insert(named.name).second)
      throw ConfigError("Two tensors are called '" + named.name + "'.");
    st::TensorInfo info = tensor_info(named);  // refuses what has no strides or storage
    // Tensors without elements share nothing.
    if (named.tensor.numel() > 0) {
      const auto [at, fresh] = first.emplace(identity(named.tensor), named.name);
      if (!fresh) {
        found.aliases.emplace(named.name, at->second);
        continue;
      }
    }
    found.tensors.push_back(named);
    found.infos.push_back(std::move(info));
  }
  return found;
}

std::span<const std::byte> bytes_of(const at::Tensor& contiguous) {
  return {static_cast<const std::byte*>(contiguous.const_data_ptr()), contiguous.nbytes()};
}

void write_tensors(const std::vector<NamedTensor>& tensors, std::vector<st::TensorInfo> infos,
                   const fs::path& path, std::map<std::string, std::string> metadata) {
  metadata.emplace("format", "pt");
  st::Writer writer(path, st::Header(std::move(infos), std::move(metadata)));
  std::map<std::string_view, const at::Tensor*> by_name;
  for (const NamedTensor& named : tensors) by_name.emplace(named.name, &named.tensor);
  // In the order of the file, so that the disk sees one stream.
  for (const st::TensorInfo& info : writer.header().tensors()) {
    const at::Tensor host =
        by_name.at(info.name)->detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
    writer.write(info, bytes_of(host));
  }
  writer.finish();
}

std::string shape_text(c10::IntArrayRef shape) { return "[" + text::join(shape) + "]"; }

// LibTorch counts two 4-bit numbers as one element.
std::vector<std::int64_t> tensor_shape(const st::TensorInfo& info, const fs::path& path) {
  std::vector<std::int64_t> shape = info.shape;
  if (info.dtype == st::Dtype::kF4) {
    if (shape.empty() || shape.back() % 2 != 0) {
      throw CheckpointError(
          text::concat("The tensor '", info.name, "' of ", path.string(),
                       " has 4-bit elements and the shape ", shape_text(shape),
                       ", whose last dimension is odd; LibTorch holds them in pairs."),
          path.string());
    }
    shape.back() /= 2;
  }
  return shape;
}

}  // namespace

st::Dtype file_dtype(c10::ScalarType dtype) {
  if (const auto found = dtype_of(dtype)) return *found;
  throw UnsupportedError(text::concat("safetensors files have no dtype for ", c10::toString(dtype),
                                      ". Convert the tensor, or save a .pt file."));
}

c10::ScalarType tensor_dtype(st::Dtype dtype) {
  for (const DtypePair& pair : kDtypes) {
    if (pair.file == dtype) return pair.tensor;
  }
  throw UnsupportedError(text::concat("LibTorch has no dtype for ", st::name(dtype),
                                      ". Its bytes can be read with io::safetensors::Reader."));
}

st::TensorInfo tensor_info(const NamedTensor& named) {
  check_plain(named);
  const at::Tensor& tensor = named.tensor;
  const auto dtype = dtype_of(tensor.scalar_type());
  if (!dtype) {
    throw UnsupportedError(text::concat(
        "The tensor '", named.name, "' has the dtype ", c10::toString(tensor.scalar_type()),
        ", which safetensors files do not have. Convert it, or save "
        "a .pt file."));
  }
  st::TensorInfo info{.name = named.name, .dtype = *dtype, .shape = tensor.sizes().vec()};
  if (info.dtype == st::Dtype::kF4) {
    if (info.shape.empty()) {
      throw UnsupportedError(
          "The tensor '" + named.name +
          "' is a pair of 4-bit numbers without a dimension. It cannot be saved.");
    }
    info.shape.back() *= 2;
  }
  return info;
}

void save_file(const std::vector<NamedTensor>& tensors, const fs::path& path,
               std::map<std::string, std::string> metadata) {
  Unique stored = unique(tensors);
  metadata.merge(stored.aliases);
  io::replace_file(path, [&](const fs::path& partial) {
    write_tensors(stored.tensors, std::move(stored.infos), partial, std::move(metadata));
  });
}

std::vector<std::string> save_sharded(const std::vector<NamedTensor>& tensors,
                                      const fs::path& folder, std::string_view max_shard_size,
                                      std::string_view stem,
                                      const std::map<std::string, std::string>& metadata) {
  const std::uint64_t most = st::parse_size(max_shard_size);
  Unique stored = unique(tensors);
  std::map<std::string_view, const NamedTensor*> by_name;
  for (const NamedTensor& named : stored.tensors) by_name.emplace(named.name, &named);
  return st::write_shards(folder, stem, st::split(std::move(stored.infos), most),
                          [&](const fs::path& path, const std::vector<st::TensorInfo>& infos) {
                            std::map<std::string, std::string> with_aliases = metadata;
                            std::vector<NamedTensor> part;
                            for (const st::TensorInfo& info : infos) {
                              part.push_back(*by_name.at(info.name));
                              for (const auto& [alias, name] : stored.aliases) {
                                if (name == info.name) with_aliases.emplace(alias, name);
                              }
                            }
                            write_tensors(part, infos, path, std::move(with_aliases));
                          });
}

// --------------------------------------------------------------------------------- TensorReader

TensorReader::TensorReader(const fs::path& path)
    : files_(std::make_shared<const st::Collection>(path, io::Access::kCopyOnWrite)) {
  for (const auto& reader : files_->readers()) {
    for (const st::TensorInfo& info : reader->header().tensors()) names_.push_back(info.name);
    const auto& metadata = reader->header().metadata();
    metadata_.insert(metadata.begin(), metadata.end());
  }
  for (const auto& [alias, name] : metadata_) {
    // {"format": "pt"} is in most files, and no tensor's name.
    if (alias == "format" || files_->tensors().contains(alias) || !files_->tensors().contains(name))
      continue;
    aliases_.emplace(alias, name);
    names_.push_back(alias);
  }
}

bool TensorReader::contains(std::string_view name) const {
  return files_->tensors().contains(stored_name(name));
}

std::string_view TensorReader::stored_name(std::string_view name) const {
  const auto at = aliases_.find(name);
  return at == aliases_.end() ? name : std::string_view(at->second);
}

const st::Collection::Entry& TensorReader::entry(std::string_view name) const {
  return files_->at(stored_name(name));
}

const st::TensorInfo& TensorReader::info(std::string_view name) const { return *entry(name).info; }

std::vector<std::int64_t> TensorReader::shape(std::string_view name) const {
  const auto& [reader, info] = entry(name);
  return tensor_shape(*info, reader->path());
}

at::Tensor TensorReader::get(std::string_view name) const {
  const auto& [reader, info] = entry(name);
  const auto dtype = tensor_dtype(info->dtype);
  const auto shape = tensor_shape(*info, reader->path());
  const auto options = at::TensorOptions().dtype(dtype);
  const auto bytes = reader->bytes(*info);
  // A file of another writer may hold elements across their boundaries, which no kernel expects.
  if (bytes.empty() ||
      reinterpret_cast<std::uintptr_t>(bytes.data()) % c10::elementSize(dtype) != 0) {
    at::Tensor copy = at::empty(shape, options);
    if (!bytes.empty()) std::memcpy(copy.mutable_data_ptr(), bytes.data(), bytes.size());
    return copy;
  }
  // The map is copy-on-write, so writing through the tensor is allowed.
  return at::from_blob(
      const_cast<std::byte*>(bytes.data()), shape, [file = reader->file()](void*) {}, options);
}

void TensorReader::read_into(std::string_view name, const at::Tensor& tensor) const {
  const auto& [reader, info] = entry(name);
  const auto shape = tensor_shape(*info, reader->path());
  if (tensor.sizes() != shape) {
    throw CheckpointError(text::concat("The tensor '", name, "' has the shape ", shape_text(shape),
                                       " in ", reader->path().string(), ", and ",
                                       shape_text(tensor.sizes()), " was expected."),
                          reader->path().string());
  }
  const at::Tensor to = tensor.detach();
  if (to.is_cpu() && to.is_contiguous() && to.scalar_type() == tensor_dtype(info->dtype) &&
      !to.is_conj() && !to.is_neg()) {
    // Straight to where it belongs: no page is mapped, and a file that is cut short now is an
    // error.
    io::File::open(reader->path())
        .read(to.mutable_data_ptr(), info->bytes(), reader->header().data_offset() + info->begin);
    return;
  }
  reader->file()->check();
  to.copy_(get(name));
}

std::vector<NamedTensor> load_file(const fs::path& path) {
  const TensorReader reader(path);
  std::vector<NamedTensor> tensors;
  std::map<std::string_view, at::Tensor> first;  // names of one tensor share it
  for (const std::string& name : reader.names()) {
    at::Tensor& tensor = first[reader.stored_name(name)];
    if (!tensor.defined()) tensor = reader.get(name);
    tensors.push_back({name, tensor});
  }
  return tensors;
}

namespace {

// Where tensors are loaded from: a file, or tensors in memory.
struct Source {
  fs::path path;
  std::vector<std::string> names;
  // Nothing when there is no such tensor.
  std::function<std::optional<std::vector<std::int64_t>>(std::string_view name)> shape;
  // Names that share a tensor have one stored name.
  std::function<std::string_view(std::string_view name)> stored_name;
  std::function<void(std::string_view name, const at::Tensor& into)> read;
};

Mismatch fill(const std::vector<NamedTensor>& tensors, const Source& source, bool strict) {
  Mismatch mismatch;
  std::vector<std::string> shapes;
  std::vector<const NamedTensor*> found;
  std::set<std::string_view> used;
  std::set<Identity> filled;
  for (const NamedTensor& named : tensors) {
    check_plain(named);
    const auto shape = source.shape(named.name);
    if (!shape) continue;
    found.push_back(&named);
    filled.insert(identity(named.tensor));
    used.insert(source.stored_name(named.name));
    if (named.tensor.sizes() != *shape) {
      shapes.push_back(text::concat("'", named.name, "' is ", shape_text(*shape),
                                    " in the file and ", shape_text(named.tensor.sizes()),
                                    " here"));
    }
  }
  for (const NamedTensor& named : tensors) {
    if (!filled.contains(identity(named.tensor))) mismatch.missing.push_back(named.name);
  }
  for (const std::string& name : source.names) {
    if (!used.contains(source.stored_name(name))) mismatch.unexpected.push_back(name);
  }
  std::string problems;
  if (!shapes.empty()) problems += " Shapes differ: " + text::join(shapes) + ".";
  if (strict && !mismatch.missing.empty())
    problems += " The file lacks " + text::join(mismatch.missing) + ".";
  if (strict && !mismatch.unexpected.empty())
    problems += " The file also has " + text::join(mismatch.unexpected) + ".";
  if (!problems.empty()) {
    throw CheckpointError(source.path.string() + " does not fit, and nothing was changed." +
                              problems + " It seems to be of another model.",
                          source.path.string());
  }
  for (const NamedTensor* named : found) source.read(named->name, named->tensor);
  return mismatch;
}

}  // namespace

Mismatch load_into(const std::vector<NamedTensor>& tensors, const fs::path& path, bool strict) {
  const TensorReader reader(path);
  Source source{.path = reader.files().path(),
                .names = reader.names(),
                .shape = {},
                .stored_name = {},
                .read = {}};
  source.shape = [&](std::string_view name) -> std::optional<std::vector<std::int64_t>> {
    if (!reader.contains(name)) return std::nullopt;
    return reader.shape(name);
  };
  source.stored_name = [&](std::string_view name) { return reader.stored_name(name); };
  source.read = [&](std::string_view name, const at::Tensor& into) {
    reader.read_into(name, into);
  };
  return fill(tensors, source, strict);
}

Mismatch load_into(const std::vector<NamedTensor>& tensors, const std::vector<NamedTensor>& from,
                   const fs::path& path, bool strict) {
  std::map<std::string_view, const at::Tensor*> by_name;
  std::map<Identity, std::string_view> first_name;  // tied ones share their memory
  Source source{.path = path, .names = {}, .shape = {}, .stored_name = {}, .read = {}};
  for (const NamedTensor& named : from) {
    check_plain(named);
    by_name.emplace(named.name, &named.tensor);
    if (named.tensor.numel() > 0) first_name.emplace(identity(named.tensor), named.name);
    source.names.push_back(named.name);
  }
  source.shape = [&](std::string_view name) -> std::optional<std::vector<std::int64_t>> {
    const auto at = by_name.find(name);
    if (at == by_name.end()) return std::nullopt;
    return at->second->sizes().vec();
  };
  source.stored_name = [&](std::string_view name) {
    const auto first = first_name.find(identity(*by_name.at(name)));
    return first == first_name.end() ? name : first->second;
  };
  source.read = [&](std::string_view name, const at::Tensor& into) {
    into.detach().copy_(*by_name.at(name));
  };
  return fill(tensors, source, strict);
}

std::vector<NamedTensor> module_tensors(const ModuleRecord& module) {
  std::vector<NamedTensor> tensors;
  const auto walk = [&](const auto& self, const ModuleNode& node) -> void {
    for (const auto* own : {&node.parameters, &node.buffers}) {
      for (const NamedTensor& named : *own) {
        if (named.tensor.defined()) tensors.push_back(named);  // not a bias that is switched off
      }
    }
    for (const ModuleNode& child : node.children) self(self, child);
  };
  walk(walk, module.root());
  return tensors;
}

}  // namespace accelerate::checkpoints
