#include <accelerate/base/error.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>
#include <device_map/layers.hpp>
#include <device_map/sizes.hpp>

#include <algorithm>
#include <map>
#include <optional>

namespace accelerate {
namespace {

using device_map::is_layer;

// What waits for a place, in order: modules, and tensors of modules that were split. A linked list
// over ids, in which tensors come after modules.
class Queue {
 public:
  explicit Queue(std::size_t ids) : next_(ids + 1, kAbsent), before_(ids + 1, kAbsent) {
    next_[end()] = before_[end()] = static_cast<int>(end());
  }
  bool contains(int id) const { return next_[at(id)] != kAbsent; }
  int front() const { return next_[end()]; }
  bool empty() const { return front() == static_cast<int>(end()); }
  int after(int id) const { return next_[at(id)]; }
  bool is_end(int id) const { return id == static_cast<int>(end()); }
  void insert_before(int position, int id) {
    const int before = before_[at(position)];
    next_[at(before)] = id;
    before_[at(id)] = before;
    next_[at(id)] = position;
    before_[at(position)] = id;
  }
  void push_front(int id) { insert_before(front(), id); }
  void remove(int id) {
    next_[at(before_[at(id)])] = next_[at(id)];
    before_[at(next_[at(id)])] = before_[at(id)];
    next_[at(id)] = before_[at(id)] = kAbsent;
  }

 private:
  static constexpr int kAbsent = -1;
  static std::size_t at(int id) { return static_cast<std::size_t>(id); }
  std::size_t end() const { return next_.size() - 1; }
  std::vector<int> next_, before_;
};

class Solver {
 public:
  Solver(const ModelTree& tree, const MaxMemory& max_memory, const DeviceMapOptions& options)
      : tree_(tree),
        options_(options),
        limits_(get_max_memory(max_memory)),
        sizes_(device_map::measure(tree, options.sizes())),
        groups_(device_map::tied_groups(tree)),
        groups_of_(tree.modules().size() + tree.tensors().size()),
        queue_(tree.modules().size() + tree.tensors().size()),
        layers_(tree, sizes_, options.no_split_module_classes()) {
    if (limits_.empty() || limits_.back().first != Place::disk()) {
      limits_.emplace_back(Place::disk(), -1);  // no limit
    }
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      for (const int tensor : groups_[g]) {
        const auto note = [&](int id) {
          auto& list = groups_of_[static_cast<std::size_t>(id)];
          if (list.empty() || list.back() != static_cast<int>(g))
            list.push_back(static_cast<int>(g));
        };
        note(id_of(tensor));
        for (int m = tree.tensors()[static_cast<std::size_t>(tensor)].module; m >= 0; m = parent(m))
          note(m);
      }
    }
    for (const int id : parts(0)) queue_.insert_before(end(), id);
  }

  DeviceMap solve() {
    while (!queue_.empty()) {
      const int item = queue_.front();
      queue_.remove(item);
      layers_.visit(item);
      if (!try_current_place(item)) next_place(item);
    }
    warn_of_buffers();
    DeviceMap map = options_.clean_result() ? clean() : DeviceMap();
    if (!options_.clean_result()) {
      for (const int id : order_) map.emplace_back(name(id), place_.at(id));
    }
    return map;
  }

 private:
  struct Ties {
    std::int64_t size = 0;     // of the module with everything tied to it
    std::vector<int> holders;  // what waits and has a tensor of it, once for each such tensor
  };

  bool is_module(int id) const { return id < static_cast<int>(tree_.modules().size()); }
  int id_of(int tensor) const { return static_cast<int>(tree_.modules().size()) + tensor; }
  int tensor_of(int id) const { return id - static_cast<int>(tree_.modules().size()); }
  int parent(int module) const { return tree_.modules()[static_cast<std::size_t>(module)].parent; }
  int end() const { return static_cast<int>(tree_.modules().size() + tree_.tensors().size()); }
  const std::string& name(int id) const {
    return is_module(id) ? tree_.modules()[static_cast<std::size_t>(id)].name
                         : tree_.tensors()[static_cast<std::size_t>(tensor_of(id))].name;
  }
  std::int64_t size(int id) const {
    return is_module(id) ? sizes_.modules[static_cast<std::size_t>(id)]
                         : sizes_.tensors[static_cast<std::size_t>(tensor_of(id))];
  }
  bool can_split(int id) const {
    return is_module(id) && !is_layer(tree_, id, options_.no_split_module_classes());
  }

  // What a module is split into.
  std::vector<int> parts(int module) const {
    const ModelTree::Module& entry = tree_.modules()[static_cast<std::size_t>(module)];
    std::vector<int> ids;
    for (const int tensor : entry.parameters) ids.push_back(id_of(tensor));
    ids.insert(ids.end(), entry.children.begin(), entry.children.end());
    for (const int tensor : entry.buffers) ids.push_back(id_of(tensor));
    return ids;
  }
  // Puts the parts of a module where it was in the queue.
  void split_in_queue(int module) {
    for (const int part : parts(module)) queue_.insert_before(module, part);
    queue_.remove(module);
  }

