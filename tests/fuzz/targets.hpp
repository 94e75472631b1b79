#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// What the fuzzers run: each reads the bytes as a file and uses all that was read. Whatever the
/// bytes are, the reader gives values or throws CheckpointError (or UnsupportedError, for a dtype
/// that LibTorch lacks); anything else ends the process.
namespace accelerate::fuzz {

/// A safetensors file, and an index of such files.
void safetensors(std::span<const std::uint8_t> input);
/// A file of torch.save.
void pt(std::span<const std::uint8_t> input);

}  // namespace accelerate::fuzz
