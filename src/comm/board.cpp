#include "comm/board.hpp"

#include "comm/world_impl.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/comm/native.hpp>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <fstream>
#include <new>
#include <random>
#include <string_view>
#include <system_error>

namespace accelerate::comm {
namespace {

constexpr const char* kName = "accelerate-board";
constexpr std::size_t kLine = 64;
constexpr std::size_t kLongestNotice = 2000;
// Until this rank hears of a loss that another may have failed by.
constexpr std::chrono::milliseconds kUntilHeard{500};

std::size_t in_lines(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const noexcept { return descriptor_; }

 private:
  int descriptor_;
};

// Names the machine as far as memory can be shared on it. Two that have it in common may be apart
// all the same (containers); then opening the other's memory fails, or finds another's.
std::string this_machine() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

// Memory of `bytes` that a file of this kind has, or null.
std::shared_ptr<void> map(int file, std::size_t bytes) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  return {memory, [bytes](void* mapped) { ::munmap(mapped, bytes); }};
}

// The memory that another process made, or null where it cannot be reached.
std::shared_ptr<void> map_of(const std::string& place, std::size_t bytes) {
  std::array<char, 64> target{};
  if (::readlink(place.c_str(), target.data(), target.size() - 1) <= 0 ||
      std::string_view(target.data()).find(kName) == std::string_view::npos)
    return nullptr;
  const File file(::open(place.c_str(), O_RDWR | O_CLOEXEC));
  struct stat status {};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0 ||
      static_cast<std::size_t>(status.st_size) != bytes)
    return nullptr;
  return map(file.get(), bytes);
}

[[noreturn]] void refuse(const char* what, int rank) {
  const int code = errno;
  throw DistributedError(
      text::concat("The memory in which ranks tell each other what they do could not be made: ",
                   what, " failed with \"", std::generic_category().message(code), "\"."),
      "create_group", rank);
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value,
           const timespec* most) {
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, most,
                   nullptr, 0);
}

enum State : std::uint32_t { kAway, kReady, kRung };

}  // namespace

struct Board::Row {
  alignas(kLine) Bell caller;
  alignas(kLine) Bell watcher;
  alignas(kLine) Word first{0};
};

struct Board::Head {
  std::uint64_t token = 0;
  std::atomic<std::int64_t> notice{0};   // its number, once it can be read
  std::atomic<std::int64_t> claimed{0};  // the highest number that somebody writes, or wrote
  std::uint32_t length = 0;
  std::array<char, kLongestNotice> text{};
};

static_assert(Board::Word::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "memory that processes share must not need a lock");