  bool inside(int tensor, int id) const {
    if (!is_module(id)) return tensor == tensor_of(id);
    for (int m = tree_.tensors()[static_cast<std::size_t>(tensor)].module; m >= 0; m = parent(m)) {
      if (m == id) return true;
    }
    return false;
  }
  // Everything tied to a module or tensor that waits, which `waits(id)` says.
  template <class Waits>
  Ties ties(int id, const Waits& waits) const {
    Ties ties{size(id), {}};
    for (const int g : groups_of_[static_cast<std::size_t>(id)]) {
      for (const int tensor : groups_[static_cast<std::size_t>(g)]) {
        if (inside(tensor, id)) continue;
        int holder = id_of(tensor);
        if (!waits(holder)) {
          holder = tree_.tensors()[static_cast<std::size_t>(tensor)].module;
          while (holder >= 0 && !waits(holder)) holder = parent(holder);
        }
        if (holder < 0) continue;  // placed already: this name of it follows
        ties.holders.push_back(holder);
        // A shared tensor is in one of the sizes only, where its first name is.
        ties.size += size(holder);
      }
    }
    return ties;
  }
  Ties ties(int id) const {
    return ties(id, [this](int other) { return queue_.contains(other); });
  }

  bool has_reserve() const {
    const Place place = limits_[current_].first;
    if (place == Place::cpu()) return true;
    return current_ == 0 && place.kind == Place::Kind::accelerator;
  }
  bool unlimited() const { return limits_[current_].second < 0; }

  // True when the item was placed, or split and put back.
  bool try_current_place(int item) {
    const std::int64_t reserve = has_reserve() ? layers_.largest() : 0;
    const std::int64_t budget = limits_[current_].second - reserve;
    const Ties tied = ties(item);
    if (unlimited() || used_ + tied.size <= budget) {
      used_ += tied.size;
      place(item);
      for (const int id : tied.holders) {
        if (!queue_.contains(id)) continue;
        queue_.remove(id);
        place(id);
        layers_.place_unseen(id);
      }
      return true;
    }
    if (!tied.holders.empty() && used_ + size(item) <= budget) {
      // It would fit alone. Perhaps only a part of what it is tied to has to come along.
      for (const int id : tied.holders) {
        if (!can_split(id)) continue;
        split_in_queue(id);
        queue_.push_front(item);
        layers_.reset(-1);
        return true;
      }
    }
    if (used_ + size(item) >= budget && can_split(item)) {
      queue_.push_front(item);
      split_in_queue(item);
      layers_.reset(-1);
      return true;
    }
    if (used_ == 0 && options_.fallback_allocation() && limits_[current_].first != Place::disk() &&
        !fallback_waits_) {
      const std::int64_t limit = limits_[current_].second - std::max(layers_.largest(), tied.size);
      const int found = limit >= 0 ? find_fallback(limit) : -1;
      if (found >= 0) {
        fallback_waits_ = true;
        queue_.push_front(item);
        queue_.push_front(found);
        return true;
      }
    }
    if (used_ == 0) {
      log::debug(text::concat("No module could be placed on ", limits_[current_].first,
                              ", which has ", text::format_bytes(limits_[current_].second), "; '",
                              name(item), "' needs ", text::format_bytes(tied.size + reserve),
                              " there."));
    }
    return false;
  }

  // The first module in order, children before siblings, that fits the limit, taken out of the
  // queue.
  int find_fallback(std::int64_t limit) {
    std::vector<int> stack;
    for (int id = queue_.front(); !queue_.is_end(id); id = queue_.after(id)) stack.push_back(id);
    std::reverse(stack.begin(), stack.end());
    std::vector<bool> in_stack(static_cast<std::size_t>(end()), false);
    for (const int id : stack) in_stack[static_cast<std::size_t>(id)] = true;
    const auto waits = [&](int id) { return bool(in_stack[static_cast<std::size_t>(id)]); };
    while (!stack.empty()) {
      const int id = stack.back();
      stack.pop_back();
      in_stack[static_cast<std::size_t>(id)] = false;
      if (ties(id, waits).size > limit) {
        if (!can_split(id)) continue;
        const auto inner = parts(id);
        stack.insert(stack.end(), inner.rbegin(), inner.rend());
        for (const int part : inner) in_stack[static_cast<std::size_t>(part)] = true;
        continue;
      }
      while (!queue_.contains(id)) {  // split what it is in, from the top
        int above = is_module(id) ? parent(id)
                                  : tree_.tensors()[static_cast<std::size_t>(tensor_of(id))].module;
        while (!queue_.contains(above)) above = parent(above);
        split_in_queue(above);
      }
      queue_.remove(id);
      return id;
    }
    return -1;
  }

