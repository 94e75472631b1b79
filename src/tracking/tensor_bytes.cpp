#include <accelerate/base/error.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <new>

namespace accelerate::tracking {
namespace {

// Stands in front of each block, in as many bytes as LibTorch aligns tensors to.
struct Header {
  Header* before = nullptr;
  Header* after = nullptr;
  std::int64_t bytes = 0;
  std::int64_t serial = 0;
  MemoryKind kind = MemoryKind::other;
};
static_assert(sizeof(Header) <= c10::gAlignment);

Header* header_of(void* data) {
  return reinterpret_cast<Header*>(static_cast<char*>(data) - c10::gAlignment);
}

void release(void* data);

}  // namespace

void PeakBytes::merge(const PeakBytes& other) {
  if (other.total > total) {
    total = other.total;
    at_peak = other.at_peak;
  }
  for (const MemoryKind kind : kMemoryKinds)
    by_kind[kind] = std::max(by_kind[kind], other.by_kind[kind]);
}

/// The books. One peak is kept up with every allocation; whenever a watch begins, ends or is read,
/// it is added to all that are running and begins anew, so that watches cost nothing while they
/// run.
class Counter {
 public:
  // Never destroyed: tensors in static variables are released after main.
  static Counter& instance() {
    static Counter& counter = *new Counter;
    return counter;
  }

  void add(Header& block) {
    const std::lock_guard lock(mutex_);
    block.serial = ++serial_;
    block.before = last_;
    (last_ != nullptr ? last_->after : first_) = &block;
    last_ = &block;
    ++blocks_;
    change(block.kind, block.bytes);
    note_peak(block.kind);
  }

  void remove(Header& block) {
    const std::lock_guard lock(mutex_);
    (block.before != nullptr ? block.before->after : first_) = block.after;
    (block.after != nullptr ? block.after->before : last_) = block.before;
    --blocks_;
    change(block.kind, -block.bytes);
  }

  void label(Header& block, MemoryKind kind) {
    const std::lock_guard lock(mutex_);
    change(block.kind, -block.bytes);
    block.kind = kind;
    change(kind, block.bytes);
    note_peak(kind);
  }

  TensorBytes bytes() {
    const std::lock_guard lock(mutex_);
    settle();
    return {total_, by_kind_, blocks_, overall_.total, overall_};
  }
  void reset() {
    const std::lock_guard lock(mutex_);
    settle();
    overall_ = latest_;
  }

  void begin(PeakWatch& watch) {
    const std::lock_guard lock(mutex_);
    settle();
    watch.peaks_ = latest_;
    watches_.push_back(&watch);
  }
  void end(PeakWatch& watch) {
    const std::lock_guard lock(mutex_);
    std::erase(watches_, &watch);
  }
  PeakBytes read(PeakWatch& watch, bool restart) {
    const std::lock_guard lock(mutex_);
    settle();
    const PeakBytes result = watch.peaks_;
    if (restart) watch.peaks_ = latest_;
    return result;
  }

  std::vector<LiveBlock> live() {
    std::vector<LiveBlock> result;
    const std::lock_guard lock(mutex_);
    result.reserve(static_cast<std::size_t>(blocks_));
    for (const Header* block = first_; block != nullptr; block = block->after)
      result.push_back({block->serial, block->bytes, block->kind});
    return result;
  }

 private:
  void change(MemoryKind kind, std::int64_t bytes) {
    total_ += bytes;
    by_kind_[kind] += bytes;
  }
  void note_peak(MemoryKind kind) {
    latest_.by_kind[kind] = std::max(latest_.by_kind[kind], by_kind_[kind]);
    if (total_ > latest_.total) {
      latest_.total = total_;
      latest_.at_peak = by_kind_;
    }
  }
  void settle() {
    for (PeakWatch* watch : watches_) watch->peaks_.merge(latest_);
    overall_.merge(latest_);
    latest_ = {total_, by_kind_, by_kind_};
  }

  std::mutex mutex_;
  std::int64_t total_ = 0;
  BytesByKind by_kind_;
  std::int64_t blocks_ = 0;
  std::int64_t serial_ = 0;
  PeakBytes latest_;   // since settle()
  PeakBytes overall_;  // up to settle()
  std::vector<PeakWatch*> watches_;
  Header* first_ = nullptr;
  Header* last_ = nullptr;
};

namespace {

void release(void* data) {
  if (data == nullptr) return;
  Header* block = header_of(data);
  Counter::instance().remove(*block);
  c10::profiledCPUMemoryReporter().Delete(data);
  c10::free_cpu(block);
}

class CountingAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, at::kCPU};
    if (bytes > std::numeric_limits<std::size_t>::max() / 2) throw std::bad_alloc();
    void* memory = c10::alloc_cpu(bytes + c10::gAlignment);
    auto* block = new (memory) Header;
    block->bytes = static_cast<std::int64_t>(bytes);
    block->kind = current_memory_kind();
    void* data = static_cast<char*>(memory) + c10::gAlignment;
    Counter::instance().add(*block);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &release, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

CountingAllocator& allocator() {
  static CountingAllocator& allocator = *new CountingAllocator;
  return allocator;
}

}  // namespace

void count_cpu_tensors() {
  static std::once_flag once;
  std::call_once(once, [] { c10::SetCPUAllocator(&allocator(), /*priority=*/100); });
  if (!counts_cpu_tensors()) {
    throw UnsupportedError(
        "Another library has put in a CPU allocator of a higher priority, so the bytes of CPU "
        "tensors cannot be counted. Run without it to measure memory.");
  }
}

bool counts_cpu_tensors() noexcept { return c10::GetCPUAllocator() == &allocator(); }

TensorBytes tensor_bytes() { return Counter::instance().bytes(); }

void reset_peak() { Counter::instance().reset(); }

bool label(const at::Tensor& tensor, MemoryKind kind) {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  const c10::DataPtr& data = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (data.get_deleter() != &release || data.get_context() == nullptr) return false;
  Counter::instance().label(*header_of(data.get_context()), kind);
  return true;
}

PeakWatch::PeakWatch() { Counter::instance().begin(*this); }

PeakWatch::~PeakWatch() { Counter::instance().end(*this); }

PeakBytes PeakWatch::peaks() const {
  return Counter::instance().read(const_cast<PeakWatch&>(*this), /*restart=*/false);
}

PeakBytes PeakWatch::restart() { return Counter::instance().read(*this, /*restart=*/true); }

std::vector<LiveBlock> live_blocks() { return Counter::instance().live(); }

}  // namespace accelerate::tracking
