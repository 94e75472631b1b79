#pragma once

// The whole library in one include. Everything in it includes only the parts of LibTorch it needs;
// programs that define modules include <torch/torch.h> besides.

#include <accelerate/accelerator/accelerator.hpp>
#include <accelerate/base/error.hpp>
#include <accelerate/base/json.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/run.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/big_model/init_empty.hpp>
#include <accelerate/big_model/load.hpp>
#include <accelerate/big_model/sizes.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/comm/collectives.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/core/memory.hpp>
#include <accelerate/core/random.hpp>
#include <accelerate/core/tree.hpp>
#include <accelerate/data/loader.hpp>
#include <accelerate/intercept/operator_policy.hpp>
#include <accelerate/optim/optimizer.hpp>
#include <accelerate/optim/scheduler.hpp>
#include <accelerate/optim/schedules.hpp>
#include <accelerate/parallel/activation_checkpointing.hpp>
#include <accelerate/parallel/activation_offload.hpp>
#include <accelerate/state/state.hpp>
#include <accelerate/tracking/memory_tracker.hpp>
