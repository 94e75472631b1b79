#pragma once

#include <accelerate/io/mapped_file.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

namespace accelerate::checkpoints {

/// The records of a zip archive as Python's `torch.save` writes it: stored, not compressed. Trusts
/// no number in it: every record lies inside the file, none lies in another, and what is compressed
/// or encrypted is refused, so that nothing here can grow beyond the file's own size. The archive's
/// CRC-32s are not compared; torch can be told not to write them.
class ZipReader {
 public:
  /// Throws CheckpointError when the file is not such an archive.
  explicit ZipReader(std::shared_ptr<const io::MappedFile> file);

  /// By name, without the folder that everything in the archive lies in.
  const std::map<std::string, std::span<const std::byte>, std::less<>>& records() const noexcept {
    return records_;
  }

 private:
  std::map<std::string, std::span<const std::byte>, std::less<>> records_;
};

}  // namespace accelerate::checkpoints
