#include "io/async_engine.hpp"
#include "io/file_kind.hpp"
#include "io/large_files.hpp"

#include <accelerate/base/environment.hpp>
#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/async_file.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <map>
#include <system_error>
#include <utility>

namespace accelerate::io {
namespace {

// Large enough that a call costs nothing beside its data, small enough that an operation becomes
// several that run at once.
constexpr std::size_t kPieceBytes = std::size_t{4} << 20;

std::string reason(int code) { return std::generic_category().message(code); }

class Descriptor {
 public:
  explicit Descriptor(int value = -1) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  int get() const noexcept { return value_; }

 private:
  int value_;
};

// Opens with O_DIRECT if asked, and without where the filesystem knows no such thing.
template <class Open>
Descriptor open_maybe_direct(bool& direct, const std::string& name, Open&& open) {
  if (direct) {
    const int descriptor = open(O_DIRECT);
    if (descriptor >= 0 || errno != EINVAL) return Descriptor(descriptor);
    direct = false;
    log::debug(name + " is used through the page cache: its filesystem has no direct I/O.",
               log::Ranks::all);
  }
  return Descriptor(open(0));
}

int open_scratch(const std::filesystem::path& folder, int flags) {
  const int nameless =
      ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | O_EXCL | flags, 0600);
  if (nameless >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return nameless;
  // A filesystem without nameless files: the name goes as soon as it is there.
  std::string path = (folder / "accelerate-XXXXXX").string();
  const int named = ::mkostemp(path.data(), O_CLOEXEC | flags);
  const int code = errno;
  ::unlink(path.c_str());
  errno = code;
  return named;
}

std::unique_ptr<Engine> choose_engine(int descriptor, const std::optional<AsyncEngine>& wanted,
                                      AsyncEngine& chosen) {
  chosen = AsyncEngine::threads;
  if (wanted == AsyncEngine::threads) return make_thread_engine(descriptor);
  std::string why_not = "ACCELERATE_IO_URING turns io_uring off";
  if (wanted || Environment::process().get_bool("ACCELERATE_IO_URING").value_or(true)) {
    if (auto engine = make_uring_engine(descriptor, why_not)) {
      chosen = AsyncEngine::io_uring;
      return engine;
    }
    if (wanted)
      throw UnsupportedError("io_uring was asked for, and " + why_not + ". Use the threads.");
  }
  log::debug("Files are read and written by threads: " + why_not + ".", log::Ranks::all);
  return make_thread_engine(descriptor);
}

struct Operation {
  std::size_t pieces = 0;
  std::string error;
  int code = 0;
};

}  // namespace

bool io_uring_works(std::string* why_not) {
  static const std::string reason = [] {
    std::string sentence;
    make_uring_engine(-1, sentence);
    return sentence;
  }();
  if (why_not != nullptr) *why_not = reason;
  return reason.empty();
}

struct AsyncFile::Impl {
  Impl(Descriptor opened, std::string file_name, bool is_direct, const AsyncFileOptions& options)
      : descriptor(std::move(opened)), name(std::move(file_name)), direct(is_direct) {
    struct stat status {};
    if (::fstat(descriptor.get(), &status) != 0) fail("could not be looked at", errno);
    size = static_cast<std::uint64_t>(status.st_size);
    engine = choose_engine(descriptor.get(), options.engine(), kind);
  }

  ~Impl() {
    try {
      while (in_flight > 0) end_one();
    } catch (const std::exception& error) {
      log::warning(describe(error), log::Ranks::all);
    }
    for (const auto& [ticket, operation] : operations) {
      if (!operation.error.empty()) log::warning(operation.error, log::Ranks::all);
    }
  }

  [[noreturn]] void fail(const std::string& what, int code) const {
    throw FileError(text::concat(name, " ", what, ": ", reason(code), "."), name, code);
  }

  Ticket start(bool is_write, std::uint64_t offset, std::byte* memory, std::size_t length) {
    if (direct && (offset % kAlignment != 0 || length % kAlignment != 0 ||
                   reinterpret_cast<std::uintptr_t>(memory) % kAlignment != 0)) {
      throw Error(text::concat(name, " is open for direct I/O, which wants multiples of ",
                               kAlignment, ", and was given offset ", offset, ", length ", length,
                               " and address ", static_cast<const void*>(memory), "."));
    }
    const std::uint64_t ticket = next_ticket++;
    Operation& operation = operations[ticket];
    for (std::size_t begin = 0; begin < length; begin += kPieceBytes) {
      const std::size_t part = std::min(kPieceBytes, length - begin);
      begin_piece(operation, {ticket, is_write, offset + begin, memory + begin, part});
    }
    return Ticket{ticket};
  }

  void begin_piece(Operation& operation, const Piece& piece) {
    while (in_flight >= Engine::kDepth) end_one();
    engine->start(piece);
    ++operation.pieces;
    ++in_flight;
  }

  // Takes in the end of one piece; what is left of a short one goes on.
  void end_one() {
    const auto [piece, result] = engine->wait_one();
    --in_flight;
    Operation& operation = operations.at(piece.operation);
    --operation.pieces;
    if (result == -EINTR || result == -EAGAIN) return begin_piece(operation, piece);
    if (result > 0 && static_cast<std::size_t>(result) < piece.length) {
      const auto moved = static_cast<std::size_t>(result);
      return begin_piece(operation, {piece.operation, piece.is_write, piece.offset + moved,
                                     piece.memory + moved, piece.length - moved});
    }
    if (result > 0 || !operation.error.empty()) return;
    const char* what =
        piece.is_write ? " could not be written at byte " : " could not be read at byte ";
    operation.code = result < 0 ? static_cast<int>(-result) : EIO;
    operation.error =
        text::concat(name, what, piece.offset, " (", piece.length,
                     " bytes): ", result < 0 ? reason(operation.code) : "the file ends there", ".");
  }

