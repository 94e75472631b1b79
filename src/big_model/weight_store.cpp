#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/big_model/weight_store.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/io/safetensors.hpp>
#include <base/parse_json.hpp>
#include <big_model/folder_lock.hpp>
#include <big_model/parts.hpp>
#include <intercept/internal_ops.hpp>
#include <io/inside.hpp>
#include <io/system_error.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <map>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
namespace safetensors = io::safetensors;

// Small beside the weights, and large enough for a read to cost nothing.
constexpr std::int64_t kStagingBytes = std::int64_t{128} << 10;
constexpr std::int64_t kStagingBytesForDevices = std::int64_t{4} << 20;

// numpy's names of dtypes, in which the original's index is written; the last two kinds numpy does
// not know and the original writes by torch's name.
constexpr std::array<std::pair<const char*, at::ScalarType>, 20> kDtypes{{
    {"float32", at::kFloat},
    {"float64", at::kDouble},
    {"float16", at::kHalf},
    {"int64", at::kLong},
    {"int32", at::kInt},
    {"int16", at::kShort},
    {"int8", at::kChar},
    {"uint8", at::kByte},
    {"bool", at::kBool},
    {"uint16", at::kUInt16},
    {"uint32", at::kUInt32},
    {"uint64", at::kUInt64},
    {"complex64", at::kComplexFloat},
    {"complex128", at::kComplexDouble},
    {"bfloat16", at::kBFloat16},
    {"float8_e4m3fn", at::kFloat8_e4m3fn},
    {"float8_e5m2", at::kFloat8_e5m2},
    {"float8_e4m3fnuz", at::kFloat8_e4m3fnuz},
    {"float8_e5m2fnuz", at::kFloat8_e5m2fnuz},
    {"float8_e8m0fnu", at::kFloat8_e8m0fnu},
}};

at::ScalarType dtype_of(std::string_view name, const fs::path& index) {
  if (name.starts_with("torch.")) name.remove_prefix(6);
  for (const auto& [text, dtype] : kDtypes) {
    if (name == text) return dtype;
  }
  throw CheckpointError(
      text::concat("The offload index ", index, " has the unknown dtype '", name, "'."),
      index.string());
}

std::string name_of(at::ScalarType dtype, const std::string& weight) {
  for (const auto& [text, known] : kDtypes) {
    if (known == dtype) return text;
  }
  throw UnsupportedError(text::concat("'", weight, "' has dtype ", dtype,
                                      ", which cannot be written to an offload folder."));
}

void add_collection(WeightStore& store, const fs::path& path) {
  const safetensors::Collection files(path);
  for (const auto& [name, entry] : files.tensors()) {
    const safetensors::Header& header = entry.reader->header();
    store.add(name, {entry.reader->path(), header.data_offset() + entry.info->begin,
                     entry.reader->file()->stamp(), checkpoints::tensor_dtype(entry.info->dtype),
                     entry.info->shape});
  }
  // A name that is tied to another is in the metadata only, under the name that has the bytes.
  for (const auto& reader : files.readers()) {
    for (const auto& [name, stored] : reader->header().metadata()) {
      if (store.find(name) == nullptr && store.find(stored) != nullptr)
        store.add(name, *store.find(stored));
    }
  }
}

// Nothing when it can be.
std::string not_a_file_name(const std::string& weight) {
  if (weight.find_first_of(std::string_view("/\0", 2)) == std::string::npos && !weight.empty() &&
      !weight.starts_with('.'))
    return {};
  return text::concat("has the weight '", weight, "', which cannot be the name of a file.");
}

bool can_be_counted(const WeightStore::Entry& entry) {
  std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(entry.dtype));
  for (const std::int64_t size : entry.shape) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return false;
  }
  return true;
}

