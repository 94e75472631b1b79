#pragma once

namespace accelerate {

/// The dtype that a prepared module's forward computes in. Parameters and optimizer state stay
/// fp32.
enum class MixedPrecision { no, fp16, bf16, fp8 };

}  // namespace accelerate
