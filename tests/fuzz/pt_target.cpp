#include <accelerate/base/error.hpp>
#include <accelerate/checkpoint/pt_file.hpp>

#include <ATen/core/Tensor.h>

#include <ATen/ops/empty.h>

#include <cstdint>
#include <string_view>

#include "checkpoint/unpickler.hpp"
#include "fuzz/memory_file.hpp"
#include "fuzz/targets.hpp"

namespace accelerate::fuzz {

namespace {

volatile std::byte last_byte{};

// Reads the first and the last element, wherever the strides put it.
void touch(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto* first = static_cast<const std::byte*>(tensor.const_data_ptr());
  const auto size = static_cast<std::int64_t>(tensor.element_size());
  for (std::int64_t i = 0; i < size; ++i) {
    last_byte = first[i];
    last_byte = first[last * size + i];
  }
}

void walk(const checkpoints::PyValue& value) {
  if (value.is<at::Tensor>()) {
    touch(value.as_tensor());
  } else if (value.is<checkpoints::PyList>()) {
    for (const checkpoints::PyValue& item : value.as_list()) walk(item);
  } else if (value.is<checkpoints::PyDict>()) {
    for (const auto* pairs : {&value.as_dict().items, &value.as_dict().attributes}) {
      for (const auto& [key, item] : *pairs) {
        walk(key);
        walk(item);
      }
    }
  }
}

// A change of a pickle's length would break the archive around it, so pickles come bare too, with
// any storage they want.
void read_pickle(std::span<const std::uint8_t> input) {
  const auto storage_of = [](std::string_view key, std::uint64_t bytes) {
    if (bytes > 4096) throw CheckpointError("too large for a test", std::string(key));
    at::Tensor memory = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
    return memory.zero_().storage();
  };
  walk(checkpoints::unpickle({reinterpret_cast<const char*>(input.data()), input.size()},
                             storage_of, "fuzz.pkl"));
}

}  // namespace

void pt(std::span<const std::uint8_t> input) {
  static MemoryFile file("fuzz.pt");
  const bool archive = input.size() > 1 && input[0] == 'P' && input[1] == 'K';
  try {
    if (archive) {
      file.fill(input);
      walk(checkpoints::load_pt(file.path()));
    } else {
      read_pickle(input);
    }
  } catch (const CheckpointError&) {
  }
}

}  // namespace accelerate::fuzz
