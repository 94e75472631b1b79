#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

/// The two ways an AsyncFile moves data. An engine is used by one thread.
namespace accelerate::io {

/// One system call's worth of an operation.
struct Piece {
  std::uint64_t operation = 0;
  bool is_write = false;
  std::uint64_t offset = 0;
  std::byte* memory = nullptr;
  std::size_t length = 0;
};

/// How a piece ended: the bytes moved, or an errno below zero.
struct PieceResult {
  Piece piece;
  std::int64_t result = 0;
};

class Engine {
 public:
  /// Pieces that may be in flight at once.
  static constexpr std::size_t kDepth = 64;

  virtual ~Engine() = default;
  /// Starts a piece; fewer than kDepth are in flight.
  virtual void start(const Piece& piece) = 0;
  /// Waits for any piece to end; at least one is in flight.
  virtual PieceResult wait_one() = 0;
};

std::unique_ptr<Engine> make_thread_engine(int descriptor);
/// Null, with a sentence in `why_not`, when it does not work here.
std::unique_ptr<Engine> make_uring_engine(int descriptor, std::string& why_not);

}  // namespace accelerate::io
