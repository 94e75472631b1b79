// What the library takes from libtorch_cuda.so: NCCL, simulated, and allocation snapshots, which
// there are none of. Linked in place of src/comm/nccl_backend.cpp.
//
// The simulated NCCL is Gloo on the bytes of the device, on a stream of its own, with NCCL's rules
// of what waits for what. SIM_NCCL=0 says that there is none.

#include "comm/gloo_backend.hpp"
#include "comm/nccl_backend.hpp"
#include "sim_device/sim_device.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/cuda/memory_snapshot.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

// As ProcessGroupNCCL's: wait() has the current stream wait, not the host, and lets go of the
// tensors, which are kept until then.
class NcclWork final : public c10d::Work {
 public:
  NcclWork(int rank, c10d::OpType type, at::Device device, c10::Stream ran_on, Tensors kept,
           Tensors outputs)
      : Work(rank, type),
        device_(device),
        done_(device.type()),
        kept_(std::move(kept)),
        outputs_(std::move(outputs)) {
    done_.record(ran_on);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<at::Device>{device});
    const c10::StreamGuard on(ran_on);
    future_->markCompleted(at::IValue(outputs_));
  }
  bool isCompleted() override { return done_.query(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    done_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    kept_.clear();
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  void abort() override {}

 private:
  at::Device device_;
  c10::Event done_;
  Tensors kept_;
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

class Nccl final : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
      : Backend(rank, size), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "nccl"; }
  void abort() override { gloo_->abort(); }

  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return run("nccl:all_reduce", c10d::OpType::ALLREDUCE, options.asyncOp, tensors, tensors,
               [&](Tensors&, Tensors& out) {
                 auto own = options;
                 const bool mean = sum_for_mean(own.reduceOp);
                 gloo_->allreduce(out, own)->wait();
                 if (mean) divide(out);
               });
  }
  Work allreduce_coalesced(Tensors& tensors,
                           const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return run("nccl:broadcast", c10d::OpType::BROADCAST, options.asyncOp, tensors, tensors,
               [&](Tensors&, Tensors& out) {
                 for (at::Tensor& each : out) {
                   Tensors bytes{each.view(-1).view(at::kByte)};
                   gloo_->broadcast(bytes, options)->wait();
                 }
               });
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input,
                       const c10d::AllgatherOptions& options) override {
    return run("nccl:all_gather", c10d::OpType::_ALLGATHER_BASE, options.asyncOp, {input}, {output},
               [&](Tensors& in, Tensors& out) { gather_bytes(out[0], in[0]); });
  }
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::AllgatherOptions& options) override {
    return run("nccl:all_gather", c10d::OpType::COALESCED, options.asyncOp, inputs, outputs,
               [&](Tensors& in, Tensors& out) {
                 for (std::size_t i = 0; i < in.size(); ++i) gather_bytes(out[i], in[i]);
               });
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::AllgatherOptions& options) override {
    return run("nccl:all_gather", c10d::OpType::ALLGATHER, options.asyncOp, inputs, outputs.at(0),
               [&](Tensors& in, Tensors& out) {
                 const auto length = in[0].numel();
                 at::Tensor all = at::empty({getSize() * length}, in[0].options());
                 gather_bytes(all, in[0]);
                 for (int rank = 0; rank < getSize(); ++rank) {
                   at::Tensor& part = out[static_cast<std::size_t>(rank)];
                   part.copy_(all.narrow(0, rank * length, length).view_as(part));
                 }
               });
  }
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override {
    return run("nccl:reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, options.asyncOp, {input},
               {output}, [&](Tensors& in, Tensors& out) { scatter_sum(out[0], in[0], options); });
  }
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options) override {
    return run("nccl:reduce_scatter", c10d::OpType::COALESCED, options.asyncOp, inputs, outputs,
               [&](Tensors& in, Tensors& out) {
                 for (std::size_t i = 0; i < in.size(); ++i) scatter_sum(out[i], in[i], options);
               });
  }
  Work barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  static bool sum_for_mean(c10d::ReduceOp& op) {
    if (op != c10d::ReduceOp::AVG) return false;
    op = c10d::ReduceOp::SUM;
    return true;
  }
  void divide(Tensors& tensors) const {
    for (at::Tensor& each : tensors) each.div_(getSize());
  }
  void gather_bytes(const at::Tensor& output, const at::Tensor& input) {
    at::Tensor from = input.reshape(-1).view(at::kByte);
    at::Tensor to = output.view(-1).view(at::kByte);
    gloo_->_allgather_base(to, from, {})->wait();
  }
  void scatter_sum(at::Tensor& output, at::Tensor& input,
                   const c10d::ReduceScatterOptions& options) {
    auto own = options;
    const bool mean = sum_for_mean(own.reduceOp);
    gloo_->_reduce_scatter_base(output, input, own)->wait();
    if (mean) output.div_(getSize());
  }

  // On NCCL's stream, after what the current one has done; with `own_stream` false on the current.
  template <class Act>
  Work run(const char* name, c10d::OpType type, bool own_stream, const Tensors& reads,
           const Tensors& writes, Act act) {
    const at::NoGradGuard no_grad;
    const at::Device device = writes.at(0).device();
    TORCH_CHECK(device.is_cuda(), "NCCL was given a tensor on ", device, ".");
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Stream computing = guard.getStream(device);
    c10::Stream stream = computing;
    if (own_stream) {
      auto at = streams_.find(device.index());
      if (at == streams_.end())
        at = streams_.emplace(device.index(), guard.getStreamFromGlobalPool(device, true)).first;
      stream = at->second;
      c10::Event ready(device.type());
      ready.record(computing);
      ready.block(stream);
    }
    {
      const c10::StreamGuard on(stream);
      note(name, reads, writes);
    }
    Tensors in, out, kept = reads;
    kept.insert(kept.end(), writes.begin(), writes.end());
    for (const at::Tensor& each : reads) in.push_back(host_view(each.detach()));
    for (const at::Tensor& each : writes) out.push_back(host_view(each.detach()));
    act(in, out);
    return c10::make_intrusive<NcclWork>(getRank(), type, device, stream, std::move(kept), writes);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

}  // namespace
}  // namespace sim

namespace accelerate::comm {

std::string nccl_missing() {
  const char* wanted = std::getenv("SIM_NCCL");
  return wanted != nullptr && std::string_view(wanted) == "0" ? "SIM_NCCL is 0" : "";
}

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout) {
  auto gloo = make_gloo_backend(c10::make_intrusive<c10d::PrefixStore>("simulated nccl", store),
                                rank, size, timeout, /*interface=*/"");
  return c10::make_intrusive<sim::Nccl>(std::move(gloo), rank, size);
}

}  // namespace accelerate::comm

namespace torch::cuda {

void _record_memory_history(std::optional<std::string>, std::optional<std::string>,
                            const std::string&, size_t, bool, bool, bool,
                            const std::vector<std::string>&) {
  TORCH_CHECK(false, "The simulated device takes no allocation snapshots.");
}

std::string _memory_snapshot_pickled() {
  TORCH_CHECK(false, "The simulated device takes no allocation snapshots.");
}

}  // namespace torch::cuda
