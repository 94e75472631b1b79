#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace accelerate::intercept {

struct PolicyRecord;

/// The parameters with policies that lie in one storage.
class PolicyMarks {
 public:
  PolicyMarks() = default;
  PolicyMarks(const PolicyMarks&) = delete;
  PolicyMarks& operator=(const PolicyMarks&) = delete;
  ~PolicyMarks();

  /// The parameter that `view` is a view of, or null.
  PolicyRecord* find(const at::TensorBase& view) const;
  /// Throws ConfigError when another one lies there.
  void add(PolicyRecord& record, const at::TensorBase& tensor);
  void remove(const PolicyRecord& record) noexcept;
  /// Whether it is marked where `tensor` lies.
  bool has(const PolicyRecord& record, const at::TensorBase& tensor) const;
  bool empty() const noexcept { return spans_.empty(); }

 private:
  struct Span {
    std::int64_t begin, end;  // bytes
    PolicyRecord* record;
  };
  static Span span(const at::TensorBase& tensor);
  std::vector<Span> spans_;
};

/// Ordinary memory that parameters with policies lie in. It stands before the storage's allocator,
/// where a view finds it in constant time and without a lock.
class MarkedStorage final : public c10::Allocator,
                            public std::enable_shared_from_this<MarkedStorage> {
 public:
  explicit MarkedStorage(const c10::Storage& storage);
  ~MarkedStorage() override;

  c10::DataPtr allocate(std::size_t bytes) override { return former_->allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return former_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    former_->copy_data(to, from, bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override {
    return former_->is_simple_data_ptr(pointer);
  }
  PolicyMarks marks;

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  c10::Allocator* former_;
};

namespace detail {
inline std::atomic<int> policies_attached = 0;
}
/// Whether any parameter of the process carries a policy.
inline bool policies_exist() noexcept {
  return detail::policies_attached.load(std::memory_order_relaxed) > 0;
}

/// The parameter with policies that `tensor` is, or is a view of; null for all others.
PolicyRecord* record_of(const at::TensorBase& tensor);

}  // namespace accelerate::intercept
