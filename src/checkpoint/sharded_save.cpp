#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/sharded.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/checkpoint/together.hpp>
#include <accelerate/io/mapped_file.hpp>

#include "base/parse_json.hpp"
#include "checkpoint/as_saved.hpp"
#include "checkpoint/pickler.hpp"
#include "io/checked_writer.hpp"
#include "io/file_lock.hpp"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>

namespace accelerate::checkpoints {

namespace fs = std::filesystem;
namespace st = io::safetensors;

namespace {

std::span<const std::byte> bytes_of(const at::Tensor& contiguous) {
  return {static_cast<const std::byte*>(contiguous.const_data_ptr()), contiguous.nbytes()};
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
}

std::string hex_of(const std::vector<std::uint64_t>& checksums) {
  std::string hex;
  for (const std::uint64_t sum : checksums) hex += io::checksum_text(sum);
  return hex;
}

// The elements that a process has: [[offsets, sizes], ...], or null for all.
Json boxes_of(const LocalTensor& part) {
  if (part.placement.is_whole()) return {};
  Json boxes = Json::array();
  for (const PlacedBox& placed : part.boxes())
    boxes.push_back({placed.box.offsets, placed.box.sizes});
  return boxes;
}

// What each process tells the others: [name, boxes, of_first_process, bytes].
Json describe_parts(const TensorGroup& group) {
  Json parts = Json::array();
  for (const LocalTensor& part : group.parts) {
    parts.push_back({part.name, boxes_of(part), group.of_first_process.contains(part.name),
                     part.tensor.nbytes()});
  }
  return parts;
}

// Who writes each part that several have: the tensor's name and the boxes' text, to rank.
using PartKey = std::pair<std::string, std::string>;

struct GroupPlan {
  bool whole = true;
  int owner = 0;                   ///< of the one file, where all is whole
  std::map<PartKey, int> writers;  ///< elsewhere
};

GroupPlan plan_group(const std::vector<Json>& by_rank, std::size_t index,
                     std::vector<std::uint64_t>& load) {
  GroupPlan plan;
  bool replicas_differ = false;
  std::uint64_t bytes = 0;
  struct Candidate {
    std::vector<int> ranks;
    std::uint64_t bytes = 0;
    bool of_first = false;
  };
  std::map<PartKey, Candidate> parts;
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const Json& part : by_rank[rank]) {
      Candidate& candidate = parts[{part[0].get<std::string>(), part[1].dump()}];
      candidate.ranks.push_back(static_cast<int>(rank));
      candidate.bytes = part[3].get<std::uint64_t>();
      candidate.of_first = part[2].get<bool>();
      plan.whole = plan.whole && part[1].is_null();
      replicas_differ = replicas_differ || candidate.of_first;
    }
  }
  for (const auto& [key, candidate] : parts) {
    bytes += candidate.bytes;
    // Small parameters may each be whole, and one here and one there.
    plan.whole = plan.whole && candidate.ranks.size() == by_rank.size();
  }
  if (plan.whole) {
    plan.owner = replicas_differ ? 0 : static_cast<int>(index % by_rank.size());
    load[static_cast<std::size_t>(plan.owner)] += bytes;
    return plan;
  }
  for (const auto& [key, candidate] : parts) {
    int writer = candidate.ranks.front();
    if (!candidate.of_first) {
      for (const int rank : candidate.ranks) {
        if (load[static_cast<std::size_t>(rank)] < load[static_cast<std::size_t>(writer)])
          writer = rank;
      }
    }
    plan.writers.emplace(key, writer);
    load[static_cast<std::size_t>(writer)] += candidate.bytes;
  }
  return plan;
}

