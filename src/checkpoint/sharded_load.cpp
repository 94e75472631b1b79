#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/sharded.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/checkpoint/together.hpp>

#include "base/in_threads.hpp"
#include "checkpoint/as_saved.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

namespace accelerate::checkpoints {

namespace fs = std::filesystem;

namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return "[" + text::join(shape) + "]";
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Numbers of one kind become each other. A real number made of an integer's bytes, or a complex one
// without its imaginary part, would be another number.
bool same_kind(const io::SavedTensor& saved, const at::Tensor& tensor) {
  if (io::safetensors::bits(saved.dtype) % 8 != 0) return false;  // saved as bytes
  const auto from = tensor_dtype(saved.dtype);
  const auto to = tensor.scalar_type();
  return c10::isFloatingType(from) == c10::isFloatingType(to) &&
         c10::isComplexType(from) == c10::isComplexType(to);
}

std::string kinds_text(const io::SavedTensor& saved, const at::Tensor& tensor) {
  return text::concat("has dtype ", io::safetensors::name(saved.dtype), " in the checkpoint and ",
                      c10::toString(tensor.scalar_type()), " here");
}

}  // namespace

Load::Load(comm::Group group, const fs::path& folder) : group_(std::move(group)) {
  folder_ = io::replaced_folder(folder);
  together(group_, "opening a checkpoint", folder_.string(), [&] {
    std::error_code code;
    if (!fs::exists(folder_, code)) {
      throw CheckpointError(text::concat("There is no checkpoint ", folder_.string(), "."),
                            folder_.string());
    }
    if (!fs::is_directory(folder_, code)) {
      throw CheckpointError(
          text::concat("A checkpoint is a folder, and ", folder_.string(), " is a file."),
          folder_.string());
    }
    if (!fs::exists(folder_ / io::Manifest::kFileName, code)) {
      throw CheckpointError(
          text::concat("The folder ", folder_.string(), " has no ", io::Manifest::kFileName,
                       ", so it is not a complete checkpoint of this library."),
          folder_.string());
    }
    const fs::path path = folder_ / io::Manifest::kFileName;
    const std::string contents = io::read_file(path);
    manifest_ = io::Manifest::parse(contents, path);
    identity_ = first_line(contents);
    manifest_.check_files(folder_);
  });
  const auto identities = group_.all_gather_bytes(identity_);
  for (std::size_t rank = 0; rank < identities.size(); ++rank) {
    if (identities[rank] == identities[0]) continue;
    throw CheckpointError(
        text::concat("Process ", rank, " finds another checkpoint at ", folder_.string(),
                     " than process 0. Nothing was loaded; give all processes the same one, and "
                     "load it while nobody saves there."),
        folder_.string());
  }
  files_ = std::make_unique<io::BoxReader>(folder_, manifest_);
  first_block_.assign(1, 0);
  for (const io::SavedFile& file : manifest_.files)
    first_block_.push_back(first_block_.back() + file.checksums.size());
  taken_.assign(first_block_.back(), false);
}

void Load::want(std::string_view group, LocalTensor part, bool fresh) {
  part.tensor = as_saved(part.tensor);
  const io::SavedTensor* saved = manifest_.find(group, part.name);
  if (saved == nullptr) {
    throw CheckpointError(text::concat("The checkpoint ", folder_.string(), " has no '", part.name,
                                       "' among its tensors of ", group, "."),
                          folder_.string());
  }
  if (saved->shape != part.placement.shape()) {
    throw CheckpointError(text::concat("The checkpoint ", folder_.string(), " has '", part.name,
                                       "' with shape ", shape_text(saved->shape), ", and shape ",
                                       shape_text(part.placement.shape()), " was expected."),
                          folder_.string());
  }
  if (!same_kind(*saved, part.tensor)) {
    throw CheckpointError(
        text::concat("The checkpoint ", folder_.string(), " is damaged or of another model: '",
                     part.name, "' ", kinds_text(*saved, part.tensor), "."),
        folder_.string());
  }
  if (part.placement.count() > 0) add(*saved, std::move(part), fresh);
}

