// The only file that sees gloo's interface, through the declarations in gloo_shim/.
#include "comm/gloo_backend.hpp"

#include <accelerate/base/environment.hpp>
#include <accelerate/base/log.hpp>
#include <accelerate/base/text.hpp>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>

#include <exception>
#include <mutex>
#include <string_view>
#include <typeinfo>

namespace accelerate::comm {
namespace {

class GlooBackend final : public c10d::ProcessGroupGloo {
 public:
  using ProcessGroupGloo::ProcessGroupGloo;
  void abort() override {
    for (const auto& context : contexts_) context->closeConnections();
  }

  // c10d's own reduce-scatters over gloo, too, reduce a copy everywhere and keep a part of it, but
  // their works have no future: they are only over once somebody waits, and cannot be ended when a
  // rank is lost.
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    std::vector<at::Tensor> sums;
    for (const at::Tensor& input : inputs) sums.push_back(input.clone().flatten());
    return reduce_and_keep(outputs, std::move(sums), options);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    std::vector<at::Tensor> outputs{output};
    std::vector<at::Tensor> inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    std::vector<at::Tensor> sums;
    for (const std::vector<at::Tensor>& parts : inputs) {
      std::vector<at::Tensor> flat;
      for (const at::Tensor& part : parts) flat.push_back(part.flatten());
      sums.push_back(at::cat(flat));
    }
    return reduce_and_keep(outputs, std::move(sums), options);
  }

 private:
  // Each of `sums` is this process' own and is to be summed; this rank's part goes to `outputs`.
  c10::intrusive_ptr<c10d::Work> reduce_and_keep(const std::vector<at::Tensor>& outputs,
                                                 std::vector<at::Tensor> sums,
                                                 const c10d::ReduceScatterOptions& options) {
    c10d::AllreduceOptions reduction;
    reduction.reduceOp = options.reduceOp;
    reduction.timeout = options.timeout;
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> reduced;
    for (at::Tensor& sum : sums) {
      std::vector<at::Tensor> one{sum};
      reduced.push_back(allreduce(one, reduction)->getFuture());
    }
    const auto keep = [outputs, sums, rank = getRank()](c10::ivalue::Future& done) -> c10::IValue {
      if (done.hasError()) std::rethrow_exception(done.exception_ptr());
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < outputs.size(); ++i) {
        const std::int64_t length = outputs[i].numel();
        outputs[i].copy_(sums[i].narrow(0, rank * length, length).view_as(outputs[i]));
        // gloo's thread holds on to the tensor for a while; nobody needs its memory.
        sums[i].storage().unsafeGetStorageImpl()->reset();
      }
      return outputs;
    };
    const auto type = c10::ListType::create(c10::TensorType::get());
    const auto all = reduced.size() == 1 ? reduced.front() : c10::collectAll(as_list(reduced));
    return c10d::Work::create_from_future(all->then(keep, type));
  }
  static c10::List<c10::intrusive_ptr<c10::ivalue::Future>> as_list(
      const std::vector<c10::intrusive_ptr<c10::ivalue::Future>>& futures) {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> list(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const auto& future : futures) list.push_back(future);
    return list;
  }
};

std::terminate_handler terminate_before = nullptr;

// Gloo throws on a thread of its own when a message has another size than its receiver has room
// for, which ends the process: nobody can catch that, but it can be explained.
void explain_and_terminate() {
  if (const std::exception_ptr error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& thrown) {
      if (std::string_view(typeid(thrown).name()).find("4gloo") != std::string_view::npos) {
        log::error(text::concat(
            "Gloo ends this process, because another rank sent it a message of an unexpected size: "
            "the ranks called different collectives, or the same one with tensors of different "
            "shapes. Run with ACCELERATE_DEBUG_MODE=1, which compares the calls and names those "
            "that differ. Gloo says: ",
            thrown.what()));
      }
    } catch (...) {
      // Not Gloo's.
    }
  }
  terminate_before();
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout,
                                                    const std::string& interface) {
  static std::once_flag explained;
  std::call_once(explained, [] { terminate_before = std::set_terminate(explain_and_terminate); });
  using Options = c10d::ProcessGroupGloo::Options;
  c10::intrusive_ptr<Options> options;
  if (interface.empty() || Environment::process().has("GLOO_SOCKET_IFNAME")) {
    options = Options::create_default(timeout);
  } else {
    options = Options::create(timeout);
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(interface));
  }
  return c10::make_intrusive<GlooBackend>(store, rank, size, std::move(options));
}

}  // namespace accelerate::comm