// Only a checkpoint, or nothing, may be replaced: whatever else is in the folder would be lost.
void check_replaceable(const fs::path& folder) {
  const auto refuse = [&](const auto&... why) {
    throw CheckpointError(
        text::concat("The checkpoint was to be saved as the folder ", folder.string(), why...),
        folder.string());
  };
  std::error_code code;
  const auto status = fs::status(folder, code);
  if (status.type() == fs::file_type::not_found) {
    if (fs::is_symlink(folder, code))
      refuse(", a link to what is not there. Make that folder, or name another.");
    return;
  }
  if (status.type() != fs::file_type::directory)
    refuse(", and that is a file. Name another folder.");
  std::set<std::string> own;
  if (fs::exists(folder / io::Manifest::kFileName)) {
    own.emplace(io::Manifest::kFileName);
    try {
      for (const io::SavedFile& file : io::Manifest::read(folder).files) own.insert(file.name);
    } catch (const CheckpointError&) {
      refuse(", which would be replaced, and the ", io::Manifest::kFileName,
             " in it is damaged or another program's, so that a checkpoint's files and others "
             "cannot be told apart. Nothing was changed. Remove that folder, or name another.");
    }
  }
  for (const std::string& name : io::files_in(folder)) {
    if (own.contains(name)) continue;
    refuse(", which would be replaced, and ", name,
           " in it is no part of a checkpoint of this library. Name another folder.");
  }
}

// What hooks put there. Throws CheckpointError for what would make a checkpoint that cannot be
// loaded or replaced.
std::vector<std::string> files_of_hooks(const fs::path& folder) {
  std::vector<std::string> names = io::files_in(folder);
  for (const std::string& name : names) {
    const auto refuse = [&](const char* why) {
      throw CheckpointError(
          text::concat("A hook put ", name, " into the checkpoint ", folder.string(), ", ", why,
                       " The checkpoint was not saved."),
          folder.string());
    };
    std::error_code code;
    if (fs::symlink_status(folder / name, code).type() != fs::file_type::regular)
      refuse("which is not a file, so it could not be verified. Copy what it stands for.");
    if (name == io::Manifest::kFileName)
      refuse("which is the name of the checkpoint's own list of files. Name it otherwise.");
    try {
      static_cast<void>(Json(name).dump());
    } catch (const Json::exception&) {
      refuse("whose name is not UTF-8, so it could not be listed. Name it otherwise.");
    }
  }
  return names;
}

}  // namespace

at::Tensor as_saved(const at::Tensor& tensor) {
  const at::Tensor own = tensor.detach();
  return own.scalar_type() == at::kFloat4_e2m1fn_x2 ? own.view(at::kByte) : own;
}

TensorGroup module_group(const parallel::Strategy& strategy, std::string name) {
  TensorGroup group;
  group.name = std::move(name);
  group.parts = strategy.shards();
  const ModuleRecord& module = strategy.module();
  for (const NamedTensor& buffer : module.buffers()) {
    group.parts.push_back(whole_tensor(buffer.name, buffer.tensor));
    group.of_first_process.insert(buffer.name);
  }
  std::set<std::string> stored;
  for (const auto* tensors : {&module.parameters(), &module.buffers()}) {
    for (const NamedTensor& entry : *tensors) stored.insert(entry.name);
  }
  for (const auto& names : module.tied()) {
    const auto first = std::find_if(names.begin(), names.end(),
                                    [&](const std::string& n) { return stored.contains(n); });
    for (const std::string& other : names) {
      if (first != names.end() && other != *first) group.aliases.emplace(other, *first);
    }
  }
  return group;
}

std::shared_ptr<io::FileLock> lock_of(const fs::path& folder) {
  return std::make_shared<io::FileLock>(
      folder.parent_path() / ("." + folder.filename().string() + ".lock"),
      text::concat("The checkpoint ", folder.string(), " is being saved"),
      "Nothing of it was changed. Give each run a folder of its own, or wait until the other has "
      "ended.");
}

Save::Save(comm::Group group, fs::path folder) : group_(std::move(group)) {
  folder = fs::absolute(folder).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();
  // What a link names is replaced, on the disk that it is on, and not the link.
  std::error_code code;
  if (fs::is_symlink(folder, code)) {
    if (const fs::path real = fs::canonical(folder, code); !code) folder = real;
  }
  folder_ = std::move(folder);
  partial_ = folder_.parent_path() / ("." + folder_.filename().string() + ".partial");
}

