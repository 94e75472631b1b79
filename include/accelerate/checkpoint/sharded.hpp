#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/checkpoint/py_value.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/core/module.hpp>
#include <accelerate/io/manifest.hpp>
#include <accelerate/parallel/strategy.hpp>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::io {
class CheckedWriter;
class FileLock;
}  // namespace accelerate::io

/// Checkpoints that every process writes its own part of, and that any number of processes read the
/// parts they need of.
namespace accelerate::checkpoints {

/// A tensor, or the consecutive elements of it that this process has.
struct TensorPart {
  std::string name;
  /// Of the whole tensor.
  std::vector<std::int64_t> shape;
  /// Its dimensions from the slowest to the fastest, in the order in which elements are counted;
  /// empty for row-major order.
  std::vector<std::int64_t> order;
  /// The first element, and how many.
  std::int64_t first = 0;
  std::int64_t count = 0;
  /// They: of `shape` where they are the whole tensor, else of any shape, in the order of the
  /// elements.
  at::Tensor data;
  /// Other processes may have it with other values (a buffer): the first one's are saved.
  bool of_first_process = false;
  /// To load into: nobody uses `data` unless the load succeeds, so it may be filled before
  /// everything was verified.
  bool fresh = false;

  bool is_whole() const noexcept;
};

/// Tensors that are saved together: a model's, or an optimizer's. Where no process has only a part,
/// they lie in one file `name`.safetensors, as other programs read it.
struct TensorGroup {
  std::string name;
  std::vector<TensorPart> parts;
  /// Other names of a tensor.
  std::map<std::string, std::string> aliases;
  /// If given, the one file is `name`.bin, with this value of the tensors (contiguous, on the host,
  /// one storage each), as Python's torch.save would write it.
  std::function<PyValue(const std::vector<TensorPart>& parts)> python = nullptr;
};

/// A whole tensor. Shares its memory; 4-bit numbers, of which LibTorch counts two as one element,
/// are seen as bytes.
TensorPart whole_part(std::string name, const at::Tensor& tensor);
/// What `shard` is of its parameter, with `data` (the leaf, or a state of the optimizer that is
/// shaped like it) for its elements. Shares memory with `data`.
TensorPart part_of(const parallel::ParameterShard& shard, const at::Tensor& data);
/// What this process has of a module: its parts of the parameters (some may have no elements), and
/// the buffers.
TensorGroup module_group(const parallel::Strategy& strategy, std::string name);

/// Held by who saves the checkpoint `folder`, so that no other run takes its partial folder for one
/// that was left. Throws CheckpointError, naming the other, when another does.
std::shared_ptr<io::FileLock> lock_of(const std::filesystem::path& folder);

/// One checkpoint being saved. Construct it, `add` what it has, `plan`, perhaps `take_snapshot`,
/// then `write`.
class Save {
 public:
  /// A folder of the name `folder` is replaced when the checkpoint is complete, and not before;
  /// until then it is written to `.NAME.partial` beside it. Throws CheckpointError when what is
  /// there is a file, or a folder with something else in it than a checkpoint. Where it is a link
  /// to a folder, that folder is meant.
  Save(comm::Group group, std::filesystem::path folder);

  void add(TensorGroup tensors);
  /// A small file. Each is added by one process, or by several with equal contents.
  void add_file(std::string name, std::string contents);
  /// What the manifest says besides. Of the first process.
  void set_about(Json about);

  /// Collective. Decides who writes what, and makes the partial folder. Throws CheckpointError on
  /// every process when one cannot, or when another run is saving there, which it names.
  void plan();
  /// Where files can be put between `plan` and `write` that are to be part of the checkpoint.
  const std::filesystem::path& partial_folder() const noexcept { return partial_; }
  /// Copies what this process writes to host memory, so that it may change from now on.
  void take_snapshot();
  /// Collective over `group`, which has the members of the constructor's. Writes, syncs and checks
  /// the files, and gives the folder its name. Throws on every process when one failed; then what
  /// was there before is as it was. May run in another thread.
  void write(const comm::Group& group);

