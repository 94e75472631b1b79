#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace fuzz {

/// The decisions of a random program. Each has a name and depends on nothing but the seed and that
/// name, so that one can be taken away and all others stay.
class Draws {
 public:
  explicit Draws(std::uint64_t seed, std::set<std::string> without = {})
      : seed_(seed), without_(std::move(without)) {}

  /// One of 0 to n - 1.
  int pick(const std::string& name, int n) const {
    return static_cast<int>(hash(name) % static_cast<std::uint64_t>(n));
  }
  /// True in so many of 100 programs, unless it was taken away.
  bool chance(const std::string& name, int percent) const {
    if (pick(name, 100) >= percent || without_.contains(name)) return false;
    // "=recomputed" takes that kind of block away wherever it stands.
    const auto equals = name.find('=');
    if (equals != std::string::npos && without_.contains(name.substr(equals))) return false;
    taken_.insert(name);
    return true;
  }
  std::uint64_t seed() const noexcept { return seed_; }
  /// What `chance` said yes to.
  const std::set<std::string>& taken() const noexcept { return taken_; }

 private:
  std::uint64_t hash(const std::string& name) const {
    std::uint64_t h = seed_ * 0x9E3779B97F4A7C15ULL + 0x1234567;
    for (const char c : name) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001B3ULL;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ULL;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBULL;
    return h ^ (h >> 31);
  }

  std::uint64_t seed_;
  std::set<std::string> without_;
  mutable std::set<std::string> taken_;
};

/// So many processes a seed wants.
inline int ranks_of(std::uint64_t seed) {
  constexpr int kRanks[] = {2, 1, 2, 3};
  return kRanks[seed % 4];
}

}  // namespace fuzz
