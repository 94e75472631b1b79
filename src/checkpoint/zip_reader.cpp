#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "checkpoint/zip_reader.hpp"

namespace accelerate::checkpoints {

namespace {

// The names of the fields are those of the format's description, APPNOTE.TXT of PKWARE, 4.3.
constexpr std::uint32_t kLocalHeader = 0x04034b50;
constexpr std::uint32_t kCentralHeader = 0x02014b50;
constexpr std::uint32_t kEnd = 0x06054b50;
constexpr std::uint32_t kEnd64 = 0x06064b50;
constexpr std::uint32_t kEnd64Locator = 0x07064b50;
constexpr std::uint64_t kLocalHeaderBytes = 30, kCentralHeaderBytes = 46, kEndBytes = 22,
                        kEnd64Bytes = 56, kLocatorBytes = 20;

class Parser {
 public:
  explicit Parser(const io::MappedFile& file) : file_(file), bytes_(file.bytes()) {}

  std::map<std::string, std::span<const std::byte>, std::less<>> run() {
    const Directory directory = find_directory();
    std::uint64_t at = directory.offset;
    for (std::uint64_t i = 0; i < directory.entries; ++i) at = read_entry(at, directory);
    if (at != directory.offset + directory.bytes)
      refuse("its directory has another length than it says");
    check_overlaps(directory.offset);
    return strip_folder();
  }

 private:
  struct Directory {
    std::uint64_t entries, bytes, offset;
  };
  struct Entry {
    std::string name;
    std::uint64_t header, data, bytes;
  };

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... why) const {
    const std::string path = file_.path().string();
    throw CheckpointError(
        text::concat(path, " is not a file that torch.save wrote, or is damaged: ", why..., "."),
        path);
  }

  // Little-endian, wherever it lies.
  std::uint64_t number(std::uint64_t at, int bytes) const {
    if (at > bytes_.size() || static_cast<std::uint64_t>(bytes) > bytes_.size() - at)
      refuse("it ends too early");
    std::uint64_t value = 0;
    for (int i = bytes - 1; i >= 0; --i)
      value =
          value << 8 | std::to_integer<std::uint64_t>(bytes_[at + static_cast<std::uint64_t>(i)]);
    return value;
  }
  void require(std::uint64_t at, std::uint32_t signature, const char* what) const {
    if (number(at, 4) != signature) refuse("there is no ", what, " at byte ", at);
  }

  Directory find_directory() const {
    if (bytes_.size() < kEndBytes) refuse("it has only ", bytes_.size(), " bytes");
    // The end record is followed by a comment of up to 64 KiB.
    const std::uint64_t last = bytes_.size() - kEndBytes;
    const std::uint64_t first = last > 0xffff ? last - 0xffff : 0;
    std::optional<std::uint64_t> end;
    for (std::uint64_t at = last + 1; at-- > first && !end;) {
      if (number(at, 4) == kEnd && number(at + 20, 2) == bytes_.size() - at - kEndBytes) end = at;
    }
    if (!end) refuse("it has no zip directory at its end. It was cut short, or is of another kind");
    Directory directory{number(*end + 10, 2), number(*end + 12, 4), number(*end + 16, 4)};
    std::uint64_t limit = *end;
    if (*end >= kLocatorBytes && number(*end - kLocatorBytes, 4) == kEnd64Locator) {
      const std::uint64_t at = number(*end - kLocatorBytes + 8, 8);
      if (at > *end - kLocatorBytes || *end - kLocatorBytes - at < kEnd64Bytes)
        refuse("its zip64 record lies outside of it");
      require(at, kEnd64, "zip64 record");
      const Directory wide{number(at + 32, 8), number(at + 40, 8), number(at + 48, 8)};
      const auto differs = [](std::uint64_t narrow, std::uint64_t full, std::uint64_t elsewhere) {
        return narrow != elsewhere && narrow != full;
      };
      if (differs(directory.entries, wide.entries, 0xffff) ||
          differs(directory.bytes, wide.bytes, 0xffffffff) ||
          differs(directory.offset, wide.offset, 0xffffffff)) {
        refuse("its two end records describe two different directories");
      }
      directory = wide;
      limit = at;
    }
    if (directory.offset > limit || directory.bytes > limit - directory.offset)
      refuse("its directory lies outside of it");
    if (directory.entries > directory.bytes / kCentralHeaderBytes)
      refuse("its directory cannot hold ", directory.entries, " entries");
    return directory;
  }

