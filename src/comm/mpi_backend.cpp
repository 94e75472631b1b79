#include "comm/mpi_backend.hpp"

#include "comm/mpi_progress.hpp"
#include "comm/mpi_types.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <limits>
#include <numeric>

namespace accelerate::comm {
namespace {

using c10d::OpType;
using text::concat;
using Requests = std::vector<MPI_Request>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr std::int64_t kMostPerCall = std::numeric_limits<int>::max();

std::int64_t bytes_of(const at::Tensor& tensor) {
  return tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
}
char* data(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }

void check(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || !tensor.is_contiguous() || tensor.is_sparse()) {
    throw UnsupportedError("MPI carries dense contiguous CPU tensors.");
  }
}
void check(const Tensors& tensors, std::size_t expected) {
  if (tensors.size() != expected) {
    throw UnsupportedError(
        concat("MPI was given ", tensors.size(), " tensors where ", expected, " were expected."));
  }
  for (const auto& tensor : tensors) check(tensor);
}

/// For calls that count once: a count of 2^31 or more has no place in them.
int one_count(std::int64_t count) {
  if (count > kMostPerCall) {
    throw UnsupportedError(
        concat("One rank's part has ", count, " units, and MPI takes at most ", kMostPerCall,
               " in this operation. Communicate the tensor in slices, or use the gloo backend."));
  }
  return static_cast<int>(count);
}

/// For calls that can be made piece by piece: `call(offset, count, request)` for each piece.
template <class Call>
void in_pieces(std::int64_t count, Requests& requests, Call&& call) {
  for (std::int64_t offset = 0; offset < count || offset == 0; offset += mpi_piece()) {
    const auto piece = std::min(mpi_piece(), count - offset);
    requests.emplace_back(MPI_REQUEST_NULL);
    call(offset, static_cast<int>(piece), &requests.back());
    if (count == 0) break;
  }
}

at::Tensor flat(const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  Tensors lines;
  for (const auto& tensor : tensors) lines.push_back(tensor.reshape(-1));
  return at::cat(lines);
}
at::Tensor room_for(const Tensors& tensors) {
  std::int64_t count = 0;
  for (const auto& tensor : tensors) count += tensor.numel();
  return at::empty({count}, tensors.front().options());
}
void spread(const at::Tensor& line, const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  std::int64_t offset = 0;
  for (const auto& tensor : tensors) {
    tensor.detach().copy_(line.narrow(0, offset, tensor.numel()).view_as(tensor));
    offset += tensor.numel();
  }
}
void check_equal_parts(const Tensors& parts, const at::Tensor& one) {
  for (const auto& part : parts) {
    if (part.numel() != one.numel() || part.scalar_type() != one.scalar_type()) {
      throw UnsupportedError(
          "Each rank's part has to have the same number of elements and one dtype.");
    }
  }
}

class MpiBackend final : public c10d::Backend {
 public:
  MpiBackend(std::shared_ptr<MpiProgress> progress, std::shared_ptr<MpiChannel> channel, int rank,
             int size, std::chrono::milliseconds timeout)
      : Backend(rank, size),
        progress_(std::move(progress)),
        channel_(std::move(channel)),
        timeout_(timeout) {}

  ~MpiBackend() override {
    // MPI may not free a communicator that it still works on.
    if (channel_->under_way == 0 && !channel_->broken && mpi_is_up())
      MPI_Comm_free(&channel_->comm);
  }

