#include <accelerate/base/error.hpp>
#include <accelerate/io/async_file.hpp>
#include <accelerate/io/checksum.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/io/manifest.hpp>
#include <accelerate/io/mapped_file.hpp>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "base/in_threads.hpp"
#include "io/checked_writer.hpp"

namespace accelerate::io {
namespace {

namespace fs = std::filesystem;

std::string pattern(std::size_t bytes, unsigned seed = 1) {
  std::mt19937 engine(seed);
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(engine());
  return text;
}

std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text));
}

// The message of the CheckpointError that `action` throws, and its path.
template <class Action>
std::pair<std::string, std::string> failure(Action&& action) {
  try {
    action();
  } catch (const CheckpointError& error) {
    return {error.what(), error.path()};
  }
  ADD_FAILURE() << "Nothing was thrown";
  return {};
}

void expect_mentions(const std::string& message, std::initializer_list<std::string> parts) {
  for (const std::string& part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << message << "\nlacks: " << part;
}

TEST(File, WritesAndReadsAtPositionsFromSeveralThreads) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "data";
  const std::string text = pattern(40 << 20);  // more than one system call moves
  {
    File file = File::create(path);
    file.preallocate(text.size());
    EXPECT_EQ(file.size(), text.size());
    std::vector<std::thread> threads;
    for (std::size_t part = 0; part < 4; ++part) {
      threads.emplace_back([&, part] {
        const std::size_t quarter = text.size() / 4;
        file.write(text.data() + part * quarter, quarter, part * quarter);
      });
    }
    for (std::thread& thread : threads) thread.join();
    file.sync();
    file.close();
  }
  EXPECT_EQ(read_file(path), text);
  const File file = File::open(path);
  std::string part(1000, '\0');
  file.read(part.data(), part.size(), 12345);
  EXPECT_EQ(part, text.substr(12345, 1000));
  const auto [message, where] =
      failure([&] { file.read(part.data(), part.size(), text.size() - 10); });
  expect_mentions(message, {path.string(), "ends at byte", "990 more bytes"});
  EXPECT_EQ(where, path.string());
  expect_mentions(failure([&] { read_file(path, 100); }).first, {path.string(), "at most 100"});
}

TEST(File, SaysWhatIsWrongWithAPath) {
  const TemporaryFolder folder;
  expect_mentions(failure([&] { File::open(folder.path() / "none"); }).first,
                  {"none", "No such file"});
  expect_mentions(failure([&] { File::open(folder.path()); }).first,
                  {folder.path().string(), "Is a directory"});
  expect_mentions(failure([&] { MappedFile(folder.path()); }).first,
                  {folder.path().string(), "Is a directory"});
  expect_mentions(failure([&] { File::create(folder.path() / "none" / "x"); }).first,
                  {"none/x", "No such file"});
  write_file(folder.path() / "file", "x");
  expect_mentions(failure([&] { make_folders(folder.path() / "file" / "sub"); }).first,
                  {"file/sub", "Not a directory"});
  expect_mentions(failure([&] { make_folders(folder.path() / "file"); }).first,
                  {"file", "Not a directory"});
  EXPECT_GT(free_bytes(folder.path() / "not" / "yet"), 0U);
  try {
    File::open(folder.path() / "none");
  } catch (const CheckpointError& error) {
    EXPECT_THROW(std::rethrow_if_nested(error),
                 std::system_error);           // the system's own error is kept
    EXPECT_EQ(describe(error), error.what());  // which says the same
  }
}

TEST(File, WhatIsNoFileIsNotWaitedFor) {
  const TemporaryFolder folder;
  const fs::path pipe = folder.path() / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  expect_mentions(failure([&] { File::open(pipe); }).first, {"pipe is a named pipe", "a file was"});
  expect_mentions(failure([&] { File::create(pipe); }).first, {"is a named pipe"});
  expect_mentions(failure([&] { read_file(pipe); }).first, {"is a named pipe"});
  expect_mentions(failure([&] { MappedFile{pipe}; }).first, {"is a named pipe"});
  expect_mentions(failure([&] { safetensors::Header::read(pipe); }).first, {"is a named pipe"});
  expect_mentions(failure([&] { read_file("/dev/zero"); }).first, {"is a device"});
  EXPECT_THROW(AsyncFile::open(pipe, false), FileError);
}

