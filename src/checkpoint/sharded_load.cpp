#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/sharded.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/checkpoint/together.hpp>

#include "base/in_threads.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <set>

namespace accelerate::checkpoints {

namespace fs = std::filesystem;

namespace {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return "[" + text::join(shape) + "]";
}

std::vector<std::int64_t> sizes_in_order(const std::vector<std::int64_t>& shape,
                                         const std::vector<std::int64_t>& order) {
  std::vector<std::int64_t> sizes = shape;
  for (std::size_t i = 0; i < order.size(); ++i)
    sizes[i] = shape[static_cast<std::size_t>(order[i])];
  return sizes;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Numbers of one kind become each other. A real number made of an integer's bytes, or a complex one
// without its imaginary part, would be another number.
bool same_kind(const io::SavedTensor& saved, const at::Tensor& tensor) {
  const auto from = tensor_dtype(saved.dtype);
  const auto to = tensor.scalar_type();
  return c10::isFloatingType(from) == c10::isFloatingType(to) &&
         c10::isComplexType(from) == c10::isComplexType(to);
}

std::string kinds_text(const io::SavedTensor& saved, const at::Tensor& tensor) {
  return text::concat("has dtype ", io::safetensors::name(saved.dtype), " in the checkpoint and ",
                      c10::toString(tensor.scalar_type()), " here");
}

// From dimensions in `order` back to the tensor's own.
at::Tensor in_own_order(const at::Tensor& tensor, const std::vector<std::int64_t>& order) {
  if (order.empty()) return tensor;
  std::vector<std::int64_t> back(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    back[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
  return tensor.permute(back);
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
  files_ = std::make_unique<io::PieceReader>(folder_, manifest_);
  first_block_.assign(1, 0);
  for (const io::SavedFile& file : manifest_.files)
    first_block_.push_back(first_block_.back() + file.checksums.size());
  taken_.assign(first_block_.back(), false);
}

void Load::want(std::string_view group, TensorPart part) {
  const io::SavedTensor* saved = manifest_.find(group, part.name);
  if (saved == nullptr) {
    throw CheckpointError(text::concat("The checkpoint ", folder_.string(), " has no '", part.name,
                                       "' among its tensors of ", group, "."),
                          folder_.string());
  }
  if (saved->shape != part.shape) {
    throw CheckpointError(text::concat("The checkpoint ", folder_.string(), " has '", part.name,
                                       "' with shape ", shape_text(saved->shape), ", and shape ",
                                       shape_text(part.shape), " was expected."),
                          folder_.string());
  }
  if (!same_kind(*saved, part.data)) {
    throw CheckpointError(
        text::concat("The checkpoint ", folder_.string(), " is damaged or of another model: '",
                     part.name, "' ", kinds_text(*saved, part.data), "."),
        folder_.string());
  }
  if (part.count > 0) wanted_.push_back({saved, std::move(part)});
}

void Load::want_all(const TensorGroup& group, bool strict) {
  const auto saved = manifest_.groups.find(group.name);
  if (saved == manifest_.groups.end()) {
    throw CheckpointError(text::concat("The checkpoint ", folder_.string(), " has no ", group.name,
                                       ". It was saved from a program that prepared less."),
                          folder_.string());
  }
  std::vector<std::string> missing, shapes;
  std::set<std::string> known;
  for (const TensorPart& part : group.parts) {
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
    if (tensor->shape != part.shape) {
      shapes.push_back(text::concat("'", part.name, "' has shape ", shape_text(tensor->shape),
                                    " in the checkpoint and ", shape_text(part.shape), " here"));
    } else if (!same_kind(*tensor, part.data)) {
      shapes.push_back(text::concat("'", part.name, "' ", kinds_text(*tensor, part.data)));
    } else if (part.count > 0) {
      wanted_.push_back({tensor, part});
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

// The elements that are wanted are consecutive where they were saved, and of the same dtype.
bool Load::Wanted::is_direct() const {
  return part.data.is_cpu() && part.data.scalar_type() == tensor_dtype(saved->dtype) &&
         part.data.is_contiguous() &&
         (part.is_whole() ? saved->order.empty() : saved->order == part.order);
}

// Calls `visit(block, move)` for each block that has wanted bytes, with these bytes. They have no
// place where they are not direct.
template <class Visitor>
void Load::for_each_block(const Wanted& wanted, Visitor&& visit) const {
  const io::SavedTensor& saved = *wanted.saved;
  const bool all = !wanted.part.is_whole() && saved.order != wanted.part.order;
  const std::int64_t wanted_first = all ? 0 : wanted.part.first;
  auto* const data =
      wanted.is_direct() ? static_cast<std::byte*>(wanted.part.data.mutable_data_ptr()) : nullptr;
  io::PieceReader::for_each_part(
      saved, wanted_first, all ? saved.elements() : wanted.part.count,
      [&](const io::Piece& piece, std::int64_t first, std::int64_t count) {
        const std::uint64_t from = piece.position + saved.bytes(first - piece.first);
        const std::uint64_t to = from + saved.bytes(count);
        for (std::uint64_t at = from; at < to;) {
          const std::uint64_t block = at / io::kChecksumBlock;
          const std::uint64_t end = std::min<std::uint64_t>(to, (block + 1) * io::kChecksumBlock);
          auto* const place =
              data == nullptr ? nullptr : data + saved.bytes(first - wanted_first) + (at - from);
          visit(first_block_[piece.file] + block, Move{piece.file, at, end - at, place});
          at = end;
        }
      });
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
  std::vector<std::vector<Move>> fresh(needed.size());
  std::set<std::size_t> read_from;
  for (const Wanted& wanted : wanted_) {
    for_each_block(wanted, [&](std::size_t block, const Move& move) {
      needed[block] = '1';
      read_from.insert(move.file);
      if (wanted.part.fresh && move.to != nullptr) fresh[block].push_back(move);
    });
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
        for (const Move& move : fresh[begin + block])
          std::memcpy(move.to, &bytes[move.position % io::kChecksumBlock], move.bytes);
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

// Through another dtype, device or order.
void Load::convert(const Wanted& wanted) const {
  const io::SavedTensor& saved = *wanted.saved;
  const TensorPart& part = wanted.part;
  const auto fill = [&](const at::Tensor& tensor, std::int64_t first, std::int64_t count) {
    files_->read(saved, first, count, static_cast<std::byte*>(tensor.mutable_data_ptr()));
  };
  const auto options = at::TensorOptions().dtype(tensor_dtype(saved.dtype));
  if (!part.is_whole() && saved.order == part.order) {
    const at::Tensor lying = at::empty(part.data.sizes(), options);
    fill(lying, part.first, part.count);
    part.data.copy_(lying);
    return;
  }
  const at::Tensor lying = at::empty(sizes_in_order(saved.shape, saved.order), options);
  fill(lying, 0, saved.elements());
  at::Tensor own = in_own_order(lying, saved.order);
  if (part.is_whole()) {
    part.data.copy_(own);
    return;
  }
  // A part in one order of memory out of a tensor saved in another.
  if (!part.order.empty()) own = own.permute(part.order);
  part.data.copy_(
      own.contiguous().view(-1).narrow(0, part.first, part.count).view(part.data.sizes()));
}

void Load::read_fresh() {
  std::vector<const Wanted*> chosen;
  for (const Wanted& wanted : wanted_) {
    if (wanted.part.fresh) chosen.push_back(&wanted);
  }
  fill(chosen);
  fresh_is_read_ = true;
}

void Load::read() {
  std::vector<const Wanted*> chosen;
  for (const Wanted& wanted : wanted_) {
    if (!wanted.part.fresh || !fresh_is_read_) chosen.push_back(&wanted);
  }
  fill(chosen);
}

void Load::fill(const std::vector<const Wanted*>& chosen) {
  // Threads read blocks, so that they share a large tensor.
  std::vector<Move> moves;
  std::vector<const Wanted*> others;
  for (const Wanted* wanted : chosen) {
    if (!wanted->is_direct()) {
      others.push_back(wanted);
      continue;
    }
    for_each_block(*wanted, [&](std::size_t block, const Move& move) {
      if (!wanted->part.fresh || !taken_[block]) moves.push_back(move);
    });
    wanted->part.data.unsafeGetTensorImpl()->bump_version();
  }
  const std::size_t count = moves.size() + others.size();
  in_threads(std::min(reading_threads(), count), count, [&] {
    return [&](std::size_t i) {
      if (i < others.size()) {
        const at::NoGradGuard no_grad;
        convert(*others[i]);
        return;
      }
      const Move& move = moves[i - others.size()];
      files_->file(move.file).read(move.to, move.bytes, move.position);
    };
  });
}

}  // namespace accelerate::checkpoints
