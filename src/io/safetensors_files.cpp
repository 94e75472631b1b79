#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/manifest.hpp>
#include <accelerate/io/safetensors.hpp>

#include <algorithm>
#include <cstdio>
#include <set>

#include "base/parse_json.hpp"
#include "io/inside.hpp"
#include "io/system_error.hpp"

namespace accelerate::io::safetensors {

namespace fs = std::filesystem;

// --------------------------------------------------------------------------------------- Writer

Writer::Writer(const fs::path& path, Header header)
    : header_(std::move(header)), file_(File::create(path)) {
  file_.preallocate(header_.file_bytes());
  file_.write(header_.text().data(), header_.text().size(), 0);
}

void Writer::write(const TensorInfo& info, std::span<const std::byte> bytes, std::uint64_t offset) {
  if (offset > info.bytes() || bytes.size() > info.bytes() - offset) {
    throw ConfigError(text::concat("The tensor '", info.name, "' has ", info.bytes(),
                                   " bytes, and ", bytes.size(), " were to be written from byte ",
                                   offset, " on."));
  }
  file_.write(bytes.data(), bytes.size(), header_.data_offset() + info.begin + offset);
  written_.fetch_add(bytes.size(), std::memory_order_relaxed);
}

void Writer::write(std::string_view name, std::span<const std::byte> bytes, std::uint64_t offset) {
  const TensorInfo* const info = header_.find(name);
  if (info == nullptr) {
    throw ConfigError(text::concat("The file ", file_.path().string(),
                                   " was begun without a tensor '", name, "'."));
  }
  write(*info, bytes, offset);
}

void Writer::finish() {
  if (written_ != header_.data_bytes()) {
    throw StateError(text::concat("The header of ", file_.path().string(), " promises ",
                                  header_.data_bytes(), " bytes of tensors, and ", written_.load(),
                                  " were written."));
  }
  file_.sync();
  file_.close();
}

// ---------------------------------------------------------------------------------------- Index

namespace {

Json parse_index(const fs::path& path) {
  try {
    return parse_json(read_file(path, 100'000'000));
  } catch (const DataError& error) {
    throw_damaged(path, "The index ", path.string(), " cannot be read. ", error.what());
  }
}

}  // namespace

Index Index::read(const fs::path& path) {
  const Json json = parse_index(path);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    throw_damaged(path, path.string(),
                  " has no object 'weight_map', which says in which file each tensor is.");
  }
  Index index;
  for (const auto& [name, file] : json["weight_map"].items()) {
    if (!file.is_string())
      throw_damaged(path, path.string(), " names no file for the tensor '", name, "'.");
    if (!stays_inside(file.get<std::string>())) {
      throw_damaged(path, path.string(), " says that the tensor '", name, "' is in '",
                    file.get<std::string>(), "', which is not a file in its folder.");
    }
    index.weight_map.emplace(name, file.get<std::string>());
  }
  // Some writers leave it out or write a float: nothing here depends on it.
  const auto metadata = json.find("metadata");
  if (metadata != json.end() && metadata->is_object() && metadata->contains("total_size") &&
      (*metadata)["total_size"].is_number_unsigned()) {
    index.total_size = (*metadata)["total_size"].get<std::uint64_t>();
  }
  return index;
}

std::string Index::text() const {
  nlohmann::ordered_json json;
  json["metadata"]["total_size"] = total_size;
  json["weight_map"] = weight_map;
  return json.dump(2) + "\n";
}

std::string shard_name(std::string_view stem, std::size_t shard, std::size_t shards) {
  if (shards == 1) return std::string(stem) + ".safetensors";
  char numbers[48];
  std::snprintf(numbers, sizeof numbers, "-%05zu-of-%05zu", shard + 1, shards);
  return std::string(stem) + numbers + ".safetensors";
}

std::string index_name(std::string_view stem) {
  return std::string(stem) + ".safetensors.index.json";
}

std::uint64_t parse_size(std::string_view text) {
  const auto bytes = text::to_bytes(text);
  if (!bytes || *bytes <= 0) {
    throw ConfigError(text::concat("'", text,
                                   "' is not a size. Write a number and one of B, KB, MB, GB, TB, "
                                   "KiB, MiB, GiB and TiB: \"5GB\"."));
  }
  return static_cast<std::uint64_t>(*bytes);
}

std::vector<std::vector<TensorInfo>> split(std::vector<TensorInfo> tensors, std::uint64_t most) {
  // A header of one tensor knows its size, and refuses what has none.
  const auto bytes_of = [](const TensorInfo& info) { return Header({info}).data_bytes(); };
  std::vector<std::vector<TensorInfo>> shards;
  std::vector<TensorInfo> open;
  std::uint64_t in_open = 0;
  for (TensorInfo& info : tensors) {
    const std::uint64_t bytes = bytes_of(info);
    if (bytes > most) {
      shards.push_back({std::move(info)});
      continue;
    }
    if (in_open > most - bytes) {
      shards.push_back(std::exchange(open, {}));
      in_open = 0;
    }
    in_open += bytes;
    open.push_back(std::move(info));
  }
  if (!open.empty() || shards.empty()) shards.push_back(std::move(open));
  return shards;
}