TEST(File, AWriteBeyondTheLimitIsAnErrorAndNotTheEnd) {
  const TemporaryFolder folder;
  write_file(folder.path() / "file", "old");
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int failures = 0;
    const auto fails = [&](auto&& act) {
      try {
        act();
      } catch (const CheckpointError& error) {
        failures += std::string_view(error.what()).find("ulimit -f") != std::string_view::npos;
      }
    };
    fails([&] { write_file(folder.path() / "file", std::string(100'000, 'x')); });
    fails([&] { File::create(folder.path() / "other").preallocate(100'000); });
    ::_exit(failures == 2 && read_file(folder.path() / "file") == "old" ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

// ---------------------------------------------------------------------------------------- faults

int fail_at = -1;  // which call, counted from 0
int calls = 0;
int fail_with = 0;
std::map<faults::Operation, int> seen;
int fail_hook(faults::Operation operation, const fs::path&, std::size_t&) {
  ++seen[operation];
  return calls++ == fail_at ? fail_with : 0;
}
int short_hook(faults::Operation operation, const fs::path&, std::size_t& bytes) {
  if (operation == faults::Operation::kWrite) bytes = std::min<std::size_t>(bytes, 1000);
  return 0;
}
int torn_hook(faults::Operation operation, const fs::path& path, std::size_t& bytes) {
  if (calls++ == fail_at) ::kill(::getpid(), SIGKILL);
  return short_hook(operation, path, bytes);
}

struct WithHook {
  explicit WithHook(faults::Hook hook, int at = -1, int error = EIO) {
    fail_at = at;
    fail_with = error;
    calls = 0;
    seen.clear();
    faults::set_hook(hook);
  }
  ~WithHook() { faults::set_hook(nullptr); }
};

TEST(Faults, EveryFailureLeavesTheOldFileAndNoRest) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "state";
  write_file(path, "old");
  int operations = 0;
  {
    const WithHook hook(fail_hook);
    write_file(folder.path() / "other", "x");
    operations = calls;
    EXPECT_EQ(seen[faults::Operation::kCreate], 1);
    EXPECT_EQ(seen[faults::Operation::kWrite], 1);
    EXPECT_EQ(seen[faults::Operation::kSync], 2);  // the file and its folder
    EXPECT_EQ(seen[faults::Operation::kRename], 1);
    fs::remove(folder.path() / "other");
  }
  for (int at = 0; at < operations; ++at) {
    const WithHook hook(fail_hook, at, at % 2 == 0 ? EIO : ENOSPC);
    EXPECT_THROW(write_file(path, "new"), CheckpointError);
    // After the rename the new one is there: only its name may be lost.
    EXPECT_EQ(read_file(path), at + 1 == operations ? "new" : "old") << at;
    EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 1) << at;
  }
}

// Where names can be exchanged, and where not.
TEST(Faults, AFolderIsReplacedOrStaysWhateverFails) {
  static bool exchanges;
  const auto hook = [](faults::Operation operation, const fs::path&, std::size_t&) {
    if (calls++ == fail_at) return EIO;
    return operation == faults::Operation::kExchange && !exchanges ? EINVAL : 0;
  };
  for (const bool can : {true, false}) {
    exchanges = can;
    int replaced = 0;
    for (int at = 0;; ++at) {
      const TemporaryFolder folder;
      const fs::path to = folder.path() / "to", from = folder.path() / "from";
      for (const auto& [where, text] : {std::pair(to, "old"), std::pair(from, "new"),
                                        std::pair(folder.path() / "to.previous", "mine")}) {
        make_folders(where);
        write_file(where / "state", text);
      }
      bool thrown = false;
      {
        const WithHook set(hook, at);
        ::testing::internal::CaptureStderr();
        try {
          replace_folder(from, to);
        } catch (const CheckpointError&) {
          thrown = true;
        }
      }
      const bool reached = calls > at;
      const std::string said = ::testing::internal::GetCapturedStderr();
      EXPECT_EQ(read_file(to / "state"), thrown ? "old" : "new") << at;
      EXPECT_EQ(fs::exists(from) && read_file(from / "state") == "new", thrown) << at;
      EXPECT_EQ(said.find("was replaced") != std::string::npos, reached && !thrown) << said;
      EXPECT_EQ(read_file(folder.path() / "to.previous" / "state"), "mine");
      if (!thrown) ++replaced;
      if (!reached) {
        EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"to", "to.previous"}));
        EXPECT_GE(at, 4);
        break;
      }
      // The next one clears up.
      if (thrown) continue;
      make_folders(from);
      replace_folder(from, to);
      EXPECT_FALSE(fs::exists(folder.path() / ".to.previous")) << at;
    }
    EXPECT_GT(replaced, 2);
  }
  // A process that dies between two renames.
  const TemporaryFolder folder;
  make_folders(folder.path() / ".to.previous");
  EXPECT_EQ(replaced_folder(folder.path() / "to" / ""), folder.path() / ".to.previous");
  make_folders(folder.path() / "to.previous");
  delete_path(folder.path() / ".to.previous");
  EXPECT_EQ(replaced_folder(folder.path() / "to"), folder.path() / "to");
}

TEST(Faults, AFullDiskSaysHowMuchIsFree) {
  const TemporaryFolder folder;
  const WithHook hook(fail_hook, 1, ENOSPC);
  expect_mentions(failure([&] { write_file(folder.path() / "state", "123"); }).first,
                  {"3 B", "state", "free", "No space left on device"});
}

TEST(Faults, ShortWritesAreContinued) {
  const TemporaryFolder folder;
  const std::string text = pattern(12345);
  const WithHook hook(short_hook);
  write_file(folder.path() / "state", text);
  EXPECT_EQ(read_file(folder.path() / "state"), text);
}

TEST(Faults, AKillAtAnyCallLeavesOldOrNewInFull) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "state";
  const std::string old_text = pattern(5000, 2), new_text = pattern(7000, 3);
  bool survived = false;
  bool saw_new = false;
  for (int at = 0; !survived; ++at) {
    ASSERT_LT(at, 100);
    write_file(path, old_text);
    EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"state"}) << at;
    const pid_t child = ::fork();
    if (child == 0) {
      const WithHook hook(torn_hook, at);
      write_file(path, new_text);
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    survived = WIFEXITED(status);
    const std::string now = read_file(path);
    saw_new |= now == new_text;
    EXPECT_TRUE(now == old_text || now == new_text) << "after a kill at call " << at;
  }
  EXPECT_TRUE(saw_new);
}

// ------------------------------------------------------------------------------------ MappedFile

TEST(MappedFile, ReadsSlicesAndNoticesWhatHappenedToTheFile) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "data";
  const std::string text = pattern(100'000);
  write_file(path, text);
  const MappedFile map(path, Advice::kSequential);
  EXPECT_EQ(std::memcmp(map.bytes().data(), text.data(), text.size()), 0);
  for (const Advice advice :
       {Advice::kWillNeed, Advice::kDontNeed, Advice::kRandom, Advice::kNormal}) {
    map.advise(advice, 5000, 50'000);
    map.advise(advice, 99'999);
    map.advise(advice, 1'000'000);
    EXPECT_EQ(std::memcmp(map.bytes().data(), text.data(), text.size()), 0);
  }
  EXPECT_EQ(map.slice(99'990, 10).size(), 10U);
  EXPECT_THROW(map.slice(99'990, 11), CheckpointError);
  EXPECT_THROW(map.slice(100'001, 0), CheckpointError);
  EXPECT_THROW(map.slice(1, ~std::uint64_t{0}), CheckpointError);
  EXPECT_FALSE(map.map_cached(text.size(), 1));
  map.check();
  fs::resize_file(path, 10);
  EXPECT_FALSE(map.map_cached(0, text.size()));
  expect_mentions(failure([&] { map.slice(0, 10); }).first, {path.string(), "100000", "cut short"});
  expect_mentions(failure([&] { map.check(); }).first, {path.string(), "100000", "cut short"});
  write_file(path, text);
  expect_mentions(failure([&] { map.check(); }).first, {path.string(), "replaced"});
  fs::remove(path);
  expect_mentions(failure([&] { map.check(); }).first, {path.string(), "not there any more"});
  write_file(path, "");
  EXPECT_EQ(MappedFile(path).size(), 0U);
  EXPECT_TRUE(MappedFile(path).slice(0, 0).empty());
}

// ------------------------------------------------------------------------------------ in_threads

TEST(InThreads, NothingToDoNeedsNoThreads) {
  in_threads(0, 0, [] { return [](std::size_t) { ADD_FAILURE(); }; });
}

TEST(InThreads, AThreadThatCannotBeMadeIsAnError) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the memory that is kept from them here";
#endif
  for (const bool watched : {false, true}) {
    const pid_t child = ::fork();
    if (child == 0) {
      // Room for a few stacks of threads.
      std::size_t pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      const rlim_t most = pages * static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)) + (40 << 20);
      const rlimit limit{most, most};
      if (::setrlimit(RLIMIT_AS, &limit) != 0) ::_exit(2);
      try {
        in_threads(
            1000, 1000,
            [] {
              return
                  [](std::size_t) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
            },
            watched ? std::function<void()>([] {}) : nullptr);
      } catch (const std::system_error&) {
        ::_exit(0);
      }
      ::_exit(1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
}

// -------------------------------------------------------------------------------------- checksum

TEST(Checksum, IsXxh3AndNoticesEveryFlippedBit) {
  EXPECT_EQ(checksum_text(checksum({})), "2d06800538d394c2");  // xxhsum -H3 of an empty file
  EXPECT_EQ(parse_checksum("2d06800538d394c2"), checksum({}));
  for (const char* bad : {"", "2d06800538d394c", "2d06800538d394c2 ", "2D06800538D394C2",
                          "+d06800538d394c2", "0x06800538d394c2"}) {
    EXPECT_EQ(parse_checksum(bad), std::nullopt) << bad;
  }
  std::string text = pattern(4096);
  const std::uint64_t whole = checksum(as_bytes(text));
  for (std::size_t bit = 0; bit < text.size() * 8; ++bit) {
    text[bit / 8] ^= static_cast<char>(1 << bit % 8);
    EXPECT_NE(checksum(as_bytes(text)), whole);
    text[bit / 8] ^= static_cast<char>(1 << bit % 8);
  }
}

TEST(Checksum, PiecesGiveTheBlocksOfTheWhole) {
  const std::string text = pattern(10'000);
  for (const std::size_t block : {1, 7, 256, 1000, 9999, 10'000, 10'001}) {
    const auto whole = block_checksums(as_bytes(text), block);
    EXPECT_EQ(whole.size(), (text.size() + block - 1) / block);
    BlockChecksums pieces(block);
    std::mt19937 engine(4);
    for (int round = 0; round < 2; ++round) {  // the second time, it was begun anew
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t take = std::min<std::size_t>(engine() % 3000, text.size() - at);
        pieces.update(as_bytes(text).subspan(at, take));
        at += take;
      }
      EXPECT_EQ(pieces.bytes(), text.size());
      EXPECT_EQ(pieces.finish(), whole);
    }
  }
  EXPECT_TRUE(block_checksums({}).empty());
}

TEST(CheckedWriter, WritesWhatWasAppendedWithTheChecksumsOfItsBlocks) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "file";
  std::string all;
  CheckedWriter out(path);
  for (const std::size_t size : {5U, 3'000'000U, 0U, 70'000'000U, 1U, 1'048'576U}) {
    const auto piece = std::make_shared<std::string>(size, static_cast<char>('a' + size % 26));
    for (std::size_t i = 0; i < size; i += 999) (*piece)[i] = static_cast<char>(i / 999);
    all += *piece;
    const auto bytes = std::as_bytes(std::span(*piece));
    if (size < 100) {
      out.append(bytes);  // copied: it is gone before it is written
    } else {
      out.append(bytes, piece);
    }
  }
  EXPECT_EQ(out.size(), all.size());
  EXPECT_EQ(out.finish(), block_checksums(std::as_bytes(std::span(all))));
  EXPECT_TRUE(read_file(path) == all);
}

TEST(ReadLease, EndsWhenSomebodyWantsToWrite) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "file";
  write_file(path, "text");
  const File file = File::open(path);
  {
    const ReadLease lease(file);
    if (!lease.holds()) GTEST_SKIP() << "this file system knows no leases";
    const int writer = ::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    EXPECT_EQ(writer, -1);
    EXPECT_EQ(errno, EWOULDBLOCK);
    EXPECT_FALSE(lease.holds());
  }
  File writer = File::open_writable(path);  // waits for nobody
  EXPECT_FALSE(ReadLease(file).holds());
}

// From the page cache, where blocks are read in place, and from the disk.
TEST(VerifyBlocks, ReadsTheBlocksItIsGivenAndNamesADamagedOne) {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "file";
  std::string text = pattern(40 * kChecksumBlock + 4567);
  write_file(path, text);
  const SavedFile saved{"file", text.size(), block_checksums(as_bytes(text))};
  const std::vector<std::size_t> all = [] {
    std::vector<std::size_t> blocks(41);
    std::iota(blocks.begin(), blocks.end(), 0);
    return blocks;
  }();
  const std::vector<std::size_t> some{0, 1, 2, 3, 4, 5, 9, 11, 12, 40};
  const auto forget = [&] {
    File file = File::open_writable(path);
    file.sync();
    EXPECT_EQ(::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED), 0);
  };
  for (const bool cached : {true, false}) {
    for (const auto& blocks : {all, some}) {
      if (!cached) forget();
      std::mutex mutex;
      std::set<std::size_t> seen;
      verify_blocks(
          folder.path(), saved, blocks, [&](std::size_t block, std::span<const std::byte> bytes) {
            const std::string expected = text.substr(block * kChecksumBlock, kChecksumBlock);
            const std::scoped_lock lock(mutex);
            EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), as_bytes(expected).begin(),
                                   as_bytes(expected).end()))
                << block;
            EXPECT_TRUE(seen.insert(block).second) << block;
          });
      EXPECT_EQ(seen, std::set<std::size_t>(blocks.begin(), blocks.end()));
    }
  }
  for (const std::size_t at : {std::size_t{0}, 11 * kChecksumBlock - 1, text.size() - 1}) {
    text[at] = static_cast<char>(text[at] ^ 1);
    {
      File file = File::open_writable(path);
      file.write(&text[at], 1, at);
    }
    const std::size_t block = at / kChecksumBlock;
    for (const bool cached : {true, false}) {
      if (!cached) forget();
      expect_mentions(failure([&] { verify_blocks(folder.path(), saved, all); }).first,
                      {path.string(), "damaged", std::to_string(block * kChecksumBlock)});
      verify_blocks(folder.path(), saved, std::vector<std::size_t>{(block + 1) % 40});
    }
    text[at] = static_cast<char>(text[at] ^ 1);
    write_file(path, text);
  }
}

TEST(Manifest, RefusesElementsThatCannotBeToldApart) {
  Manifest manifest;
  manifest.files = {{"data", 2, {0}}};
  SavedTensor& tensor = manifest.groups["model"]["w"];
  tensor = {safetensors::Dtype::kF4, {2, 2}, {1, 0}, {{0, 0, {{0, 0}, {2, 2}}}}};
  expect_mentions(failure([&] { manifest.check("manifest.json"); }).first, {"'w'", "4 bits"});
  tensor.order.clear();
  manifest.check("manifest.json");
  tensor.boxes = {{0, 0, {{0, 0}, {1, 2}}}, {0, 1, {{1, 0}, {1, 2}}}};
  expect_mentions(failure([&] { manifest.check("manifest.json"); }).first, {"'w'", "one box"});
}

TEST(Manifest, DeepJsonIsAnError) {
  Manifest manifest;
  manifest.about["deep"] = 1;
  std::string text = manifest.text();
  const std::string deep = std::string(50'000, '[') + std::string(50'000, ']');
  text.replace(text.find("\"deep\":1") + 7, 1, deep);
  const std::string rest = text.substr(text.find('\n') + 1);
  text = "{\"checksum\":\"" + checksum_text(checksum(as_bytes(rest))) + "\",\n" + rest;
  expect_mentions(failure([&] { Manifest::parse(text, "manifest.json"); }).first,
                  {"manifest.json", "200 deep"});
}

TEST(CheckedWriter, AnErrorWhileWritingComesOut) {
  const TemporaryFolder folder;
  faults::set_hook([](faults::Operation operation, const fs::path&, std::size_t&) {
    return operation == faults::Operation::kWrite ? ENOSPC : 0;
  });
  const std::string text = "text";
  {
    CheckedWriter out(folder.path() / "finished");
    out.append(std::as_bytes(std::span(text)));
    EXPECT_THROW(out.finish(), CheckpointError);
  }
  {
    CheckedWriter out(folder.path() / "appended");
    const auto append_much = [&] {
      for (int i = 0; i < 1'000'000; ++i) out.append(std::as_bytes(std::span(text)));
    };
    EXPECT_THROW(append_much(), CheckpointError);
  }
  {
    CheckedWriter dropped(folder.path() / "dropped");
    dropped.append(std::as_bytes(std::span(text)));
  }
  faults::set_hook(nullptr);
}

}  // namespace
}  // namespace accelerate::io
