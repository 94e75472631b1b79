#pragma once

namespace accelerate::comm {

/// While it lives, errors of debug mode say that this thread is in this call of the program. What
/// the call itself calls does not change that.
class UserCall {
 public:
  /// `name` is a literal: "accelerator.backward()".
  explicit UserCall(const char* name) noexcept : is_outermost_(current_ == nullptr) {
    if (is_outermost_) current_ = name;
  }
  ~UserCall() {
    if (is_outermost_) current_ = nullptr;
  }
  UserCall(const UserCall&) = delete;
  UserCall& operator=(const UserCall&) = delete;

  /// Null where the program called a group itself.
  static const char* name() noexcept { return current_; }

 private:
  static thread_local const char* current_;
  bool is_outermost_;
};

}  // namespace accelerate::comm
