#include "comm/observed_backend.hpp"

#include "comm/call_check.hpp"
#include "comm/staging.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <mutex>
#include <numeric>
#include <optional>
#include <type_traits>

namespace accelerate::comm {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.numel() * static_cast<std::int64_t>(tensor.element_size()) : 0;
}
std::int64_t bytes_of(const Tensors& tensors) {
  return std::accumulate(
      tensors.begin(), tensors.end(), std::int64_t{0},
      [](std::int64_t sum, const at::Tensor& tensor) { return sum + bytes_of(tensor); });
}
std::int64_t bytes_of(const TensorLists& lists) {
  return std::accumulate(
      lists.begin(), lists.end(), std::int64_t{0},
      [](std::int64_t sum, const Tensors& tensors) { return sum + bytes_of(tensors); });
}
Tensors flat(const TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

std::string to_text(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "mean";
    case c10d::ReduceOp::PRODUCT:
      return "product";
    case c10d::ReduceOp::MIN:
      return "minimum";
    case c10d::ReduceOp::MAX:
      return "maximum";
    default:
      return text::concat("operation ", static_cast<int>(op.op_));
  }
}
std::string from(std::int64_t rank) { return text::concat("from rank ", rank); }
std::string to(std::int64_t rank) { return text::concat("to rank ", rank); }

class ObservedBackend final : public c10d::Backend {
 public:
  ObservedBackend(c10::intrusive_ptr<c10d::Backend> inner, c10::intrusive_ptr<c10d::Backend> notes,
                  std::shared_ptr<GroupWatch> watch, Memory memory,
                  std::vector<c10::intrusive_ptr<c10d::Backend>> aborted)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        watch_(std::move(watch)),
        host_(memory == Memory::host),
        aborted_(std::move(aborted)) {
    if (notes) check_.emplace(std::move(notes), watch_);
    for (const auto& backend : aborted_) watch_->abort_on_loss(backend.get());
  }
  ~ObservedBackend() override {
    for (const auto& backend : aborted_) watch_->forget(backend.get());
    // gloo's threads may still wait for what another rank will never send, and destroying the
    // backend would wait for them, up to the timeout. They end with the process.
    if (watch_->knows_loss() || watch_->is_broken()) {
      static auto* const kept = new std::vector<c10::intrusive_ptr<c10d::Backend>>;
      static std::mutex mutex;
      const std::lock_guard lock(mutex);
      kept->push_back(inner_);
      kept->insert(kept->end(), aborted_.begin(), aborted_.end());
    }
  }