  const std::filesystem::path& folder() const noexcept { return folder_; }
  /// Bytes of tensors that this process writes, and has written.
  std::uint64_t total_bytes() const noexcept { return total_bytes_; }
  std::uint64_t written_bytes() const noexcept { return written_bytes_; }

 private:
  struct OutFile {
    std::string name;
    std::size_t group = 0;
    std::vector<TensorPart> parts;
  };
  // What they say of the files that they wrote goes into the manifest.
  Json write_files();
  Json write_tensors(const OutFile& file);
  Json write_python(const OutFile& file);
  Json write_text(const std::string& name, const std::string& contents) const;
  Json file_report(const OutFile& file, io::CheckedWriter& out,
                   const std::map<std::string_view, std::uint64_t>& positions) const;
  void complete(const std::vector<std::string>& reports);

  comm::Group group_;
  std::filesystem::path folder_;
  std::filesystem::path partial_;
  std::vector<TensorGroup> groups_;
  std::map<std::string, std::string> texts_;
  Json about_ = Json::object();
  std::vector<OutFile> mine_;
  std::shared_ptr<io::FileLock> lock_;
  std::uint64_t total_bytes_ = 0;
  std::atomic<std::uint64_t> written_bytes_{0};
};

/// One checkpoint being loaded. Construct it, `want` what this process needs, `verify`, and only
/// then `read`.
class Load {
 public:
  /// Collective. Reads the list of what there is. Throws CheckpointError on every process when it
  /// is missing or damaged on one, or another list than the first process has.
  Load(comm::Group group, const std::filesystem::path& folder);

  const io::Manifest& manifest() const noexcept { return manifest_; }
  const std::filesystem::path& folder() const noexcept { return folder_; }
  /// Notes that the elements of `part.data` are to be read from the tensor of `part.name`. Throws
  /// CheckpointError when there is no such tensor, its shape is another, or its numbers are of
  /// another kind (integers where real numbers belong, say).
  void want(std::string_view group, TensorPart part);
  /// Throws CheckpointError with all differences in its message when a wanted group has other
  /// shapes or kinds of numbers, and with `strict` when it has other names, than `group`. Otherwise
  /// wants what both have.
  void want_all(const TensorGroup& group, bool strict);

  /// Collective. Every file is as it was written, each byte checked by a process that needs it:
  /// throws CheckpointError on every process when one byte is not. What is `fresh` is filled on the
  /// way, from the bytes that this process checks.
  void verify();
  /// A small file, verified. Throws CheckpointError when it is not there or damaged.
  std::string text(const std::string& name) const;
  bool has_file(const std::string& name) const;
  /// Fills what was wanted `fresh` and is not there yet; `read` then leaves it.
  void read_fresh();
  /// Fills everything that was wanted. Tensors of another dtype are converted.
  void read();

 private:
  struct Wanted {
    const io::SavedTensor* saved;
    TensorPart part;
    bool is_direct() const;
  };
  // Bytes of a file that go where they are wanted as they are.
  struct Move {
    std::size_t file;
    std::uint64_t position;
    std::uint64_t bytes;
    std::byte* to;
  };
  template <class Visitor>
  void for_each_block(const Wanted& wanted, Visitor&& visit) const;
  void convert(const Wanted& wanted) const;
  void fill(const std::vector<const Wanted*>& chosen);
  // Throws CheckpointError when another checkpoint has taken this one's name since.
  void require_same() const;

  comm::Group group_;
  std::filesystem::path folder_;
  io::Manifest manifest_;
  std::string identity_;  // the manifest's first line
  // What is verified and what is read is one opening of a file, whatever happens to its name.
  std::unique_ptr<io::PieceReader> files_;
  std::vector<Wanted> wanted_;
  std::vector<std::size_t> first_block_;  // of each file, counted through all
  std::vector<bool> taken_;               // blocks whose bytes are where fresh tensors want them
  bool fresh_is_read_ = false;
};

}  // namespace accelerate::checkpoints
