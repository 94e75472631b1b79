// Built in place of nccl_backend.cpp where LibTorch or the machine has no NCCL.
#include "comm/nccl_backend.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <nccl_missing.hpp>

namespace accelerate::comm {

std::string nccl_missing() { return kNcclMissing; }

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>&, int,
                                                    int, std::chrono::milliseconds) {
  throw UnsupportedError(text::concat(
      "The nccl backend was asked for, and this build of accelerate-cpp has none: ", kNcclMissing,
      ". Build it again with that mended and -DACCELERATE_WITH_NCCL=ON, or use the gloo or mpi "
      "backend."));
}

}  // namespace accelerate::comm
