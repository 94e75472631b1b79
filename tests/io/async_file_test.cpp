// Asynchronous files: the same behaviour whoever moves the data, with and without the page cache.
#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/io/async_file.hpp>

#include <gtest/gtest.h>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <random>
#include <vector>

namespace accelerate::io {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

struct AlignedMemory {
  explicit AlignedMemory(std::size_t bytes)
      : data(static_cast<std::byte*>(std::aligned_alloc(AsyncFile::kAlignment, bytes)), std::free),
        size(bytes) {
    std::memset(data.get(), 0, bytes);
  }
  std::span<std::byte> span(std::size_t begin = 0, std::size_t length = std::dynamic_extent) {
    return std::span<std::byte>(data.get(), size).subspan(begin, length);
  }
  std::unique_ptr<std::byte, decltype(&std::free)> data;
  std::size_t size;
};

void fill(std::span<std::byte> memory, unsigned seed) {
  std::mt19937 random(seed);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "accelerate-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

template <class Action>
std::string message_of(Action&& action, int code) {
  try {
    action();
  } catch (const FileError& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no FileError was thrown";
  return {};
}

struct Kind {
  AsyncEngine engine;
  bool direct;
};

class AsyncFiles : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    std::string why_not;
    if (GetParam().engine == AsyncEngine::io_uring && !io_uring_works(&why_not))
      GTEST_SKIP() << why_not;
  }
  AsyncFileOptions options() const {
    return AsyncFileOptions().engine(GetParam().engine).direct(GetParam().direct);
  }
  TemporaryFolder folder_;
};

TEST_P(AsyncFiles, ReadWhatWasWrittenInAnyOrder) {
  constexpr std::size_t kBytes = 21 * kMiB + AsyncFile::kAlignment;
  AsyncFile file = AsyncFile::scratch(folder_.path(), kBytes, options());
  EXPECT_EQ(file.size(), kBytes);
  EXPECT_EQ(file.engine(), GetParam().engine);
  AlignedMemory written(kBytes), found(kBytes);
  // What nobody has written is zero.
  fill(found.span(), 1);
  file.wait(file.read(0, found.span()));
  EXPECT_TRUE(std::ranges::equal(found.span(), written.span()));

  fill(written.span(), 2);
  std::vector<std::size_t> cuts;
  for (std::size_t at = 0; at < kBytes;)
    cuts.push_back(std::exchange(
        at, std::min(kBytes, at + (cuts.size() % 7 + 1) * AsyncFile::kAlignment * 61)));
  cuts.push_back(kBytes);
  std::vector<std::size_t> order(cuts.size() - 1);
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::shuffle(order.begin(), order.end(), std::mt19937(3));
  for (std::size_t i : order) file.write(cuts[i], written.span(cuts[i], cuts[i + 1] - cuts[i]));
  file.wait_all();
  std::vector<AsyncFile::Ticket> tickets;
  for (std::size_t i : order)
    tickets.push_back(file.read(cuts[i], found.span(cuts[i], cuts[i + 1] - cuts[i])));
  for (auto ticket : tickets) file.wait(ticket);
  EXPECT_TRUE(std::ranges::equal(found.span(), written.span()));

  // The map sees what was written, and what is written to it is in the file.
  const auto map = file.map();
  EXPECT_EQ(std::memcmp(map.get(), written.data.get(), kBytes), 0);
  map.get()[kMiB] ^= std::byte{1};
  file.wait(file.read(0, found.span()));
  EXPECT_EQ(found.span()[kMiB], written.span()[kMiB] ^ std::byte{1});
}

TEST_P(AsyncFiles, MapOutlivesItsFileAndTheFolderStaysEmpty) {
  std::shared_ptr<std::byte> map;
  {
    AsyncFile file = AsyncFile::scratch(folder_.path() / "made" / "for it", kMiB, options());
    AlignedMemory written(kMiB);
    fill(written.span(), 4);
    file.write(0, written.span());
    EXPECT_TRUE(std::filesystem::is_empty(folder_.path() / "made" / "for it"));
    map = file.map();
    // The write is still in flight: the destructor waits for it.
    AsyncFile moved = std::move(file);
    moved = AsyncFile::scratch(folder_.path(), 0, options());
    EXPECT_EQ(moved.map(), nullptr);
    EXPECT_EQ(std::memcmp(map.get(), written.data.get(), kMiB), 0);
  }
  EXPECT_NE(map.get()[5], map.get()[6]);
}

TEST_P(AsyncFiles, ReadingPastTheEndNamesFileAndPlace) {
  const auto path = folder_.path() / "short.bin";
  std::ofstream(path) << std::string(2 * AsyncFile::kAlignment, 'x');
  AsyncFile file = AsyncFile::open(path, /*writable=*/false, options());
  AlignedMemory memory(4 * AsyncFile::kAlignment);
  const std::string message = message_of([&] { file.wait(file.read(0, memory.span())); }, EIO);
  EXPECT_EQ(message,
            path.string() + " could not be read at byte 8192 (8192 bytes): the file ends there.");
  // The file goes on being of use, and what is inside it is read.
  file.wait(file.read(AsyncFile::kAlignment, memory.span(0, AsyncFile::kAlignment)));
  EXPECT_EQ(memory.span()[5], std::byte{'x'});
}

TEST_P(AsyncFiles, FailedWritesAreSentences) {
  const auto path = folder_.path() / "read_only.bin";
  std::ofstream(path) << std::string(AsyncFile::kAlignment, 'x');
  AsyncFile file = AsyncFile::open(path, /*writable=*/false, options());
  AlignedMemory memory(AsyncFile::kAlignment);
  file.write(0, memory.span());
  const std::string message = message_of([&] { file.wait_all(); }, EBADF);
  EXPECT_NE(message.find(path.string() + " could not be written at byte 0"), std::string::npos);
  file.wait_all();
}

TEST_P(AsyncFiles, WritingMoreThanTheSystemAllowsIsAnError) {
  // A limit on file sizes stands in for a disk that is full: the first part fits.
  AsyncFile file = AsyncFile::scratch(folder_.path(), kMiB, options());
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit limited = before;
  limited.rlim_cur = kMiB + AsyncFile::kAlignment;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limited), 0);
  AlignedMemory memory(2 * kMiB);
  file.write(0, memory.span());
  const std::string message = message_of([&] { file.wait_all(); }, EFBIG);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_NE(message.find("could not be written at byte 1052672"), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, AsyncFiles,
    ::testing::Values(Kind{AsyncEngine::threads, false}, Kind{AsyncEngine::threads, true},
                      Kind{AsyncEngine::io_uring, false}, Kind{AsyncEngine::io_uring, true}),
    [](const auto& info) {
      return std::string(info.param.engine == AsyncEngine::threads ? "threads" : "io_uring") +
             (info.param.direct ? "_direct" : "");
    });