  const std::string getBackendName() const override { return inner_->getBackendName(); }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  bool supportsCoalescing() const override { return inner_->supportsCoalescing(); }
  bool supportsTimeEstimation() const override { return inner_->supportsTimeEstimation(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void startCoalescing() override { inner_->startCoalescing(); }
  WorkPtr endCoalescing() override { return inner_->endCoalescing(); }
  void abort() override { inner_->abort(); }
  void shutdown() override { inner_->shutdown(); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    if (check_) check_->compare("broadcast", tensors, from(options.rootRank));
    Staging staging(host_, Staging::Use::move);
    return run("broadcast", OpType::BROADCAST, bytes_of(tensors), tensors, staging, [&] {
      Tensors staged = staging.inout(tensors);
      return inner_->broadcast(staged, options);
    });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    if (check_) check_->compare("all_reduce", tensors, to_text(options.reduceOp));
    Staging staging(host_, Staging::Use::reduce);
    return run("all_reduce", OpType::ALLREDUCE, bytes_of(tensors), tensors, staging, [&] {
      Tensors staged = staging.inout(tensors);
      return inner_->allreduce(staged, with_reduction(options, staging, tensors));
    });
  }

  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Staging staging(false, Staging::Use::reduce);
    return run("all_reduce", OpType::_ALLREDUCE_SPARSE, 0, tensors, staging,
               [&] { return inner_->allreduce_sparse(tensors, options); });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    if (check_) check_->compare("all_reduce", tensors, to_text(options.reduceOp));
    Staging staging(host_, Staging::Use::reduce);
    return run("all_reduce", OpType::ALLREDUCE_COALESCED, bytes_of(tensors), tensors, staging, [&] {
      Tensors staged = staging.inout(tensors);
      return inner_->allreduce_coalesced(staged, with_reduction(options, staging, tensors));
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    if (check_) {
      check_->compare("reduce", tensors,
                      text::concat(to_text(options.reduceOp), ", ", to(options.rootRank)));
    }
    Staging staging(host_, Staging::Use::reduce);
    return run("reduce", OpType::REDUCE, bytes_of(tensors), tensors, staging, [&] {
      Tensors staged = staging.inout(tensors);
      return inner_->reduce(staged, with_reduction(options, staging, tensors));
    });
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    if (check_) check_->compare("all_gather", inputs);
    Staging staging(host_, Staging::Use::move);
    return run("all_gather", OpType::ALLGATHER, bytes_of(outputs), flat(outputs), staging, [&] {
      TensorLists staged;
      for (auto& list : outputs) staged.push_back(staging.out(list));
      Tensors given = staging.in(inputs);
      return inner_->allgather(staged, given, options);
    });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    if (check_) check_->compare("all_gather", {input});
    Staging staging(host_, Staging::Use::move);
    return run("all_gather", OpType::_ALLGATHER_BASE, bytes_of(output), {output}, staging, [&] {
      at::Tensor staged = staging.out(output);
      at::Tensor given = staging.in(input);
      return inner_->_allgather_base(staged, given, options);
    });
  }

  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override {
    if (check_) check_->compare("all_gather", inputs);
    Staging staging(host_, Staging::Use::move);
    return run("all_gather", OpType::ALLGATHER_COALESCED, bytes_of(outputs), flat(outputs), staging,
               [&] {
                 TensorLists staged;
                 for (auto& list : outputs) staged.push_back(staging.out(list));
                 Tensors given = staging.in(inputs);
                 return inner_->allgather_coalesced(staged, given, options);
               });
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    if (check_) check_->compare("all_gather", inputs);
    Staging staging(host_, Staging::Use::move);
    return run("all_gather", OpType::COALESCED, bytes_of(outputs), outputs, staging, [&] {
      Tensors staged = staging.out(outputs);
      Tensors given = staging.in(inputs);
      return inner_->allgather_into_tensor_coalesced(staged, given, options);
    });
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    if (check_) check_->compare("gather", inputs, to(options.rootRank));
    Staging staging(host_, Staging::Use::move);
    return run("gather", OpType::GATHER, bytes_of(inputs) * getSize(), flat(outputs), staging, [&] {
      TensorLists staged;
      for (auto& list : outputs) staged.push_back(staging.out(list));
      Tensors given = staging.in(inputs);
      return inner_->gather(staged, given, options);
    });
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override {
    if (check_) check_->compare("scatter", outputs, from(options.rootRank));
    Staging staging(host_, Staging::Use::move);
    return run("scatter", OpType::SCATTER, bytes_of(outputs) * getSize(), outputs, staging, [&] {
      Tensors staged = staging.out(outputs);
      TensorLists given;
      for (auto& list : inputs) given.push_back(staging.in(list));
      return inner_->scatter(staged, given, options);
    });
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    if (check_) check_->compare("reduce_scatter", flat(inputs), to_text(options.reduceOp));
    Staging staging(host_, Staging::Use::reduce);
    return run("reduce_scatter", OpType::REDUCE_SCATTER, bytes_of(inputs), outputs, staging, [&] {
      Tensors staged = staging.out(outputs);
      TensorLists given;
      for (auto& list : inputs) given.push_back(staging.in(list));
      return inner_->reduce_scatter(staged, given, with_reduction(options, staging, outputs));
    });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    if (check_) check_->compare("reduce_scatter", {input}, to_text(options.reduceOp));
    Staging staging(host_, Staging::Use::reduce);
    return run("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, bytes_of(input), {output}, staging,
               [&] {
                 at::Tensor staged = staging.out(output);
                 at::Tensor given = staging.in(input);
                 return inner_->_reduce_scatter_base(staged, given,
                                                     with_reduction(options, staging, {output}));
               });
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    if (check_) check_->compare("reduce_scatter", inputs, to_text(options.reduceOp));
    Staging staging(host_, Staging::Use::reduce);
    return run("reduce_scatter", OpType::COALESCED, bytes_of(inputs), outputs, staging, [&] {
      Tensors staged = staging.out(outputs);
      Tensors given = staging.in(inputs);
      return inner_->reduce_scatter_tensor_coalesced(staged, given,
                                                     with_reduction(options, staging, outputs));
    });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    if (check_) check_->compare("all_to_all", {});
    Staging staging(host_, Staging::Use::move);
    return run("all_to_all", OpType::ALLTOALL_BASE, bytes_of(input), {output}, staging, [&] {
      // Rows are what splits count, so bytes keep them.
      at::Tensor staged = rows_like(staging.out(output), output);
      at::Tensor given = rows_like(staging.in(input), input);
      return inner_->alltoall_base(staged, given, output_splits, input_splits, options);
    });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    if (check_) check_->compare("all_to_all", {});
    Staging staging(host_, Staging::Use::move);
    return run("all_to_all", OpType::ALLTOALL, bytes_of(inputs), outputs, staging, [&] {
      Tensors staged = staging.out(outputs);
      Tensors given = staging.in(inputs);
      return inner_->alltoall(staged, given, options);
    });
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    Staging staging(host_, Staging::Use::move);
    return run(
        "send", OpType::SEND, bytes_of(tensors), tensors, staging,
        [&] {
          Tensors staged = staging.in(tensors);
          return inner_->send(staged, destination, tag);
        },
        destination);
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    Staging staging(host_, Staging::Use::move);
    return run(
        "recv", OpType::RECV, bytes_of(tensors), tensors, staging,
        [&] {
          Tensors staged = staging.out(tensors);
          return inner_->recv(staged, source, tag);
        },
        source);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    Staging staging(host_, Staging::Use::move);
    return run("recv", OpType::RECVANYSOURCE, bytes_of(tensors), tensors, staging, [&] {
      Tensors staged = staging.out(tensors);
      return inner_->recvAnysource(staged, tag);
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    if (check_) check_->compare("barrier", {});
    Staging staging(false, Staging::Use::move);
    return run("barrier", OpType::BARRIER, 0, {}, staging,
               [&] { return inner_->barrier(options); });
  }

  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_for_all) override {
    guarded("barrier", 0, [&] { inner_->monitoredBarrier(options, wait_for_all); });
  }

 private:
  static at::Tensor rows_like(const at::Tensor& staged, const at::Tensor& original) {
    if (staged.dim() == original.dim() || original.dim() == 0 || original.size(0) == 0)
      return staged;
    return staged.view({original.size(0), -1});
  }

  template <class OptionsType>
  OptionsType with_reduction(const OptionsType& options, Staging& staging,
                             const Tensors& outputs) const {
    OptionsType changed = options;
    changed.reduceOp = staging.reduction(options.reduceOp, outputs, getSize());
    return changed;
  }

  /// Counts and starts; errors of starting are explained.
  template <class Start>
  std::invoke_result_t<Start> guarded(const char* kind, std::int64_t bytes, Start&& start) {
    watch_->check_alive(kind);
    watch_->count(kind, bytes);
    try {
      return start();
    } catch (...) {
      std::rethrow_exception(watch_->explain(std::current_exception(), watch_->operation(kind)));
    }
  }

  template <class Start>
  WorkPtr run(const char* kind, OpType type, std::int64_t bytes, Tensors outputs, Staging& staging,
              Start&& start, int peer = -1) {
    WorkPtr inner = guarded(kind, bytes, start);
    if (!host_ || !inner) return inner;
    auto work = c10::make_intrusive<ObservedWork>(watch_, kind, type, peer, std::move(inner),
                                                  std::move(outputs), staging.finish());
    work->start();
    return work;
  }

  const c10::intrusive_ptr<c10d::Backend> inner_;
  const std::shared_ptr<GroupWatch> watch_;
  const bool host_;
  const std::vector<c10::intrusive_ptr<c10d::Backend>> aborted_;
  std::optional<CallCheck> check_;  // in debug mode
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> observe(c10::intrusive_ptr<c10d::Backend> inner,
                                          c10::intrusive_ptr<c10d::Backend> notes,
                                          std::shared_ptr<GroupWatch> watch, Memory memory,
                                          std::vector<c10::intrusive_ptr<c10d::Backend>> aborted) {
  return c10::make_intrusive<ObservedBackend>(std::move(inner), std::move(notes), std::move(watch),
                                              memory, std::move(aborted));
}

}  // namespace accelerate::comm
