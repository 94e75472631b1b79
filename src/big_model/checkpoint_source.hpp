#pragma once

#include <accelerate/big_model/weight_store.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <big_model/open_files.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::big_model {

/// A checkpoint of either format: safetensors, or files of torch.save.
class CheckpointSource {
 public:
  /// A file, an index, or a folder with one of them. Throws CheckpointError when it is none, when
  /// several could be meant, or when a file is missing or damaged.
  explicit CheckpointSource(const std::filesystem::path& path);

  std::vector<std::string> names() const;
  bool contains(std::string_view name) const;
  at::ScalarType dtype(std::string_view name) const;
  std::vector<std::int64_t> shape(std::string_view name) const;
  /// Fills a part of a tensor of the weight's shape, as for_parts gives them: all of it, or what
  /// begins at the element `begin`. May be called by several threads.
  void read(std::string_view name, std::int64_t begin, const at::Tensor& part) const;

  /// Whether two names have the same values, bit for bit. Reads both unless they are one.
  bool are_equal(std::string_view one, std::string_view other) const;

  /// A weight as it lies in its mapped file: nothing is read yet, and writing to it does not change
  /// the file. Undefined where it cannot be used so: in an offload folder, or when its elements are
  /// not aligned.
  at::Tensor map(std::string_view name) const;

  /// The file that a weight is in; of files of torch.save, the checkpoint as it was given.
  const std::filesystem::path& file(std::string_view name) const {
    const WeightStore::Entry* entry = store_.find(name);
    return entry != nullptr ? entry->file : given_;
  }

  /// Null when the weights are in files of torch.save.
  const WeightStore* store() const noexcept { return tensors_.empty() ? &store_ : nullptr; }

 private:
  void add_pt(const std::filesystem::path& file);

  std::filesystem::path given_;
  WeightStore store_;
  mutable OpenFiles files_;
  std::map<std::string, at::Tensor, std::less<>> tensors_;  // in mapped files
  std::optional<checkpoints::TensorReader> mapped_;
};

}  // namespace accelerate::big_model