void Save::add(TensorGroup tensors) {
  std::erase_if(tensors.parts, [](const LocalTensor& part) {
    return part.placement.count() == 0 && !part.placement.is_whole();
  });
  for (LocalTensor& part : tensors.parts) part.tensor = as_saved(part.tensor);
  groups_.push_back(std::move(tensors));
}

void Save::add_file(std::string name, std::string contents) {
  texts_.insert_or_assign(std::move(name), std::move(contents));
}

void Save::set_about(Json about) { about_ = std::move(about); }

void Save::plan() {
  Json own = Json::object();
  own["groups"] = Json::array();
  own["texts"] = Json::array();
  for (const TensorGroup& group : groups_)
    own["groups"].push_back({{"name", group.name}, {"parts", describe_parts(group)}});
  for (const auto& [name, contents] : texts_) own["texts"].push_back(name);

  std::vector<Json> all;
  for (const std::string& text : group_.all_gather_bytes(own.dump()))
    all.push_back(parse_json(text));
  together(group_, "planning the checkpoint", folder_.string(), [&] {
    for (const TensorGroup& group : groups_) {
      // Refuses what a file cannot hold, by name.
      for (const LocalTensor& part : group.parts)
        static_cast<void>(tensor_info({part.name, part.tensor}));
    }
    std::vector<std::uint64_t> load(all.size());
    const auto self = static_cast<std::size_t>(group_.rank());
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      std::vector<Json> parts;
      for (const Json& rank : all) {
        if (rank["groups"].size() != groups_.size() ||
            rank["groups"][g]["name"] != groups_[g].name) {
          throw StateError(
              "The processes prepared different modules or optimizers, or in another order, so "
              "they cannot be saved together. Call prepare() alike on all.");
        }
        parts.push_back(rank["groups"][g]["parts"]);
      }
      const GroupPlan plan = plan_group(parts, g, load);
      OutFile out;
      out.group = g;
      const std::string suffix = plan.whole ? std::string() : text::concat(".rank", group_.rank());
      out.name =
          groups_[g].name + suffix + (plan.whole && groups_[g].python ? ".bin" : ".safetensors");
      for (const LocalTensor& part : groups_[g].parts) {
        const int writer =
            plan.whole ? plan.owner : plan.writers.at({part.name, boxes_of(part).dump()});
        if (writer == group_.rank()) out.parts.push_back(part);
      }
      if (!out.parts.empty() || (plan.whole && plan.owner == group_.rank())) {
        for (const LocalTensor& part : out.parts) total_bytes_ += part.tensor.nbytes();
        mine_.push_back(std::move(out));
      }
    }
    // A text that several have is the first one's.
    for (std::size_t rank = 0; rank < self; ++rank) {
      for (const Json& name : all[rank]["texts"]) texts_.erase(name.get<std::string>());
    }
    groups_.shrink_to_fit();
    if (group_.rank() != 0) return;
    check_replaceable(folder_);
    if (const fs::path parent = folder_.parent_path(); !fs::is_directory(parent))
      io::make_folders(parent);
    lock_ = lock_of(folder_);
    io::delete_path(partial_);
    io::make_folders(partial_);
  });
}

void Save::take_snapshot() {
  const at::NoGradGuard no_grad;
  for (OutFile& file : mine_) {
    for (LocalTensor& part : file.parts) {
      const at::Tensor host = on_host(part.tensor);
      part.tensor = host.is_alias_of(part.tensor) ? host.clone() : host;
    }
  }
  // The others' parts would keep what has just been copied elsewhere alive.
  for (TensorGroup& group : groups_) group.parts.clear();
}

Json Save::file_report(const OutFile& file, io::CheckedWriter& out,
                       const Positions& positions) const {
  Json tensors = Json::array();
  for (const LocalTensor& part : file.parts) {
    Json boxes = Json::array();
    for (const auto& [box, position] : positions.at(part.name))
      boxes.push_back({position, box.offsets, box.sizes});
    tensors.push_back({part.name, std::string(st::name(file_dtype(part.tensor.scalar_type()))),
                       part.placement.shape(), std::move(boxes)});
  }
  const std::uint64_t bytes = out.size();
  return {{"name", file.name},
          {"bytes", bytes},
          {"checksums", hex_of(out.finish())},
          {"group", groups_[file.group].name},
          {"tensors", std::move(tensors)}};
}

