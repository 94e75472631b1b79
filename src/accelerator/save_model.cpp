#include <accelerate/accelerator/accelerator.hpp>

#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/checkpoint/together.hpp>
#include <accelerate/io/manifest.hpp>

#include "base/parse_json.hpp"
#include "comm/user_call.hpp"

#include <ATen/ops/full.h>

namespace accelerate {

std::vector<std::string> Accelerator::save_model(PreparedModuleBase& model,
                                                 const std::filesystem::path& folder,
                                                 const std::string& max_shard_size,
                                                 bool safe_serialization) const {
  const comm::UserCall call("save_model()");
  // What is whole anyway is written from where it is; what is gathered would fill the device.
  const auto state = model.state_dict(
      parallel::StateDictOptions().rank0_only(true).offload_to_cpu(model.strategy().owns_leaves()));
  std::vector<std::string> files;
  checkpoints::together(world(), "save_model()", folder.string(), [&] {
    if (!is_main_process()) return;
    if (safe_serialization) {
      files = checkpoints::save_sharded(state, folder, max_shard_size);
    } else {
      io::expect_no_checkpoint(folder);
      io::make_folders(folder);
      files = {"pytorch_model.bin"};
      checkpoints::save_pt(checkpoints::state_dict(state), folder / files.front());
      // Readers would prefer an earlier set of safetensors files.
      io::safetensors::remove_shards(folder, "model");
    }
  });
  return parse_json(world().broadcast_bytes(Json(files).dump())).get<std::vector<std::string>>();
}

void Accelerator::stop_on_signals(const std::vector<int>& signals) {
  signals_.reset();
  signals_ = std::make_unique<SignalWatch>(signals);
}

bool Accelerator::stop_requested() const {
  const comm::UserCall call("stop_requested()");
  if (signals_ == nullptr) return false;
  const bool own = signals_->received() != 0;
  if (world().size() == 1) return own;
  const at::Tensor any =
      at::full({1}, own ? 1 : 0, at::TensorOptions().device(device()).dtype(at::kInt));
  world().all_reduce(any, comm::ReduceOp::max).wait();
  return any.item<int>() > 0;
}

}  // namespace accelerate
