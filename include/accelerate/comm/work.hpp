#pragma once

#include <memory>

namespace accelerate::comm {

/// A collective under way. Its tensors must not be touched, and its results are not there, before
/// `wait()` has returned. On CUDA `wait()` orders the current stream after the collective and does
/// not block the host.
class [[nodiscard]] Work {
 public:
  struct Impl;
  /// Work that was done at once (a group of one).
  Work() = default;
  explicit Work(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  /// Returns when the collective is done. Throws DistributedError (TimeoutError, PeerLostError)
  /// that names the operation and the rank.
  void wait();
  /// True when wait() would not block. Point-to-point work of gloo says so only after wait().
  bool done() const;

  const std::shared_ptr<Impl>& impl() const noexcept { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace accelerate::comm
