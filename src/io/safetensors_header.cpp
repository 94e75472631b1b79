#include <algorithm>
#include <array>
#include <limits>
#include <set>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/safetensors.hpp>

#include "base/parse_json.hpp"
#include "io/system_error.hpp"

namespace accelerate::io::safetensors {

namespace fs = std::filesystem;

namespace {

struct DtypeRow {
  std::string_view name;
  int bits;
};
// In the order of the enumeration.
constexpr std::array<DtypeRow, 22> kDtypes{{
    {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
    {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
    {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
    {"I64", 64},        {"U64", 64},
}};

// The limit of the format's own library.
constexpr std::uint64_t kMostHeaderBytes = 100'000'000;
// As many as LibTorch's kernels take.
constexpr std::size_t kMostDimensions = 64;
// So that the tensors of a mapped file lie as allocated ones do.
constexpr std::size_t kAlignment = 64;

// The bytes of a tensor of this shape, or the reason why there is no such number.
struct Size {
  std::uint64_t bytes = 0;
  const char* problem = nullptr;
};

Size size_of(const std::vector<std::int64_t>& shape, Dtype dtype) {
  std::uint64_t elements = 1;
  bool empty = false;
  for (const std::int64_t length : shape) {
    if (length < 0) return {0, "has a negative dimension"};
    empty |= length == 0;
    // LibTorch computes strides of empty tensors too.
    if (__builtin_mul_overflow(
            elements, static_cast<std::uint64_t>(std::max<std::int64_t>(length, 1)), &elements) ||
        elements > std::numeric_limits<std::uint64_t>::max() / 64) {
      return {0, "has more elements than can be counted"};
    }
  }
  if (empty) elements = 0;
  const std::uint64_t all_bits = elements * static_cast<std::uint64_t>(bits(dtype));
  if (all_bits % 8 != 0) return {0, "does not fill a whole number of bytes"};
  return {all_bits / 8, nullptr};
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return "[" + text::join(shape) + "]";
}

// Reads the header as it is parsed. The format allows one structure only, so a state for each place
// in it is enough, and nothing is built of a header that is something else. Duplicate keys, which a
// JSON value would hide, are seen.
class HeaderHandler final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderHandler(const fs::path& path) : path_(path) {}

  std::vector<TensorInfo> tensors;
  std::map<std::string, std::string> metadata;

  bool key(string_t& key) override {
    switch (state_) {
      case State::kTensors:
        if (!names_.insert(key).second) refuse("two tensors are called '", key, "'");
        if (key == "__metadata__") {
          state_ = State::kMetadataValue;
        } else {
          tensors.emplace_back().name = key;
          seen_ = 0;
          state_ = State::kTensorValue;
        }
        return true;
      case State::kMetadata:
        if (metadata.contains(key)) refuse("its metadata has '", key, "' twice");
        metadata_key_ = key;
        return true;
      case State::kTensor: {
        static constexpr std::array<std::string_view, 3> kFields{"dtype", "shape", "data_offsets"};
        const auto at = std::find(kFields.begin(), kFields.end(), key) - kFields.begin();
        if (at == 3) refuse(tensor(), " has an unknown field '", key, "'");
        if (seen_ & (1 << at)) refuse(tensor(), " has '", key, "' twice");
        seen_ |= 1 << at;
        state_ = std::array{State::kDtype, State::kShapeValue, State::kOffsetsValue}[at];
        return true;
      }
      default:
        return misplaced("a key");
    }
  }

  bool start_object(std::size_t) override {
    switch (state_) {
      case State::kStart:
        state_ = State::kTensors;
        return true;
      case State::kMetadataValue:
        state_ = State::kMetadata;
        return true;
      case State::kTensorValue:
        state_ = State::kTensor;
        return true;
      default:
        return misplaced("an object");
    }
  }

  bool end_object() override {
    switch (state_) {
      case State::kTensors:
        state_ = State::kEnd;
        return true;
      case State::kMetadata:
        state_ = State::kTensors;
        return true;
      case State::kTensor:
        if (seen_ != 7) refuse(tensor(), " lacks one of dtype, shape and data_offsets");
        state_ = State::kTensors;
        return true;
      default:
        return misplaced("the end of an object");
    }
  }

  bool start_array(std::size_t) override {
    switch (state_) {
      case State::kShapeValue:
        state_ = State::kShape;
        return true;
      case State::kOffsetsValue:
        state_ = State::kOffsets;
        offsets_ = 0;
        return true;
      default:
        return misplaced("an array");
    }
  }

  bool end_array() override {
    if (state_ == State::kOffsets && offsets_ != 2) {
      refuse(tensor(), " has ", offsets_, " data_offsets, and two belong there");
    }
    state_ = State::kTensor;
    return true;
  }

  bool string(string_t& value) override {
    if (state_ == State::kMetadata) {
      metadata.emplace(std::move(metadata_key_), value);
      return true;
    }
    if (state_ != State::kDtype) return misplaced("text");
    const auto dtype = parse_dtype(value);
    if (!dtype)
      refuse(tensor(), " has the dtype '", value.substr(0, 40),
             "', which this version does not know");
    tensors.back().dtype = *dtype;
    state_ = State::kTensor;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    TensorInfo* const info = tensors.empty() ? nullptr : &tensors.back();
    if (state_ == State::kShape) {
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        refuse(tensor(), " has a dimension of ", value);
      }
      if (info->shape.size() == kMostDimensions) {
        refuse(tensor(), " has more than ", kMostDimensions, " dimensions");
      }
      info->shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (state_ == State::kOffsets) {
      if (offsets_++ < 2) (offsets_ == 1 ? info->begin : info->end) = value;
      return true;
    }
    return misplaced("a number");
  }

  bool number_integer(number_integer_t value) override {
    if (state_ == State::kShape || state_ == State::kOffsets) {
      refuse(tensor(), " has ", value, " in its shape or data_offsets");
    }
    return misplaced("a number");
  }
  bool number_float(number_float_t, const string_t& text) override {
    return misplaced("the number " + text.substr(0, 40));
  }
  bool null() override {
    if (state_ != State::kMetadataValue) return misplaced("null");
    state_ = State::kTensors;  // as the format's own library reads it: no metadata
    return true;
  }
  bool boolean(bool) override { return misplaced("true or false"); }
  bool binary(binary_t&) override { return misplaced("binary data"); }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    refuse("it is not JSON in UTF-8 at byte ", position, " of the header (", error.what(), ")");
  }

 private:
  enum class State {
    kStart,
    kTensors,
    kMetadataValue,
    kMetadata,
    kTensorValue,
    kTensor,
    kDtype,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kEnd,
  };

  template <class... Parts>
  [[noreturn]] void refuse(const Parts&... why) const {
    throw_damaged(path_, path_.string(), " is not a safetensors file: ", why..., ".");
  }
  bool misplaced(const std::string& what) const {
    refuse("its header has ", what, " where none belongs",
           tensors.empty() ? "" : ", at or after " + tensor());
  }
  std::string tensor() const { return "the tensor '" + tensors.back().name + "'"; }

  const fs::path& path_;
  State state_ = State::kStart;
  std::set<std::string, std::less<>> names_;
  std::string metadata_key_;
  int seen_ = 0;
  int offsets_ = 0;
};

}  // namespace

std::string_view name(Dtype dtype) noexcept {
  return kDtypes[static_cast<std::size_t>(dtype)].name;
}

std::optional<Dtype> parse_dtype(std::string_view name) noexcept {
  for (std::size_t i = 0; i < kDtypes.size(); ++i) {
    if (kDtypes[i].name == name) return static_cast<Dtype>(i);
  }
  return std::nullopt;
}

int bits(Dtype dtype) noexcept { return kDtypes[static_cast<std::size_t>(dtype)].bits; }

Header::Header(std::vector<TensorInfo> tensors, std::map<std::string, std::string> metadata)
    : tensors_(std::move(tensors)), metadata_(std::move(metadata)) {
  std::stable_sort(tensors_.begin(), tensors_.end(), [](const TensorInfo& a, const TensorInfo& b) {
    return bits(a.dtype) > bits(b.dtype);
  });
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  if (!metadata_.empty()) json["__metadata__"] = metadata_;
  std::uint64_t at = 0;
  for (TensorInfo& info : tensors_) {
    const Size size = size_of(info.shape, info.dtype);
    if (size.problem != nullptr) {
      throw ConfigError(text::concat(
          "The tensor '", info.name, "' of shape ", shape_text(info.shape), " and dtype ",
          safetensors::name(info.dtype), ' ', size.problem, "; safetensors cannot hold it."));
    }
    if (info.name == "__metadata__") {
      throw ConfigError("A tensor cannot be called __metadata__ in a safetensors file.");
    }
    info.begin = at;
    if (__builtin_add_overflow(at, size.bytes, &at)) {
      throw ConfigError("The tensors have more bytes than can be counted.");
    }
    info.end = at;
  }
  index();
  // ordered_json looks for a key by going through all: appending keeps this linear.
  auto& object = json.get_ref<nlohmann::ordered_json::object_t&>();
  for (const TensorInfo& info : tensors_) {
    nlohmann::ordered_json entry;
    entry["dtype"] = safetensors::name(info.dtype);
    entry["shape"] = info.shape;
    entry["data_offsets"] = {info.begin, info.end};
    object.push_back({info.name, std::move(entry)});
  }
  try {
    text_ = std::string(8, '\0') + json.dump();
  } catch (const nlohmann::json::exception&) {
    std::throw_with_nested(
        ConfigError("A tensor's name or the metadata is not UTF-8, which safetensors files need."));
  }
  text_.resize((text_.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  const std::uint64_t length = text_.size() - 8;
  if (length > kMostHeaderBytes) {
    throw ConfigError(text::concat("The header of a safetensors file may have ", kMostHeaderBytes,
                                   " bytes, and these ", tensors_.size(), " tensors need ", length,
                                   ". Write them to several files."));
  }
  for (int i = 0; i < 8; ++i)
    text_[static_cast<std::size_t>(i)] = static_cast<char>(length >> (8 * i));
  data_offset_ = text_.size();
}

void Header::index() {
  by_name_.reserve(tensors_.size());
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (!by_name_.emplace(tensors_[i].name, i).second) {
      throw ConfigError("Two tensors are called '" + tensors_[i].name + "'.");
    }
  }
}

Header Header::parse(std::string_view json, std::uint64_t data_bytes, const fs::path& path) {
  const auto refuse = [&](const auto&... why) {
    throw_damaged(path, path.string(), " is not a safetensors file: ", why..., ".");
  };
  HeaderHandler handler(path);
  if (json.starts_with("\xef\xbb\xbf")) refuse("its header begins with a byte-order mark");
  try {
    scan_json(json, handler);
  } catch (const DataError& error) {
    throw_damaged(path, path.string(), " is not a safetensors file: ", error.what());
  }

  Header header;
  header.tensors_ = std::move(handler.tensors);
  header.metadata_ = std::move(handler.metadata);
  header.data_offset_ = 8 + json.size();
  std::stable_sort(header.tensors_.begin(), header.tensors_.end(),
                   [](const TensorInfo& a, const TensorInfo& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  std::uint64_t at = 0;
  for (const TensorInfo& info : header.tensors_) {
    const auto which = [&] { return "the tensor '" + info.name + "'"; };
    const Size size = size_of(info.shape, info.dtype);
    if (size.problem != nullptr)
      refuse(which(), " of shape ", shape_text(info.shape), ' ', size.problem);
    if (info.end < info.begin)
      refuse(which(), " ends at ", info.end, ", before it begins at ", info.begin);
    if (info.begin < at)
      refuse(which(), " overlaps with the one before it, at byte ", info.begin, " of the data");
    if (info.begin > at) refuse("no tensor has the bytes ", at, " to ", info.begin, " of the data");
    if (info.bytes() != size.bytes) {
      refuse(which(), " of shape ", shape_text(info.shape), " and dtype ",
             safetensors::name(info.dtype), " needs ", size.bytes, " bytes and has ", info.bytes());
    }
    at = info.end;
  }
  if (at > data_bytes) {
    refuse("its tensors need ", at, " bytes and ", data_bytes,
           " follow the header. It was cut short");
  }
  if (at < data_bytes) refuse(data_bytes - at, " bytes follow after the last tensor");
  header.index();
  return header;
}

namespace {

// The length of the JSON, checked against the file's size.
std::uint64_t header_length(const unsigned char* first, std::uint64_t file_bytes,
                            const fs::path& path) {
  std::uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | first[i];
  if (first[0] == 'P' && first[1] == 'K' && first[2] == 3 && first[3] == 4) {
    throw_damaged(path, path.string(),
                  " is not a safetensors file but a zip archive, as torch.save writes. Expected is "
                  "safetensors here: convert it first.");
  }
  if (length > kMostHeaderBytes) {
    throw_damaged(path, path.string(), " is not a safetensors file: its header would have ", length,
                  " bytes, and the format allows ", kMostHeaderBytes, ".");
  }
  if (length > file_bytes - 8) {
    throw_damaged(path, path.string(), " is not a safetensors file: its header would have ", length,
                  " bytes, and the file has ", file_bytes,
                  ". It is something else, or was cut short.");
  }
  return length;
}

[[noreturn]] void throw_too_short(const fs::path& path, std::uint64_t bytes) {
  throw_damaged(path, path.string(), " is not a safetensors file: it has ", bytes,
                " bytes, and 8 are needed for the length of the header alone.");
}

}  // namespace

Header Header::read(const fs::path& path) {
  const File file = File::open(path);
  const std::uint64_t bytes = file.size();
  if (bytes < 8) throw_too_short(path, bytes);
  std::array<unsigned char, 8> first{};
  file.read(first.data(), first.size(), 0);
  const std::uint64_t length = header_length(first.data(), bytes, path);
  std::string json(length, '\0');
  file.read(json.data(), json.size(), 8);
  return parse(json, bytes - 8 - length, path);
}

const TensorInfo* Header::find(std::string_view name) const {
  const auto at = by_name_.find(std::string(name));
  return at == by_name_.end() ? nullptr : &tensors_[at->second];
}

// --------------------------------------------------------------------------------------- Reader

Reader::Reader(const fs::path& path, Access access)
    : file_(std::make_shared<const MappedFile>(path, Advice::kNormal, access)) {
  const std::uint64_t bytes = file_->size();
  if (bytes < 8) throw_too_short(path, bytes);
  const auto* const data = reinterpret_cast<const unsigned char*>(file_->bytes().data());
  const std::uint64_t length = header_length(data, bytes, path);
  header_ =
      Header::parse({reinterpret_cast<const char*>(data) + 8, length}, bytes - 8 - length, path);
}

const TensorInfo& Reader::info(std::string_view name) const {
  const TensorInfo* const info = header_.find(name);
  if (info == nullptr) throw_damaged(path(), path().string(), " has no tensor '", name, "'.");
  return *info;
}

std::span<const std::byte> Reader::bytes(const TensorInfo& info) const {
  return file_->slice(header_.data_offset() + info.begin, info.bytes());
}

}  // namespace accelerate::io::safetensors
