#include <accelerate/base/log.hpp>
#include <accelerate/io/file.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <utility>

#include "io/file_kind.hpp"
#include "io/file_stamp.hpp"
#include "io/large_files.hpp"
#include "io/system_error.hpp"

namespace accelerate::io {

namespace fs = std::filesystem;

namespace {

std::atomic<faults::Hook> fault_hook{nullptr};

// What the test that set a hook wants to happen: 0, or an errno.
int injected(faults::Operation operation, const fs::path& path, std::size_t& bytes) {
  const faults::Hook hook = fault_hook.load(std::memory_order_acquire);
  return hook == nullptr ? 0 : hook(operation, path, bytes);
}

int injected(faults::Operation operation, const fs::path& path) {
  std::size_t bytes = 0;
  return injected(operation, path, bytes);
}

// One system call moves at most this much, so that a signal or an injected fault is never far away.
constexpr std::size_t kMostAtOnce = std::size_t{16} << 20;

[[noreturn]] void throw_full(int error, const fs::path& path, std::uint64_t bytes) {
  if (error == ENOSPC || error == EDQUOT) {
    std::error_code ignored;
    const auto space = fs::space(path.parent_path().empty() ? "." : path.parent_path(), ignored);
    throw_system(error, path, "Could not write ",
                 text::format_bytes(static_cast<std::int64_t>(bytes)), " to ", path.string(),
                 ", whose disk has ",
                 ignored ? std::string("an unknown number of bytes")
                         : text::format_bytes(static_cast<std::int64_t>(space.available)),
                 " free. Make room or save elsewhere");
  }
  throw_system(
      error, path, "Could not write ", bytes, " bytes to ", path.string(),
      error == EFBIG ? ", beyond the largest size of a file that is allowed (ulimit -f)" : "");
}

extern "C" void ignore_signal(int) {}

fs::path folder_of(const fs::path& path) {
  const fs::path folder = path.parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

}  // namespace

void signal_of_large_files_is_an_error() {
  static const bool done = [] {
    struct sigaction now {};
    if (::sigaction(SIGXFSZ, nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return true;
    // A handler, as programs that are started would inherit that it is ignored.
    now.sa_handler = ignore_signal;
    now.sa_flags = SA_RESTART;
    return ::sigaction(SIGXFSZ, &now, nullptr) == 0;
  }();
  static_cast<void>(done);
}

void faults::set_hook(Hook hook) noexcept { fault_hook.store(hook, std::memory_order_release); }

// ------------------------------------------------------------------------------------------ File

File::File(fs::path path, int flags) : path_(std::move(path)) {
  if (flags & O_CREAT) {
    if (const int error = injected(faults::Operation::kCreate, path_)) {
      throw_system(error, path_, "Could not make the file ", path_.string());
    }
  }
  if (const char* other = other_than_file(path_)) {
    if (fs::is_directory(path_))
      throw_system(EISDIR, path_, "Could not open ", path_.string(), " as a file");
    throw_damaged(path_, path_.string(), " is ", other, ", and a file was expected.");
  }
  if ((flags & O_ACCMODE) != O_RDONLY) signal_of_large_files_is_an_error();
  do {
    descriptor_ = ::open(path_.c_str(), flags | O_CLOEXEC, 0666);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ < 0) {
    throw_system(errno, path_, flags & O_CREAT ? "Could not make the file " : "Could not open ",
                 path_.string());
  }
}

File File::open(const fs::path& path) { return File(path, O_RDONLY); }
File File::open_writable(const fs::path& path) { return File(path, O_RDWR); }
File File::create(const fs::path& path) { return File(path, O_RDWR | O_CREAT | O_TRUNC); }

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

File& File::operator=(File&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  return *this;
}

File::~File() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void File::read(void* data, std::size_t bytes, std::uint64_t offset) const {
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t n =
        ::pread(descriptor_, static_cast<char*>(data) + done, std::min(bytes - done, kMostAtOnce),
                static_cast<off_t>(offset + done));
    if (n < 0) {
      if (errno == EINTR) continue;
      throw_system(errno, path_, "Could not read ", bytes, " bytes from byte ", offset, " of ",
                   path_.string());
    }
    if (n == 0) {
      throw_damaged(path_, path_.string(), " ends at byte ", offset + done, ", where ",
                    bytes - done, " more bytes were expected. It was cut short.");
    }
    done += static_cast<std::size_t>(n);
  }
}

void File::write(const void* data, std::size_t bytes, std::uint64_t offset) {
  std::size_t done = 0;
  while (done < bytes) {
    std::size_t next = std::min(bytes - done, kMostAtOnce);
    if (const int error = injected(faults::Operation::kWrite, path_, next)) {
      throw_full(error, path_, bytes - done);
    }
    const ssize_t n = ::pwrite(descriptor_, static_cast<const char*>(data) + done, next,
                               static_cast<off_t>(offset + done));
    if (n < 0) {
      if (errno == EINTR) continue;
      throw_full(errno, path_, bytes - done);
    }
    done += static_cast<std::size_t>(n);
  }
}

void File::preallocate(std::uint64_t bytes) {
  int error = injected(faults::Operation::kPreallocate, path_);
  if (error == 0 && bytes > 0) {
    do {
      error = ::fallocate(descriptor_, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (error == EINTR);
    // Some file systems cannot: then a full disk shows while writing.
    if (error == EOPNOTSUPP || error == ENOSYS) error = 0;
  }
  if (error == 0 && ::ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) error = errno;
  if (error != 0) throw_full(error, path_, bytes);
}

void File::start_sync(std::uint64_t offset, std::uint64_t bytes) noexcept {
  // A hint: errors come out of `sync`.
  ::sync_file_range(descriptor_, static_cast<off_t>(offset), static_cast<off_t>(bytes),
                    SYNC_FILE_RANGE_WRITE);
}

void File::sync() {
  int error = injected(faults::Operation::kSync, path_);
  if (error == 0 && ::fsync(descriptor_) != 0) error = errno;
  if (error != 0) throw_system(error, path_, "Could not bring ", path_.string(), " to the disk");
}

void File::close() {
  const int descriptor = std::exchange(descriptor_, -1);
  if (descriptor >= 0 && ::close(descriptor) != 0 && errno != EINTR) {
    throw_system(errno, path_, "Closing ", path_.string(), " reported that a write was lost");
  }
}

FileStamp File::stamp() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) {
    throw_system(errno, path_, "Could not tell the size of ", path_.string());
  }
  return stamp_of(status);
}

// ---------------------------------------------------------------------------------- whole files

ReadLease::ReadLease(const File& file) : descriptor_(file.descriptor()) {
  // The system tells of one who waits by SIGIO, which would end the process; SIGURG is ignored.
  if (::fcntl(descriptor_, F_SETSIG, SIGURG) == 0) ::fcntl(descriptor_, F_SETLEASE, F_RDLCK);
}
ReadLease::~ReadLease() { ::fcntl(descriptor_, F_SETLEASE, F_UNLCK); }
bool ReadLease::holds() const noexcept { return ::fcntl(descriptor_, F_GETLEASE) == F_RDLCK; }

std::string read_file(const fs::path& path, std::uint64_t most) {
  const File file = File::open(path);
  const std::uint64_t size = file.size();
  if (size > most) {
    throw_damaged(path, path.string(), " has ", size, " bytes, and at most ", most,
                  " were expected.");
  }
  std::string contents(size, '\0');
  file.read(contents.data(), contents.size(), 0);
  return contents;
}

namespace {

// The machine is named as well: another one's process cannot be seen from here.
std::string this_machine() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

// What the process that was writing `partial` would have made, if it has ended; else nothing.
std::string_view abandoned(std::string_view partial) {
  constexpr std::string_view kEnd = ".partial";
  const std::string machine = "." + this_machine();
  if (!partial.ends_with(kEnd)) return {};
  partial.remove_suffix(kEnd.size());
  const auto dot = partial.rfind('.');
  if (dot == std::string_view::npos) return {};
  const auto process = text::to_int(partial.substr(dot + 1));
  if (!process || *process <= 0 || ::kill(static_cast<pid_t>(*process), 0) == 0 || errno != ESRCH)
    return {};
  partial = partial.substr(0, dot);
  if (!partial.ends_with(machine)) return {};
  partial.remove_suffix(machine.size());
  return partial;
}

}  // namespace

fs::path partial_of(const fs::path& path) {
  const std::string file = path.filename().string();
  remove_abandoned(folder_of(path), [&](std::string_view name) { return name == file; });
  fs::path partial = path;
  return partial += text::concat(".", this_machine(), ".", ::getpid(), ".partial");
}

void remove_abandoned(const fs::path& folder,
                      const std::function<bool(std::string_view name)>& is_one) {
  std::error_code ignored;  // whoever writes here next is told
  for (fs::directory_iterator at(folder, ignored), end; !ignored && at != end;
       at.increment(ignored)) {
    const std::string name = at->path().filename().string();
    const std::string_view file = abandoned(name);
    std::error_code removed;
    if (!file.empty() && is_one(file)) fs::remove(at->path(), removed);
  }
}

void replace_file(const fs::path& path, const std::function<void(const fs::path& partial)>& write) {
  const fs::path partial = partial_of(path);
  try {
    write(partial);
    rename_durably(partial, path);
  } catch (...) {
    std::error_code ignored;  // the first error is the one to report
    fs::remove(partial, ignored);
    throw;
  }
}

void write_file(const fs::path& path, std::string_view contents) {
  replace_file(path, [&](const fs::path& partial) {
    File file = File::create(partial);
    file.write(contents.data(), contents.size(), 0);
    file.sync();
    file.close();
  });
}

void sync_folder(const fs::path& folder) {
  int error = injected(faults::Operation::kSync, folder);
  if (error == 0) {
    const int descriptor = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) {
      error = errno;
    } else {
      // EINVAL: a file system that has nothing to sync for a folder.
      if (::fsync(descriptor) != 0 && errno != EINVAL) error = errno;
      ::close(descriptor);
    }
  }
  if (error != 0) {
    throw_system(error, folder, "Could not bring the names in ", folder.string(), " to the disk");
  }
}

void rename_durably(const fs::path& from, const fs::path& to) {
  int error = injected(faults::Operation::kRename, to);
  if (error == 0 && ::rename(from.c_str(), to.c_str()) != 0) error = errno;
  if (error != 0) {
    throw_system(error, to, "Could not rename ", from.string(), " to ", to.string());
  }
  sync_folder(folder_of(to));
}

namespace {

fs::path previous_of(const fs::path& folder) {
  const fs::path plain = folder.has_filename() ? folder : folder.parent_path();
  return plain.parent_path() / ("." + plain.filename().string() + ".previous");
}

void rename_now(const fs::path& from, const fs::path& to) {
  int error = injected(faults::Operation::kRename, to);
  if (error == 0 && ::rename(from.c_str(), to.c_str()) != 0) error = errno;
  if (error != 0) {
    throw_system(error, to, "Could not put ", from.string(), " in the place of ", to.string());
  }
}

}  // namespace

void replace_folder(const fs::path& from, const fs::path& to) {
  const fs::path previous = previous_of(to);
  bool exchanged = false;
  if (!fs::exists(to)) {
    rename_now(from, to);
  } else {
    int error = injected(faults::Operation::kExchange, to);
    if (error == 0 &&
        ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) {
      error = errno;
    }
    if (error == EINVAL || error == ENOSYS) {
      delete_path(previous);
      rename_now(to, previous);
      try {
        rename_now(from, to);
      } catch (...) {
        std::error_code ignored;  // then `replaced_folder` finds it
        fs::rename(previous, to, ignored);
        throw;
      }
    } else if (error != 0) {
      throw_system(error, to, "Could not put ", from.string(), " in the place of ", to.string());
    } else {
      exchanged = true;
    }
  }
  // From here on the new one is there, so nothing that fails is an error of the replacement.
  try {
    sync_folder(folder_of(to));
    delete_path(previous);
    if (exchanged) delete_path(from);
  } catch (const Error& error) {
    log::warning(text::concat(
        to.string(), " was replaced; then an operation failed, so the folder ",
        "before may be left as ", (exchanged ? from : previous).string(), ": ", describe(error)));
  }
}

fs::path replaced_folder(const fs::path& folder) {
  std::error_code ignored;
  const fs::path previous = previous_of(folder);
  return !fs::exists(folder, ignored) && fs::exists(previous, ignored) ? previous : folder;
}

void delete_path(const fs::path& path) {
  std::error_code code;
  if (const int error = injected(faults::Operation::kRemove, path)) {
    code.assign(error, std::generic_category());
  } else {
    fs::remove_all(path, code);
    // Above it is a file: then it is not there.
    if (code == std::errc::not_a_directory) code.clear();
  }
  if (code) throw_system(code.value(), path, "Could not remove ", path.string());
}

std::vector<std::string> names_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code code;
  for (fs::directory_iterator at(folder, code), end; !code && at != end; at.increment(code)) {
    names.push_back(at->path().filename().string());
  }
  if (code) throw_system(code.value(), folder, "Could not list the folder ", folder.string());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> files_in(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code code;
  for (fs::recursive_directory_iterator at(folder, code), end; !code && at != end;
       at.increment(code)) {
    std::error_code ignored;
    if (at->symlink_status(ignored).type() == fs::file_type::directory) continue;
    names.push_back(at->path().lexically_relative(folder).string());
  }
  if (code) throw_system(code.value(), folder, "Could not list the folder ", folder.string());
  std::sort(names.begin(), names.end());
  return names;
}

void make_folders(const fs::path& folder) {
  std::error_code code;
  if (const int error = injected(faults::Operation::kCreate, folder)) {
    code.assign(error, std::generic_category());
  } else {
    fs::create_directories(folder, code);
  }
  if (!code && !fs::is_directory(folder, code))
    code = std::make_error_code(std::errc::not_a_directory);
  if (code) throw_system(code.value(), folder, "Could not make the folder ", folder.string());
}

std::uint64_t free_bytes(const fs::path& path) {
  fs::path there = fs::absolute(path);
  std::error_code code;
  while (!fs::exists(there, code) && there.has_relative_path()) there = there.parent_path();
  const auto space = fs::space(there, code);
  if (code) {
    throw_system(code.value(), path, "Could not tell how much room there is for ", path.string());
  }
  return space.available;
}

// ------------------------------------------------------------------------------ TemporaryFolder

TemporaryFolder::TemporaryFolder(const fs::path& parent, const std::string& prefix) {
  std::string name = (parent / (prefix + "XXXXXX")).string();
  int error = injected(faults::Operation::kCreate, name);
  if (error == 0 && ::mkdtemp(name.data()) == nullptr) error = errno;
  if (error != 0) {
    throw_system(error, parent, "Could not make a temporary folder in ", parent.string());
  }
  path_ = name;
}

TemporaryFolder::TemporaryFolder(TemporaryFolder&& other) noexcept
    : path_(std::exchange(other.path_, {})) {}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  if (!path_.empty()) fs::remove_all(path_, ignored);
}

fs::path TemporaryFolder::keep() noexcept { return std::exchange(path_, {}); }

}  // namespace accelerate::io
