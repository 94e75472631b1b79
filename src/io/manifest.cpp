#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/manifest.hpp>
#include <accelerate/io/mapped_file.hpp>

#include "base/in_threads.hpp"
#include "base/parse_json.hpp"
#include "io/inside.hpp"
#include "io/system_error.hpp"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>

namespace accelerate::io {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kFormat = "accelerate-cpp checkpoint";
constexpr int kVersion = 1;

std::string first_line(std::string_view rest) {
  const auto bytes = std::as_bytes(std::span(rest.data(), rest.size()));
  return text::concat("{\"checksum\":\"", checksum_text(checksum(bytes)), "\",\n");
}

std::size_t blocks_of(std::uint64_t bytes) {
  return static_cast<std::size_t>((bytes + kChecksumBlock - 1) / kChecksumBlock);
}

}  // namespace

std::int64_t SavedTensor::elements() const noexcept {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

std::string Manifest::text() const {
  Json file_list = Json::array();
  for (const SavedFile& file : files) {
    std::string sums;
    for (const std::uint64_t sum : file.checksums) sums += checksum_text(sum);
    file_list.push_back({{"name", file.name}, {"bytes", file.bytes}, {"checksums", sums}});
  }
  Json group_list = Json::object();
  for (const auto& [group, tensors] : groups) {
    Json& list = group_list[group] = Json::object();
    for (const auto& [name, tensor] : tensors) {
      Json pieces = Json::array();
      for (const Piece& piece : tensor.pieces)
        pieces.push_back({piece.file, piece.first, piece.count, piece.position});
      Json entry = {{"dtype", std::string(safetensors::name(tensor.dtype))},
                    {"shape", tensor.shape}};
      if (!tensor.order.empty()) entry["order"] = tensor.order;
      entry["pieces"] = std::move(pieces);
      list[name] = std::move(entry);
    }
  }
  const Json body = {{"format", std::string(kFormat)},
                     {"version", kVersion},
                     {"block", kChecksumBlock},
                     {"about", about},
                     {"files", std::move(file_list)},
                     {"groups", std::move(group_list)},
                     {"aliases", aliases}};
  const std::string rest = body.dump().substr(1) + "\n";
  return first_line(rest) + rest;
}

Manifest Manifest::parse(std::string_view contents, const fs::path& path) {
  const auto refuse = [&](const std::string& what) {
    throw CheckpointError(
        text::concat(path.string(), " ", what, " Nothing was loaded; use another checkpoint."),
        path.string());
  };
  const auto line = contents.find('\n');
  if (line == std::string_view::npos ||
      contents.substr(0, line + 1) != first_line(contents.substr(line + 1))) {
    refuse("is damaged: its checksum is not that of its contents.");
  }
  Manifest manifest;
  try {
    const Json all = parse_json(contents);
    if (all.at("format") != kFormat) refuse("is not a list of an accelerate-cpp checkpoint.");
    if (all.at("version") != kVersion) {
      refuse(text::concat("has version ", all.at("version").dump(), ", and this library reads ",
                          kVersion, "."));
    }
    if (all.at("block") != kChecksumBlock)
      refuse(text::concat("has checksums of blocks of ", all.at("block").dump(), " bytes, and ",
                          kChecksumBlock, " was expected."));
    manifest.about = all.at("about");
    for (const Json& entry : all.at("files")) {
      SavedFile file;
      file.name = entry.at("name").get<std::string>();
      file.bytes = entry.at("bytes").get<std::uint64_t>();
      const auto& sums = entry.at("checksums").get_ref<const std::string&>();
      if (!stays_inside(file.name))
        refuse(text::concat("names the file '", file.name, "', which is not in its folder."));
      for (std::size_t at = 0; at + 16 <= sums.size(); at += 16) {
        const auto sum = parse_checksum(std::string_view(sums).substr(at, 16));
        if (!sum) refuse(text::concat("has unreadable checksums of the file ", file.name, "."));
        file.checksums.push_back(*sum);
      }
      if (file.checksums.size() != blocks_of(file.bytes) || sums.size() % 16 != 0)
        refuse(text::concat("has the wrong number of checksums of the file ", file.name, "."));
      manifest.files.push_back(std::move(file));
    }
    for (const auto& [group, tensors] : all.at("groups").items()) {
      auto& list = manifest.groups[group];
      for (const auto& [name, entry] : tensors.items()) {
        SavedTensor tensor;
        const auto dtype = safetensors::parse_dtype(entry.at("dtype").get<std::string>());
        if (!dtype) refuse(text::concat("has an unknown dtype for '", name, "'."));
        tensor.dtype = *dtype;
        tensor.shape = entry.at("shape").get<std::vector<std::int64_t>>();
        if (entry.contains("order")) tensor.order = entry["order"].get<std::vector<std::int64_t>>();
        for (const Json& piece : entry.at("pieces")) {
          tensor.pieces.push_back({piece.at(0).get<std::size_t>(), piece.at(1).get<std::int64_t>(),
                                   piece.at(2).get<std::int64_t>(),
                                   piece.at(3).get<std::uint64_t>()});
        }
        list.emplace(name, std::move(tensor));
      }
    }
    manifest.aliases = all.at("aliases").get<decltype(manifest.aliases)>();
  } catch (const DataError& error) {
    refuse(text::concat("cannot be read. ", error.what()));
  } catch (const Json::exception& error) {
    std::throw_with_nested(CheckpointError(
        text::concat(path.string(), " is not what a list of a checkpoint looks like."),
        path.string()));
  }
  manifest.check(path);
  return manifest;
}

Manifest Manifest::read(const fs::path& folder) {
  const fs::path path = folder / kFileName;
  if (std::error_code ignored; !fs::exists(path, ignored)) {
    throw CheckpointError(text::concat("There is no complete checkpoint of this library in ",
                                       folder.string(), ": it has no ", kFileName, "."),
                          folder.string());
  }
  return parse(read_file(path), path);
}

void Manifest::check(const fs::path& path) {
  const auto refuse = [&](const auto&... what) {
    throw CheckpointError(text::concat(path.string(), " contradicts itself: ", what...),
                          path.string());
  };
  for (auto& [group, tensors] : groups) {
    for (auto& [name, tensor] : tensors) {
      std::int64_t elements = 1;
      for (const std::int64_t size : tensor.shape) {
        if (size < 0 || (size > 0 && elements > (std::int64_t{1} << 58) / size))
          refuse("the shape of '", name, "' in ", group, " cannot be.");
        elements *= size;
      }
      std::vector<std::int64_t> order = tensor.order;
      std::sort(order.begin(), order.end());
      for (std::size_t i = 0; i < order.size(); ++i) {
        if (order.size() != tensor.shape.size() || order[i] != static_cast<std::int64_t>(i))
          refuse("the order of the dimensions of '", name, "' in ", group, " is not one.");
      }
      if (!order.empty() && safetensors::bits(tensor.dtype) % 8 != 0) {
        refuse("'", name, "' in ", group, " has dimensions in another order, and elements of ",
               safetensors::bits(tensor.dtype), " bits, which cannot be told apart.");
      }
      auto& pieces = tensor.pieces;
      std::sort(pieces.begin(), pieces.end(),
                [](const Piece& a, const Piece& b) { return a.first < b.first; });
      std::int64_t next = 0;
      for (const Piece& piece : pieces) {
        if (piece.first != next || piece.count < 0 || piece.count > elements - next) {
          refuse("'", name, "' in ", group, " has its elements from ", piece.first,
                 " on in one piece, and the piece before ends at ", next,
                 ". Each element belongs in one piece.");
        }
        next += piece.count;
        const auto bits = static_cast<std::uint64_t>(safetensors::bits(tensor.dtype));
        if (static_cast<std::uint64_t>(piece.count) * bits % 8 != 0 || piece.file >= files.size() ||
            piece.position > files[piece.file].bytes ||
            tensor.bytes(piece.count) > files[piece.file].bytes - piece.position) {
          refuse("a piece of '", name, "' in ", group, " lies outside of its file.");
        }
      }
      if (next != elements) {
        refuse("of '", name, "' in ", group, " ", next, " elements of ", elements,
               " are in its pieces.");
      }
    }
  }
  for (const auto& [group, names] : aliases) {
    for (const auto& [name, target] : names) {
      if (find(group, target) == nullptr)
        refuse("'", name, "' in ", group, " stands for '", target, "', which is not there.");
    }
  }
}

void Manifest::check_files(const fs::path& folder) const {
  for (const SavedFile& file : files) {
    const fs::path path = folder / file.name;
    std::error_code code;
    const auto size = fs::file_size(path, code);
    if (code) {
      throw CheckpointError(
          text::concat("The checkpoint ", folder.string(), " lacks its file ", file.name,
                       ". Nothing was loaded; use another checkpoint."),
          path.string());
    }
    if (size != file.bytes) {
      throw CheckpointError(text::concat(path.string(), " has ", size, " bytes, and ", file.bytes,
                                         " were written. Nothing was loaded; use another "
                                         "checkpoint."),
                            path.string());
    }
  }
}

const SavedTensor* Manifest::find(std::string_view group, const std::string& name) const {
  const auto tensors = groups.find(group);
  if (tensors == groups.end()) return nullptr;
  auto found = tensors->second.find(name);
  if (found == tensors->second.end()) {
    const auto others = aliases.find(group);
    if (others == aliases.end()) return nullptr;
    const auto other = others->second.find(name);
    if (other == others->second.end()) return nullptr;
    found = tensors->second.find(other->second);
  }
  return found == tensors->second.end() ? nullptr : &found->second;
}

void expect_no_checkpoint(const fs::path& folder) {
  std::error_code ignored;  // what cannot be looked at is reported when it is written to
  if (!fs::exists(folder / Manifest::kFileName, ignored)) return;
  throw CheckpointError(
      text::concat("Weights were to be written to the folder ", folder.string(),
                   ", which holds a checkpoint; with them it could not be loaded any more. Nothing "
                   "was written. Name another folder."),
      folder.string());
}

void verify_blocks(const fs::path& folder, const SavedFile& saved,
                   std::span<const std::size_t> blocks, const VerifiedBlock& each) {
  if (!blocks.empty()) verify_blocks(File::open(folder / saved.name), saved, blocks, each);
}

void verify_blocks(const File& file, const SavedFile& saved, std::span<const std::size_t> blocks,
                   const VerifiedBlock& each) {
  if (blocks.empty()) return;
  // What is cached is read where it lies, which takes half the time of copying it here; unless
  // somebody could cut the file short meanwhile, which would end the process.
  constexpr std::size_t kMapped = 4;
  // Each thread reads a long stretch: the system then reads ahead of it in ever larger pieces,
  // whose pages are faster to copy afterwards, too.
  constexpr std::size_t kLongest = 256;
  const std::size_t threads = std::min(reading_threads(), blocks.size());
  const std::size_t taken = std::min(kLongest, (blocks.size() + threads - 1) / threads);
  const std::size_t parts = (blocks.size() + taken - 1) / taken;
  const auto begin_of = [](std::size_t block) { return std::uint64_t{block} * kChecksumBlock; };
  const auto size_of = [&](std::size_t block) {
    return static_cast<std::size_t>(
        std::min<std::uint64_t>(kChecksumBlock, saved.bytes - begin_of(block)));
  };
  const ReadLease lease(file);
  std::optional<MappedFile> map;
  if (lease.holds()) map.emplace(file);
  const auto check = [&](std::size_t block, std::span<const std::byte> bytes) {
    if (checksum(bytes) != saved.checksums[block]) {
      throw CheckpointError(
          text::concat(file.path().string(), " is damaged: bytes ", begin_of(block), " to ",
                       begin_of(block) + bytes.size() - 1,
                       " are not those that were written. Nothing was loaded; use another "
                       "checkpoint."),
          file.path().string());
    }
    if (each) each(block, bytes);
  };
  in_threads(std::min(parts, threads), parts, [&] {
    // One block: it stays in the processor's cache until it was checked and taken.
    std::vector<std::byte> buffer(kChecksumBlock);
    return [&, buffer = std::move(buffer)](std::size_t part) mutable {
      const auto mine = blocks.subspan(part * taken, std::min(taken, blocks.size() - part * taken));
      for (std::size_t i = 0; i < mine.size();) {
        std::size_t next = i + 1;
        while (next < mine.size() && next < i + kMapped && mine[next] == mine[next - 1] + 1) ++next;
        const std::uint64_t begin = begin_of(mine[i]);
        const std::uint64_t bytes = begin_of(mine[next - 1]) + size_of(mine[next - 1]) - begin;
        const bool cached = map && lease.holds() && map->map_cached(begin, bytes);
        for (; i < next; ++i) {
          const std::size_t block = mine[i];
          if (cached) {
            check(block, map->slice(begin_of(block), size_of(block)));
            continue;
          }
          const auto read = std::span(buffer).first(size_of(block));
          file.read(read.data(), read.size(), begin_of(block));
          check(block, read);
        }
        if (cached) map->advise(Advice::kDontNeed, begin, bytes);
      }
    };
  });
}

PieceReader::PieceReader(fs::path folder, const Manifest& manifest)
    : folder_(std::move(folder)), manifest_(manifest) {}

const File& PieceReader::file(std::size_t index) {
  const std::lock_guard lock(mutex_);
  auto found = open_.find(index);
  if (found == open_.end())
    found = open_.emplace(index, File::open(folder_ / manifest_.files[index].name)).first;
  return found->second;
}

void PieceReader::read(const SavedTensor& tensor, std::int64_t first, std::int64_t count,
                       std::byte* data) {
  for_each_part(tensor, first, count,
                [&](const Piece& piece, std::int64_t begin, std::int64_t length) {
                  file(piece.file)
                      .read(data + tensor.bytes(begin - first), tensor.bytes(length),
                            piece.position + tensor.bytes(begin - piece.first));
                });
}

}  // namespace accelerate::io
