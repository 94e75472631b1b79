#pragma once

#include <chrono>
#include <exception>
#include <string>

namespace accelerate::comm {

/// Which operation an error is about, and where.
struct OperationName {
  std::string operation;
  std::string group;
  int rank = 0;
  int size = 1;
  /// In debug mode: what the program called, such as "accelerator.backward()".
  std::string call;

  /// "all_reduce in group \"world\" on rank 1 of 4, in accelerator.backward(),".
  std::string text() const;
};

enum class FailureKind {
  ours,        ///< already one of the library's errors
  timeout,     ///< nobody answered in time
  connection,  ///< a connection to another rank broke
  other
};

/// What an exception of c10d, gloo, NCCL or MPI is about.
FailureKind classify(const std::exception_ptr& failure);

/// The library's error for `failure`, the original nested in it. An error that is the library's own
/// already is returned as it is. `remark` is added to a timeout's message. `compared`: debug mode
/// is on.
std::exception_ptr translate(const std::exception_ptr& failure, const OperationName& name,
                             std::chrono::milliseconds timeout, bool compared,
                             const std::string& remark = {});

}  // namespace accelerate::comm
