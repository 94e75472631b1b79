#pragma once

#include <accelerate/io/file.hpp>
#include <accelerate/io/mapped_file.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

/// The safetensors format: eight bytes with the length of a JSON header, the header (names, dtypes,
/// shapes, offsets and a map of text called metadata), and the bytes of the tensors without gaps.
/// Everything that is read is checked before it is used; a file that is not exactly so is a
/// CheckpointError that names the file and the reason.
namespace accelerate::io::safetensors {

/// Every dtype of the format.
enum class Dtype : std::uint8_t {
  kBool,
  kF4,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

/// As it stands in a file: "F32", "F8_E4M3".
std::string_view name(Dtype dtype) noexcept;
std::optional<Dtype> parse_dtype(std::string_view name) noexcept;
/// Of one element: 4 to 64.
int bits(Dtype dtype) noexcept;

/// One tensor of a file. Elements lie in row-major order, little-endian.
struct TensorInfo {
  std::string name;
  Dtype dtype = Dtype::kF32;
  std::vector<std::int64_t> shape;
  /// Where its bytes are, counted from the end of the header.
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  std::uint64_t bytes() const noexcept { return end - begin; }
};

/// What stands before the tensors.
class Header {
 public:
  /// Nothing.
  Header() = default;
  /// Places tensors one after another, those with larger elements first so that all are aligned,
  /// and otherwise in the order given. Their `begin` and `end` are ignored. Throws ConfigError when
  /// two have one name, or when a shape is negative, has more elements than can be counted, or
  /// fills no whole number of bytes.
  explicit Header(std::vector<TensorInfo> tensors,
                  std::map<std::string, std::string> metadata = {});
  /// From the JSON of a file of which `data_bytes` follow the header. Throws CheckpointError naming
  /// `path`.
  static Header parse(std::string_view json, std::uint64_t data_bytes,
                      const std::filesystem::path& path);
  /// Reads the header of a file, and nothing else of it.
  static Header read(const std::filesystem::path& path);

  /// In the order of their bytes.
  const std::vector<TensorInfo>& tensors() const noexcept { return tensors_; }
  const std::map<std::string, std::string>& metadata() const noexcept { return metadata_; }
  /// Null when there is none of this name.
  const TensorInfo* find(std::string_view name) const;
  /// Where in the file the bytes of the tensors begin.
  std::uint64_t data_offset() const noexcept { return data_offset_; }
  std::uint64_t data_bytes() const noexcept { return tensors_.empty() ? 0 : tensors_.back().end; }
  std::uint64_t file_bytes() const noexcept { return data_offset_ + data_bytes(); }
  /// The bytes before the tensors, of a header that was made and not read: length, JSON, and spaces
  /// up to a multiple of 64.
  const std::string& text() const noexcept { return text_; }

 private:
  void index();

  std::vector<TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
  std::unordered_map<std::string, std::size_t> by_name_;
  std::uint64_t data_offset_ = 0;
  std::string text_;
};

/// A file, mapped into memory.
class Reader {
 public:
  /// Throws CheckpointError unless the file is as the format says.
  explicit Reader(const std::filesystem::path& path, Access access = Access::kReadOnly);

  const Header& header() const noexcept { return header_; }
  /// Throws CheckpointError when there is none of this name.
  const TensorInfo& info(std::string_view name) const;
  /// The bytes of a tensor of this file's header. Valid as long as `file()` is held.
  std::span<const std::byte> bytes(const TensorInfo& info) const;
  /// The map. Whoever keeps pointers into it keeps this.
  const std::shared_ptr<const MappedFile>& file() const noexcept { return file_; }
  const std::filesystem::path& path() const noexcept { return file_->path(); }

 private:
  std::shared_ptr<const MappedFile> file_;
  Header header_;
};

/// Writes a file whose tensors' names and shapes are known and whose bytes come in any order.
/// `write` may be called from several threads at once for different bytes.
class Writer {
 public:
  /// Makes the file, in place of one that is there, sets its space aside and writes the header.
  Writer(const std::filesystem::path& path, Header header);

