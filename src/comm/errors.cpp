#include "comm/errors.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <torch/csrc/distributed/c10d/exception.h>

#include <new>

namespace accelerate::comm {
namespace {

bool contains(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    if (text.find(part) != std::string::npos) return true;
  }
  return false;
}

/// gloo's exceptions reach us as plain runtime errors, so their text has to tell.
FailureKind classify_text(const std::string& text) {
  if (contains(text,
               {"Timed out", "timed out", "Application timeout", "imeout", "monitoredBarrier"}))
    return FailureKind::timeout;
  if (contains(text, {"onnection closed", "onnection reset", "onnection refused", "Broken pipe",
                      "Socket closed", "aborted", "onnection was closed", "remote process exited",
                      "ocket is not connected"})) {
    return FailureKind::connection;
  }
  return FailureKind::other;
}

template <class Wrapper, class... Arguments>
std::exception_ptr nest(const std::exception_ptr& failure, Arguments&&... arguments) {
  try {
    try {
      std::rethrow_exception(failure);
    } catch (...) {
      std::throw_with_nested(Wrapper(std::forward<Arguments>(arguments)...));
    }
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

std::string OperationName::text() const {
  return text::concat(operation, " in group \"", group, "\" on rank ", rank, " of ", size,
                      call.empty() ? "" : text::concat(", in ", call, ","));
}

FailureKind classify(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Error&) {
    return FailureKind::ours;
  } catch (const c10d::TimeoutError&) {
    return FailureKind::timeout;
  } catch (const std::exception& error) {
    return classify_text(error.what());
  } catch (...) {
    return FailureKind::other;
  }
}

std::exception_ptr translate(const std::exception_ptr& failure, const OperationName& name,
                             std::chrono::milliseconds timeout, bool compared,
                             const std::string& remark) {
  try {
    std::rethrow_exception(failure);
  } catch (const c10::OutOfMemoryError&) {
    return nest<OutOfMemoryError>(failure, text::concat("Memory ran out in ", name.text(), "."));
  } catch (const std::bad_alloc&) {
    return nest<OutOfMemoryError>(failure, text::concat("Memory ran out in ", name.text(), "."));
  } catch (...) {
    // Everything else is told apart below.
  }
  switch (classify(failure)) {
    case FailureKind::ours:
      return failure;
    case FailureKind::timeout:
      return nest<TimeoutError>(
          failure,
          text::concat(name.text(), " waited longer than the timeout of ",
                       text::format_seconds(timeout.count() / 1e3),
                       compared ? ". Another rank has not come to it: it is slower than the "
                                  "timeout allows, or it has stopped, or waits in another group. "
                                  "Raise the timeout (ACCELERATE_TIMEOUT, in seconds), or see what "
                                  "that rank does."
                                : ". Another rank does not take part in it: it is slower than the "
                                  "timeout allows, or it runs other operations. Raise the timeout "
                                  "(ACCELERATE_TIMEOUT, in seconds), or have every call compared "
                                  "between ranks (ACCELERATE_DEBUG_MODE=1).",
                       remark),
          name.operation, name.rank);
    case FailureKind::connection:
      return nest<PeerLostError>(
          failure,
          text::concat(name.text(),
                       " lost the connection to another rank, and it could not be told which. Look "
                       "for the first error in the other ranks' output."),
          name.operation, name.rank, -1);
    case FailureKind::other:
      break;
  }
  return nest<DistributedError>(failure, text::concat(name.text(), " failed"), name.operation,
                                name.rank);
}

}  // namespace accelerate::comm
