#pragma once

#include <intercept/key.hpp>

#include <ATen/core/grad_mode.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/InferenceMode.h>

namespace accelerate::intercept {

/// For the library's own tensor work in the middle of the user's: not intercepted, no gradients, no
/// autocast, ordinary tensors even when the user is in inference mode.
class InternalOpsGuard {
 private:
  c10::InferenceMode ordinary_{false};
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard exclude_{c10::autocast_dispatch_keyset |
                                              c10::DispatchKeySet(kTag)};
};

}  // namespace accelerate::intercept
