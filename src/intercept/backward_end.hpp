#pragma once

#include <functional>

namespace accelerate::intercept {

/// To be called within a backward pass, by a hook: `over(failed)` is called once when this pass has
/// ended, whoever began it. With `failed`, an exception ended it; then `over` runs while that is
/// under way, and must not throw.
void when_backward_ends(std::function<void(bool failed)> over);

}  // namespace accelerate::intercept
