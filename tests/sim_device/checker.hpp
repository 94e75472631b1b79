#pragma once

// The happens-before checker. What a real device leaves open, the order of work on two streams and
// of work and host, is kept as clocks: one of each stream, and one of the host, whose threads count
// as one. Each use of memory is noted with its stream and its number there, and compared with the
// uses before it.

#include "sim_device/clock.hpp"

#include <c10/core/Stream.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

/// One lock for all that is simulated. Recursive: freeing memory may happen anywhere.
std::recursive_mutex& mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

/// Names of operators are kept once, for ever.
const std::string* kept_name(const std::string& name);

struct Stream {
  Stream(c10::Stream stream, int index, Clock clock, std::string name)
      : stream(stream), index(index), clock(std::move(clock)), name(std::move(name)) {}
  c10::Stream stream;
  int index;
  Clock clock;  // what is done before the stream's next operator
  std::string name;
  std::recursive_mutex busy;  // held while an operator of the stream runs
};
Stream& stream_of(const c10::Stream& stream);

struct Event {
  Clock clock;
  int asked = 0;
  std::chrono::steady_clock::time_point time;
};

/// Bytes that an operator reads or writes.
struct Use {
  const void* begin;
  std::size_t bytes;
  bool write;
};

/// A use that was made before.
struct Access {
  std::uintptr_t begin, end;
  bool write;
  int stream;
  std::uint64_t number;
  const std::string* op;
};

/// Memory of a device, in use or freed, or pinned memory of the host.
struct Block {
  std::uintptr_t begin = 0;
  std::size_t size = 0;
  std::size_t requested = 0;
  int device = -1;  // -1: pinned
  int stream = -1;  // on which it was allocated
  bool live = true;
  std::uint64_t serial = 0;
  std::vector<Access> accesses = {};
  std::set<int> recorded = {};  // streams that recordStream named
  int ignored_records = 0;      // recordStream through a foreign pointer
};
Block& add_block(Block block);
Block* block_at(const void* address);
void remove_block(std::uintptr_t begin);

/// The next operator of a stream. Throws RaceError when a use of it is not ordered after an earlier
/// one. Its number is returned.
std::uint64_t start(Stream& stream, const std::string* op, const std::vector<Use>& uses);
/// What the host has waited for is done for the stream as well. Throws what was found late.
void host_joins(Stream& stream);
/// Memory that an operator allocated and wrote.
void wrote(const Stream& stream, std::uint64_t number, const std::string* op, const Use& use);
/// `stream` is about to be given the memory of a block that was freed on it, or other memory that
/// was freed as early. Throws RaceError when another stream may still use it.
void check_reuse(const Stream& stream, Block& freed);

void record(Event& event, const Stream& stream);
void wait_for(Stream& waiting, const Event& event);
/// "Not yet" the first time, unless the host knows better: a program must live with both answers.
bool query(Event& event);
bool host_has(const Clock& clock);
void host_waits_for(const Clock& clock);
void synchronize(const Stream& stream);
void synchronize_device(c10::DeviceIndex device);

/// A copy between pinned memory and a device that the host has not waited for yet.
struct Transfer {
  bool to_host;
  void* host;
  std::size_t size;
  std::vector<char> bytes;  // to the host: what arrives when the host has waited
  std::size_t hash = 0;     // from the host: the source must stay as it was until then
  int stream = 0;
  std::uint64_t number = 0;
  const std::string* op = nullptr;
};
void add_transfer(Transfer transfer);
/// A copy that reads (or writes) these bytes is ordered after all that came before on the device:
/// copies to them have arrived, and, where they are written, copies from them have read them.
void settle_transfers(const void* begin, std::size_t bytes, bool written);
/// Pinned memory is freed.
void drop_transfers(const void* begin, std::size_t bytes);
std::size_t hash_of(const void* data, std::size_t bytes);

void count_ignored_record_stream();

}  // namespace sim