  const std::string getBackendName() const override { return "mpi"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override { progress_->abandon(channel_); }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check(tensors, 1);
    return submit(OpType::BROADCAST, tensors, options.timeout,
                  [tensor = tensors[0], root = static_cast<int>(options.rootRank)](MPI_Comm comm) {
                    Requests requests;
                    const auto units = mpi_units(bytes_of(tensor));
                    in_pieces(units.count, requests,
                              [&](std::int64_t offset, int count, MPI_Request* request) {
                                check_mpi(MPI_Ibcast(data(tensor) + offset * units.unit_bytes,
                                                     count, units.type, root, comm, request),
                                          "MPI_Ibcast");
                              });
                    return requests;
                  });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check(tensors, 1);
    return all_reduce(OpType::ALLREDUCE, tensors, options);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    check(tensors, tensors.size());
    return all_reduce(OpType::ALLREDUCE_COALESCED, tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check(tensors, 1);
    const auto type = mpi_type(tensors[0].scalar_type());
    const auto op = mpi_op(tensors[0].scalar_type(), options.reduceOp);
    const int root = static_cast<int>(options.rootRank);
    return submit(
        OpType::REDUCE, tensors, options.timeout,
        [tensor = tensors[0], type, op, root, is_root = root == getRank()](MPI_Comm comm) {
          Requests requests;
          in_pieces(
              tensor.numel(), requests, [&](std::int64_t offset, int count, MPI_Request* request) {
                char* place = data(tensor) + offset * tensor.element_size();
                check_mpi(MPI_Ireduce(is_root ? MPI_IN_PLACE : place, is_root ? place : nullptr,
                                      count, type, op, root, comm, request),
                          "MPI_Ireduce");
              });
          return requests;
        });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    return all_gather(OpType::_ALLGATHER_BASE, {output}, {input}, options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    return all_gather(OpType::COALESCED, outputs, inputs, options);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    check(inputs, 1);
    check(outputs.at(0), static_cast<std::size_t>(getSize()));
    check_equal_parts(outputs[0], inputs[0]);
    const at::Tensor line = room_for(outputs[0]);
    return submit(
        OpType::ALLGATHER, outputs[0], options.timeout,
        [line, input = inputs[0]](MPI_Comm comm) {
          return Requests{gather_all(line, input, comm)};
        },
        [line, list = outputs[0]] { spread(line, list); });
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    check(inputs, 1);
    const int root = static_cast<int>(options.rootRank);
    const Tensors list = root == getRank() ? outputs.at(0) : Tensors{};
    if (root == getRank()) {
      check(list, static_cast<std::size_t>(getSize()));
      check_equal_parts(list, inputs[0]);
    }
    const at::Tensor line = list.empty() ? at::Tensor() : room_for(list);
    return submit(
        OpType::GATHER, list, options.timeout,
        [line, input = inputs[0], root](MPI_Comm comm) {
          const auto units = mpi_units(bytes_of(input));
          const int count = one_count(units.count);
          MPI_Request request = MPI_REQUEST_NULL;
          check_mpi(
              MPI_Igather(data(input), count, units.type, line.defined() ? data(line) : nullptr,
                          count, units.type, root, comm, &request),
              "MPI_Igather");
          return Requests{request};
        },
        [line, list] {
          if (line.defined()) spread(line, list);
        });
  }

  WorkPtr scatter(Tensors& outputs, TensorLists& inputs,
                  const c10d::ScatterOptions& options) override {
    check(outputs, 1);
    const int root = static_cast<int>(options.rootRank);
    at::Tensor line;
    if (root == getRank()) {
      check(inputs.at(0), static_cast<std::size_t>(getSize()));
      check_equal_parts(inputs[0], outputs[0]);
      line = flat(inputs[0]);
    }
    return submit(OpType::SCATTER, outputs, options.timeout,
                  [line, output = outputs[0], root](MPI_Comm comm) {
                    const auto units = mpi_units(bytes_of(output));
                    const int count = one_count(units.count);
                    MPI_Request request = MPI_REQUEST_NULL;
                    check_mpi(MPI_Iscatter(line.defined() ? data(line) : nullptr, count, units.type,
                                           data(output), count, units.type, root, comm, &request),
                              "MPI_Iscatter");
                    return Requests{request};
                  });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_all(OpType::_REDUCE_SCATTER_BASE, {output}, {input}, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    return reduce_scatter_all(OpType::COALESCED, outputs, inputs, options);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    check(outputs, 1);
    check(inputs.at(0), static_cast<std::size_t>(getSize()));
    check_equal_parts(inputs[0], outputs[0]);
    return reduce_scatter_all(OpType::REDUCE_SCATTER, outputs, {flat(inputs[0])}, options);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    check(output);
    check(input);
    const auto whole = [&](const at::Tensor& tensor, std::vector<int64_t> splits) {
      const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
      if (splits.empty()) splits.assign(static_cast<std::size_t>(getSize()), rows / getSize());
      if (static_cast<int>(splits.size()) != getSize() ||
          std::accumulate(splits.begin(), splits.end(), std::int64_t{0}) != rows) {
        throw UnsupportedError(concat("The splits [", text::join(splits), "] do not add up to ",
                                      rows, " rows for ", getSize(), " ranks."));
      }
      return splits;
    };
    const auto row = [](const at::Tensor& tensor) {
      return tensor.numel() == 0 ? std::int64_t{0} : bytes_of(tensor) / tensor.size(0);
    };
    return exchange(OpType::ALLTOALL_BASE, {output}, output, input, whole(output, output_splits),
                    whole(input, input_splits), std::max(row(input), row(output)), options, {});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    check(outputs, static_cast<std::size_t>(getSize()));
    check(inputs, static_cast<std::size_t>(getSize()));
    const auto counts = [](const Tensors& tensors) {
      std::vector<int64_t> sizes;
      for (const auto& tensor : tensors) sizes.push_back(tensor.numel());
      return sizes;
    };
    const at::Tensor line = room_for(outputs);
    return exchange(OpType::ALLTOALL, outputs, line, flat(inputs), counts(outputs), counts(inputs),
                    static_cast<std::int64_t>(line.element_size()), options,
                    [line, outputs] { spread(line, outputs); });
  }

  WorkPtr send(Tensors& tensors, int destination, int tag) override {
    check(tensors, 1);
    return submit(OpType::SEND, tensors, c10d::kUnsetTimeout,
                  [tensor = tensors[0], destination, tag](MPI_Comm comm) {
                    Requests requests;
                    const auto units = mpi_units(bytes_of(tensor));
                    in_pieces(units.count, requests,
                              [&](std::int64_t offset, int count, MPI_Request* request) {
                                check_mpi(MPI_Isend(data(tensor) + offset * units.unit_bytes, count,
                                                    units.type, destination, tag, comm, request),
                                          "MPI_Isend");
                              });
                    return requests;
                  });
  }

  WorkPtr recv(Tensors& tensors, int source, int tag) override {
    check(tensors, 1);
    return receive(OpType::RECV, tensors, source, tag);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    check(tensors, 1);
    if (mpi_units(bytes_of(tensors[0])).count > mpi_piece()) {
      throw UnsupportedError(
          "A receive from any rank has to fit into one MPI message: pieces of several senders "
          "could be mixed. Name the sender, or "
          "receive the tensor in slices.");
    }
    return receive(OpType::RECVANYSOURCE, tensors, MPI_ANY_SOURCE, tag);
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return submit(OpType::BARRIER, {}, options.timeout, [](MPI_Comm comm) {
      MPI_Request request = MPI_REQUEST_NULL;
      check_mpi(MPI_Ibarrier(comm, &request), "MPI_Ibarrier");
      return Requests{request};
    });
  }

 private:
  template <class Start>
  WorkPtr submit(OpType type, Tensors outputs, std::chrono::milliseconds timeout, Start start,
                 std::function<void()> finish = {}) {
    ++sequence_;
    MpiOperation operation;
    operation.channel = channel_;
    operation.work = c10::make_intrusive<MpiWork>(getRank(), type, std::move(outputs));
    operation.start = [start = std::move(start), comm = channel_->comm] { return start(comm); };
    operation.finish = std::move(finish);
    operation.deadline =
        std::chrono::steady_clock::now() + (timeout.count() > 0 ? timeout : timeout_);
    const WorkPtr work = operation.work;
    progress_->submit(std::move(operation));
    return work;
  }

  template <class Options>
  WorkPtr all_reduce(OpType op_type, const Tensors& tensors, const Options& options) {
    std::vector<std::pair<MPI_Datatype, MPI_Op>> kinds;
    for (const auto& tensor : tensors) {
      kinds.emplace_back(mpi_type(tensor.scalar_type()),
                         mpi_op(tensor.scalar_type(), options.reduceOp));
    }
    return submit(op_type, tensors, options.timeout, [tensors, kinds](MPI_Comm comm) {
      Requests requests;
      for (std::size_t index = 0; index < tensors.size(); ++index) {
        const auto& tensor = tensors[index];
        in_pieces(
            tensor.numel(), requests, [&](std::int64_t offset, int count, MPI_Request* request) {
              check_mpi(
                  MPI_Iallreduce(MPI_IN_PLACE, data(tensor) + offset * tensor.element_size(), count,
                                 kinds[index].first, kinds[index].second, comm, request),
                  "MPI_Iallreduce");
            });
      }
      return requests;
    });
  }

  static MPI_Request gather_all(const at::Tensor& output, const at::Tensor& input, MPI_Comm comm) {
    const auto units = mpi_units(bytes_of(input));
    const int count = one_count(units.count);
    int rank = 0;
    MPI_Comm_rank(comm, &rank);
    // An input that is this rank's place in the output is what MPI calls in place.
    const bool in_place = data(input) == data(output) + rank * bytes_of(input);
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Iallgather(in_place ? MPI_IN_PLACE : data(input), count, units.type, data(output),
                             count, units.type, comm, &request),
              "MPI_Iallgather");
    return request;
  }

  WorkPtr all_gather(OpType type, const Tensors& outputs, const Tensors& inputs,
                     const c10d::AllgatherOptions& options) {
    check(outputs, inputs.size());
    check(inputs, inputs.size());
    for (std::size_t index = 0; index < inputs.size(); ++index) {
      if (bytes_of(outputs[index]) != bytes_of(inputs[index]) * getSize()) {
        throw UnsupportedError("An all-gather's output has to hold one input of each rank.");
      }
    }
    return submit(type, outputs, options.timeout, [outputs, inputs](MPI_Comm comm) {
      Requests requests;
      for (std::size_t index = 0; index < inputs.size(); ++index) {
        requests.push_back(gather_all(outputs[index], inputs[index], comm));
      }
      return requests;
    });
  }

  WorkPtr reduce_scatter_all(OpType op_type, const Tensors& outputs, const Tensors& inputs,
                             const c10d::ReduceScatterOptions& options) {
    check(outputs, inputs.size());
    check(inputs, inputs.size());
    // MPI forbids that the two overlap, and callers like to have the output inside the input.
    Tensors results;
    for (std::size_t index = 0; index < inputs.size(); ++index) {
      if (bytes_of(inputs[index]) != bytes_of(outputs[index]) * getSize()) {
        throw UnsupportedError("A reduce-scatter's input has to hold one output of each rank.");
      }
      const char* begin = data(inputs[index]);
      const char* place = data(outputs[index]);
      const bool overlap = place >= begin && place < begin + bytes_of(inputs[index]);
      results.push_back(overlap ? at::empty_like(outputs[index]) : outputs[index]);
    }
    const auto op = static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp);
    for (const auto& input : inputs)
      mpi_op(input.scalar_type(), op);  // refuses here rather than later
    return submit(
        op_type, outputs, options.timeout,
        [results, inputs, op](MPI_Comm comm) {
          Requests requests;
          for (std::size_t index = 0; index < inputs.size(); ++index) {
            const auto dtype = inputs[index].scalar_type();
            requests.emplace_back(MPI_REQUEST_NULL);
            check_mpi(MPI_Ireduce_scatter_block(data(inputs[index]), data(results[index]),
                                                one_count(results[index].numel()), mpi_type(dtype),
                                                mpi_op(dtype, op), comm, &requests.back()),
                      "MPI_Ireduce_scatter_block");
          }
          return requests;
        },
        [results, outputs] {
          const at::NoGradGuard no_grad;
          for (std::size_t index = 0; index < outputs.size(); ++index) {
            if (!results[index].is_same(outputs[index]))
              outputs[index].detach().copy_(results[index]);
          }
        });
  }

  /// The counts and offsets of an all-to-all, kept until MPI is done with them.
  struct Exchange {
    std::vector<int> sent, sent_at, received, received_at;
    MPI_Datatype row = MPI_DATATYPE_NULL;
  };

  WorkPtr exchange(OpType type, const Tensors& outputs, const at::Tensor& output,
                   const at::Tensor& input, const std::vector<int64_t>& output_splits,
                   const std::vector<int64_t>& input_splits, std::int64_t row_bytes,
                   const c10d::AllToAllOptions& options, std::function<void()> finish) {
    const auto plan = std::make_shared<Exchange>();
    const auto lay_out = [](const std::vector<int64_t>& splits, std::vector<int>& counts,
                            std::vector<int>& offsets) {
      std::int64_t offset = 0;
      for (const auto split : splits) {
        counts.push_back(one_count(split));
        offsets.push_back(one_count(offset));
        offset += split;
      }
    };
    lay_out(input_splits, plan->sent, plan->sent_at);
    lay_out(output_splits, plan->received, plan->received_at);
    const int row = one_count(std::max<std::int64_t>(row_bytes, 1));
    return submit(
        type, outputs, options.timeout,
        [plan, output, input, row](MPI_Comm comm) {
          check_mpi(MPI_Type_contiguous(row, MPI_BYTE, &plan->row), "MPI_Type_contiguous");
          check_mpi(MPI_Type_commit(&plan->row), "MPI_Type_commit");
          MPI_Request request = MPI_REQUEST_NULL;
          check_mpi(MPI_Ialltoallv(input.data_ptr(), plan->sent.data(), plan->sent_at.data(),
                                   plan->row, output.data_ptr(), plan->received.data(),
                                   plan->received_at.data(), plan->row, comm, &request),
                    "MPI_Ialltoallv");
          return Requests{request};
        },
        [plan, finish = std::move(finish)] {
          MPI_Type_free(&plan->row);
          if (finish) finish();
        });
  }

  WorkPtr receive(OpType type, const Tensors& tensors, int source, int tag) {
    return submit(type, tensors, c10d::kUnsetTimeout,
                  [tensor = tensors[0], source, tag](MPI_Comm comm) {
                    Requests requests;
                    const auto units = mpi_units(bytes_of(tensor));
                    in_pieces(units.count, requests,
                              [&](std::int64_t offset, int count, MPI_Request* request) {
                                check_mpi(MPI_Irecv(data(tensor) + offset * units.unit_bytes, count,
                                                    units.type, source, tag, comm, request),
                                          "MPI_Irecv");
                              });
                    return requests;
                  });
  }

  const std::shared_ptr<MpiProgress> progress_;
  const std::shared_ptr<MpiChannel> channel_;
  std::chrono::milliseconds timeout_;
  std::uint64_t sequence_ = 0;
};

}  // namespace

bool have_mpi() { return true; }

MpiPlace mpi_place() {
  ensure_mpi();
  MpiPlace place{};
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &place.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &place.size), "MPI_Comm_size");
  return place;
}

