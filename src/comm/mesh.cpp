#include <accelerate/comm/mesh.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <algorithm>

namespace accelerate::comm {

using text::concat;

Mesh::Mesh(Group group, Axes axes, const std::vector<std::vector<std::string>>& flattened)
    : whole_(std::move(group)), axes_(std::move(axes)) {
  std::int64_t product = 1;
  std::vector<std::string> described;
  for (std::size_t axis = 0; axis < axes_.size(); ++axis) {
    const auto& [name, size] = axes_[axis];
    const bool twice = std::any_of(axes_.begin(), axes_.begin() + static_cast<std::ptrdiff_t>(axis),
                                   [&](const auto& other) { return other.first == name; });
    if (name.empty() || twice || size < 1) {
      throw ConfigError(concat("A mesh was given the axis \"", name, "\" of size ", size,
                               "; every axis needs a name of its own and a size from 1 up."));
    }
    product *= size;
    described.push_back(concat(name, " ", size));
  }
  if (product != whole_.size()) {
    throw ConfigError(concat("The axes of the mesh (", text::join(described), ") make ", product,
                             " places, and the group \"", whole_.name(), "\" has ", whole_.size(),
                             " processes. The sizes have to multiply to that."));
  }
  coordinates_.resize(axes_.size());
  int rest = whole_.rank();
  for (std::size_t axis = axes_.size(); axis-- > 0;) {
    coordinates_[axis] = rest % axes_[axis].second;
    rest /= axes_[axis].second;
  }
  for (const auto& [name, size] : axes_) groups_.emplace(std::vector{name}, split({name}));
  for (const auto& along : flattened) {
    for (const auto& axis : along) {
      if (std::count(along.begin(), along.end(), axis) > 1) {
        throw ConfigError(
            concat("The axis \"", axis, "\" was named twice in one flattened group of the mesh."));
      }
    }
    if (!groups_.contains(along)) groups_.emplace(along, split(along));
  }
}

Group Mesh::split(const std::vector<std::string>& along) const {
  const auto wide = [this](const std::vector<std::string>& names) {
    std::vector<std::string> wide;
    for (const auto& name : names) {
      if (size(name) > 1) wide.push_back(name);
    }
    return wide;
  };
  std::vector<std::string> all;
  for (const auto& [name, size] : axes_) all.push_back(name);
  if (wide(along) == wide(all)) return whole_;
  for (const auto& [other, group] : groups_) {
    if (wide(along) == wide(other)) return group;
  }
  // The axes left out tell the groups apart; those along it order one group.
  int color = 0;
  for (std::size_t axis = 0; axis < axes_.size(); ++axis) {
    if (std::find(along.begin(), along.end(), axes_[axis].first) == along.end())
      color = color * axes_[axis].second + coordinates_[axis];
  }
  int key = 0;
  for (const auto& name : along) key = key * size(name) + coordinate(name);
  return whole_.split(color, key, text::join(along, "_"), Sharing::together);
}

std::size_t Mesh::index(const std::string& axis) const {
  std::vector<std::string> names;
  for (std::size_t place = 0; place < axes_.size(); ++place) {
    if (axes_[place].first == axis) return place;
    names.push_back(axes_[place].first);
  }
  throw ConfigError(
      concat("The mesh has no axis \"", axis, "\". Its axes are ", text::join(names), "."));
}

bool Mesh::has(const std::string& axis) const {
  return std::any_of(axes_.begin(), axes_.end(),
                     [&](const auto& entry) { return entry.first == axis; });
}
int Mesh::size(const std::string& axis) const { return axes_[index(axis)].second; }
int Mesh::coordinate(const std::string& axis) const { return coordinates_[index(axis)]; }
const Group& Mesh::group(const std::string& axis) const {
  static_cast<void>(index(axis));
  return groups_.at({axis});
}

const Group& Mesh::flattened(const std::vector<std::string>& axes) const {
  const auto made = groups_.find(axes);
  if (made != groups_.end()) return made->second;
  throw ConfigError(
      concat("The mesh was not made with a group over the axes ", text::join(axes), "."));
}

}  // namespace accelerate::comm
