#pragma once

#include <stdexcept>
#include <string>

namespace accelerate {

/// Base of every error this library throws. The message is one or more sentences: what was found,
/// what was expected, what to try. An error that came from LibTorch, c10d, MPI or the operating
/// system is kept nested (`std::rethrow_if_nested`).
class Error : public std::runtime_error {
 public:
  /// Control characters in the message, which names in files may have, are written as "\x1b".
  explicit Error(const std::string& message);
};

/// An argument, an environment variable or a configuration file says something unusable.
class ConfigError : public Error {
 public:
  using Error::Error;
};

/// The library was used in the wrong order: re-initialised with other settings, used before
/// `prepare()`, stepped without gradients.
class StateError : public Error {
 public:
  using Error::Error;
};

/// A collective or the rendezvous failed. Names the operation and the rank it failed on.
class DistributedError : public Error {
 public:
  DistributedError(const std::string& message, std::string operation, int rank);
  /// The operation that failed, for example "all_reduce".
  const std::string& operation() const noexcept { return operation_; }
  /// The rank of this process in the group the operation ran in.
  int rank() const noexcept { return rank_; }

 private:
  std::string operation_;
  int rank_;
};

/// A rank did not arrive in time.
class TimeoutError : public DistributedError {
 public:
  using DistributedError::DistributedError;
};

/// Another rank died or stopped answering.
class PeerLostError : public DistributedError {
 public:
  PeerLostError(const std::string& message, std::string operation, int rank, int lost_rank);
  /// The rank that was lost, or -1 when nobody could tell which.
  int lost_rank() const noexcept { return lost_rank_; }

 private:
  int lost_rank_;
};

/// Mixed precision: a dtype the device cannot compute in, a gradient unscaled twice.
class PrecisionError : public Error {
 public:
  using Error::Error;
};

/// A module cannot be sharded as asked, or sharded memory was used in a way that cannot work.
class ShardingError : public Error {
 public:
  using Error::Error;
};

/// A dataset, a batch or a data file is not what it should be.
class DataError : public Error {
 public:
  using Error::Error;
};

/// The system refused to open, read or write a file: the disk is full or fails, or it is forbidden.
class FileError : public Error {
 public:
  FileError(const std::string& message, std::string path, int code);
  /// The file or folder the error is about.
  const std::string& path() const noexcept { return path_; }
  /// The system's errno.
  int code() const noexcept { return code_; }

 private:
  std::string path_;
  int code_;
};

/// A checkpoint is missing, damaged, or belongs to something else.
class CheckpointError : public Error {
 public:
  CheckpointError(const std::string& message, std::string path);
  /// The file or folder the error is about.
  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

/// The launcher could not start its processes, or one of them failed.
class LaunchError : public Error {
 public:
  LaunchError(const std::string& message, int exit_code);
  /// What the launcher exits with.
  int exit_code() const noexcept { return exit_code_; }

 private:
  int exit_code_;
};

/// Something this library, LibTorch or the machine does not have. The message names it and the way
/// round.
class UnsupportedError : public Error {
 public:
  using Error::Error;
};

/// Memory ran out, on the device or on the host.
class OutOfMemoryError : public Error {
 public:
  using Error::Error;
};

/// The message of `error` followed by the messages of everything nested in it, innermost last,
/// joined by " Caused by: ". Backtraces that LibTorch appends to its messages are left out.
std::string describe(const std::exception& error);

}  // namespace accelerate
