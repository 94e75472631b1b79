#include "io/async_engine.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <liburing.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <vector>

namespace accelerate::io {
namespace {

[[noreturn]] void fail(const char* call, int code) {
  throw Error(text::concat("io_uring failed in ", call, ": ", std::generic_category().message(code),
                           ". Set ACCELERATE_IO_URING=0 to do without it."));
}

class UringEngine final : public Engine {
 public:
  explicit UringEngine(int descriptor) : descriptor_(descriptor) {
    for (std::size_t i = kDepth; i-- > 0;) free_.push_back(i);
  }
  ~UringEngine() override {
    if (open_) io_uring_queue_exit(&ring_);
  }

  int open() {
    const int code = io_uring_queue_init(kDepth, &ring_, 0);
    open_ = code == 0;
    return -code;
  }

  /// Plain reads and writes came with Linux 5.6, later than the ring itself.
  bool can_read_and_write() {
    io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
    if (probe == nullptr) return false;
    const bool can = io_uring_opcode_supported(probe, IORING_OP_READ) != 0 &&
                     io_uring_opcode_supported(probe, IORING_OP_WRITE) != 0;
    io_uring_free_probe(probe);
    return can;
  }

  void start(const Piece& piece) override {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    if (entry == nullptr) fail("io_uring_get_sqe", EBUSY);
    const std::size_t slot = free_.back();
    free_.pop_back();
    pieces_[slot] = piece;
    const auto length = static_cast<unsigned>(piece.length);
    if (piece.is_write) {
      io_uring_prep_write(entry, descriptor_, piece.memory, length, piece.offset);
    } else {
      io_uring_prep_read(entry, descriptor_, piece.memory, length, piece.offset);
    }
    io_uring_sqe_set_data64(entry, slot);
    int code = 0;
    do {
      code = io_uring_submit(&ring_);
    } while (code == -EINTR);
    // Out of resources for now: the entry stays in the ring, and wait_one submits it.
    if (code < 0 && code != -EAGAIN && code != -EBUSY) fail("io_uring_submit", -code);
  }

  PieceResult wait_one() override {
    io_uring_cqe* ended = nullptr;
    int code = io_uring_peek_cqe(&ring_, &ended);
    while (code != 0) {
      code = io_uring_submit_and_wait(&ring_, 1);
      if (code < 0 && code != -EINTR && code != -EAGAIN && code != -EBUSY)
        fail("io_uring_submit_and_wait", -code);
      code = io_uring_peek_cqe(&ring_, &ended);
    }
    const auto slot = static_cast<std::size_t>(io_uring_cqe_get_data64(ended));
    const PieceResult result{pieces_[slot], ended->res};
    io_uring_cqe_seen(&ring_, ended);
    free_.push_back(slot);
    return result;
  }

 private:
  int descriptor_;
  bool open_ = false;
  io_uring ring_{};
  std::array<Piece, kDepth> pieces_;
  std::vector<std::size_t> free_;
};

}  // namespace

std::unique_ptr<Engine> make_uring_engine(int descriptor, std::string& why_not) {
  auto engine = std::make_unique<UringEngine>(descriptor);
  if (const int code = engine->open(); code != 0) {
    why_not = text::concat("this system refuses io_uring (", std::generic_category().message(code),
                           code == EPERM ? "), as containers do" : ")");
    return nullptr;
  }
  if (!engine->can_read_and_write()) {
    why_not = "this kernel's io_uring has no plain reads and writes, which came with Linux 5.6";
    return nullptr;
  }
  return engine;
}

}  // namespace accelerate::io