  void wait(std::uint64_t ticket) {
    const auto found = operations.find(ticket);
    if (found == operations.end()) return;
    while (found->second.pieces > 0) end_one();
    const Operation operation = std::move(found->second);
    operations.erase(found);
    if (!operation.error.empty()) throw FileError(operation.error, name, operation.code);
  }

  void wait_all() {
    while (in_flight > 0) end_one();
    const auto ended = std::exchange(operations, {});
    for (const auto& [ticket, operation] : ended) {
      if (!operation.error.empty()) throw FileError(operation.error, name, operation.code);
    }
  }

  Descriptor descriptor;
  std::string name;
  bool direct;
  std::uint64_t size = 0;
  AsyncEngine kind = AsyncEngine::threads;
  std::uint64_t next_ticket = 1;
  std::size_t in_flight = 0;
  std::map<std::uint64_t, Operation> operations;
  std::unique_ptr<Engine> engine;
};

AsyncFile::AsyncFile(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
AsyncFile::~AsyncFile() = default;
AsyncFile::AsyncFile(AsyncFile&&) noexcept = default;
AsyncFile& AsyncFile::operator=(AsyncFile&&) noexcept = default;

AsyncFile AsyncFile::open(const std::filesystem::path& path, bool writable,
                          const AsyncFileOptions& options) {
  bool direct = options.direct();
  const std::string name = path.string();
  if (const char* other = other_than_file(path)) {
    throw FileError(text::concat(name, " is ", other, ", and a file was expected."), name, EINVAL);
  }
  if (writable) signal_of_large_files_is_an_error();
  Descriptor descriptor = open_maybe_direct(direct, name, [&](int flags) {
    return ::open(path.c_str(), (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | flags);
  });
  if (descriptor.get() < 0) {
    const int code = errno;
    throw FileError(
        text::concat(name, " could not be opened for ",
                     writable ? "reading and writing" : "reading", ": ", reason(code), "."),
        name, code);
  }
  return AsyncFile(std::make_unique<Impl>(std::move(descriptor), name, direct, options));
}

AsyncFile AsyncFile::scratch(const std::filesystem::path& folder, std::uint64_t bytes,
                             const AsyncFileOptions& options) {
  const std::string name = "The scratch file in " + folder.string();
  signal_of_large_files_is_an_error();
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  const auto refuse = [&](const std::string& what, int code) {
    throw FileError(text::concat(name, " ", what, ": ", reason(code), "."), folder.string(), code);
  };
  if (failed) refuse("could not be made, nor could the folder", failed.value());
  const auto free = std::filesystem::space(folder, failed).available;
  const auto too_little = [&] {
    throw FileError(
        text::concat("A scratch file of ", text::format_bytes(static_cast<std::int64_t>(bytes)),
                     " was to be made in ", folder.string(), ", where ",
                     text::format_bytes(static_cast<std::int64_t>(free)),
                     " are free. Free some, or name a folder on a larger disk."),
        folder.string(), ENOSPC);
  };
  if (!failed && free < bytes) too_little();

  bool direct = options.direct();
  Descriptor descriptor =
      open_maybe_direct(direct, name, [&](int flags) { return open_scratch(folder, flags); });
  if (descriptor.get() < 0) refuse("could not be made", errno);
  if (bytes > 0) {
    const int code = ::posix_fallocate(descriptor.get(), 0, static_cast<off_t>(bytes));
    if (code == ENOSPC || code == EFBIG) too_little();
    if (code != 0) refuse("could not be given its room on the disk", code);
  }
  return AsyncFile(std::make_unique<Impl>(std::move(descriptor), name, direct, options));
}

AsyncFile::Ticket AsyncFile::read(std::uint64_t offset, std::span<std::byte> memory) {
  return impl_->start(false, offset, memory.data(), memory.size());
}
AsyncFile::Ticket AsyncFile::write(std::uint64_t offset, std::span<const std::byte> memory) {
  return impl_->start(true, offset, const_cast<std::byte*>(memory.data()), memory.size());
}
void AsyncFile::wait(Ticket ticket) { impl_->wait(static_cast<std::uint64_t>(ticket)); }
void AsyncFile::wait_all() { impl_->wait_all(); }

std::shared_ptr<std::byte> AsyncFile::map() const {
  const std::size_t length = impl_->size;
  if (length == 0) return nullptr;
  void* memory =
      ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, impl_->descriptor.get(), 0);
  if (memory == MAP_FAILED) impl_->fail("could not be mapped into memory", errno);
  return {static_cast<std::byte*>(memory),
          [length](std::byte* mapped) { ::munmap(mapped, length); }};
}

std::uint64_t AsyncFile::size() const noexcept { return impl_->size; }
AsyncEngine AsyncFile::engine() const noexcept { return impl_->kind; }
bool AsyncFile::direct() const noexcept { return impl_->direct; }
const std::string& AsyncFile::name() const noexcept { return impl_->name; }

}  // namespace accelerate::io
