#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/checkpoint/py_value.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/core/local_tensor.hpp>
#include <accelerate/core/module.hpp>
#include <accelerate/io/box_reader.hpp>
#include <accelerate/io/manifest.hpp>
#include <accelerate/parallel/strategy.hpp>

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace accelerate::io {
class CheckedWriter;
class FileLock;
}  // namespace accelerate::io

/// Checkpoints that every process writes its own part of, and that any number of processes read the
/// parts they need of.
namespace accelerate::checkpoints {

/// Tensors that are saved together: a model's, or an optimizer's. Where no process has only a part,
/// they lie in one file `name`.safetensors, as other programs read it.
struct TensorGroup {
  std::string name;
  /// What this process has of each. They share memory with who uses them.
  std::vector<LocalTensor> parts;
  /// Other names of a tensor.
  std::map<std::string, std::string> aliases;
  /// Other processes may have these with other values (buffers): the first one's are saved.
  std::set<std::string> of_first_process = {};
  /// If given, the one file is `name`.bin, with this value of the tensors (whole, contiguous, on
  /// the host, one storage each), as Python's torch.save would write it.
  std::function<PyValue(const std::vector<NamedTensor>& tensors)> python = nullptr;
};

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
    std::vector<LocalTensor> parts;
  };
  // By the tensor's name: its boxes in a file, and where each begins.
  using Positions = std::map<std::string_view, std::vector<std::pair<Box, std::uint64_t>>>;
  // What they say of the files that they wrote goes into the manifest.
  Json write_files();
  Json write_tensors(const OutFile& file);
  Json write_python(const OutFile& file);
  Json write_text(const std::string& name, const std::string& contents) const;
  Json file_report(const OutFile& file, io::CheckedWriter& out, const Positions& positions) const;
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
  /// Notes that the elements of `part.tensor` are to be read from the tensor of `part.name`. When
  /// it is `fresh`, nobody uses it unless the load succeeds, so it may be filled before everything
  /// was verified. Throws CheckpointError when there is no such tensor, its shape is another, or
  /// its numbers are of another kind (integers where real numbers belong, say).
  void want(std::string_view group, LocalTensor part, bool fresh = false);
  /// Throws CheckpointError with all differences in its message when a wanted group has other
  /// shapes or kinds of numbers, and with `strict` when it has other names, than `group`. Otherwise
  /// wants what both have.
  void want_all(const TensorGroup& group, bool strict, bool fresh = false);

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
  /// So many bytes of the files were read to fill what was wanted. Those that were read to verify
  /// them, and to fill what is fresh on the way, are not counted.
  std::uint64_t bytes_read() const noexcept { return files_->bytes_read(); }

 private:
  struct Wanted {
    const io::SavedTensor* saved;
    LocalTensor part;
    bool fresh;
    // The bytes go where they are wanted as they are, and not through another tensor.
    bool direct;
    std::vector<io::Overlap> overlaps;
  };
  void add(const io::SavedTensor& saved, LocalTensor part, bool fresh);
  // Calls `visit(block)` for each block, of all files, that has bytes of it.
  template <class Visitor>
  void for_each_block(const io::Overlap& overlap, Visitor&& visit) const;
  void convert(const Wanted& wanted) const;
  void fill(const std::vector<const Wanted*>& chosen);
  // Throws CheckpointError when another checkpoint has taken this one's name since.
  void require_same() const;

  comm::Group group_;
  std::filesystem::path folder_;
  io::Manifest manifest_;
  std::string identity_;  // the manifest's first line
  // What is verified and what is read is one opening of a file, whatever happens to its name.
  std::unique_ptr<io::BoxReader> files_;
  std::vector<Wanted> wanted_;
  std::vector<std::size_t> first_block_;  // of each file, counted through all
  std::vector<bool> taken_;               // blocks whose bytes are where fresh tensors want them
  bool fresh_is_read_ = false;
};

}  // namespace accelerate::checkpoints
