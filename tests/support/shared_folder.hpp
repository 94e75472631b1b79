#pragma once

#include <support/distributed.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/io/file.hpp>

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <system_error>

namespace accelerate::testing {

/// A folder that all ranks use, and that goes when all have come to its end. In memory where the
/// machine has a place for that.
class SharedFolder {
 public:
  SharedFolder() {
    namespace fs = std::filesystem;
    std::string name;
    if (world().rank() == 0)
      name =
          io::TemporaryFolder(fs::is_directory("/dev/shm") ? "/dev/shm" : "/tmp").keep().string();
    path_ = world().broadcast_bytes(name);
  }
  ~SharedFolder() {
    try {
      world().barrier();  // the others may still read
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
    std::error_code ignored;
    if (world().rank() == 0) std::filesystem::remove_all(path_, ignored);
  }
  SharedFolder(const SharedFolder&) = delete;
  SharedFolder& operator=(const SharedFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// Tests that each have such a folder.
class WithSharedFolder : public ::testing::Test {
 private:
  SharedFolder shared_;

 protected:
  const std::filesystem::path& folder = shared_.path();
};

}  // namespace accelerate::testing