TEST(AsyncFile, TheEnvironmentTurnsIoUringOff) {
  const TemporaryFolder folder;
  ::setenv("ACCELERATE_IO_URING", "0", 1);
  EXPECT_EQ(AsyncFile::scratch(folder.path(), 1).engine(), AsyncEngine::threads);
  ::setenv("ACCELERATE_IO_URING", "perhaps", 1);
  EXPECT_THROW(AsyncFile::scratch(folder.path(), 1), ConfigError);
  ::unsetenv("ACCELERATE_IO_URING");
  EXPECT_EQ(AsyncFile::scratch(folder.path(), 1).engine(),
            io_uring_works() ? AsyncEngine::io_uring : AsyncEngine::threads);
}

// Has the kernel refuse io_uring to this process, as container runtimes do.
bool forbid_io_uring() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{std::size(filter), filter};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(AsyncFileDeathTest, DoesWithoutIoUringWhereItIsForbidden) {
  const auto use = [] {
    if (!forbid_io_uring()) ::_exit(3);
    log::set_level(log::Level::debug);
    const TemporaryFolder folder;
    AsyncFile file = AsyncFile::scratch(folder.path(), 1);
    bool refused = false;
    try {
      AsyncFile::scratch(folder.path(), 1, AsyncFileOptions().engine(AsyncEngine::io_uring));
    } catch (const UnsupportedError&) {
      refused = true;
    }
    std::filesystem::remove_all(folder.path());
    ::_exit(file.engine() == AsyncEngine::threads && refused ? 0 : 1);
  };
  EXPECT_EXIT(use(), ::testing::ExitedWithCode(0),
              io_uring_works() ? "read and written by threads: this system refuses io_uring "
                                 "\\(Operation not permitted\\), as containers do"
                               : "read and written by threads");
}

TEST(AsyncFile, SaysBeforehandWhatTheDiskLacks) {
  const TemporaryFolder folder;
  const std::string message =
      message_of([&] { AsyncFile::scratch(folder.path(), std::uint64_t{1} << 50); }, ENOSPC);
  EXPECT_NE(
      message.find("A scratch file of 1024.00 TiB was to be made in " + folder.path().string()),
      std::string::npos)
      << message;
  EXPECT_NE(message.find(" are free."), std::string::npos);
}

TEST(AsyncFile, RefusesWhatItCannotOpenOrAlign) {
  const TemporaryFolder folder;
  const auto missing = folder.path() / "missing";
  EXPECT_EQ(message_of([&] { AsyncFile::open(missing, true); }, ENOENT),
            missing.string() +
                " could not be opened for reading and writing: No such file or directory.");
  std::ofstream(folder.path() / "file") << "x";
  message_of([&] { AsyncFile::scratch(folder.path() / "file", 1); }, ENOTDIR);
  AsyncFile file =
      AsyncFile::scratch(folder.path(), AsyncFile::kAlignment, AsyncFileOptions().direct(true));
  AlignedMemory memory(AsyncFile::kAlignment);
  if (file.direct()) {
    EXPECT_THROW(file.read(1, memory.span()), Error);
    EXPECT_THROW(file.read(0, memory.span(0, 100)), Error);
  }
}

}  // namespace
}  // namespace accelerate::io