  void place(int id) {
    const Place place = limits_[current_].first;
    place_.emplace(id, place);
    order_.push_back(id);
    layers_.place(id);
    fallback_waits_ = false;
    if (place.kind != Place::Kind::accelerator && !options_.offload_buffers()) {
      offloaded_buffers_ += buffers(id);
    }
  }

  std::int64_t buffers(int id) const {
    if (!is_module(id)) return 0;
    const ModelTree::Module& module = tree_.modules()[static_cast<std::size_t>(id)];
    std::int64_t bytes = 0;
    for (const int tensor : module.buffers)
      bytes += sizes_.tensors[static_cast<std::size_t>(tensor)];
    for (const int child : module.children) bytes += buffers(child);
    return bytes;
  }

  void next_place(int item) {
    if (current_ + 1 == limits_.size()) {
      const Ties tied = ties(item);
      throw ConfigError(text::concat(
          "The model does not fit: '", name(item), "' needs ", text::format_bytes(tied.size),
          " and the disk, the last place, has ",
          text::format_bytes(limits_[current_].second - used_), " of its ",
          text::format_bytes(limits_[current_].second), " left. The whole model needs ",
          text::format_bytes(sizes_.modules[0]), ". Raise the limits, or leave the disk's out."));
    }
    note_use(has_reserve() ? layers_.largest() : 0);
    used_ = 0;
    ++current_;
    queue_.push_front(item);
  }

  void note_use(std::int64_t reserve) {
    if (limits_[current_].first.kind == Place::Kind::accelerator)
      most_free_ = std::max(most_free_, limits_[current_].second - used_ - reserve);
  }

  void warn_of_buffers() {
    note_use(0);
    for (std::size_t i = current_ + 1; i < limits_.size(); ++i) {
      if (limits_[i].first.kind == Place::Kind::accelerator)
        most_free_ = std::max(most_free_, limits_[i].second);
    }
    const bool accelerators = limits_.front().first.kind == Place::Kind::accelerator;
    if (offloaded_buffers_ == 0 || options_.offload_buffers() || !accelerators ||
        most_free_ >= offloaded_buffers_)
      return;
    log::warning(text::concat(
        "The buffers of offloaded modules take ", text::format_bytes(offloaded_buffers_),
        ", which no accelerator has room for beside its weights. If memory runs out, set "
        "offload_buffers."));
  }

  // Modules whose parts all go to one place are named instead of their parts.
  DeviceMap clean() const {
    struct Below {
      int count = 0;  // of keys
      std::optional<Place> place;
      bool mixed = false;
    };
    std::vector<Below> below(tree_.modules().size());
    for (const auto& [id, place] : place_) {
      int m = is_module(id) ? parent(id)
                            : tree_.tensors()[static_cast<std::size_t>(tensor_of(id))].module;
      for (; m >= 0; m = parent(m)) {
        Below& above = below[static_cast<std::size_t>(m)];
        ++above.count;
        if (above.place && *above.place != place) above.mixed = true;
        above.place = place;
      }
    }
    DeviceMap map;
    const auto walk = [&](const auto& self, int id) -> void {
      if (const auto found = place_.find(id); found != place_.end()) {
        map.emplace_back(name(id), found->second);
        return;
      }
      if (!is_module(id)) return;
      const Below& all = below[static_cast<std::size_t>(id)];
      if (all.count > 1 && !all.mixed) {
        map.emplace_back(name(id), *all.place);
        return;
      }
      for (const int part : parts(id)) self(self, part);
    };
    walk(walk, 0);
    return map;
  }

  const ModelTree& tree_;
  const DeviceMapOptions& options_;
  MaxMemory limits_;
  device_map::Sizes sizes_;
  std::vector<std::vector<int>> groups_;
  std::vector<std::vector<int>> groups_of_;  // by id: groups with a member in it
  Queue queue_;
  device_map::Layers layers_;
  std::size_t current_ = 0;
  std::int64_t used_ = 0;        // of the current place
  bool fallback_waits_ = false;  // found, and not placed yet
  std::map<int, Place> place_;
  std::vector<int> order_;
  std::int64_t offloaded_buffers_ = 0;
  std::int64_t most_free_ = 0;
};

}  // namespace

DeviceMap infer_auto_device_map(const ModelTree& tree, const MaxMemory& max_memory,
                                const DeviceMapOptions& options) {
  return Solver(tree, max_memory, options).solve();
}

DeviceMap named_device_map(const std::string& name, const ModelTree& tree,
                           const MaxMemory& max_memory, const DeviceMapOptions& options) {
  if (name == "sequential") return infer_auto_device_map(tree, max_memory, options);
  if (name != "auto" && name != "balanced" && name != "balanced_low_0") {
    throw ConfigError(text::concat("There is no device map '", name,
                                   "'. Those by name are auto, balanced, balanced_low_0 and "
                                   "sequential."));
  }
  return infer_auto_device_map(
      tree, get_balanced_memory(tree, max_memory, options, name == "balanced_low_0"), options);
}

}  // namespace accelerate
