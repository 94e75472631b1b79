#include <accelerate/comm/group.hpp>

#include "comm/errors.hpp"
#include "comm/work_impl.hpp"
#include "comm/world_impl.hpp"

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

namespace accelerate::comm {
namespace {

using text::concat;

c10d::ReduceOp::RedOpType to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return c10d::ReduceOp::SUM;
    case ReduceOp::avg:
      return c10d::ReduceOp::AVG;
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::product:
      return c10d::ReduceOp::PRODUCT;
  }
  return c10d::ReduceOp::SUM;
}

void check_average(const at::Tensor& tensor, ReduceOp op, const char* operation) {
  if (op == ReduceOp::avg && !at::isFloatingType(tensor.scalar_type()) &&
      !at::isComplexType(tensor.scalar_type())) {
    throw ConfigError(concat(
        operation, " was asked for the mean of a tensor of ", c10::toString(tensor.scalar_type()),
        ", which cannot hold one. Convert it to a floating dtype, or use ReduceOp::sum."));
  }
}

/// Collectives work on memory from a tensor's first element to its last.
void check_tensor(const Group::Impl& group, const at::Tensor& tensor, const char* operation) {
  if (!tensor.defined()) {
    throw ConfigError(
        concat(operation, " in group \"", group.name, "\" was given an undefined tensor."));
  }
  if (!tensor.is_contiguous()) {
    throw ConfigError(
        concat(operation, " in group \"", group.name, "\" was given a tensor of shape [",
               text::join(tensor.sizes()), "] and strides [", text::join(tensor.strides()),
               "]; it works in place on contiguous memory. Give it tensor.contiguous()."));
  }
}

void check_rank(const Group::Impl& group, int rank, const char* operation) {
  if (rank < 0 || rank >= group.size) {
    throw ConfigError(concat(operation, " names rank ", rank, " of group \"", group.name,
                             "\", whose ranks go from 0 to ", group.size - 1, "."));
  }
}

const c10::intrusive_ptr<c10d::Backend>& backend_for(const Group::Impl& group,
                                                     const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? group.cuda_backend : group.cpu_backend;
}

/// Starts a collective and translates what goes wrong in starting it.
template <class Start>
Work launch(const Group::Impl& group, const char* operation, const at::Tensor& tensor,
            Start&& start) {
  if (group.closed) {
    throw StateError(concat(
        operation, " was called on group \"", group.name,
        "\" after the run was shut down. Call it before shutdown (or before end_training)."));
  }
  auto impl = std::make_shared<Work::Impl>();
  impl->watch = group.watch;
  impl->name = group.watch->operation(operation);
  try {
    impl->work = start(*backend_for(group, tensor));
  } catch (...) {
    std::rethrow_exception(group.watch->explain(std::current_exception(), impl->name));
  }
  return Work(std::move(impl));
}

/// Messages of up to so many bytes travel together with their length.
constexpr std::int64_t kInlineBytes = 504;
constexpr std::int64_t kHeaderBytes = kInlineBytes + 8;

void write_header(const at::Tensor& header, const std::string& bytes) {
  auto* data = header.data_ptr<std::uint8_t>();
  const std::int64_t size = static_cast<std::int64_t>(bytes.size());
  std::memcpy(data, &size, sizeof size);
  if (size <= kInlineBytes) std::memcpy(data + sizeof size, bytes.data(), bytes.size());
}

std::int64_t header_size(const std::uint8_t* header) {
  std::int64_t size = 0;
  std::memcpy(&size, header, sizeof size);
  return size;
}

at::Tensor byte_tensor(std::int64_t size) {
  return at::zeros({size}, at::TensorOptions(at::kByte));
}

std::string to_string(const at::Tensor& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.const_data_ptr<std::uint8_t>()),
                     static_cast<std::size_t>(bytes.numel()));
}

}  // namespace

