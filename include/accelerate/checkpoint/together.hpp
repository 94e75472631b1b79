#pragma once

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/comm/group.hpp>

#include <exception>
#include <string>
#include <string_view>

namespace accelerate::checkpoints {

/// Collective: runs `work`, and throws on every process when it threw on any; where it did not, a
/// CheckpointError that says what failed and where. `work` must not communicate, so that a process
/// that fails leaves nobody waiting.
template <class Work>
void together(const comm::Group& group, std::string_view what, std::string_view path, Work&& work) {
  std::exception_ptr failure;
  std::string message;
  try {
    work();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    message = describe(error);
    if (message.empty()) message = "an error without a message";
  }
  if (group.size() == 1) {
    if (failure) std::rethrow_exception(failure);
    return;
  }
  const auto outcomes = group.all_gather_bytes(message);
  if (failure) std::rethrow_exception(failure);
  for (std::size_t rank = 0; rank < outcomes.size(); ++rank) {
    if (outcomes[rank].empty()) continue;
    throw CheckpointError(
        text::concat("Process ", rank, " failed in ", what, ", so all stopped: ", outcomes[rank]),
        std::string(path));
  }
}

}  // namespace accelerate::checkpoints
