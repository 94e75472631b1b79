#pragma once

#include "comm/group_watch.hpp"

#include <accelerate/comm/work.hpp>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>

namespace accelerate::comm {

struct Work::Impl {
  c10::intrusive_ptr<c10d::Work> work;
  OperationName name;
  std::shared_ptr<GroupWatch> watch;
  bool waited = false;
};

}  // namespace accelerate::comm
