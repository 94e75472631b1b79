#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

namespace accelerate::checkpoints {

// An optimizer gives out and takes its state through LibTorch's archives, whose contents can
// otherwise be reached only by writing a zip file and reading it back. An explicit instantiation
// may name private members; this is the one way in that copies nothing.
template <class Tag, auto Member>
struct ArchiveAccess {
  friend auto archive_member(Tag) { return Member; }
};
struct OutputModule {
  friend auto archive_member(OutputModule);
};
struct InputModule {
  friend auto archive_member(InputModule);
};
template struct ArchiveAccess<OutputModule, &torch::serialize::OutputArchive::module_>;
template struct ArchiveAccess<InputModule, &torch::serialize::InputArchive::module_>;

inline torch::jit::Module& contents(torch::serialize::OutputArchive& archive) {
  return archive.*archive_member(OutputModule{});
}
inline torch::jit::Module& contents(torch::serialize::InputArchive& archive) {
  return archive.*archive_member(InputModule{});
}

}  // namespace accelerate::checkpoints