void add_folder(WeightStore& store, const fs::path& index_path) {
  const auto refuse = [&](const std::string& what) {
    throw CheckpointError(text::concat("The offload index ", index_path, " ", what),
                          index_path.string());
  };
  Json index;
  try {
    index = parse_json(io::read_file(index_path));
  } catch (const DataError& error) {
    refuse(text::concat("cannot be read. ", error.what()));
  }
  if (!index.is_object()) refuse("is not a JSON object.");
  const fs::path folder = index_path.parent_path();
  struct Opened {
    io::FileStamp stamp;
    safetensors::Header header;
  };
  std::map<std::string, Opened> opened;  // many weights are in one
  for (const auto& [name, value] : index.items()) {
    try {
      if (value.contains("safetensors_file")) {
        const auto& file_name = value.at("safetensors_file").get_ref<const std::string&>();
        if (!io::stays_inside(file_name)) {
          refuse(text::concat("says that '", name, "' is in '", file_name,
                              "', which is not a file in its folder."));
        }
        const fs::path file = folder / file_name;
        const std::string weight = value.value("weight_name", name);
        auto found = opened.find(file_name);
        if (found == opened.end()) {
          const io::FileStamp stamp = io::File::open(file).stamp();
          found = opened.emplace(file_name, Opened{stamp, safetensors::Header::read(file)}).first;
        }
        const auto& [stamp, header] = found->second;
        const safetensors::TensorInfo* info = header.find(weight);
        if (info == nullptr)
          refuse(text::concat("says that '", weight, "' is in ", file, ", and it is not."));
        store.add(name, {file, header.data_offset() + info->begin, stamp,
                         checkpoints::tensor_dtype(info->dtype), info->shape});
        continue;
      }
      if (const std::string why = not_a_file_name(name); !why.empty()) refuse(why);
      WeightStore::Entry entry{folder / (name + ".dat"),
                               0,
                               {},
                               dtype_of(value.at("dtype").get<std::string>(), index_path),
                               value.at("shape").get<std::vector<std::int64_t>>()};
      if (std::any_of(entry.shape.begin(), entry.shape.end(), [](auto size) { return size < 0; }))
        refuse(text::concat("gives '", name, "' a negative dimension."));
      if (!can_be_counted(entry))
        refuse(text::concat("gives '", name, "' more elements than can be counted."));
      entry.stamp = io::File::open(entry.file).stamp();
      if (entry.stamp.bytes != static_cast<std::uint64_t>(entry.bytes())) {
        refuse(text::concat("says that '", name, "' has ", entry.bytes(), " bytes, and ",
                            entry.file, " has ", entry.stamp.bytes, "."));
      }
      store.add(name, std::move(entry));
    } catch (const Json::exception&) {
      refuse(text::concat("does not say the dtype and shape of '", name, "'."));
    }
  }
}

std::string what_changed(const io::FileStamp& before, const io::FileStamp& now) {
  if (now.device != before.device || now.inode != before.inode)
    return "was replaced by another file";
  if (now.bytes != before.bytes)
    return text::concat("had ", before.bytes, " bytes and now has ", now.bytes);
  return "was written to";
}

// Never written to in place: whoever has the old file open keeps its values, and whoever finds the
// new one under its name can tell.
io::FileStamp replace_file(const fs::path& path, const at::Tensor& contents) {
  fs::path partial = path;
  partial += ".partial";
  try {
    io::File file = io::File::create(partial);
    file.write(contents.const_data_ptr(), contents.nbytes(), 0);
    const io::FileStamp stamp = file.stamp();
    file.close();
    if (std::rename(partial.c_str(), path.c_str()) != 0)
      io::throw_system(errno, path, "Could not rename ", partial.string(), " to ", path.string());
    return stamp;
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    fs::remove(partial, ignored);
    throw;
  }
}

}  // namespace

std::int64_t WeightStore::Entry::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

std::int64_t WeightStore::Entry::bytes() const {
  return elements() * static_cast<std::int64_t>(c10::elementSize(dtype));
}

WeightStore WeightStore::open(const fs::path& path) {
  WeightStore store;
  const bool is_folder = fs::is_directory(path);
  if (is_folder && fs::exists(path / "index.json") && !fs::exists(path / "model.safetensors")) {
    add_folder(store, fs::absolute(path / "index.json"));
  } else if (!is_folder && path.filename() == "index.json") {
    add_folder(store, fs::absolute(path));
  } else {
    add_collection(store, path);
  }
  return store;
}

