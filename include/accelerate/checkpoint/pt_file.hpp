#pragma once

#include <accelerate/checkpoint/py_value.hpp>

#include <filesystem>

/// The files of Python's `torch.save` and `torch.load`: models' and optimizers' state dicts and
/// whatever else is made of numbers, text, lists, dicts and tensors.
namespace accelerate::checkpoints {

/// Reads a file that Python's `torch.save` wrote (since version 1.6). Nothing in a file is ever
/// run: it may name the few functions that make tensors and dicts of data, which are done here, and
/// every other name is refused. Tensors are on the CPU, wherever they were saved from, lie in the
/// mapped file (nothing is read before it is used, and what is written into them does not reach the
/// file), and share memory where they did. dtypes and devices are given as text: "torch.float32",
/// "cuda:0". Throws CheckpointError when the file is damaged or not such a file, and says how to
/// convert it where that is possible.
PyValue load_pt(const std::filesystem::path& path);

/// Writes a file that Python's `torch.load`, with `weights_only=True` as by default, reads: in full
/// or not at all, in place of one that is there. Tensors that share memory share it afterwards.
/// Throws UnsupportedError for tensors that are sparse, quantized or without data.
void save_pt(const PyValue& value, const std::filesystem::path& path);

}  // namespace accelerate::checkpoints
