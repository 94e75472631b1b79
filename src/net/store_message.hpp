#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace accelerate::net {

/// What a client of the store and its server say to each other: one message there, one back, each
/// after its length in four bytes.
struct StoreMessage {
  enum class Kind : std::uint8_t {
    // Requests, with the parts that they take.
    set,          ///< key, value, key, value, ...
    get,          ///< keys; waits for them
    wait,         ///< keys
    check,        ///< keys; number: 1 when all are there
    add,          ///< key; number: what to add, then the sum
    append,       ///< key, value
    compare_set,  ///< key, expected, desired
    erase,        ///< key; number: 1 when it was there
    count,        ///< number: how many keys there are
    // Answers.
    done,       ///< with the values asked for
    timed_out,  ///< with the keys that did not come
    impossible  ///< with the reason
  };
  Kind kind = Kind::done;
  /// get, wait: the most milliseconds to wait.
  std::int64_t number = 0;
  std::vector<std::string> parts;
};

/// The most bytes of one message; more are refused before they are sent, and not read.
inline constexpr std::size_t kMostMessageBytes = std::size_t{64} << 20;
inline constexpr std::size_t kLengthBytes = 4;

/// With its length before it.
std::string encode(const StoreMessage& message);
/// The length that the first four bytes announce.
std::size_t announced_length(std::string_view bytes);
/// Without the length. False when the bytes are no message.
bool decode(std::string_view bytes, StoreMessage& message);

}  // namespace accelerate::net