  // Reads one entry of the directory and gives where the next one begins.
  std::uint64_t read_entry(std::uint64_t at, const Directory& directory) {
    const std::uint64_t directory_end = directory.offset + directory.bytes;
    if (directory_end - at < kCentralHeaderBytes) refuse("its directory ends within an entry");
    require(at, kCentralHeader, "directory entry");
    const std::uint64_t flags = number(at + 8, 2), method = number(at + 10, 2);
    std::uint64_t packed = number(at + 20, 4), bytes = number(at + 24, 4),
                  header = number(at + 42, 4);
    const std::uint64_t name_bytes = number(at + 28, 2), extra_bytes = number(at + 30, 2),
                        comment_bytes = number(at + 32, 2);
    const std::uint64_t name_at = at + kCentralHeaderBytes, extra_at = name_at + name_bytes;
    const std::uint64_t next = extra_at + extra_bytes + comment_bytes;
    if (next > directory_end) refuse("its directory ends within an entry");
    std::string name(reinterpret_cast<const char*>(bytes_.data() + name_at), name_bytes);
    read_zip64(extra_at, extra_bytes, bytes, packed, header);
    if (flags & 1) refuse("the record '", name, "' is encrypted");
    if (method != 0 || packed != bytes)
      refuse("the record '", name,
             "' is compressed, as in a TorchScript module (which torch::jit::load reads), and "
             "torch.save stores records as they are");
    // The local header repeats the name, has a padding of its own, and is followed by the data.
    if (header > directory.offset || directory.offset - header < kLocalHeaderBytes)
      refuse("the record '", name, "' lies outside of it");
    require(header, kLocalHeader, "record");
    const std::uint64_t local_name = number(header + 26, 2), local_extra = number(header + 28, 2);
    const std::uint64_t data = header + kLocalHeaderBytes + local_name + local_extra;
    if (data > directory.offset || bytes > directory.offset - data)
      refuse("the record '", name, "' lies outside of it");
    if (local_name != name_bytes ||
        !std::equal(bytes_.begin() + static_cast<std::ptrdiff_t>(name_at),
                    bytes_.begin() + static_cast<std::ptrdiff_t>(extra_at),
                    bytes_.begin() + static_cast<std::ptrdiff_t>(header + kLocalHeaderBytes))) {
      refuse("the record '", name, "' is called otherwise where it lies");
    }
    entries_.push_back({std::move(name), header, data, bytes});
    return next;
  }

  // Numbers that are 0xffffffff stand in the extra field, in this order.
  void read_zip64(std::uint64_t at, std::uint64_t left, std::uint64_t& bytes, std::uint64_t& packed,
                  std::uint64_t& header) const {
    constexpr std::uint64_t kElsewhere = 0xffffffff;
    while (left >= 4) {
      const std::uint64_t id = number(at, 2), field = number(at + 2, 2);
      if (field > left - 4) refuse("an extra field is longer than its place");
      if (id == 1) {
        std::uint64_t from = at + 4;
        for (std::uint64_t* value : {&bytes, &packed, &header}) {
          if (*value != kElsewhere) continue;
          if (from + 8 > at + 4 + field) refuse("a zip64 field is too short");
          *value = number(from, 8);
          from += 8;
        }
        return;
      }
      at += 4 + field;
      left -= 4 + field;
    }
  }

  void check_overlaps(std::uint64_t end) {
    std::sort(entries_.begin(), entries_.end(),
              [](const Entry& a, const Entry& b) { return a.header < b.header; });
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const std::uint64_t next = i + 1 < entries_.size() ? entries_[i + 1].header : end;
      if (entries_[i].data + entries_[i].bytes > next)
        refuse("the record '", entries_[i].name, "' overlaps with the next one");
    }
  }

  std::map<std::string, std::span<const std::byte>, std::less<>> strip_folder() const {
    std::map<std::string, std::span<const std::byte>, std::less<>> records;
    std::string folder;
    for (const Entry& entry : entries_) {
      const auto slash = entry.name.find('/');
      if (slash == std::string::npos) refuse("the record '", entry.name, "' is in no folder");
      if (folder.empty()) folder = entry.name.substr(0, slash + 1);
      if (!entry.name.starts_with(folder))
        refuse("its records are in different folders, ", folder, " and that of ", entry.name);
      if (!records.emplace(entry.name.substr(slash + 1), bytes_.subspan(entry.data, entry.bytes))
               .second) {
        refuse("the record '", entry.name, "' is there twice");
      }
    }
    return records;
  }

  const io::MappedFile& file_;
  std::span<const std::byte> bytes_;
  std::vector<Entry> entries_;
};

}  // namespace

ZipReader::ZipReader(std::shared_ptr<const io::MappedFile> file) : records_(Parser(*file).run()) {}

}  // namespace accelerate::checkpoints