std::string mpi_broadcast(const std::string& bytes) {
  ensure_mpi();
  int size = static_cast<int>(bytes.size());
  check_mpi(MPI_Bcast(&size, 1, MPI_INT, 0, MPI_COMM_WORLD), "MPI_Bcast");
  std::string all = bytes;
  all.resize(static_cast<std::size_t>(size));
  check_mpi(MPI_Bcast(all.data(), size, MPI_CHAR, 0, MPI_COMM_WORLD), "MPI_Bcast");
  return all;
}

c10::intrusive_ptr<c10d::Backend> make_mpi_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                   const std::vector<int>& global_ranks, int rank,
                                                   std::chrono::milliseconds timeout) {
  const auto progress = MpiProgress::get();
  // Creating a communicator blocks until all have come, with no timeout; the store has one.
  std::vector<std::string> arrivals;
  for (const int member : global_ranks) arrivals.push_back(concat("mpi/", member));
  store->set(arrivals[static_cast<std::size_t>(rank)], std::string("here"));
  store->wait(arrivals, timeout);

  MPI_Group everyone = MPI_GROUP_NULL;
  MPI_Group members = MPI_GROUP_NULL;
  const auto channel = std::make_shared<MpiChannel>();
  check_mpi(MPI_Comm_group(MPI_COMM_WORLD, &everyone), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(everyone, static_cast<int>(global_ranks.size()), global_ranks.data(),
                           &members),
            "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(MPI_COMM_WORLD, members, 0, &channel->comm),
            "MPI_Comm_create_group");
  MPI_Group_free(&members);
  MPI_Group_free(&everyone);
  check_mpi(MPI_Comm_set_errhandler(channel->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return c10::make_intrusive<MpiBackend>(progress, channel, rank,
                                         static_cast<int>(global_ranks.size()), timeout);
}

}  // namespace accelerate::comm
