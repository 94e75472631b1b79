#include "net/store_message.hpp"

namespace accelerate::net {
namespace {

void write(std::string& bytes, std::uint64_t value, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) bytes += static_cast<char>(value >> (8 * i));
}

/// Takes the first `size` bytes off. The caller has looked that there are so many.
std::uint64_t read(std::string_view& bytes, std::size_t size) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < size; ++i)
    value |= std::uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  bytes.remove_prefix(size);
  return value;
}

constexpr std::size_t kHead = 1 + 8 + 4;  // kind, number, how many parts

}  // namespace

std::string encode(const StoreMessage& message) {
  std::size_t size = kHead;
  for (const std::string& part : message.parts) size += 4 + part.size();
  std::string bytes;
  bytes.reserve(kLengthBytes + size);
  write(bytes, size, kLengthBytes);
  write(bytes, static_cast<std::uint64_t>(message.kind), 1);
  write(bytes, static_cast<std::uint64_t>(message.number), 8);
  write(bytes, message.parts.size(), 4);
  for (const std::string& part : message.parts) {
    write(bytes, part.size(), 4);
    bytes += part;
  }
  return bytes;
}

std::size_t announced_length(std::string_view bytes) {
  return static_cast<std::size_t>(read(bytes, kLengthBytes));
}

bool decode(std::string_view bytes, StoreMessage& message) {
  if (bytes.size() < kHead) return false;
  const auto kind = read(bytes, 1);
  if (kind > static_cast<std::uint64_t>(StoreMessage::Kind::impossible)) return false;
  message.kind = static_cast<StoreMessage::Kind>(kind);
  message.number = static_cast<std::int64_t>(read(bytes, 8));
  auto parts = read(bytes, 4);
  if (parts > bytes.size() / 4) return false;
  message.parts.clear();
  message.parts.reserve(parts);
  for (; parts > 0; --parts) {
    if (bytes.size() < 4) return false;
    const auto size = read(bytes, 4);
    if (size > bytes.size()) return false;
    message.parts.emplace_back(bytes.substr(0, size));
    bytes.remove_prefix(size);
  }
  return bytes.empty();
}

}  // namespace accelerate::net
