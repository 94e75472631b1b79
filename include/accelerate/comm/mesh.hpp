#pragma once

#include <accelerate/comm/group.hpp>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace accelerate::comm {

/// The processes of a group laid out along named axes, for example {{"dp_replicate", 2},
/// {"dp_shard", 4}}. The last axis varies fastest: neighbours along it have neighbouring ranks, and
/// so are on one machine where its size allows.
class Mesh {
 public:
  using Axes = std::vector<std::pair<std::string, int>>;

  /// Makes a group for each axis, and for each list of `flattened`; what consists of the same ranks
  /// is one group. Collective over `group`. Throws ConfigError when the sizes do not multiply to
  /// the size of the group, or a name is empty, unknown, or comes twice.
  Mesh(Group group, Axes axes, const std::vector<std::vector<std::string>>& flattened = {});

  const Group& whole() const noexcept { return whole_; }
  const Axes& axes() const noexcept { return axes_; }
  bool has(const std::string& axis) const;
  /// How many processes lie along the axis. Throws ConfigError for a name the mesh does not have.
  int size(const std::string& axis) const;
  /// This process's place along the axis.
  int coordinate(const std::string& axis) const;
  /// The processes that differ from this one along this axis only, in its order.
  const Group& group(const std::string& axis) const;
  /// The processes that differ from this one along these axes only, the first of them slowest.
  /// Throws ConfigError for axes that the mesh was not made to flatten.
  const Group& flattened(const std::vector<std::string>& axes) const;

 private:
  std::size_t index(const std::string& axis) const;
  Group split(const std::vector<std::string>& along) const;

  Group whole_;
  Axes axes_;
  std::vector<int> coordinates_;
  std::map<std::vector<std::string>, Group> groups_;
};

}  // namespace accelerate::comm
