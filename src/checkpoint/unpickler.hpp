#pragma once

#include <accelerate/checkpoint/py_value.hpp>

#include <c10/core/Storage.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string_view>

namespace accelerate::checkpoints {

/// Gives the storage that a file has under a key, and throws when it has none of exactly so many
/// bytes.
using StorageOf = std::function<c10::Storage(std::string_view key, std::uint64_t bytes)>;

/// The value that a pickle describes. Pickles are programs of a stack machine; of its operations,
/// those that build data are done here, and of the functions that it can call, those that make
/// tensors, dicts, sizes and bytes. Everything else is a CheckpointError that says what it was.
/// `path` is for the messages.
PyValue unpickle(std::string_view pickle, const StorageOf& storage_of,
                 const std::filesystem::path& path);

}  // namespace accelerate::checkpoints
