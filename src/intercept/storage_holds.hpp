#pragma once

#include <intercept/tagged_storage.hpp>

#include <c10/util/SmallVector.h>

namespace accelerate::intercept {

/// The tagged storages that one operator uses. They stay in memory for as long as this lives.
class StorageHolds {
 public:
  StorageHolds() = default;
  StorageHolds(const StorageHolds&) = delete;
  StorageHolds& operator=(const StorageHolds&) = delete;
  ~StorageHolds() {
    for (TaggedStorage* storage : held_) storage->let_go();
  }

  /// Brings what `tensor` lies in. Null when the tensor is not tagged.
  TaggedStorage* add(const at::Tensor& tensor) {
    if (!is_tagged(tensor)) return nullptr;
    TaggedStorage* storage = TaggedStorage::of(tensor);
    if (storage == nullptr) return nullptr;
    storage->hold();
    held_.push_back(storage);
    if (!storage->ready()) storage->owner().demand(*storage);
    return storage;
  }

 private:
  c10::SmallVector<TaggedStorage*, 6> held_;
};

}  // namespace accelerate::intercept
