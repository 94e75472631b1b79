#pragma once

#include <intercept/key.hpp>
#include <intercept/policy_marks.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace accelerate::intercept {

/// A storage whose memory comes and goes under the tensors that view it. It is never replaced, so a
/// tensor that autograd saved finds the memory again when backward comes to it. While it is empty,
/// every access to its data through ATen throws an error that names it.
///
/// It is found from a tensor in constant time and without a lock, because it is the `Allocator`
/// that the StorageImpl points to. That also catches whoever tries to resize the storage.
class TaggedStorage final : public c10::Allocator {
 public:
  /// Who decides what is in memory. Calls may come from any thread.
  class Owner {
   public:
    /// An operator is about to use the storage, and holds it. Returns when the memory is there.
    virtual void demand(TaggedStorage& storage) = 0;
    /// The last operator that held the storage is done, and `want_empty` was asked meanwhile.
    virtual void unheld(TaggedStorage& storage) noexcept = 0;
    /// An operator is about to write to `view`, which lies in this storage. May throw.
    virtual void will_write(TaggedStorage&, const at::Tensor& /*view*/) {}
    /// An operator wrote to `view`, which lies in this storage; it still holds the storage.
    virtual void written(TaggedStorage& storage, const at::Tensor& view, const std::string& op) = 0;
    /// `set_data` is about to point a tensor of this storage elsewhere. May throw.
    virtual void repointed(TaggedStorage&) {}
    /// What a program is to do instead, where its use of the storage is refused: sentences that the
    /// refusal ends with.
    virtual std::string advice() const { return {}; }

   protected:
    ~Owner() = default;
  };

  /// Starts empty. `name` appears in messages, `id` is the owner's to tell its storages apart.
  TaggedStorage(int id, std::string name, std::int64_t elements, at::ScalarType dtype,
                at::Device device, Owner& owner);
  /// Tensors that still lie in the storage throw from now on when they are used.
  ~TaggedStorage();
  TaggedStorage(const TaggedStorage&) = delete;
  TaggedStorage& operator=(const TaggedStorage&) = delete;

  /// The tagged storage under `tensor`, or null when it lies in an ordinary one. Throws StateError
  /// when the storage was given up by its owner.
  static TaggedStorage* of(const at::TensorBase& tensor);

  /// A tagged tensor over part of the storage; there need not be memory yet.
  at::Tensor view(at::IntArrayRef sizes, at::IntArrayRef strides, std::int64_t offset) const;

  /// Puts `contents`, a flat tensor of the storage's length and dtype, under every view.
  void fill(at::Tensor contents);
  /// Takes the memory away from under the views and returns it.
  at::Tensor empty();
  /// What `fill` gave: an untagged tensor with a version counter of its own, so that autograd does
  /// not mistake the library's writes for the user's. Undefined while empty.
  const at::Tensor& contents() const noexcept { return contents_; }

  /// Whether operators may use the storage without asking the owner. To be set only when filled.
  void set_ready(bool ready) noexcept { ready_.store(ready); }
  /// True when an operator is using the storage; then `unheld` is called once the last one is done,
  /// unless `cancel_empty` comes first.
  bool want_empty() noexcept;
  void cancel_empty() noexcept { wanted_empty_.store(false); }
  bool empty_is_wanted() const noexcept { return wanted_empty_.load(); }

  /// An operator begins to use the storage: counted first, so that nobody takes the memory away.
  void hold() noexcept { holds_.fetch_add(1); }
  bool ready() const noexcept { return ready_.load(); }
  void let_go() noexcept {
    if (holds_.fetch_sub(1) == 1 && wanted_empty_.load()) owner_->unheld(*this);
  }

  /// Where in it parameters with policies lie.
  PolicyMarks& marks() noexcept { return marks_; }

  Owner& owner() const noexcept { return *owner_; }
  int id() const noexcept { return id_; }
  const std::string& name() const noexcept { return name_; }
  std::int64_t elements() const noexcept { return elements_; }
  std::int64_t bytes() const noexcept { return elements_ * static_cast<std::int64_t>(item_size_); }
  at::ScalarType dtype() const noexcept { return dtype_; }
  at::Device device() const noexcept { return device_; }

  /// c10::Allocator: called when somebody resizes the storage. Throws ShardingError.
  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;

 private:
  int id_;
  std::string name_;
  std::int64_t elements_;
  std::size_t item_size_;
  at::ScalarType dtype_;
  at::Device device_;
  Owner* owner_;
  c10::Storage storage_;
  at::Tensor contents_;
  // Sequentially consistent on purpose: `hold` then `ready` on one thread, and `set_ready(false)`
  // then `want_empty` on another, must not both miss each other.
  std::atomic<bool> ready_ = false;
  std::atomic<bool> wanted_empty_ = false;
  std::atomic<std::int64_t> holds_ = 0;
  PolicyMarks marks_;
};

/// Gives a tensor the tag, or takes it away; nothing else changes.
void set_tag(const at::Tensor& tensor, bool on);

/// Gives a tensor that lies in ordinary memory the tag, or takes it away. Its memory stays; while
/// it has the tag, `set_data`, and with it `module->to()`, throws a StateError.
void guard(const at::Tensor& tensor, bool on);

/// A view of part of `flat`, the part that this process has of a gradient. It is an ordinary tensor
/// that has the tag; to scale it by a tensor of one element throws a StateError, because such a
/// factor comes of a norm, and that of a part is another on every process.
at::Tensor part_of_gradient(const at::Tensor& flat, at::IntArrayRef sizes, std::int64_t offset);
bool is_part_of_gradient(const at::TensorBase& tensor);

/// A tensor of the meta device with the shape of `like`, which has the tag; an operator that uses
/// it throws a StateError with `message`, which must live as long as the program.
at::Tensor given_up(const at::Tensor& like, const char* message);

/// Whether every use of it throws: it is `given_up`, or lies in a storage that is gone.
bool is_given_up(const at::TensorBase& tensor);

}  // namespace accelerate::intercept
