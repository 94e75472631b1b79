#pragma once

#include "comm/errors.hpp"

#include <accelerate/comm/work.hpp>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace accelerate::comm {

struct Work::Impl {
  c10::intrusive_ptr<c10d::Work> work;
  OperationName name;
  std::chrono::milliseconds timeout{0};
  /// Divided by name.size when the work is done, if defined (the mean of a reduction).
  at::Tensor to_average;
  bool waited = false;
};

}  // namespace accelerate::comm
