#include <accelerate/comm/mesh.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <algorithm>

namespace accelerate::comm {

using text::concat;

Mesh::Mesh(Group group, Axes axes) : whole_(std::move(group)), axes_(std::move(axes)) {
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
  for (std::size_t axis = 0; axis < axes_.size(); ++axis)
    groups_.push_back(split({axis}, axes_[axis].first));
}

Group Mesh::split(const std::vector<std::size_t>& along, const std::string& name) const {
  // The axes left out tell the groups apart; those along it order one group.
  int color = 0;
  for (std::size_t axis = 0; axis < axes_.size(); ++axis) {
    if (std::find(along.begin(), along.end(), axis) == along.end())
      color = color * axes_[axis].second + coordinates_[axis];
  }
  int key = 0;
  for (const std::size_t axis : along) key = key * axes_[axis].second + coordinates_[axis];
  return whole_.split(color, key, name);
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
const Group& Mesh::group(const std::string& axis) const { return groups_[index(axis)]; }

Group Mesh::flattened(const std::vector<std::string>& axes) {
  std::vector<std::size_t> along;
  for (const auto& axis : axes) {
    along.push_back(index(axis));
    if (std::count(axes.begin(), axes.end(), axis) > 1) {
      throw ConfigError(
          concat("The axis \"", axis, "\" was named twice in one flattened group of the mesh."));
    }
  }
  if (along.size() == 1) return groups_[along.front()];
  if (along.size() == axes_.size() && std::is_sorted(along.begin(), along.end())) return whole_;
  if (const auto made = flattened_.find(axes); made != flattened_.end()) return made->second;
  return flattened_.emplace(axes, split(along, text::join(axes, "_"))).first->second;
}

}  // namespace accelerate::comm