  /// A tensor's bytes, or a part of them that begins `offset` bytes into it. Throws ConfigError
  /// when there is no such tensor, or when they do not fit.
  void write(const TensorInfo& info, std::span<const std::byte> bytes, std::uint64_t offset = 0);
  void write(std::string_view name, std::span<const std::byte> bytes, std::uint64_t offset = 0);
  /// Brings the file to the disk and closes it. Throws StateError when fewer bytes were written
  /// than the header promises.
  void finish();

  const Header& header() const noexcept { return header_; }
  File& file() noexcept { return file_; }

 private:
  Header header_;
  File file_;
  std::atomic<std::uint64_t> written_{0};
};

// ------------------------------------------------------------------------------- sets of files

/// The file that says in which file each tensor of a set is: `model.safetensors.index.json`, as
/// Hugging Face's tools write it.
struct Index {
  /// Name of the tensor to name of the file, in the folder of the index.
  std::map<std::string, std::string> weight_map;
  /// Bytes of all tensors.
  std::uint64_t total_size = 0;

  /// Throws CheckpointError when it is not such a file, or names a file outside its folder.
  static Index read(const std::filesystem::path& path);
  /// With sorted names and an indentation of two, as Python writes it.
  std::string text() const;
};

/// "model" and 0 of 1: `model.safetensors`; 0 of 3: `model-00001-of-00003.safetensors`.
std::string shard_name(std::string_view stem, std::size_t shard, std::size_t shards);
/// `model.safetensors.index.json`.
std::string index_name(std::string_view stem);

/// Bytes from text such as "5GB" (5 * 10^9) or "5GiB". Throws ConfigError when it is not a size
/// above zero.
std::uint64_t parse_size(std::string_view text);

/// Which tensors go together into one file of at most `most` bytes, as Hugging Face's tools choose:
/// filled in the order given; one that is larger has a file of its own, before the one that is
/// being filled. At least one (empty) shard.
std::vector<std::vector<TensorInfo>> split(std::vector<TensorInfo> tensors, std::uint64_t most);

/// Writes a set of files of tensors split into `shards`, and its index where they are several:
/// `write` makes each file at the path it is given. They get their names when all are written; then
/// what an earlier set left is removed. Returns their names, the index first. Throws
/// CheckpointError when `folder` holds a checkpoint.
std::vector<std::string> write_shards(
    const std::filesystem::path& folder, std::string_view stem,
    const std::vector<std::vector<TensorInfo>>& shards,
    const std::function<void(const std::filesystem::path& path,
                             const std::vector<TensorInfo>& tensors)>& write);

/// Removes the files of a set, and its index, but for those of `kept`.
void remove_shards(const std::filesystem::path& folder, std::string_view stem,
                   const std::vector<std::string>& kept = {});

/// A set of files read as one: a file, an index, or a folder with `model.safetensors` or one index
/// in it.
class Collection {
 public:
  /// Opens every file. Throws CheckpointError when one is missing or damaged, when a tensor is not
  /// in the file that the index names, or when two files have a tensor of one name.
  explicit Collection(const std::filesystem::path& path, Access access = Access::kReadOnly);

  struct Entry {
    const Reader* reader;
    const TensorInfo* info;
  };
  /// By name.
  const std::map<std::string, Entry, std::less<>>& tensors() const noexcept { return tensors_; }
  /// Throws CheckpointError when there is none of this name.
  const Entry& at(std::string_view name) const;
  const std::vector<std::unique_ptr<Reader>>& readers() const noexcept { return readers_; }
  /// The file, or the index.
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  std::vector<std::unique_ptr<Reader>> readers_;
  std::map<std::string, Entry, std::less<>> tensors_;
};

}  // namespace accelerate::io::safetensors
