#pragma once

namespace accelerate::intercept {

/// Switches TorchScript's fusers off for the process: a fused kernel would read tagged memory past
/// the dispatcher.
void switch_off_fusers();

}  // namespace accelerate::intercept