Board::Board(const Group& group, int words, Shared shared) : group_(group), words_(words) {
  row_bytes_ = in_lines(sizeof(Row) + static_cast<std::size_t>(words) * sizeof(Word));
  const std::size_t bytes =
      in_lines(sizeof(Head)) + row_bytes_ * static_cast<std::size_t>(group.size());

  // Everyone makes memory and says where; each takes that of the first rank whose it can reach.
  const File mine(static_cast<int>(::syscall(SYS_memfd_create, kName, MFD_CLOEXEC)));
  if (mine.get() < 0) refuse("memfd_create", group.rank());
  if (::ftruncate(mine.get(), static_cast<off_t>(bytes)) != 0) refuse("ftruncate", group.rank());
  memory_ = map(mine.get(), bytes);
  if (memory_ == nullptr) refuse("mmap", group.rank());
  std::random_device random;
  const std::string token = std::to_string(std::uint64_t{random()} << 32U | random());
  (new (memory_.get()) Head)->token = std::stoull(token);
  for (int rank = 0; rank < group.size(); ++rank) {
    Row* made = new (&row(rank)) Row;
    for (int i = 1; i < words; ++i) new (&made->first + i) Word(0);
  }
  const std::string machine = this_machine();
  const auto places = group.all_gather_bytes(
      text::concat(machine, "\n/proc/", ::getpid(), "/fd/", mine.get(), "\n", token));
  int home = group.rank();
  for (int rank = 0; rank < group.rank() && shared == Shared::by_machine; ++rank) {
    const auto place = text::split(places[static_cast<std::size_t>(rank)], '\n');
    if (machine.empty() || place[0] != machine) continue;
    auto theirs = map_of(place[1], bytes);
    if (theirs == nullptr) continue;
    if (std::to_string(static_cast<const Head*>(theirs.get())->token) != place[2]) continue;
    memory_ = std::move(theirs);
    home = rank;
    break;
  }
  const auto homes = group.all_gather_bytes(std::to_string(home));
  for (int rank = 0; rank < group.size(); ++rank) {
    if (homes[static_cast<std::size_t>(rank)] == std::to_string(home)) here_.push_back(rank);
  }
  apart_ = static_cast<int>(here_.size()) < group.size();
  if (!apart_) return;
  store_ = process_group(group)->getStore();
  // What is in a store stays there, so the keys are this board's own.
  folder_ = text::concat("board/", text::split(places[0], '\n')[2], "/");
  if (here_.front() == group.rank()) {
    carries_ = true;
    for (int rank = 0; rank < group.size(); ++rank) {
      const bool other =
          rank != group.rank() && homes[static_cast<std::size_t>(rank)] == std::to_string(rank);
      if (other) others_.emplace_back(text::concat(folder_, rank), "");
    }
    key_ = text::concat(folder_, group.rank());
    sent_ = pack();
    store_->set(key_, sent_);
  }
  group.barrier();  // every key is there
}

Board::~Board() = default;

Board::Head& Board::head() const noexcept { return *static_cast<Head*>(memory_.get()); }

Board::Row& Board::row(int rank) const noexcept {
  return *reinterpret_cast<Row*>(static_cast<char*>(memory_.get()) + in_lines(sizeof(Head)) +
                                 static_cast<std::size_t>(rank) * row_bytes_);
}

Board::Word& Board::word(int rank, int index) const noexcept { return *(&row(rank).first + index); }

bool Board::post(std::int64_t number, const std::string& text) {
  if (head().claimed.load() >= number) return false;
  return put_up(number, apart_ ? agreed(number, text) : text);
}

// Ranks of several machines may have something to say at the same time, in different words: the
// first words count everywhere.
std::string Board::agreed(std::int64_t number, const std::string& text) const {
  try {
    using Bytes = std::vector<std::uint8_t>;
    const Bytes first = store_->compareSet(text::concat(folder_, "notice/", number), Bytes(),
                                           Bytes(text.begin(), text.end()));
    return {first.begin(), first.end()};
  } catch (const std::exception&) {
    return text;  // the store is gone, and the others learn that from it
  }
}

bool Board::put_up(std::int64_t number, const std::string& text) {
  std::int64_t before = head().claimed.load();
  do {
    if (before >= number) return false;
  } while (!head().claimed.compare_exchange_weak(before, number));
  head().length = static_cast<std::uint32_t>(std::min(text.size(), kLongestNotice));
  std::memcpy(head().text.data(), text.data(), head().length);
  head().notice.store(number);
  ring();
  return true;
}

bool Board::has_notice(std::int64_t number) const noexcept {
  return head().notice.load() >= number;
}

std::string Board::notice() const { return {head().text.data(), head().length}; }

Board::Bell& Board::row_bell(int rank, Sleeper sleeper) const noexcept {
  return sleeper == Sleeper::caller ? row(rank).caller : row(rank).watcher;
}

std::uint32_t Board::get_ready(Sleeper sleeper) noexcept {
  Bell& own = row_bell(group_.rank(), sleeper);
  const std::uint32_t rings = own.rings.load();
  own.state.store(kReady);
  return rings;
}

void Board::get_up(Sleeper sleeper) noexcept {
  row_bell(group_.rank(), sleeper).state.store(kAway);
}