const WeightStore::Entry* WeightStore::find(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

const WeightStore::Entry& WeightStore::at(std::string_view name) const {
  if (const Entry* entry = find(name)) return *entry;
  throw StateError(text::concat("There is no weight '", name, "' in this store."));
}

void WeightStore::read(std::string_view name, const at::Tensor& tensor) const {
  const Entry& entry = at(name);
  if (tensor.sizes() != at::IntArrayRef(entry.shape)) {
    throw CheckpointError(
        text::concat("'", name, "' has the shape [", text::join(entry.shape), "] in ", entry.file,
                     ", and [", text::join(tensor.sizes()), "] in the module."),
        entry.file.string());
  }
  entry.read(io::File::open(entry.file), name, 0, tensor);
}

void WeightStore::Entry::read(const io::File& opened, std::string_view name, std::int64_t begin,
                              const at::Tensor& tensor) const {
  const intercept::InternalOpsGuard internal;
  if (const io::FileStamp now = opened.stamp(); now != stamp) {
    throw CheckpointError(
        text::concat("The file ", file, " of the offloaded weight '", name, "' ",
                     what_changed(stamp, now),
                     " since it was opened. It must stay as it is while the module is used; put "
                     "back what was there, or load the module again."),
        file.string());
  }
  if (tensor.numel() == 0) return;
  const auto item = static_cast<std::int64_t>(c10::elementSize(dtype));
  const auto at = [&](std::int64_t element) {
    return offset + static_cast<std::uint64_t>((begin + element) * item);
  };
  if (tensor.is_cpu() && tensor.scalar_type() == dtype && tensor.is_contiguous()) {
    opened.read(tensor.mutable_data_ptr(), static_cast<std::size_t>(tensor.nbytes()), at(0));
    return;
  }
  // Through a small buffer: to another dtype, device or order in memory.
  const std::int64_t most = (tensor.is_cpu() ? kStagingBytes : kStagingBytesForDevices) / item;
  const at::Tensor staging = at::empty({std::min(most, tensor.numel())},
                                       at::TensorOptions(dtype).pinned_memory(tensor.is_cuda()));
  big_model::for_parts(tensor, most, [&](std::int64_t first, const at::Tensor& part) {
    const at::Tensor staged = staging.narrow(0, 0, part.numel()).view(part.sizes());
    opened.read(staged.mutable_data_ptr(), static_cast<std::size_t>(staged.nbytes()), at(first));
    part.copy_(staged);
  });
}

WeightStore offload_state_dict(const fs::path& folder, const std::vector<NamedTensor>& tensors) {
  return offload_state_dict(folder, tensors, [&](const NamedTensor& entry) {
    if (!entry.tensor.is_meta()) return entry.tensor;
    throw StateError(text::concat("'", entry.name,
                                  "' has a shape and no values (it is on the meta device), so it "
                                  "cannot be written to ",
                                  folder, ". Load a checkpoint first."));
  });
}

WeightStore offload_state_dict(const fs::path& folder, const std::vector<NamedTensor>& like,
                               const std::function<at::Tensor(const NamedTensor&)>& values) {
  const intercept::InternalOpsGuard internal;
  io::make_folders(folder);
  const big_model::FolderLock alone(folder, big_model::FolderLock::Kind::write);
  const fs::path index_path = fs::absolute(folder / "index.json");
  Json index = Json::object();
  if (fs::exists(index_path)) {
    try {
      index = parse_json(io::read_file(index_path));
    } catch (const DataError&) {
      index = nullptr;
    }
    if (!index.is_object()) {
      throw CheckpointError(
          text::concat("The offload index ", index_path,
                       " that is there is not a JSON object. Remove the folder, or "
                       "name another."),
          index_path.string());
    }
  }
  // Of a file that is replaced, both are there for a while.
  std::uint64_t needed = 0, largest = 0;
  for (const auto& [name, tensor] : like) {
    if (const std::string why = not_a_file_name(name); !why.empty())
      throw ConfigError(text::concat("The module ", why));
    const fs::path file = folder / (name + ".dat");
    const auto bytes = static_cast<std::uint64_t>(tensor.nbytes());
    const std::uint64_t there = fs::exists(file) ? fs::file_size(file) : 0;
    needed += bytes - std::min(there, bytes);
    if (there > 0) largest = std::max(largest, bytes);
  }
  needed += largest;
  if (const std::uint64_t free = io::free_bytes(folder); needed > free) {
    throw CheckpointError(
        text::concat("The weights to offload need ",
                     text::format_bytes(static_cast<std::int64_t>(needed)), " and the disk of ",
                     folder, " has ", text::format_bytes(static_cast<std::int64_t>(free)),
                     " left."),
        folder.string());
  }
  WeightStore store;
  for (const NamedTensor& each : like) {
    const auto& [name, tensor] = each;
    WeightStore::Entry entry{
        fs::absolute(folder / (name + ".dat")), 0, {}, tensor.scalar_type(), tensor.sizes().vec()};
    index[name] = {{"dtype", name_of(entry.dtype, name)}, {"shape", entry.shape}};
    const at::Tensor bytes = values(each).detach().cpu().to(entry.dtype).contiguous();
    entry.stamp = replace_file(entry.file, bytes);
    store.add(name, std::move(entry));
  }
  io::write_file(index_path, index.dump(2));
  return store;
}

}  // namespace accelerate