Json Save::write_tensors(const OutFile& file) {
  const TensorGroup& group = groups_[file.group];
  std::vector<st::TensorInfo> infos;
  // By their names in the file: of a part, "weight[0:4, 0:16]".
  std::map<std::string, std::pair<const LocalTensor*, PlacedBox>> entries;
  for (const LocalTensor& part : file.parts) {
    for (PlacedBox& placed : part.boxes()) {
      st::TensorInfo info = tensor_info({part.name, part.tensor});
      if (!part.placement.is_whole()) info.name += placed.box.text();
      info.shape = placed.box.sizes;
      entries.emplace(info.name, std::pair(&part, std::move(placed)));
      infos.push_back(std::move(info));
    }
  }
  std::map<std::string, std::string> metadata = group.aliases;
  metadata.emplace("format", "pt");
  const st::Header header(std::move(infos), std::move(metadata));
  io::CheckedWriter out(partial_ / file.name, header.file_bytes());
  out.append(std::as_bytes(std::span(header.text())));
  Positions positions;
  for (const st::TensorInfo& info : header.tensors()) {
    const auto& [part, placed] = entries.at(info.name);
    const auto host = std::make_shared<const at::Tensor>(on_host(part->view(placed)));
    positions[part->name].emplace_back(placed.box, out.size());
    out.append(bytes_of(*host), host);
    written_bytes_ += host->nbytes();
  }
  return file_report(file, out, positions);
}

Json Save::write_python(const OutFile& file) {
  std::vector<NamedTensor> whole;
  for (const LocalTensor& part : file.parts) {
    at::Tensor host = on_host(part.view(part.boxes().at(0)));
    if (host.storage().nbytes() != host.nbytes()) host = host.clone();
    whole.push_back({part.name, std::move(host)});
  }
  const Pickled pickled = pickle(groups_[file.group].python(whole));
  std::unordered_map<const void*, std::uint64_t> places;
  for (const at::Tensor& storage : pickled.storages) places.emplace(storage.const_data_ptr(), 0);
  const auto kept = std::make_shared<const std::vector<NamedTensor>>(std::move(whole));
  const fs::path path = partial_ / file.name;
  // While this thread computes the archive's own checksums, the writer's writes what has them.
  io::CheckedWriter out(path);
  write_archive(
      pickled,
      [&](std::span<const std::byte> bytes) {
        const auto storage = places.find(bytes.data());
        if (storage == places.end()) {
          out.append(bytes);
          return;
        }
        storage->second = out.size();
        out.append(bytes, kept);
        written_bytes_ += bytes.size();
      },
      path.string());
  Positions positions;
  for (const auto& [tensor_name, host] : *kept) {
    positions[tensor_name].emplace_back(Box::whole(host.sizes().vec()),
                                        host.numel() > 0 ? places.at(host.const_data_ptr()) : 0);
  }
  return file_report(file, out, positions);
}

Json Save::write_text(const std::string& name, const std::string& contents) const {
  io::File file = io::File::create(partial_ / name);
  file.write(contents.data(), contents.size(), 0);
  file.sync();
  file.close();
  return {{"name", name},
          {"bytes", contents.size()},
          {"checksums", hex_of(io::block_checksums(std::as_bytes(std::span(contents))))}};
}