namespace {

bool is_shard_of(std::string_view file, std::string_view stem) {
  if (file == shard_name(stem, 0, 1) || file == index_name(stem)) return true;
  // stem-00001-of-00002.safetensors
  if (!file.starts_with(stem) || !file.ends_with(".safetensors")) return false;
  file.remove_prefix(stem.size());
  file.remove_suffix(std::string_view(".safetensors").size());
  const auto of = file.find("-of-");
  const auto digits = [](std::string_view text) {
    return text.size() >= 5 &&
           std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  };
  return of != std::string_view::npos && file.starts_with('-') && digits(file.substr(1, of - 1)) &&
         digits(file.substr(of + 4));
}

}  // namespace

std::vector<std::string> write_shards(
    const fs::path& folder, std::string_view stem,
    const std::vector<std::vector<TensorInfo>>& shards,
    const std::function<void(const fs::path&, const std::vector<TensorInfo>&)>& write) {
  expect_no_checkpoint(folder);
  make_folders(folder);
  remove_abandoned(folder, [&](std::string_view file) { return is_shard_of(file, stem); });
  Index index;
  std::vector<std::string> files;
  std::vector<fs::path> partials;
  try {
    for (std::size_t i = 0; i < shards.size(); ++i) {
      files.push_back(shard_name(stem, i, shards.size()));
      for (const TensorInfo& info : shards[i]) index.weight_map.emplace(info.name, files.back());
      index.total_size += Header(shards[i]).data_bytes();
      partials.push_back(partial_of(folder / files.back()));
      write(partials.back(), shards[i]);
    }
    for (std::size_t i = 0; i < files.size(); ++i) rename_durably(partials[i], folder / files[i]);
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    for (const fs::path& partial : partials) fs::remove(partial, ignored);
    throw;
  }
  if (shards.size() > 1) {
    write_file(folder / index_name(stem), index.text());
    files.insert(files.begin(), index_name(stem));
  }
  // A reader of the folder would take what is left of an earlier set for a part of this one.
  remove_shards(folder, stem, files);
  return files;
}

void remove_shards(const fs::path& folder, std::string_view stem,
                   const std::vector<std::string>& kept) {
  for (const std::string& file : names_in(folder)) {
    if (is_shard_of(file, stem) && std::find(kept.begin(), kept.end(), file) == kept.end())
      delete_path(folder / file);
  }
}

// ----------------------------------------------------------------------------------- Collection

namespace {

bool is_folder(const fs::path& path) {
  std::error_code ignored;  // what cannot be looked at is reported when it is opened
  return fs::is_directory(path, ignored);
}

// The file or the index that a folder holds.
fs::path in_folder(const fs::path& folder) {
  std::vector<fs::path> found;
  const std::vector<std::string> names = names_in(folder);
  for (const std::string& wanted : {shard_name("model", 0, 1), index_name("model")}) {
    if (std::find(names.begin(), names.end(), wanted) != names.end()) return folder / wanted;
  }
  for (const char* end : {".safetensors.index.json", ".safetensors"}) {
    for (const std::string& name : names) {
      if (found.empty() || found.front().string().ends_with(end)) {
        if (name.ends_with(end)) found.push_back(folder / name);
      }
    }
  }
  if (found.size() == 1) return found.front();
  throw_damaged(
      folder, folder.string(), " has ", found.size(),
      " safetensors files or indices where one was expected: model.safetensors, or one ending in "
      ".safetensors.index.json. Name the file.");
}

}  // namespace

Collection::Collection(const fs::path& path, Access access)
    : path_(is_folder(path) ? in_folder(path) : path) {
  const bool indexed = path_.extension() == ".json";
  Index index;
  std::vector<std::string> files;
  if (indexed) {
    index = Index::read(path_);
    std::set<std::string> names;
    for (const auto& [tensor, file] : index.weight_map) names.insert(file);
    files.assign(names.begin(), names.end());
  } else {
    files.push_back(path_.filename().string());
  }
  std::map<std::string, const Reader*> by_file;
  for (const std::string& file : files) {
    const fs::path full = path_.parent_path() / file;
    if (std::error_code ignored; indexed && !fs::exists(full, ignored)) {
      throw_damaged(full, full.string(), " is missing, and ", path_.string(),
                    " says that tensors are in it.");
    }
    readers_.push_back(std::make_unique<Reader>(full, access));
    by_file[file] = readers_.back().get();
    for (const TensorInfo& info : readers_.back()->header().tensors()) {
      const auto [at, fresh] = tensors_.emplace(info.name, Entry{readers_.back().get(), &info});
      if (!fresh) {
        throw_damaged(full, full.string(), " and ", at->second.reader->path().string(),
                      " both have a tensor '", info.name, "'.");
      }
    }
  }
  for (const auto& [tensor, file] : index.weight_map) {
    const auto at = tensors_.find(tensor);
    if (at == tensors_.end() || at->second.reader != by_file[file]) {
      throw_damaged(path_, path_.string(), " says that the tensor '", tensor, "' is in ", file,
                    ", and it is not.");
    }
  }
}

const Collection::Entry& Collection::at(std::string_view name) const {
  const auto at = tensors_.find(name);
  if (at == tensors_.end()) throw_damaged(path_, path_.string(), " has no tensor '", name, "'.");
  return at->second;
}

}  // namespace accelerate::io::safetensors