std::uint32_t Board::rings(Sleeper sleeper) const noexcept {
  return row_bell(group_.rank(), sleeper).rings.load();
}

void Board::sleep(Sleeper sleeper, std::uint32_t rings, std::chrono::microseconds most) noexcept {
  const timespec limit{static_cast<time_t>(most.count() / 1000000),
                       static_cast<long>(most.count() % 1000000 * 1000)};
  futex(row_bell(group_.rank(), sleeper).rings, FUTEX_WAIT, rings, &limit);
}

void Board::wake(Bell& bell) noexcept {
  bell.rings.fetch_add(1);
  futex(bell.rings, FUTEX_WAKE, INT_MAX, nullptr);
}

// Whether the one who sleeps there is awake now or about to be.
bool Board::ring(Bell& bell) noexcept {
  std::uint32_t state = bell.state.load();
  if (state == kReady && bell.state.compare_exchange_strong(state, kRung)) wake(bell);
  return state != kAway;
}

void Board::ring() noexcept {
  for (const int rank : here_) {
    if (rank == group_.rank()) continue;
    // The thread that computes does all there is to do once it is awake.
    if (!ring(row_bell(rank, Sleeper::caller))) ring(row_bell(rank, Sleeper::watcher));
  }
  publish();
}

void Board::ring_caller() noexcept { ring(row_bell(group_.rank(), Sleeper::caller)); }

void Board::publish() noexcept {
  if (apart_) wake(row_bell(here_.front(), Sleeper::watcher));
}

// Numbers are read from the last to the first, as their owners write them from the first to the
// last.
std::string Board::pack() const {
  const auto words = static_cast<std::size_t>(words_);
  std::vector<std::int64_t> numbers(here_.size() * words + 1);
  for (std::size_t i = 0; i < here_.size(); ++i) {
    for (std::size_t w = words; w-- > 0;)
      numbers[i * words + w] = word(here_[i], static_cast<int>(w)).load();
  }
  numbers.back() = head().notice.load();
  std::string packed = text::concat(text::join(here_, ",", here_.size()), ";");
  packed.append(reinterpret_cast<const char*>(numbers.data()),
                numbers.size() * sizeof(std::int64_t));
  if (numbers.back() > 0) packed += notice();
  return packed;
}

void Board::unpack(const std::string& packed) {
  const auto words = static_cast<std::size_t>(words_);
  const auto ranks = text::split(packed.substr(0, packed.find(';')), ',');
  const char* from = packed.data() + packed.find(';') + 1;
  std::vector<std::int64_t> numbers(ranks.size() * words + 1);
  std::memcpy(numbers.data(), from, numbers.size() * sizeof(std::int64_t));
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    for (std::size_t w = 0; w < words; ++w)
      word(std::stoi(ranks[i]), static_cast<int>(w)).store(numbers[i * words + w]);
  }
  from += numbers.size() * sizeof(std::int64_t);
  if (numbers.back() > 0)
    put_up(numbers.back(), {from, static_cast<std::size_t>(packed.data() + packed.size() - from)});
}

bool Board::carry() {
  bool moved = false;
  if (std::string now = pack(); now != sent_) {
    store_->set(key_, now);
    sent_ = std::move(now);
    moved = true;
  }
  for (auto& [key, seen] : others_) {
    std::string now = store_->get_to_str(key);
    if (now == seen) continue;
    unpack(now);
    seen = std::move(now);
    moved = true;
  }
  if (moved) ring();
  return moved;
}

void Board::check_peers(const char* operation) const {
  group_.impl()->watch->check_present(operation);
}

bool Board::knows_loss() const { return group_.impl()->watch->knows_loss(); }

void Board::check_cause(const char* operation, bool known_elsewhere) const {
  const auto& watch = *group_.impl()->watch;
  watch.check_cause(operation, known_elsewhere ? watch.patience() : kUntilHeard);
}

}  // namespace accelerate::comm