void Save::complete(const std::vector<std::string>& reports) {
  io::Manifest manifest;
  manifest.about = about_;
  std::set<std::string> listed;
  const auto add_file = [&](const Json& entry) {
    io::SavedFile file;
    file.name = entry.at("name").get<std::string>();
    file.bytes = entry.at("bytes").get<std::uint64_t>();
    const auto& hex = entry.at("checksums").get_ref<const std::string&>();
    for (std::size_t at = 0; at < hex.size(); at += 16)
      file.checksums.push_back(*io::parse_checksum(std::string_view(hex).substr(at, 16)));
    if (!listed.insert(file.name).second)
      throw StateError(text::concat("Two processes wrote the file ", file.name, "."));
    manifest.files.push_back(std::move(file));
  };
  for (const TensorGroup& group : groups_) {
    manifest.groups[group.name];
    if (!group.aliases.empty()) manifest.aliases[group.name] = group.aliases;
  }
  for (const std::string& report : reports) {
    for (const Json& entry : parse_json(report)) {
      add_file(entry);
      if (!entry.contains("group")) continue;
      auto& tensors = manifest.groups[entry["group"].get<std::string>()];
      for (const Json& tensor : entry["tensors"]) {
        const auto dtype = *st::parse_dtype(tensor[1].get<std::string>());
        const auto shape = tensor[2].get<std::vector<std::int64_t>>();
        io::SavedTensor& saved =
            tensors.try_emplace(tensor[0].get<std::string>(), io::SavedTensor{dtype, shape, {}, {}})
                .first->second;
        if (saved.dtype != dtype || saved.shape != shape) {
          throw StateError(text::concat("The processes have different shapes or dtypes of '",
                                        tensor[0].get<std::string>(), "'."));
        }
        for (const Json& box : tensor[3]) {
          saved.boxes.push_back(
              {manifest.files.size() - 1,
               box[0].get<std::uint64_t>(),
               {box[1].get<std::vector<std::int64_t>>(), box[2].get<std::vector<std::int64_t>>()}});
        }
      }
    }
  }
  for (const std::string& name : files_of_hooks(partial_)) {
    if (listed.contains(name)) continue;
    io::File file = io::File::open_writable(partial_ / name);
    file.sync();
    const io::MappedFile map(partial_ / name);
    manifest.files.push_back({name, map.size(), io::block_checksums(map.bytes())});
  }
  const fs::path path = partial_ / io::Manifest::kFileName;
  manifest.check(path);
  const std::string text = manifest.text();
  static_cast<void>(io::Manifest::parse(text, path));  // what loads will say of it
  write_text(std::string(io::Manifest::kFileName), text);
  io::sync_folder(partial_);
  io::replace_folder(partial_, folder_);
}

// All at once: while one waits for the disk, another is written.
Json Save::write_files() {
  std::vector<Json> reports(mine_.size());
  std::vector<std::exception_ptr> failures(mine_.size());
  const auto work = [&](std::size_t i) {
    try {
      const at::NoGradGuard no_grad;
      const bool python = mine_[i].name.ends_with(".bin");
      reports[i] = python ? write_python(mine_[i]) : write_tensors(mine_[i]);
    } catch (...) {
      failures[i] = std::current_exception();
    }
  };
  std::vector<std::jthread> threads;  // joined also where one more cannot be made
  for (std::size_t i = 1; i < mine_.size(); ++i) threads.emplace_back(work, i);
  if (!mine_.empty()) work(0);
  threads.clear();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
  Json report = Json::array();
  for (Json& one : reports) report.push_back(std::move(one));
  for (const auto& [name, contents] : texts_) report.push_back(write_text(name, contents));
  return report;
}

void Save::write(const comm::Group& group) {
  const std::string path = folder_.string();
  const std::string what = text::concat("saving the checkpoint ", path);
  try {
    Json report;
    together(group, what, path, [&] {
      // Before anything large is written.
      if (group.rank() == 0) static_cast<void>(files_of_hooks(partial_));
      report = write_files();
    });
    const auto reports = group.all_gather_bytes(report.dump());
    together(group, what, path, [&] {
      if (group.rank() == 0) complete(reports);
    });
  } catch (...) {
    if (group.rank() == 0) {
      try {
        io::delete_path(partial_);
      } catch (const Error& error) {
        log::warning(describe(error));  // the first error is the one to report
      }
    }
    lock_.reset();
    throw;
  }
  lock_.reset();
}

}  // namespace accelerate::checkpoints