void Load::want_all(const TensorGroup& group, bool strict, bool fresh) {
  const auto saved = manifest_.groups.find(group.name);
  if (saved == manifest_.groups.end()) {
    throw CheckpointError(text::concat("The checkpoint ", folder_.string(), " has no ", group.name,
                                       ". It was saved from a program that prepared less."),
                          folder_.string());
  }
  std::vector<std::string> missing, shapes;
  std::set<std::string> known;
  for (LocalTensor part : group.parts) {
    part.tensor = as_saved(part.tensor);
    std::vector<std::string> names{part.name};
    for (const auto& [other, first] : group.aliases) {
      if (first == part.name) names.push_back(other);
    }
    known.insert(names.begin(), names.end());
    const auto found = std::find_if(names.begin(), names.end(), [&](const std::string& name) {
      return manifest_.find(group.name, name) != nullptr;
    });
    if (found == names.end()) {
      missing.push_back(part.name);
      continue;
    }
    const io::SavedTensor* tensor = manifest_.find(group.name, *found);
    if (tensor->shape != part.placement.shape()) {
      shapes.push_back(text::concat("'", part.name, "' has shape ", shape_text(tensor->shape),
                                    " in the checkpoint and ", shape_text(part.placement.shape()),
                                    " here"));
    } else if (!same_kind(*tensor, part.tensor)) {
      shapes.push_back(text::concat("'", part.name, "' ", kinds_text(*tensor, part.tensor)));
    } else if (part.placement.count() > 0) {
      add(*tensor, std::move(part), fresh);
    }
  }
  std::vector<std::string> unexpected;
  for (const auto& [name, tensor] : saved->second) {
    if (!known.contains(name)) unexpected.push_back(name);
  }
  if (shapes.empty() && missing.empty() && unexpected.empty()) return;
  const bool nothing_in_common = missing.size() == group.parts.size() && !group.parts.empty();
  if (shapes.empty() && !strict && !nothing_in_common) {
    log::warning(text::concat("The checkpoint ", folder_.string(), " is not quite that of this ",
                              group.name, ", and what both have is loaded. Left as it is here: ",
                              missing.empty() ? "nothing" : text::join(missing),
                              "; not used of the checkpoint: ",
                              unexpected.empty() ? "nothing" : text::join(unexpected), "."));
    return;
  }
  std::string message =
      text::concat("The checkpoint ", folder_.string(), " is not that of this ", group.name, ".");
  if (!missing.empty()) message += " Missing: " + text::join(missing) + ".";
  if (!unexpected.empty()) message += " Unexpected: " + text::join(unexpected) + ".";
  if (!shapes.empty()) message += " " + text::join(shapes, "; ") + ".";
  if (shapes.empty()) message += " Load another, or with strict off what both have.";
  throw CheckpointError(message, folder_.string());
}

// What is wanted where the numbers of a part do not lie as they were saved is read to a contiguous
// tensor of its shape first.
void Load::add(const io::SavedTensor& saved, LocalTensor part, bool fresh) {
  const at::Tensor& tensor = part.tensor;
  const bool direct = tensor.is_cpu() && tensor.scalar_type() == tensor_dtype(saved.dtype) &&
                      !tensor.is_conj() && !tensor.is_neg() &&
                      (tensor.is_contiguous() || (tensor.is_non_overlapping_and_dense() &&
                                                  tensor.sizes() == part.placement.local_shape()));
  auto overlaps =
      io::Overlap::of(saved, direct ? part.boxes()
                                    : boxes_in_memory(part.placement, tensor.sizes(),
                                                      c10::contiguous_strides(tensor.sizes())));
  wanted_.push_back({&saved, std::move(part), fresh, direct, std::move(overlaps)});
}

template <class Visitor>
void Load::for_each_block(const io::Overlap& overlap, Visitor&& visit) const {
  for (std::uint64_t at = overlap.begin(); at < overlap.end();) {
    const std::uint64_t block = at / io::kChecksumBlock;
    visit(first_block_[overlap.file()] + block);
    at = overlap.next((block + 1) * io::kChecksumBlock);
  }
}

void Load::require_same() const {
  std::string now;
  try {
    now = first_line(io::read_file(folder_ / io::Manifest::kFileName));
  } catch (const CheckpointError&) {
    // Its name is gone: not the same either.
  }
  if (now == identity_) return;
  throw CheckpointError(text::concat("The checkpoint ", folder_.string(),
                                     " was replaced by another while it was being loaded. Nothing "
                                     "was loaded; load again."),
                        folder_.string());
}