Group::Group() : impl_(std::make_shared<Impl>()) {}
Group::Group(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

int Group::rank() const noexcept { return impl_->rank; }
int Group::size() const noexcept { return impl_->size; }
const std::string& Group::name() const noexcept { return impl_->name; }
const std::string& Group::backend() const noexcept { return impl_->backend; }
const std::vector<int>& Group::global_ranks() const noexcept { return impl_->global_ranks; }
std::chrono::milliseconds Group::timeout() const noexcept { return impl_->timeout; }

namespace {

Group alone(const std::string& name, std::vector<int> global_ranks) {
  auto impl = std::make_shared<Group::Impl>();
  impl->name = name;
  impl->global_ranks = std::move(global_ranks);
  return Group(std::move(impl));
}

}  // namespace

std::string Group::Impl::offer() const { return concat(id, " ", watch->operations()); }

std::vector<std::string> Group::Impl::free_groups(const std::string& of) {
  const auto is_free = [&](const auto& part) {
    return part->sharing == Sharing::in_turn && part->name == of && part.use_count() == 1;
  };
  // One in which something failed, or is under way, may be at another place on each rank.
  std::erase_if(parts, [&](const auto& part) { return is_free(part) && !part->watch->is_idle(); });
  std::vector<std::string> all;
  for (const auto& part : parts) {
    if (is_free(part)) all.push_back(part->offer());
  }
  return all;
}

Group Group::split(int color, int key, const std::string& name, Sharing sharing) const {
  if (impl_->size == 1) return alone(name, impl_->global_ranks);
  // A group that waits here is taken only if it waits everywhere, and one that this rank has let go
  // of is closed once all have: what they have yet to receive may be in buffers that closing
  // throws away.
  std::string mine = concat(color, "\n", key);
  if (sharing == Sharing::in_turn) {
    for (const std::string& offer : impl_->free_groups(name)) mine += concat("\n", offer);
  }
  const auto dropped = impl_->world->dropped(impl_->id);
  for (const auto& [id, ranks] : dropped) mine += concat("\n", id);
  std::vector<std::pair<int, std::size_t>> members;  // (key, rank in this group)
  std::map<int, std::set<std::string>> said;         // by rank of the world
  for (const std::string& bytes : all_gather_bytes(mine)) {
    const auto lines = text::split(bytes, '\n');
    const std::size_t rank = said.size();
    said[impl_->global_ranks[rank]].insert(lines.begin() + 2, lines.end());
    if (text::to_int(lines.at(0)) == color)
      members.emplace_back(text::to_int(lines.at(1)).value(), rank);
  }
  const auto all_say = [&](const std::vector<int>& ranks, const std::string& line) {
    return std::all_of(ranks.begin(), ranks.end(),
                       [&](int rank) { return said.at(rank).contains(line); });
  };
  for (const auto& [id, ranks] : dropped) {
    if (all_say(ranks, id)) impl_->world->close_dropped(id);
  }
  std::sort(members.begin(), members.end());
  std::vector<int> global_ranks;
  for (const auto& [ignored, rank] : members) global_ranks.push_back(impl_->global_ranks[rank]);
  const std::string id = concat(impl_->id, "/", impl_->splits++, ":", color);
  if (global_ranks.size() == 1) return alone(name, global_ranks);

  if (sharing == Sharing::together && global_ranks == impl_->global_ranks) return *this;
  for (const auto& made : impl_->parts) {
    if (made->sharing != sharing || made->global_ranks != global_ranks) continue;
    if (sharing == Sharing::together ||
        (made->name == name && all_say(global_ranks, made->offer())))
      return Group(made);
  }
  const Group part(impl_->world->join(id, name, std::move(global_ranks)));
  part.impl_->watch->count_for(impl_->watch);
  part.impl_->sharing = sharing;
  if (sharing != Sharing::none) impl_->parts.push_back(part.impl_);
  return part;
}

Work Group::all_reduce(const at::Tensor& tensor, ReduceOp op) const {
  check_average(tensor, op, "all_reduce");
  if (impl_->size == 1) return {};
  check_tensor(*impl_, tensor, "all_reduce");
  return launch(*impl_, "all_reduce", tensor, [&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    return backend.allreduce(tensors, options);
  });
}

Work Group::broadcast(const at::Tensor& tensor, int source) const {
  check_rank(*impl_, source, "broadcast");
  if (impl_->size == 1) return {};
  check_tensor(*impl_, tensor, "broadcast");
  return launch(*impl_, "broadcast", tensor, [&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = source;
    return backend.broadcast(tensors, options);
  });
}

namespace {

void check_sizes(const Group::Impl& group, const at::Tensor& whole, const at::Tensor& part,
                 const char* operation) {
  if (whole.scalar_type() != part.scalar_type() || whole.numel() != part.numel() * group.size) {
    throw ConfigError(concat(operation, " in group \"", group.name, "\" of ", group.size,
                             " ranks was given ", whole.numel(), " elements of ",
                             c10::toString(whole.scalar_type()), " for the whole and ",
                             part.numel(), " of ", c10::toString(part.scalar_type()),
                             " for one rank's part; expected were ", part.numel() * group.size,
                             " and ", part.numel(), " of one dtype."));
  }
}

}  // namespace

Work Group::all_gather_into(const at::Tensor& output, const at::Tensor& input) const {
  check_tensor(*impl_, output, "all_gather_into");
  check_tensor(*impl_, input, "all_gather_into");
  check_sizes(*impl_, output, input, "all_gather_into");
  if (impl_->size == 1) {
    if (!output.is_same(input) && output.data_ptr() != input.data_ptr())
      output.view_as(input).copy_(input);
    return {};
  }
  return launch(*impl_, "all_gather", input, [&](c10d::Backend& backend) {
    at::Tensor out = output.view(-1);
    at::Tensor in = input.view(-1);
    return backend._allgather_base(out, in);
  });
}

Work Group::reduce_scatter_into(const at::Tensor& output, const at::Tensor& input,
                                ReduceOp op) const {
  check_average(input, op, "reduce_scatter_into");
  check_tensor(*impl_, output, "reduce_scatter_into");
  check_tensor(*impl_, input, "reduce_scatter_into");
  check_sizes(*impl_, input, output, "reduce_scatter_into");
  if (impl_->size == 1) {
    if (output.data_ptr() != input.data_ptr()) output.view_as(input).copy_(input);
    return {};
  }
  return launch(*impl_, "reduce_scatter", input, [&](c10d::Backend& backend) {
    at::Tensor out = output.view(-1);
    at::Tensor in = input.view(-1);
    c10d::ReduceScatterOptions options;
    options.reduceOp = to_c10d(op);
    return backend._reduce_scatter_base(out, in, options);
  });
}

Work Group::all_to_all_into(const at::Tensor& output, const at::Tensor& input,
                            std::vector<std::int64_t> output_splits,
                            std::vector<std::int64_t> input_splits) const {
  check_tensor(*impl_, output, "all_to_all_into");
  check_tensor(*impl_, input, "all_to_all_into");
  if (output.scalar_type() != input.scalar_type()) {
    throw ConfigError(concat("all_to_all_into in group \"", impl_->name,
                             "\" was given an output of ", c10::toString(output.scalar_type()),
                             " and an input of ", c10::toString(input.scalar_type()),
                             "; expected was one dtype."));
  }
  const auto check_splits = [&](const at::Tensor& tensor, const std::vector<std::int64_t>& splits,
                                const char* which) {
    const std::int64_t rows = tensor.dim() == 0 ? 0 : tensor.size(0);
    std::int64_t sum = 0;
    for (const auto split : splits) sum += split;
    const bool fits = splits.empty()
                          ? tensor.dim() > 0 && rows % impl_->size == 0
                          : static_cast<int>(splits.size()) == impl_->size && sum == rows;
    if (!fits) {
      throw ConfigError(
          concat("all_to_all_into in group \"", impl_->name, "\" was given an ", which,
                 " of shape [", text::join(tensor.sizes()), "] and splits [", text::join(splits),
                 "]; expected was one split for each of ", impl_->size,
                 " ranks, together the size of dim 0, or none when dim 0 divides evenly."));
    }
  };
  check_splits(output, output_splits, "output");
  check_splits(input, input_splits, "input");
  if (impl_->size == 1) {
    output.copy_(input);
    return {};
  }
  return launch(*impl_, "all_to_all", input, [&](c10d::Backend& backend) {
    at::Tensor out = output;
    at::Tensor in = input;
    return backend.alltoall_base(out, in, output_splits, input_splits);
  });
}

Work Group::send(const at::Tensor& tensor, int destination, int tag) const {
  check_rank(*impl_, destination, "send");
  check_tensor(*impl_, tensor, "send");
  if (destination == impl_->rank)
    throw ConfigError("send names this very rank as its destination. Copy the tensor instead.");
  return launch(*impl_, "send", tensor, [&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors{tensor};
    return backend.send(tensors, destination, tag);
  });
}

Work Group::recv(const at::Tensor& tensor, int source, int tag) const {
  check_rank(*impl_, source, "recv");
  check_tensor(*impl_, tensor, "recv");
  if (source == impl_->rank)
    throw ConfigError("recv names this very rank as its source. Copy the tensor instead.");
  return launch(*impl_, "recv", tensor, [&](c10d::Backend& backend) {
    std::vector<at::Tensor> tensors{tensor};
    return backend.recv(tensors, source, tag);
  });
}

void Group::barrier() const {
  if (impl_->size == 1) return;
  launch(*impl_, "barrier", at::Tensor(), [&](c10d::Backend& backend) {
    return backend.barrier();
  }).wait();
}

std::vector<std::string> Group::all_gather_bytes(const std::string& bytes) const {
  if (impl_->size == 1) return {bytes};
  const at::Tensor mine = byte_tensor(kHeaderBytes);
  write_header(mine, bytes);
  const at::Tensor headers = byte_tensor(kHeaderBytes * impl_->size);
  all_gather_into(headers, mine).wait();
  const auto* data = headers.const_data_ptr<std::uint8_t>();
  std::int64_t largest = 0;
  for (int rank = 0; rank < impl_->size; ++rank)
    largest = std::max(largest, header_size(data + rank * kHeaderBytes));
  at::Tensor bodies;
  if (largest > kInlineBytes) {
    const at::Tensor body = byte_tensor(largest);
    std::memcpy(body.data_ptr<std::uint8_t>(), bytes.data(), bytes.size());
    bodies = byte_tensor(largest * impl_->size);
    all_gather_into(bodies, body).wait();
  }
  std::vector<std::string> all;
  for (int rank = 0; rank < impl_->size; ++rank) {
    const auto* header = data + rank * kHeaderBytes;
    const auto size = static_cast<std::size_t>(header_size(header));
    const auto* body =
        bodies.defined() ? bodies.const_data_ptr<std::uint8_t>() + rank * largest : header + 8;
    all.emplace_back(reinterpret_cast<const char*>(body), size);
  }
  return all;
}

std::string Group::broadcast_bytes(const std::string& bytes, int source) const {
  check_rank(*impl_, source, "broadcast_bytes");
  if (impl_->size == 1) return bytes;
  const bool sends = impl_->rank == source;
  const at::Tensor header = byte_tensor(kHeaderBytes);
  if (sends) write_header(header, bytes);
  broadcast(header, source).wait();
  const auto size = header_size(header.const_data_ptr<std::uint8_t>());
  if (size <= kInlineBytes) return to_string(header.slice(0, 8, 8 + size));
  const at::Tensor body = byte_tensor(size);
  if (sends) std::memcpy(body.data_ptr<std::uint8_t>(), bytes.data(), bytes.size());
  broadcast(body, source).wait();
  return sends ? bytes : to_string(body);
}

std::string Group::scatter_bytes(const std::vector<std::string>& parts, int source) const {
  check_rank(*impl_, source, "scatter_bytes");
  const bool sends = impl_->rank == source;
  if (sends && static_cast<int>(parts.size()) != impl_->size) {
    throw ConfigError(concat("scatter_bytes in group \"", impl_->name, "\" was given ",
                             parts.size(), " parts for ", impl_->size,
                             " ranks; expected was one for each."));
  }
  if (impl_->size == 1) return parts.front();
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(impl_->size), 0);
  std::int64_t total = 0;
  if (sends) {
    for (std::size_t rank = 0; rank < sizes.size(); ++rank)
      total += sizes[rank] = static_cast<std::int64_t>(parts[rank].size());
  }
  broadcast(at::from_blob(sizes.data(), {impl_->size}, at::TensorOptions(at::kLong)), source)
      .wait();
  const at::Tensor output = byte_tensor(sizes[static_cast<std::size_t>(impl_->rank)]);
  const at::Tensor input = byte_tensor(total);
  std::int64_t offset = 0;
  for (const auto& part : parts) {
    if (!sends) break;
    std::memcpy(input.data_ptr<std::uint8_t>() + offset, part.data(), part.size());
    offset += static_cast<std::int64_t>(part.size());
  }
  std::vector<std::int64_t> input_splits(sizes.size(), 0);
  std::vector<std::int64_t> output_splits(sizes.size(), 0);
  if (sends) input_splits = sizes;
  output_splits[static_cast<std::size_t>(source)] = output.numel();
  all_to_all_into(output, input, output_splits, input_splits).wait();
  return to_string(output);
}

Traffic Group::traffic() const { return impl_->watch ? impl_->watch->traffic() : Traffic{}; }
void Group::reset_traffic() const {
  if (impl_->watch) impl_->watch->reset_traffic();
}

void Work::wait() {
  if (!impl_ || impl_->waited) return;
  try {
    impl_->work->wait();
  } catch (...) {
    std::rethrow_exception(impl_->watch->explain(std::current_exception(), impl_->name));
  }
  impl_->waited = true;
  impl_->work.reset();
}

bool Work::done() const { return !impl_ || impl_->waited || impl_->work->isCompleted(); }

}  // namespace accelerate::comm
