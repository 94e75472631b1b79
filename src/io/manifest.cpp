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
// Version 1 had runs of consecutive elements where there are boxes now.
constexpr int kVersion = 2;

std::string first_line(std::string_view rest) {
  const auto bytes = std::as_bytes(std::span(rest.data(), rest.size()));
  return text::concat("{\"checksum\":\"", checksum_text(checksum(bytes)), "\",\n");
}

std::size_t blocks_of(std::uint64_t bytes) {
  return static_cast<std::size_t>((bytes + kChecksumBlock - 1) / kChecksumBlock);
}

// A number that is one: not 0.5, and not one that only unsigned numbers reach.
std::int64_t integer(const Json& json) {
  if (json.is_number_unsigned() && json.get<std::uint64_t>() > std::uint64_t{1} << 62)
    throw DataError(text::concat("The number ", json.dump(), " in it is too large."));
  if (!json.is_number_integer())
    throw DataError(text::concat("It has ", json.dump(), " where a whole number belongs."));
  return json.get<std::int64_t>();
}

std::uint64_t natural(const Json& json) {
  const std::int64_t number = integer(json);
  if (number < 0)
    throw DataError(text::concat("It has ", number, " where no negative number belongs."));
  return static_cast<std::uint64_t>(number);
}

std::vector<std::int64_t> integers(const Json& json) {
  if (!json.is_array())
    throw DataError(text::concat("It has ", json.dump(), " where a list of numbers belongs."));
  std::vector<std::int64_t> numbers;
  for (const Json& number : json) numbers.push_back(integer(number));
  return numbers;
}

SavedBox parse_box(const Json& entry) {
  if (!entry.is_array() || entry.size() != 4)
    throw DataError(text::concat("It has ", entry.dump(), " where a box belongs."));
  return {static_cast<std::size_t>(natural(entry[0])),
          natural(entry[1]),
          {integers(entry[2]), integers(entry[3])}};
}

// Consecutive elements, in the order of the tensor's dimensions, as boxes.
void add_piece(const Json& entry, SavedTensor& tensor) {
  if (!entry.is_array() || entry.size() != 4)
    throw DataError(text::concat("It has ", entry.dump(), " where a piece belongs."));
  const std::int64_t first = integer(entry[1]), count = integer(entry[2]);
  const Placement piece = Placement(tensor.shape, tensor.order).run(first, count);
  std::uint64_t position = natural(entry[3]);
  if (count == 0) return;
  for (PlacedBox& placed : piece.boxes()) {
    const std::uint64_t bytes = tensor.bytes(placed.box.elements());
    tensor.boxes.push_back(
        {static_cast<std::size_t>(natural(entry[0])), position, std::move(placed.box)});
    position += bytes;
  }
}

}  // namespace

SavedTensor SavedTensor::as_bytes() const {
  SavedTensor all{safetensors::Dtype::kU8, {static_cast<std::int64_t>(bytes(elements()))}, {}, {}};
  for (const SavedBox& own : boxes)
    all.boxes.push_back({own.file, own.position, Box::whole(all.shape)});
  return all;
}

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
      if (!tensor.order.empty())
        throw StateError("The boxes of '" + name + "' are not in row-major order.");
      Json boxes = Json::array();
      for (const SavedBox& own : tensor.boxes)
        boxes.push_back({own.file, own.position, own.box.offsets, own.box.sizes});
      list[name] = {{"dtype", std::string(safetensors::name(tensor.dtype))},
                    {"shape", tensor.shape},
                    {"boxes", std::move(boxes)}};
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
    const bool has_pieces = all.at("version") == 1;
    if (!has_pieces && all.at("version") != kVersion) {
      refuse(text::concat("has version ", all.at("version").dump(),
                          ", and this library reads 1 to ", kVersion, "."));
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
        tensor.shape = integers(entry.at("shape"));
        if (has_pieces) {
          if (entry.contains("order")) tensor.order = integers(entry["order"]);
          for (const Json& piece : entry.at("pieces")) add_piece(piece, tensor);
        } else {
          for (const Json& box : entry.at("boxes")) tensor.boxes.push_back(parse_box(box));
        }
        list.emplace(name, std::move(tensor));
      }
    }
    manifest.aliases = all.at("aliases").get<decltype(manifest.aliases)>();
  } catch (const DataError& error) {
    refuse(text::concat("cannot be read. ", error.what()));
  } catch (const ShardingError& error) {  // of a piece
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

void Manifest::check(const fs::path& path) const {
  for (const auto& [group, tensors] : groups) {
    for (const auto& [name, tensor] : tensors) {
      const auto refuse = [&, &group = group, &name = name](const auto&... what) {
        throw CheckpointError(text::concat(path.string(), " contradicts itself about '", name,
                                           "' in ", group, ": ", what...),
                              path.string());
      };
      std::vector<Box> boxes;
      for (const SavedBox& own : tensor.boxes) boxes.push_back(own.box);
      if (const auto problem = partition_problem(tensor.shape, boxes); !problem.empty())
        refuse(problem, ".");
      const int bits = safetensors::bits(tensor.dtype);
      const bool plain =
          tensor.boxes.size() <= 1 && tensor.order.empty() &&
          static_cast<std::uint64_t>(tensor.elements()) * static_cast<std::uint64_t>(bits) % 8 == 0;
      if (bits % 8 != 0 && !plain) {
        refuse("its elements have ", bits,
               " bits, so that they can be in one box alone, in row-major order, and have to fill "
               "whole bytes.");
      }
      for (const SavedBox& own : tensor.boxes) {
        if (own.file >= files.size() || own.position > files[own.file].bytes ||
            tensor.bytes(own.box.elements()) > files[own.file].bytes - own.position)
          refuse("its box ", own.box.text(), " lies outside of its file.");
      }
    }
  }
  const auto refuse = [&](const auto&... what) {
    throw CheckpointError(text::concat(path.string(), " contradicts itself: ", what...),
                          path.string());
  };
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

}  // namespace accelerate::io
