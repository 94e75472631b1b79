#pragma once

#include <c10/core/Device.h>
#include <torch/arg.h>

#include <concepts>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace accelerate {

/// Gives memory that LibTorch's device allocators keep for reuse back to the devices.
void empty_device_cache();

/// Free memory in bytes: a GPU's own; of the host, what the kernel says can be had without
/// swapping, and no more than the limit of this process' control group leaves.
std::int64_t available_memory(at::Device device);

/// Lets go of everything given (tensors, modules, optimizers in smart pointers, containers) by
/// resetting the variables themselves, then empties the device caches. Memory is free once no other
/// handle holds it.
template <class... Objects>
void release_memory(Objects&... objects) {
  const auto release = [](auto& object) {
    if constexpr (requires { object.reset(); }) {
      object.reset();
    } else if constexpr (requires { object = nullptr; }) {
      object = nullptr;
    } else {
      object = std::remove_cvref_t<decltype(object)>{};
    }
  };
  (release(objects), ...);
  empty_device_cache();
}

/// True when `error`, or an error nested in it, says that memory ran out: c10::OutOfMemoryError,
/// std::bad_alloc, accelerate::OutOfMemoryError, or a message of LibTorch's CPU allocator, of CUDA,
/// or of cuDNN that it cannot run for want of memory.
bool is_out_of_memory(const std::exception& error);
bool is_out_of_memory(const std::exception_ptr& error);

/// Settings of find_executable_batch_size.
class BatchSizeOptions {
  /// The first batch size tried. Default: 128.
  TORCH_ARG(std::int64_t, starting_batch_size) = 128;
  /// The next batch size to try, smaller than the one given. Every rank must compute the same.
  /// Default: nine tenths, rounded down.
  TORCH_ARG(std::function<std::int64_t(std::int64_t)>, reduce) = [](std::int64_t size) {
    return size * 9 / 10;
  };
};

namespace detail {

/// The search behind find_executable_batch_size.
class BatchSizeSearch {
 public:
  /// Strings of all ranks, in rank order.
  /// `collective_failed`: this rank comes from a collective that was not completed.
  using Gather =
      std::function<std::vector<std::string>(const std::string&, bool collective_failed)>;
  /// `gather` is empty in one process.
  BatchSizeSearch(const BatchSizeOptions& options, int rank, Gather gather);

  std::int64_t batch_size() const noexcept { return size_; }
  /// Ends an attempt whose error is `error`, or null. True: it succeeded on all ranks. False: try
  /// the new batch_size(). Throws when the search is over.
  bool agree(const std::exception_ptr& error);

 private:
  void reduce();
  [[noreturn]] void give_up(const std::string& where, const std::exception_ptr& error) const;

  BatchSizeOptions options_;
  int rank_;
  Gather gather_;
  std::int64_t size_;
  std::exception_ptr last_out_of_memory_;
};

template <class Function>
auto find_batch_size(Function& function, BatchSizeSearch search) {
  using Result = std::decay_t<std::invoke_result_t<Function&, std::int64_t>>;
  for (;;) {
    empty_device_cache();
    std::exception_ptr error;
    if constexpr (std::is_void_v<Result>) {
      try {
        function(search.batch_size());
      } catch (...) {
        error = std::current_exception();
      }
      if (search.agree(error)) return;
    } else {
      std::optional<Result> result;
      try {
        result.emplace(function(search.batch_size()));
      } catch (...) {
        error = std::current_exception();
      }
      if (search.agree(error)) return std::move(*result);
    }
  }
}

}  // namespace detail

/// Calls `function(batch_size)`, again with a smaller batch size whenever it runs out of memory,
/// and returns what it returned at last. `function` must build all that depends on the batch size
/// (loaders above all) itself, and let go of it when it throws.
///
/// Throws OutOfMemoryError when the batch size reaches zero, ConfigError when `reduce` does not
/// reduce; other errors of `function` pass.
template <class Function>
requires std::invocable<Function&, std::int64_t>
auto find_executable_batch_size(Function&& function, const BatchSizeOptions& options = {}) {
  return detail::find_batch_size(function, detail::BatchSizeSearch(options, 0, {}));
}

/// The same on all ranks of `group`, a comm::Group: after every attempt the ranks tell each other
/// how it went, over a group of its own, and all try the next batch size when one of them ran out
/// of memory. So they always end with the same batch size or all throw: a rank's own error, or
/// StateError on ranks where nothing was wrong.
///
/// When memory runs out on some ranks while others already wait for them in a collective, that
/// collective cannot be completed and its connections cannot be used again. Then no smaller batch
/// size is tried: after the group's timeout every rank throws OutOfMemoryError, which says so and
/// names a batch size to start the program anew with. A rank that cannot reach the others any more
/// by then throws what its collective failed with.
template <class Function, class Group>
requires std::invocable<Function&, std::int64_t>
auto find_executable_batch_size(Function&& function, const BatchSizeOptions& options,
                                const Group& group) {
  detail::BatchSizeSearch::Gather gather;
  if (group.size() > 1) {
    // Ranks that ran out of memory come first and wait until the others' collective times out,
    // which is when their own wait does: the second group is for meeting after that, and ranks
    // whose collective failed go there at once.
    gather = [first = group.split(0, group.rank(), "batch_size"),
              second = group.split(0, group.rank(), "batch_size")](const std::string& mine,
                                                                   bool collective_failed) {
      if (!collective_failed) {
        try {
          return first.all_gather_bytes(mine);
        } catch (const std::exception&) {
        }
      }
      return second.all_gather_bytes(mine);
    };
  }
  return detail::find_batch_size(function,
                                 detail::BatchSizeSearch(options, group.rank(), std::move(gather)));
}

}  // namespace accelerate
