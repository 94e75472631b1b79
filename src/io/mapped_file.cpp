#include <accelerate/io/mapped_file.hpp>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "io/file_stamp.hpp"
#include "io/system_error.hpp"

namespace accelerate::io {

namespace fs = std::filesystem;

namespace {

void check_length(const fs::path& path, std::uint64_t mapped, std::uint64_t now) {
  if (now >= mapped) return;
  throw_damaged(path, path.string(), " had ", mapped,
                " bytes when it was mapped into memory and has ", now, " now. It was cut short.");
}

}  // namespace

MappedFile::MappedFile(const fs::path& path, Advice advice, Access access)
    : path_(fs::absolute(path)) {
  map(File::open(path).descriptor(), access);
  if (advice != Advice::kNormal) advise(advice);
}

MappedFile::MappedFile(const File& file) : path_(fs::absolute(file.path())) {
  map(file.descriptor(), Access::kReadOnly);
}

void MappedFile::map(int descriptor, Access access) {
  int error = 0;
  struct stat status {};
  if (::fstat(descriptor, &status) != 0) {
    error = errno;
  } else if (status.st_size > 0) {  // an empty file cannot be mapped, and needs not be
    size_ = static_cast<std::size_t>(status.st_size);
    const bool writable = access == Access::kCopyOnWrite;
    // Without reserving: only pages that are written to will need memory.
    void* const at = ::mmap(nullptr, size_, writable ? PROT_READ | PROT_WRITE : PROT_READ,
                            writable ? MAP_PRIVATE | MAP_NORESERVE : MAP_SHARED, descriptor, 0);
    if (at == MAP_FAILED) {
      error = errno;
    } else {
      data_ = static_cast<const std::byte*>(at);
    }
  }
  if (error != 0) throw_system(error, path_, "Could not map ", path_.string(), " into memory");
  stamp_ = stamp_of(status);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

std::span<const std::byte> MappedFile::slice(std::uint64_t offset, std::uint64_t bytes) const {
  if (offset > size_ || bytes > size_ - offset) {
    throw_damaged(path_, path_.string(), " has ", size_, " bytes, and ", bytes, " bytes from byte ",
                  offset, " on were asked for.");
  }
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0 && status.st_ino == stamp_.inode &&
      status.st_dev == stamp_.device) {
    check_length(path_, size_, static_cast<std::uint64_t>(status.st_size));
  }
  return {data_ + offset, bytes};
}

void MappedFile::advise(Advice advice, std::uint64_t offset, std::uint64_t bytes) const noexcept {
  if (offset >= size_) return;
  bytes = std::min<std::uint64_t>(bytes, size_ - offset);
  // madvise wants whole pages.
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  std::uint64_t begin = offset / page * page;
  std::uint64_t end = offset + bytes;
  int how = MADV_NORMAL;
  switch (advice) {
    case Advice::kNormal:
      break;
    case Advice::kSequential:
      how = MADV_SEQUENTIAL;
      break;
    case Advice::kRandom:
      how = MADV_RANDOM;
      break;
    case Advice::kWillNeed:
      how = MADV_WILLNEED;
      break;
    case Advice::kDontNeed:
      how = MADV_DONTNEED;
      // Pages that others still read from stay.
      begin = (offset + page - 1) / page * page;
      if (end != size_) end = end / page * page;
      break;
  }
  if (begin >= end) return;
  ::madvise(const_cast<std::byte*>(data_ + begin), end - begin, how);  // a hint: it may be ignored
}

bool MappedFile::map_cached(std::uint64_t offset, std::uint64_t bytes) const {
#ifdef MADV_POPULATE_READ
  if (offset >= size_) return false;
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t begin = offset / page * page;
  const std::uint64_t end = offset + std::min<std::uint64_t>(bytes, size_ - offset);
  void* const at = const_cast<std::byte*>(data_ + begin);
  std::vector<unsigned char> cached((end - begin + page - 1) / page);
  if (::mincore(at, end - begin, cached.data()) != 0) return false;
  const auto is_cached = [](unsigned char flags) { return (flags & 1U) != 0; };
  return std::all_of(cached.begin(), cached.end(), is_cached) &&
         ::madvise(at, end - begin, MADV_POPULATE_READ) == 0;
#else
  static_cast<void>(offset);
  static_cast<void>(bytes);
  return false;
#endif
}

void MappedFile::check() const {
  struct stat status {};
  if (::stat(path_.c_str(), &status) != 0) {
    throw_system(errno, path_, path_.string(), " was mapped into memory and is not there any more");
  }
  if (status.st_ino != stamp_.inode || status.st_dev != stamp_.device) {
    throw_damaged(path_, path_.string(),
                  " was replaced by another file since it was mapped into memory. Open it again.");
  }
  check_length(path_, size_, static_cast<std::uint64_t>(status.st_size));
}

}  // namespace accelerate::io
