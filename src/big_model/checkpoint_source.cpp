#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/io/safetensors.hpp>
#include <big_model/checkpoint_source.hpp>
#include <big_model/parts.hpp>
#include <intercept/internal_ops.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstring>
#include <set>

namespace accelerate::big_model {

namespace fs = std::filesystem;

namespace {

bool is_pt(const fs::path& file) {
  return file.extension() == ".pt" || file.extension() == ".pth" || file.extension() == ".bin";
}

// The file or index that a folder holds.
fs::path inside(const fs::path& folder) {
  for (const char* whole : {"model.safetensors", "pytorch_model.bin"}) {
    if (fs::exists(folder / whole)) return folder / whole;
  }
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".index.json") || name == "index.json") found.push_back(entry.path());
  }
  if (found.size() == 1) return found.front();
  if (found.empty()) {
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".safetensors" || is_pt(entry.path()))
        found.push_back(entry.path());
    }
    if (found.size() == 1) return found.front();
  }
  throw CheckpointError(
      text::concat("The folder ", folder, found.empty() ? " has no checkpoint" : " has several",
                   ". Expected is one of: model.safetensors, pytorch_model.bin, one index "
                   "(*.index.json) of several files, or a single file. Name the file itself."),
      folder.string());
}

}  // namespace

CheckpointSource::CheckpointSource(const fs::path& given) : given_(given) {
  if (!fs::exists(given)) {
    throw CheckpointError(text::concat("There is no checkpoint at ", given, "."), given.string());
  }
  const fs::path path = fs::is_directory(given) ? inside(given) : given;
  const std::string name = path.filename().string();
  if (is_pt(path)) {
    add_pt(path);
  } else if (name.ends_with(".bin.index.json") || name.ends_with(".pt.index.json")) {
    std::set<std::string> files;
    for (const auto& [weight, file] : io::safetensors::Index::read(path).weight_map)
      files.insert(file);
    for (const std::string& file : files) {
      if (!fs::exists(path.parent_path() / file)) {
        throw CheckpointError(text::concat("The index ", path, " names the file '", file,
                                           "', which is not beside it."),
                              path.string());
      }
    }
    for (const std::string& file : files) add_pt(path.parent_path() / file);
  } else {
    store_ = WeightStore::open(path);
    if (name != "index.json") mapped_.emplace(path);
  }
}

at::Tensor CheckpointSource::map(std::string_view name) const {
  at::Tensor tensor;
  if (const auto found = tensors_.find(name); found != tensors_.end()) {
    tensor = found->second;
  } else if (mapped_ && mapped_->contains(name)) {
    tensor = mapped_->get(name);
  }
  if (!tensor.defined() || !tensor.is_contiguous()) return {};
  const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  return address % tensor.element_size() == 0 ? tensor : at::Tensor();
}

void CheckpointSource::add_pt(const fs::path& file) {
  const checkpoints::PyValue value = checkpoints::load_pt(file);
  const auto refuse = [&](const std::string& what) {
    throw CheckpointError(
        text::concat(file, " ", what, ". Expected is a state dict: names and tensors."),
        file.string());
  };
  if (!value.is<checkpoints::PyDict>()) refuse("does not hold a dict");
  for (const auto& [key, entry] : value.as_dict().items) {
    if (!key.is<std::string>()) refuse("has a key that is no name");
    if (!entry.is<at::Tensor>())
      refuse(text::concat("has '", key.as_string(), "', which is no tensor"));
    tensors_.insert_or_assign(key.as_string(), entry.as_tensor());
  }
}

bool CheckpointSource::are_equal(std::string_view one, std::string_view other) const {
  if (dtype(one) != dtype(other) || shape(one) != shape(other)) return false;
  const WeightStore::Entry* const a = store_.find(one);
  const WeightStore::Entry* const b = store_.find(other);
  if (a == nullptr || b == nullptr) {
    const intercept::InternalOpsGuard internal;
    return at::equal(tensors_.find(one)->second, tensors_.find(other)->second);
  }
  if (a->file == b->file && a->offset == b->offset) return true;
  constexpr std::int64_t kAtOnce = 1 << 18;
  for (std::int64_t begin = 0; begin < a->elements(); begin += kAtOnce) {
    const std::int64_t count = std::min(kAtOnce, a->elements() - begin);
    const at::Tensor left = at::empty({count}, at::TensorOptions(a->dtype));
    const at::Tensor right = at::empty_like(left);
    read(one, begin, left);
    read(other, begin, right);
    if (std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) != 0)
      return false;
  }
  return true;
}

std::vector<std::string> CheckpointSource::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : store_.entries()) names.push_back(name);
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

bool CheckpointSource::contains(std::string_view name) const {
  return store_.find(name) != nullptr || tensors_.contains(name);
}

at::ScalarType CheckpointSource::dtype(std::string_view name) const {
  if (const auto* entry = store_.find(name)) return entry->dtype;
  return tensors_.find(name)->second.scalar_type();
}

std::vector<std::int64_t> CheckpointSource::shape(std::string_view name) const {
  if (const auto* entry = store_.find(name)) return entry->shape;
  return tensors_.find(name)->second.sizes().vec();
}

void CheckpointSource::read(std::string_view name, std::int64_t begin,
                            const at::Tensor& part) const {
  if (const WeightStore::Entry* entry = store_.find(name)) {
    // An offload folder has a file for each weight, too many to keep open.
    if (mapped_) return entry->read(files_.at(entry->file), name, begin, part);
    return entry->read(io::File::open(entry->file), name, begin, part);
  }
  const intercept::InternalOpsGuard internal;
  part.copy_(same_part(tensors_.find(name)->second, begin, part));
}

}  // namespace accelerate::big_model