void Load::verify() {
  // Which blocks this process needs: one bit each, file after file. What several need, one of them
  // checks; what nobody needs, anybody.
  std::string needed(first_block_.back(), '0');
  using Fresh = std::pair<const io::Overlap*, std::byte*>;
  std::vector<std::vector<Fresh>> fresh(needed.size());
  std::set<std::size_t> read_from;
  for (const Wanted& wanted : wanted_) {
    for (const io::Overlap& overlap : wanted.overlaps) {
      read_from.insert(overlap.file());
      for_each_block(overlap, [&](std::size_t block) {
        needed[block] = '1';
        if (wanted.fresh && wanted.direct) {
          fresh[block].emplace_back(&overlap,
                                    static_cast<std::byte*>(wanted.part.tensor.mutable_data_ptr()));
        }
      });
    }
  }
  const auto all = group_.all_gather_bytes(needed);
  // Neighbours go to one process: disks like long reads.
  const std::size_t neighbours = std::clamp<std::size_t>(needed.size() / (4 * all.size()), 1, 256);
  together(group_, "verifying a checkpoint", folder_.string(), [&] {
    for (const std::size_t f : read_from) files_->file(f);
    require_same();
    std::vector<std::size_t> who;
    for (std::size_t f = 0; f < manifest_.files.size(); ++f) {
      const std::size_t begin = first_block_[f];
      std::vector<std::size_t> blocks;
      for (std::size_t at = begin; at < first_block_[f + 1]; ++at) {
        who.clear();
        for (std::size_t rank = 0; rank < all.size(); ++rank) {
          if (all[rank][at] == '1') who.push_back(rank);
        }
        const std::size_t turn = at / neighbours;
        const std::size_t checker = who.empty() ? turn % all.size() : who[turn % who.size()];
        if (checker == static_cast<std::size_t>(group_.rank())) blocks.push_back(at - begin);
      }
      const auto take = [&](std::size_t block, std::span<const std::byte> bytes) {
        const std::uint64_t from = block * io::kChecksumBlock;
        for (const auto& [overlap, memory] : fresh[begin + block]) {
          overlap->for_each_run(
              from, from + bytes.size(),
              [&, to = memory](std::uint64_t position, std::uint64_t count, std::int64_t place) {
                std::memcpy(to + place, &bytes[position - from], count);
              });
        }
      };
      try {
        if (read_from.contains(f)) {
          io::verify_blocks(files_->file(f), manifest_.files[f], blocks, take);
        } else {
          io::verify_blocks(folder_, manifest_.files[f], blocks, take);
        }
      } catch (const CheckpointError&) {
        require_same();  // or the bytes are another checkpoint's, and nothing is damaged
        throw;
      }
      for (const std::size_t block : blocks) taken_[begin + block] = true;
    }
  });
}

bool Load::has_file(const std::string& name) const {
  return std::any_of(manifest_.files.begin(), manifest_.files.end(),
                     [&](const io::SavedFile& file) { return file.name == name; });
}

std::string Load::text(const std::string& name) const {
  if (!has_file(name)) {
    throw CheckpointError(text::concat("The checkpoint ", folder_.string(), " has no ", name, "."),
                          folder_.string());
  }
  std::string contents;
  try {
    contents = io::read_file(folder_ / name);
  } catch (const CheckpointError&) {
    require_same();
    throw;
  }
  const auto file = std::find_if(manifest_.files.begin(), manifest_.files.end(),
                                 [&](const io::SavedFile& one) { return one.name == name; });
  if (io::block_checksums(std::as_bytes(std::span(contents))) != file->checksums) {
    require_same();
    throw CheckpointError(text::concat((folder_ / name).string(),
                                       " is damaged: its contents are not those that were written. "
                                       "Nothing was loaded; use another checkpoint."),
                          (folder_ / name).string());
  }
  return contents;
}

void Load::convert(const Wanted& wanted) const {
  const at::Tensor saved = at::empty(wanted.part.tensor.sizes(),
                                     at::TensorOptions().dtype(tensor_dtype(wanted.saved->dtype)));
  for (const io::Overlap& overlap : wanted.overlaps)
    files_->read(overlap, overlap.begin(), overlap.end(),
                 static_cast<std::byte*>(saved.mutable_data_ptr()));
  wanted.part.tensor.copy_(saved);
}

void Load::read_fresh() {
  std::vector<const Wanted*> chosen;
  for (const Wanted& wanted : wanted_) {
    if (wanted.fresh) chosen.push_back(&wanted);
  }
  fill(chosen);
  fresh_is_read_ = true;
}

void Load::read() {
  std::vector<const Wanted*> chosen;
  for (const Wanted& wanted : wanted_) {
    if (!wanted.fresh || !fresh_is_read_) chosen.push_back(&wanted);
  }
  fill(chosen);
}

void Load::fill(const std::vector<const Wanted*>& chosen) {
  // Threads read blocks, so that they share a large tensor.
  struct Read {
    const io::Overlap* overlap;
    std::uint64_t from;
    std::byte* to;
  };
  std::vector<Read> reads;
  std::vector<const Wanted*> others;
  for (const Wanted* wanted : chosen) {
    if (!wanted->direct) {
      others.push_back(wanted);
      continue;
    }
    auto* const memory = static_cast<std::byte*>(wanted->part.tensor.mutable_data_ptr());
    for (const io::Overlap& overlap : wanted->overlaps) {
      for_each_block(overlap, [&](std::size_t block) {
        if (wanted->fresh && taken_[block]) return;
        reads.push_back(
            {&overlap, (block - first_block_[overlap.file()]) * io::kChecksumBlock, memory});
      });
    }
    wanted->part.tensor.unsafeGetTensorImpl()->bump_version();
  }
  const std::size_t count = reads.size() + others.size();
  in_threads(std::min(reading_threads(), count), count, [&] {
    return [&](std::size_t i) {
      if (i < others.size()) {
        const at::NoGradGuard no_grad;
        convert(*others[i]);
        return;
      }
      const Read& read = reads[i - others.size()];
      files_->read(*read.overlap, read.from, read.from + io::kChecksumBlock, read.to);
    };
  });
}

}  // namespace accelerate::checkpoints
