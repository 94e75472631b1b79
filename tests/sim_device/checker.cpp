#include "sim_device/checker.hpp"

#include "sim_device/settings.hpp"
#include "sim_device/sim_device.hpp"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string_view>
#include <utility>

namespace sim {
namespace {

struct Everything {
  std::recursive_mutex mutex;
  std::set<std::string> names;
  std::deque<std::unique_ptr<Stream>> streams;
  std::map<std::pair<int, c10::StreamId>, int> index_of_stream;
  Clock host;
  std::map<std::uintptr_t, Block> blocks;
  std::uint64_t blocks_made = 0;
  std::vector<Transfer> transfers;
  std::string found_late;  // a race that was found where nothing can be thrown
  Statistics statistics;
  std::uint64_t expected_races = 0;  // those before the last forget()
};

/// Races must not end in a catch (...): the exit code tells.
void end_with_an_error_if_raced();

Everything& all() {
  static auto* const made = [] {
    std::atexit(end_with_an_error_if_raced);
    return new Everything;  // never destroyed: static objects of others free memory at the end
  }();
  return *made;
}

void end_with_an_error_if_raced() {
  const std::uint64_t unexpected = all().statistics.races - all().expected_races;
  if (unexpected == 0) return;
  std::fprintf(stderr, "simulated device: the process ends, and %llu race(s) were found.\n",
               static_cast<unsigned long long>(unexpected));
  std::fflush(nullptr);
  _exit(kRacedExitCode);
}

void count_race(const std::string& message) {
  ++all().statistics.races;
  std::cerr << "simulated device: " << message << std::endl;
}

void throw_what_was_found_late() {
  if (!all().found_late.empty()) throw RaceError(std::exchange(all().found_late, {}));
}

[[noreturn]] void throw_race(const Block& block, const std::string& op, const Stream& stream,
                             bool write, const Access& before, const std::string& more) {
  const Stream& other = *all().streams[static_cast<std::size_t>(before.stream)];
  const std::string where =
      block.device < 0
          ? "pinned memory of the host"
          : "memory of " + c10::Device(kDevice, static_cast<c10::DeviceIndex>(block.device)).str();
  const std::string message = c10::str(
      "Race on ", where, " (block ", block.serial, ", ", block.requested, " bytes): ", op, " on ",
      stream.name, write ? " writes" : " reads", " what ", *before.op, " on ", other.name,
      before.write ? " wrote" : " read",
      ", and nothing orders the two: no event was waited for, and nothing was synchronised.", more);
  count_race(message);
  throw RaceError(message);
}

/// Ends the transfers that `done` says.
void settle(const std::function<bool(const Transfer&)>& done, bool deliver = true) {
  std::vector<Transfer> left;
  for (Transfer& transfer : all().transfers) {
    if (!done(transfer)) {
      left.push_back(std::move(transfer));
    } else if (transfer.to_host) {
      if (deliver) std::memcpy(transfer.host, transfer.bytes.data(), transfer.size);
    } else if (hash_of(transfer.host, transfer.size) != transfer.hash) {
      const std::string message =
          c10::str("Race on pinned memory of the host: it was changed while ", *transfer.op, " on ",
                   all().streams[static_cast<std::size_t>(transfer.stream)]->name, " copied its ",
                   transfer.size, " bytes to a device. The host has to wait for the copy first.");
      count_race(message);
      if (all().found_late.empty()) all().found_late = message;
    }
  }
  all().transfers = std::move(left);
}

bool overlap(const Transfer& transfer, const void* begin, std::size_t bytes) {
  const auto* from = static_cast<const char*>(transfer.host);
  const auto* other = static_cast<const char*>(begin);
  return from < other + bytes && other < from + transfer.size;
}

}  // namespace

std::recursive_mutex& mutex() { return all().mutex; }

const std::string* kept_name(const std::string& name) {
  const Lock lock(mutex());
  return &*all().names.insert(name).first;
}

Stream& stream_of(const c10::Stream& stream) {
  const Lock lock(mutex());
  auto& streams = all().streams;
  const auto [at, is_new] = all().index_of_stream.try_emplace({stream.device_index(), stream.id()},
                                                              static_cast<int>(streams.size()));
  if (is_new) {
    const std::string kind =
        stream.id() == 0 ? ", default stream" : c10::str(", stream ", stream.id());
    streams.push_back(
        std::make_unique<Stream>(stream, at->second, all().host, stream.device().str() + kind));
  }
  return *streams[static_cast<std::size_t>(at->second)];
}

Block& add_block(Block block) {
  block.serial = ++all().blocks_made;
  return all().blocks[block.begin] = std::move(block);
}

Block* block_at(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const auto next = all().blocks.upper_bound(at);
  if (next == all().blocks.begin()) return nullptr;
  Block& block = std::prev(next)->second;
  return at < block.begin + block.size ? &block : nullptr;
}

void remove_block(std::uintptr_t begin) { all().blocks.erase(begin); }

std::uint64_t start(Stream& stream, const std::string* op, const std::vector<Use>& uses) {
  const Lock lock(mutex());
  throw_what_was_found_late();
  stream.clock.join(all().host);
  const std::uint64_t number = stream.clock.next(stream.index);
  ++all().statistics.operators;
  if (settings().trace)
    std::cerr << "simulated device: " << stream.name << " #" << number << ' ' << *op << '\n';
  if (!settings().check) return number;
  for (const Use& use : uses) {
    if (use.bytes == 0) continue;
    Block* block = block_at(use.begin);
    TORCH_CHECK(block != nullptr && block->live, *op, " on ", stream.name,
                " uses memory that is not allocated, or not any more.");
    const auto begin = reinterpret_cast<std::uintptr_t>(use.begin);
    const auto end = begin + use.bytes;
    for (const Access& before : block->accesses) {
      const bool conflict = (use.write || before.write) && before.begin < end && begin < before.end;
      if (conflict && !stream.clock.has(before.stream, before.number))
        throw_race(*block, *op, stream, use.write, before, "");
    }
    // The new use stands for those before it that lie inside of it and are ordered before it.
    std::erase_if(block->accesses, [&](const Access& before) {
      return before.begin >= begin && before.end <= end && (use.write || !before.write) &&
             stream.clock.has(before.stream, before.number);
    });
    block->accesses.push_back({begin, end, use.write, stream.index, number, op});
    ++all().statistics.uses;
  }
  return number;
}

void host_joins(Stream& stream) {
  const Lock lock(mutex());
  throw_what_was_found_late();
  stream.clock.join(all().host);
}

void wrote(const Stream& stream, std::uint64_t number, const std::string* op, const Use& use) {
  if (!settings().check || use.bytes == 0) return;
  const Lock lock(mutex());
  const auto begin = reinterpret_cast<std::uintptr_t>(use.begin);
  block_at(use.begin)->accesses.push_back(
      {begin, begin + use.bytes, true, stream.index, number, op});
}

void check_reuse(const Stream& stream, Block& freed) {
  if (!settings().check) return;
  for (const Access& before : freed.accesses) {
    if (stream.clock.has(before.stream, before.number) || freed.recorded.contains(before.stream))
      continue;
    static const std::string allocation = "an allocation (which may be given freed memory)";
    const Block said = std::exchange(freed, Block(freed));
    freed.accesses.clear();  // once is enough
    throw_race(said, allocation, stream, true, before,
               said.ignored_records > 0
                   ? " recordStream was called through a pointer that is not the allocator's own, "
                     "which CUDA's allocator ignores."
                   : " The block was freed without recordStream.");
  }
  freed.accesses.clear();
}

void record(Event& event, const Stream& stream) {
  const Lock lock(mutex());
  event.clock = stream.clock;
  event.clock.join(all().host);
  event.asked = 0;
  event.time = std::chrono::steady_clock::now();
  if (settings().trace)
    std::cerr << "simulated device: " << stream.name << " records event " << &event << '\n';
}

void wait_for(Stream& waiting, const Event& event) {
  const Lock lock(mutex());
  waiting.clock.join(event.clock);
  if (settings().trace)
    std::cerr << "simulated device: " << waiting.name << " waits for event " << &event << '\n';
}

bool query(Event& event) {
  const Lock lock(mutex());
  if (!all().host.has(event.clock) && event.asked++ == 0) return false;
  host_waits_for(event.clock);
  return true;
}

bool host_has(const Clock& clock) {
  const Lock lock(mutex());
  return all().host.has(clock);
}

void host_waits_for(const Clock& clock) {
  const Lock lock(mutex());
  all().host.join(clock);
  ++all().statistics.host_waits;
  settle([](const Transfer& one) { return all().host.has(one.stream, one.number); });
  throw_what_was_found_late();
}

void synchronize(const Stream& stream) {
  const Lock lock(mutex());
  host_waits_for(stream.clock);
}

void synchronize_device(c10::DeviceIndex device) {
  const Lock lock(mutex());
  for (const auto& stream : all().streams) {
    if (stream->stream.device_index() == device) host_waits_for(stream->clock);
  }
}

void add_transfer(Transfer transfer) {
  const Lock lock(mutex());
  all().transfers.push_back(std::move(transfer));
}

void settle_transfers(const void* begin, std::size_t bytes, bool written) {
  const Lock lock(mutex());
  settle(
      [&](const Transfer& one) { return (one.to_host || written) && overlap(one, begin, bytes); });
}

void drop_transfers(const void* begin, std::size_t bytes) {
  const Lock lock(mutex());
  settle([&](const Transfer& one) { return overlap(one, begin, bytes); }, /*deliver=*/false);
}

std::size_t hash_of(const void* data, std::size_t bytes) {
  return std::hash<std::string_view>{}({static_cast<const char*>(data), bytes});
}

void count_ignored_record_stream() { ++all().statistics.ignored_record_streams; }

Statistics statistics() {
  const Lock lock(mutex());
  return all().statistics;
}

void forget() {
  const Lock lock(mutex());
  all().found_late.clear();
  all().transfers.clear();
  for (const auto& stream : all().streams) all().host.join(stream->clock);
  all().expected_races = all().statistics.races;
}

}  // namespace sim
