#pragma once

namespace accelerate::comm {

/// While it lives, what this thread calls was agreed on by all ranks already: debug mode, which
/// would wait for the others to come to the same call, does not compare it.
class AgreedCall {
 public:
  AgreedCall() noexcept : before_(is_one_) { is_one_ = true; }
  ~AgreedCall() { is_one_ = before_; }
  AgreedCall(const AgreedCall&) = delete;
  AgreedCall& operator=(const AgreedCall&) = delete;

  static bool is_one() noexcept { return is_one_; }

 private:
  static thread_local bool is_one_;
  bool before_;
};

}  // namespace accelerate::comm
