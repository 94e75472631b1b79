#include "core/cuda_devices.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/host_memory.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/core/memory.hpp>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/util/Exception.h>

#include <array>
#include <new>

namespace accelerate {
namespace {

// LibTorch throws most of these as plain c10::Error.
constexpr std::array kMessages{"out of memory", "DefaultCPUAllocator: can't allocate memory",
                               "DefaultCPUAllocator: not enough memory",
                               "CUDNN_STATUS_NOT_SUPPORTED", "CUBLAS_STATUS_ALLOC_FAILED"};

// How an attempt went on one rank, as it is sent to the others.
struct Outcome {
  enum class Kind : char { done = 'd', out_of_memory = 'm', failed = 'f' };
  Kind kind;
  std::int64_t batch_size;
  std::string message;

  std::string encode() const {
    return text::concat(static_cast<char>(kind), batch_size, ' ', message);
  }
  static Outcome decode(const std::string& bytes) {
    const std::size_t space = bytes.find(' ');
    return {static_cast<Kind>(bytes.at(0)), text::to_int(bytes.substr(1, space - 1)).value(),
            bytes.substr(space + 1)};
  }
};

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return describe(known);
  } catch (...) {
    return "an error that is not a std::exception";
  }
}

bool is_distributed(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const DistributedError&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

std::int64_t available_memory(at::Device device) {
  if (device.is_cpu()) return available_host_memory();
  return static_cast<std::int64_t>(at::accelerator::getMemoryInfo(device.index()).first);
}

void empty_device_cache() {
  if (cuda_device_count() == 0) return;
  auto* allocator = c10::getDeviceAllocator(c10::DeviceType::CUDA);
  if (allocator->initialized()) allocator->emptyCache();
}

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
      dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
      dynamic_cast<const OutOfMemoryError*>(&error) != nullptr) {
    return true;
  }
  const std::string_view message = error.what();
  for (const char* known : kMessages) {
    if (message.find(known) != std::string_view::npos) return true;
  }
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& nested) {
    return is_out_of_memory(nested);
  } catch (...) {
    return false;
  }
  return false;
}

bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return is_out_of_memory(known);
  } catch (...) {
    return false;
  }
}

namespace detail {

BatchSizeSearch::BatchSizeSearch(const BatchSizeOptions& options, int rank, Gather gather)
    : options_(options),
      rank_(rank),
      gather_(std::move(gather)),
      size_(options.starting_batch_size()) {
  if (!options_.reduce())
    throw ConfigError("The search for a batch size was given an empty reduce function.");
  if (size_ < 1) {
    throw ConfigError(
        text::concat("The search for a batch size was to start at ", size_, "; the least is 1."));
  }
}

void BatchSizeSearch::reduce() {
  const std::int64_t next = options_.reduce()(size_);
  if (next >= size_ || next < 0) {
    throw ConfigError(text::concat("The batch size was to be reduced from ", size_,
                                   ", and the reduce function gave ", next, "."));
  }
  if (next == 0) {
    const std::string message = text::concat(
        "No executable batch size was found: memory ran out with ", size_,
        " too, and the next is zero. Use a smaller model, shard it, or a device with more memory.");
    if (!last_out_of_memory_) throw OutOfMemoryError(message);
    try {
      std::rethrow_exception(last_out_of_memory_);
    } catch (...) {
      std::throw_with_nested(OutOfMemoryError(message));
    }
  }
  log::info(text::concat("Memory ran out with batch size ", size_, "; trying ", next, "."));
  size_ = next;
}

void BatchSizeSearch::give_up(const std::string& where, const std::exception_ptr& error) const {
  const std::string message =
      text::concat("Memory ran out on ", where, " with batch size ", size_,
                   " while other ranks waited for it in a collective, so the ranks' connections "
                   "cannot be used again. Start the program anew with a batch size of at most ",
                   options_.reduce()(size_), ".");
  try {
    std::rethrow_exception(error);
  } catch (...) {
    std::throw_with_nested(OutOfMemoryError(message));
  }
}

bool BatchSizeSearch::agree(const std::exception_ptr& error) {
  using Kind = Outcome::Kind;
  Outcome mine{Kind::done, size_, {}};
  if (error) {
    mine.kind = is_out_of_memory(error) ? Kind::out_of_memory : Kind::failed;
    mine.message = message_of(error);
    if (mine.kind == Kind::out_of_memory) last_out_of_memory_ = error;
  }
  std::vector<std::string> gathered{mine.encode()};
  if (gather_) {
    if (mine.kind == Kind::out_of_memory) {
      log::warning(
          text::concat("Memory ran out with batch size ", size_, "; waiting for the other ranks."),
          log::Ranks::all);
    }
    try {
      gathered = gather_(mine.encode(), mine.kind == Kind::failed && is_distributed(error));
    } catch (...) {
      // The others are stuck where this rank left them, or gone.
      if (mine.kind == Kind::out_of_memory)
        give_up(text::concat("rank ", log::rank()), std::current_exception());
      if (mine.kind == Kind::failed) std::rethrow_exception(error);
      throw;
    }
  }

  std::vector<int> out_of_memory, failed;
  std::string failure;
  for (std::size_t rank = 0; rank < gathered.size(); ++rank) {
    const Outcome theirs = Outcome::decode(gathered[rank]);
    if (theirs.batch_size != size_) {
      throw StateError(text::concat(
          "Rank ", rank, " tried batch size ", theirs.batch_size, " and rank ", rank_, " tried ",
          size_, ". Start at the same size, and reduce it alike, on every rank."));
    }
    if (theirs.kind == Kind::out_of_memory) out_of_memory.push_back(static_cast<int>(rank));
    if (theirs.kind == Kind::failed) {
      if (failed.empty()) failure = theirs.message;
      failed.push_back(static_cast<int>(rank));
    }
  }
  if (!failed.empty()) {
    const bool stuck = mine.kind == Kind::failed && is_distributed(error);
    if (!out_of_memory.empty() && (stuck || mine.kind == Kind::out_of_memory)) {
      give_up(text::concat("rank ", text::join(out_of_memory)), error);
    }
    if (mine.kind == Kind::failed) std::rethrow_exception(error);
    throw StateError(text::concat("The attempt with batch size ", size_, " failed on rank ",
                                  text::join(failed), ": ", failure));
  }
  if (out_of_memory.empty()) return true;
  reduce();
  return false;
}

}  // namespace detail
}  // namespace accelerate
