#pragma once

#include <accelerate/core/module.hpp>
#include <accelerate/io/file.hpp>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate {

/// Weights on a disk, found by name and read when they are wanted: a checkpoint of safetensors
/// files where it lies, or an offload folder as Python Accelerate writes it (`index.json`, and a
/// `.dat` file with the bare bytes of each weight). Files must stay as they were when the store was
/// opened: one that was replaced, written to or cut short is a CheckpointError when it is read.
/// Reading takes no more memory than a few megabytes, and may go on in several threads.
class WeightStore {
 public:
  /// One weight: its bytes lie in row-major order, little-endian.
  struct Entry {
    std::filesystem::path file;
    /// Of its first byte in the file.
    std::uint64_t offset = 0;
    /// Of the file when it was found.
    io::FileStamp stamp;
    at::ScalarType dtype = at::kFloat;
    std::vector<std::int64_t> shape;

    std::int64_t elements() const;
    std::int64_t bytes() const;
    /// Fills `tensor` with elements out of the open file: from the one numbered `begin` on, in
    /// row-major order, as many as it has; cast to its dtype. `name` is for the message when the
    /// file has changed since it was found, a CheckpointError.
    void read(const io::File& opened, std::string_view name, std::int64_t begin,
              const at::Tensor& tensor) const;
  };

  /// Nothing.
  WeightStore() = default;
  /// A safetensors file, its index, a folder with one of them, or an offload folder. Throws
  /// CheckpointError when there is no such thing, a file is missing or damaged, or a weight does
  /// not fit its file.
  static WeightStore open(const std::filesystem::path& path);

  const std::map<std::string, Entry, std::less<>>& entries() const noexcept { return entries_; }
  /// Null when there is none of this name.
  const Entry* find(std::string_view name) const;
  void add(std::string name, Entry entry) {
    entries_.insert_or_assign(std::move(name), std::move(entry));
  }

  /// Fills `tensor` with a weight of its shape; floating-point ones are cast to its dtype. Throws
  /// CheckpointError when the file has vanished or changed since it was found.
  void read(std::string_view name, const at::Tensor& tensor) const;

 private:
  const Entry& at(std::string_view name) const;

  std::map<std::string, Entry, std::less<>> entries_;
};

/// Writes weights into an offload folder, which is made if need be, and gives them back as a store.
/// A file that is there is replaced by a new one. The index is written last; what it had besides
/// these names stays in it. Throws CheckpointError, before anything is written, when the disk has
/// too little room, and when a dispatched module of any process reads from this folder.
WeightStore offload_state_dict(const std::filesystem::path& folder,
                               const std::vector<NamedTensor>& tensors);
/// The same for weights that are not all in memory: `like` have their shapes and dtypes (on the
/// meta device, for example), and `values` gives one when it is its turn.
WeightStore offload_state_dict(const std::filesystem::path& folder,
                               const std::vector<NamedTensor>& like,
                               const std::function<at::Tensor(const NamedTensor&)>& values);

}  // namespace accelerate
