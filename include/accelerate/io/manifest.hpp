#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/io/checksum.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/io/safetensors.hpp>

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// What a checkpoint's folder contains: every file with the checksums of its blocks, and where each
/// tensor's elements lie in them. Whoever has this can read any range of any tensor without reading
/// the rest, whatever the number of processes that wrote it.
namespace accelerate::io {

/// Some consecutive elements of a tensor in a file.
struct Piece {
  /// Index into Manifest::files.
  std::size_t file = 0;
  /// The first element, and how many.
  std::int64_t first = 0;
  std::int64_t count = 0;
  /// Where in the file they begin, in bytes.
  std::uint64_t position = 0;
};

/// A tensor whose elements lie in one piece or several.
struct SavedTensor {
  safetensors::Dtype dtype = safetensors::Dtype::kF32;
  std::vector<std::int64_t> shape;
  /// The dimensions from the slowest to the fastest, in the order of the elements. Empty: row-major
  /// order.
  std::vector<std::int64_t> order;
  /// By their first element, without gaps.
  std::vector<Piece> pieces;

  std::int64_t elements() const noexcept;
  /// Of so many elements. They are a whole number of bytes in a manifest that was checked.
  std::uint64_t bytes(std::int64_t count) const noexcept {
    return static_cast<std::uint64_t>(count) *
           static_cast<std::uint64_t>(safetensors::bits(dtype)) / 8;
  }
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

  /// The file's contents: JSON, whose first line has the checksum of the rest.
  std::string text() const;
  /// Throws CheckpointError, naming `path`, when this is not such a text, was changed, or
  /// contradicts itself.
  static Manifest parse(std::string_view text, const std::filesystem::path& path);
  /// Reads that of a checkpoint's folder. Throws CheckpointError when there is none.
  static Manifest read(const std::filesystem::path& folder);

  /// Throws CheckpointError, naming `path`, unless every element of every tensor is in exactly one
  /// piece, inside its file.
  void check(const std::filesystem::path& path);
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

/// Reads elements of tensors, in any thread. Keeps the files open.
class PieceReader {
 public:
  PieceReader(std::filesystem::path folder, const Manifest& manifest);

  /// Calls `visit(piece, first, count)` for each part of elements [first, first + count).
  template <class Visitor>
  static void for_each_part(const SavedTensor& tensor, std::int64_t first, std::int64_t count,
                            Visitor&& visit) {
    for (const Piece& piece : tensor.pieces) {
      const std::int64_t begin = first > piece.first ? first : piece.first;
      const std::int64_t own_end = piece.first + piece.count;
      const std::int64_t end = first + count < own_end ? first + count : own_end;
      if (begin < end) visit(piece, begin, end - begin);
    }
  }

  /// Elements [first, first + count) to `data`.
  void read(const SavedTensor& tensor, std::int64_t first, std::int64_t count, std::byte* data);
  /// One of the manifest's files, opened when it is asked for first.
  const File& file(std::size_t index);

 private:
  std::filesystem::path folder_;
  const Manifest& manifest_;
  std::mutex mutex_;
  std::map<std::size_t, File> open_;
};

}  // namespace accelerate::io
