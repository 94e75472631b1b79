#include <device_map/layers.hpp>

#include <algorithm>

namespace accelerate::device_map {

Layers::Layers(const ModelTree& tree, const Sizes& sizes, const std::vector<std::string>& no_split)
    : begin_(tree.modules().size() + tree.tensors().size(), 0), end_(begin_) {
  const auto add = [&](std::size_t id, std::int64_t bytes) {
    begin_[id] = static_cast<int>(size_.size());
    size_.push_back(bytes);
    end_[id] = static_cast<int>(size_.size());
  };
  const auto walk = [&](const auto& self, int module) -> void {
    const auto id = static_cast<std::size_t>(module);
    if (is_layer(tree, module, no_split)) return add(id, sizes.modules[id]);
    begin_[id] = static_cast<int>(size_.size());
    for (const int child : tree.modules()[id].children) self(self, child);
    end_[id] = static_cast<int>(size_.size());
  };
  const auto tensors = [&](const std::vector<int>& indices) {
    for (const int tensor : indices) {
      const auto index = static_cast<std::size_t>(tensor);
      root_tensors_.push_back(static_cast<int>(size_.size()));
      add(tree.modules().size() + index, sizes.tensors[index]);
    }
  };
  const ModelTree::Module& root = tree.modules().front();
  tensors(root.parameters);
  for (const int child : root.children) walk(walk, child);
  tensors(root.buffers);

  while (leaves_ < size_.size()) leaves_ *= 2;
  tree_.resize(2 * leaves_);
  waits_.assign(size_.size(), true);
  shown_.assign(size_.size(), true);
  for (std::size_t i = 0; i < size_.size(); ++i) set(static_cast<int>(i), size_[i]);
  largest_ = std::max<std::int64_t>(0, tree_[1].size);
}

void Layers::set(int position, std::int64_t size) {
  std::size_t node = leaves_ + static_cast<std::size_t>(position);
  tree_[node] = {size, size < 0 ? 0 : 1};
  for (node /= 2; node >= 1; node /= 2) {
    const Best& left = tree_[2 * node];
    const Best& right = tree_[2 * node + 1];
    tree_[node] = left.size > right.size ? left : right;
    if (left.size == right.size) tree_[node].count = left.count + right.count;
  }
}

void Layers::visit(int id) {
  const auto at = static_cast<std::size_t>(id);
  for (int position = begin_[at]; position < end_[at]; ++position) {
    if (!shown_[static_cast<std::size_t>(position)]) continue;
    shown_[static_cast<std::size_t>(position)] = false;
    set(position, -1);
    to_look_at_.push_back(position);
  }
  if (!shows_largest()) reset(id);
}

void Layers::place(int id) {
  const auto at = static_cast<std::size_t>(id);
  for (int position = begin_[at]; position < end_[at]; ++position)
    waits_[static_cast<std::size_t>(position)] = false;
}

void Layers::place_unseen(int id) {
  place(id);
  const auto at = static_cast<std::size_t>(id);
  for (int position = begin_[at]; position < end_[at]; ++position) to_look_at_.push_back(position);
}

void Layers::reset(int id) {
  for (const int position : root_tensors_) {
    waits_[static_cast<std::size_t>(position)] = false;
    to_look_at_.push_back(position);
  }
  root_tensors_.clear();
  std::vector<int> kept_out;
  for (const int position : to_look_at_) {
    const auto at = static_cast<std::size_t>(position);
    const bool excepted = id >= 0 && position >= begin_[static_cast<std::size_t>(id)] &&
                          position < end_[static_cast<std::size_t>(id)];
    const bool show = waits_[at] && !excepted;
    if (show != shown_[at]) {
      shown_[at] = show;
      set(position, show ? size_[at] : -1);
    }
    if (excepted && waits_[at]) kept_out.push_back(position);
  }
  to_look_at_ = std::move(kept_out);
  largest_ = std::max<std::int64_t>(0, tree_[1].size);
}

}  // namespace accelerate::device_map
