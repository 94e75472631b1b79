#include <accelerate/base/error.hpp>

#include "base/plain_text.hpp"

#include <utility>

namespace accelerate {

Error::Error(const std::string& message) : std::runtime_error(text::printable(message)) {}

DistributedError::DistributedError(const std::string& message, std::string operation, int rank)
    : Error(message), operation_(std::move(operation)), rank_(rank) {}

PeerLostError::PeerLostError(const std::string& message, std::string operation, int rank,
                             int lost_rank)
    : DistributedError(message, std::move(operation), rank), lost_rank_(lost_rank) {}

FileError::FileError(const std::string& message, std::string path, int code)
    : Error(message), path_(std::move(path)), code_(code) {}

CheckpointError::CheckpointError(const std::string& message, std::string path)
    : Error(message), path_(std::move(path)) {}

LaunchError::LaunchError(const std::string& message, int exit_code)
    : Error(message), exit_code_(exit_code) {}

namespace {

std::string without_backtrace(std::string message) {
  // c10::Error::what() appends "Exception raised from ..." and a C++ backtrace.
  for (const char* marker : {"\nException raised from ", "\nC++ CapturedTraceback"}) {
    if (auto at = message.find(marker); at != std::string::npos) message.resize(at);
  }
  while (!message.empty() && (message.back() == '\n' || message.back() == ' ')) message.pop_back();
  return message;
}

}  // namespace

std::string describe(const std::exception& error) {
  std::string text = without_backtrace(error.what());
  try {
    std::rethrow_if_nested(error);
  } catch (const std::exception& nested) {
    // Messages about files end with the system's reason already.
    const std::string cause = describe(nested);
    if (text.find(cause) == std::string::npos) text += " Caused by: " + cause;
  } catch (...) {
    text += " Caused by something that is not a std::exception.";
  }
  return text::printable(text);
}

}  // namespace accelerate
