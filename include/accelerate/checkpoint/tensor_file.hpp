#pragma once

#include <accelerate/core/module.hpp>
#include <accelerate/io/safetensors.hpp>

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// Tensors in safetensors files, which Python and other languages read and write too.
namespace accelerate::checkpoints {

/// The dtype in a file of tensors of this dtype. Throws UnsupportedError for those that safetensors
/// does not have (complex128, quantized).
io::safetensors::Dtype file_dtype(c10::ScalarType dtype);
/// And back. Throws UnsupportedError for those that LibTorch does not have (six bits).
c10::ScalarType tensor_dtype(io::safetensors::Dtype dtype);

/// A tensor's entry in a file: name, dtype and shape. Two 4-bit numbers that LibTorch counts as one
/// element are two in the file. Throws UnsupportedError when it is sparse, quantized or has no
/// data.
io::safetensors::TensorInfo tensor_info(const NamedTensor& tensor);

/// Writes a file in full or not at all, in place of one that is there. Tensors of any device and
/// strides. One that is also there under an earlier name (same memory, shape and strides) is stored
/// once, and the metadata has {name: earlier name}, as safetensors.torch.save_model writes it. To
/// the metadata, {"format": "pt"} is added.
void save_file(const std::vector<NamedTensor>& tensors, const std::filesystem::path& path,
               std::map<std::string, std::string> metadata = {});

/// Writes tensors to as many files as `max_shard_size` ("5GB" is 5 * 10^9 bytes, "5GiB" 5 * 2^30)
/// makes needed: `folder`/`stem`.safetensors, or `stem`-00001-of-00002.safetensors and so on with
/// `stem`.safetensors.index.json, as Hugging Face's tools do. Tensors fill files in the order
/// given; one that is larger has a file of its own. Files of an earlier save under this stem that
/// are not written again are removed, last. Returns the names of the files, the index first where
/// there is one.
std::vector<std::string> save_sharded(const std::vector<NamedTensor>& tensors,
                                      const std::filesystem::path& folder,
                                      std::string_view max_shard_size = "10GB",
                                      std::string_view stem = "model",
                                      const std::map<std::string, std::string>& metadata = {});

/// The tensors of a file, of an index and its files, or of a folder with either, read as they are
/// asked for.
class TensorReader {
 public:
  /// Reads the headers. Throws CheckpointError when a file is missing or damaged.
  explicit TensorReader(const std::filesystem::path& path);

  /// In the order of the files, and of the bytes in each; after them the names that share another's
  /// tensor.
  const std::vector<std::string>& names() const noexcept { return names_; }
  bool contains(std::string_view name) const;
  /// For a name that shares another's tensor, that other name; otherwise the name itself.
  std::string_view stored_name(std::string_view name) const;
  /// Of all files together.
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }
  /// Dtype, shape and place. Throws CheckpointError when there is no such tensor.
  const io::safetensors::TensorInfo& info(std::string_view name) const;
  /// The shape that `get` gives.
  std::vector<std::int64_t> shape(std::string_view name) const;

  /// A tensor on the CPU that lies in the mapped file: nothing is read before it is used, and what
  /// is written into it does not reach the file. It keeps the map. Names that share a tensor give
  /// tensors that share memory.
  at::Tensor get(std::string_view name) const;
  /// Reads into a tensor of the same shape, of any device and dtype. Throws CheckpointError when
  /// the shapes differ.
  void read_into(std::string_view name, const at::Tensor& tensor) const;

  const io::safetensors::Collection& files() const noexcept { return *files_; }

 private:
  const io::safetensors::Collection::Entry& entry(std::string_view name) const;

  std::shared_ptr<const io::safetensors::Collection> files_;
  std::vector<std::string> names_;
  std::map<std::string, std::string, std::less<>> aliases_;
  std::map<std::string, std::string> metadata_;
};

/// Every tensor of a file, an index or a folder, as TensorReader gives them.
std::vector<NamedTensor> load_file(const std::filesystem::path& path);

/// What a load did not find a match for.
struct Mismatch {
  /// Tensors that were to be filled and are not in the file.
  std::vector<std::string> missing;
  /// Tensors in the file that nothing was filled from.
  std::vector<std::string> unexpected;
};

/// A module's parameters and buffers under every name they have, in the order of Python's
/// `state_dict()`. Tied ones have several names and one memory. The tensors are the module's own:
/// fill them to load it.
std::vector<NamedTensor> module_tensors(const ModuleRecord& module);

/// Fills tensors by name from a safetensors file, an index or a folder. Everything is compared
/// before the first one is touched: throws CheckpointError, with all differences in its message,
/// when shapes differ, and when `strict` if names do. A tensor with several names (tied) is filled
/// if the file has one of them. dtypes are converted.
Mismatch load_into(const std::vector<NamedTensor>& tensors, const std::filesystem::path& path,
                   bool strict = true);

/// The same from tensors in memory, as load_pt gives them. `path` says in messages where they are
/// from.
Mismatch load_into(const std::vector<NamedTensor>& tensors, const std::vector<NamedTensor>& from,
                   const std::filesystem::path& path, bool strict = true);

}  // namespace accelerate::checkpoints
