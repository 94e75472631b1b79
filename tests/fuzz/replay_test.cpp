// The corpus of the fuzzers, and a few thousand changes to its files, always the same ones, in an
// ordinary build.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <vector>

#include "fuzz/targets.hpp"

namespace accelerate::fuzz {
namespace {

namespace fs = std::filesystem;
using Bytes = std::vector<std::uint8_t>;
using Target = void (*)(std::span<const std::uint8_t>);

std::vector<Bytes> corpus(const std::string& name) {
  std::vector<fs::path> paths;
  for (const auto& entry :
       fs::directory_iterator(fs::path(ACCELERATE_TESTS_DIR) / "fuzz" / "corpus" / name))
    paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Bytes> files;
  for (const fs::path& path : paths) {
    std::ifstream in(path, std::ios::binary);
    files.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return files;
}

class Mutator {
 public:
  Bytes operator()(Bytes bytes, const Bytes& other) {
    for (std::size_t changes = 1 + draw(4); changes > 0; --changes) change(bytes, other);
    return bytes;
  }

 private:
  std::size_t draw(std::size_t below) { return below == 0 ? 0 : engine_() % below; }

  void change(Bytes& bytes, const Bytes& other) {
    static constexpr std::uint8_t kTelling[] = {0,   1,   0x7f, 0x80, 0xff, '(', ')',
                                                '.', '"', '}',  '[',  '9',  'q', 'R'};
    const std::size_t at = draw(bytes.size());
    const auto here = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    const auto rest =
        static_cast<std::ptrdiff_t>(draw(std::min<std::size_t>(bytes.size() - at, 64)));
    switch (bytes.empty() ? 5 : draw(7)) {
      case 0:
        bytes[at] ^= static_cast<std::uint8_t>(1 << draw(8));
        break;
      case 1:
        bytes[at] = kTelling[draw(std::size(kTelling))];
        break;
      case 2:
        bytes[at] = static_cast<std::uint8_t>(bytes[at] + 1 - 2 * draw(2));
        break;
      case 3:
        bytes.erase(here, here + rest);
        break;
      case 4:
        bytes.resize(at);
        break;
      case 5:
        bytes.insert(here, kTelling[draw(std::size(kTelling))]);
        break;
      default: {  // a piece of another file, or of this one, in place of what was there
        const Bytes& from = draw(2) == 0 ? other : bytes;
        if (from.empty()) break;
        const std::size_t begin = draw(from.size());
        const Bytes piece(
            from.begin() + static_cast<std::ptrdiff_t>(begin),
            from.begin() + static_cast<std::ptrdiff_t>(
                               begin + draw(std::min<std::size_t>(from.size() - begin, 64))));
        bytes.insert(bytes.erase(here, here + rest), piece.begin(), piece.end());
      }
    }
  }

  std::mt19937 engine_{20};
};

void replay(const std::string& name, Target target) {
  const auto files = corpus(name);
  ASSERT_GT(files.size(), 5U);
  for (const Bytes& file : files) target(file);
  const char* full = std::getenv("ACCELERATE_TEST_FULL");
  const int rounds = full != nullptr && *full == '1' ? 500'000 : 4000;
  Mutator mutate;
  for (int i = 0; i < rounds; ++i) {
    const auto at = static_cast<std::size_t>(i) % files.size();
    target(mutate(files[at], files[(at * 7 + 3) % files.size()]));
  }
}

TEST(Fuzz, SafetensorsReader) { replay("safetensors", safetensors); }
TEST(Fuzz, PtReader) { replay("pt", pt); }

}  // namespace
}  // namespace accelerate::fuzz
