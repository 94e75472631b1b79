#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/base/placement.hpp>
#include <accelerate/io/checksum.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/io/safetensors.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// What a checkpoint's folder contains: every file with the checksums of its blocks, and where each
/// tensor's elements lie in them. Whoever has this can read any part of any tensor without reading
/// the rest, whatever the number of processes that wrote it.
namespace accelerate::io {

/// A box of a tensor that lies in a file without gaps.
struct SavedBox {
  /// Index into Manifest::files.
  std::size_t file = 0;
  /// Where in the file it begins, in bytes.
  std::uint64_t position = 0;
  Box box;
};

/// A tensor that lies in files as one box or several.
struct SavedTensor {
  safetensors::Dtype dtype = safetensors::Dtype::kF32;
  std::vector<std::int64_t> shape;
  /// The dimensions from the slowest to the fastest, in each box. Empty for row-major order, which
  /// is all that is written today; manifests of version 1 know others.
  std::vector<std::int64_t> order;
  /// Each element is in one of them.
  std::vector<SavedBox> boxes;

  std::int64_t elements() const noexcept;
  /// Of so many elements. They are a whole number of bytes in a manifest that was checked.
  std::uint64_t bytes(std::int64_t count) const noexcept {
    return static_cast<std::uint64_t>(count) *
           static_cast<std::uint64_t>(safetensors::bits(dtype)) / 8;
  }
  /// The same bytes as a tensor of bytes with one dimension. For elements smaller than a byte,
  /// which lie in one box.
  SavedTensor as_bytes() const;
};

struct SavedFile {
  std::string name;
  std::uint64_t bytes = 0;
  /// Of each block of kChecksumBlock bytes.
  std::vector<std::uint64_t> checksums;
};

class Manifest {
 public:
  /// The file in the checkpoint's folder.
  static constexpr std::string_view kFileName = "manifest.json";

  std::vector<SavedFile> files;
  /// Tensors by the group they belong to ("model", "optimizer") and their name.
  std::map<std::string, std::map<std::string, SavedTensor>, std::less<>> groups;
  /// In each group, other names of a tensor.
  std::map<std::string, std::map<std::string, std::string>, std::less<>> aliases;
  /// What else the writer had to say: an object.
  Json about = Json::object();

  /// The file's contents: JSON, whose first line has the checksum of the rest. Throws StateError
  /// for a tensor with an `order`, which is not written any more.
  std::string text() const;
  /// Throws CheckpointError, naming `path`, when this is not such a text, was changed, or
  /// contradicts itself.
  static Manifest parse(std::string_view text, const std::filesystem::path& path);
  /// Reads that of a checkpoint's folder. Throws CheckpointError when there is none.
  static Manifest read(const std::filesystem::path& folder);

  /// Throws CheckpointError, naming `path`, unless every element of every tensor is in exactly one
  /// box, inside its file.
  void check(const std::filesystem::path& path) const;
  /// Throws CheckpointError when a file is missing or has another size.
  void check_files(const std::filesystem::path& folder) const;
  /// Null when there is none.
  const SavedTensor* find(std::string_view group, const std::string& name) const;
};

/// Throws CheckpointError when `folder` holds a checkpoint: other files put there would make it one
/// that its manifest does not describe.
void expect_no_checkpoint(const std::filesystem::path& folder);

/// What is done with a block's bytes once its checksum was right.
using VerifiedBlock = std::function<void(std::size_t block, std::span<const std::byte> bytes)>;

/// Reads these blocks of a checkpoint's file and compares their checksums, on several threads,
/// which call `each`, if given. Throws CheckpointError naming the file and the bytes that were
/// changed.
void verify_blocks(const File& file, const SavedFile& saved, std::span<const std::size_t> blocks,
                   const VerifiedBlock& each = nullptr);
/// The same with the file of the name `saved.name` in `folder`.
void verify_blocks(const std::filesystem::path& folder, const SavedFile& saved,
                   std::span<const std::size_t> blocks, const VerifiedBlock& each = nullptr);

}  // namespace accelerate::io
