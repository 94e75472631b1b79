#include <accelerate/comm/collectives.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>

#include "comm/user_call.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/ScalarType.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>

namespace accelerate::comm {
namespace {

using text::concat;

/// Dtype and shape of each tensor of a list, as numbers that can be sent.
std::string signature(const std::vector<at::Tensor>& tensors) {
  std::vector<std::int64_t> numbers;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) {
      numbers.push_back(-1);
      continue;
    }
    numbers.push_back(static_cast<std::int64_t>(tensor.scalar_type()));
    numbers.push_back(tensor.dim());
    numbers.insert(numbers.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  return std::string(reinterpret_cast<const char*>(numbers.data()),
                     numbers.size() * sizeof(std::int64_t));
}

struct Described {
  bool defined = false;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> shape;
};

std::vector<Described> read_signature(const std::string& bytes) {
  std::vector<std::int64_t> numbers(bytes.size() / sizeof(std::int64_t));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  std::vector<Described> tensors;
  for (std::size_t at = 0; at < numbers.size();) {
    Described& tensor = tensors.emplace_back();
    if (numbers[at] < 0) {
      ++at;
      continue;
    }
    tensor.defined = true;
    tensor.dtype = static_cast<at::ScalarType>(numbers[at]);
    const auto dims = static_cast<std::size_t>(numbers[at + 1]);
    tensor.shape.assign(numbers.begin() + static_cast<std::ptrdiff_t>(at + 2),
                        numbers.begin() + static_cast<std::ptrdiff_t>(at + 2 + dims));
    at += 2 + dims;
  }
  return tensors;
}

std::string to_text(const Described& tensor) {
  if (!tensor.defined) return "undefined";
  return concat(c10::toString(tensor.dtype), "[", text::join(tensor.shape), "]");
}

/// Throws the same error on every rank when the ranks' tensors differ. Shapes travel whole in one
/// small message (up to some 20 tensors) or in two.
void check_alike(const std::vector<at::Tensor>& tensors, const Group& group, const char* operation,
                 const char* advice) {
  const auto signatures = group.all_gather_bytes(signature(tensors));
  if (std::all_of(signatures.begin(), signatures.end(),
                  [&](const auto& other) { return other == signatures.front(); }))
    return;
  std::vector<std::vector<Described>> ranks;
  std::size_t shortest = tensors.size();
  for (const auto& bytes : signatures) {
    ranks.push_back(read_signature(bytes));
    shortest = std::min(shortest, ranks.back().size());
  }
  std::string found;
  for (std::size_t index = 0; index < shortest && found.empty(); ++index) {
    std::vector<std::string> each;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      each.push_back(concat("rank ", rank, ": ", to_text(ranks[rank][index])));
    }
    const auto& first = ranks.front()[index];
    if (std::any_of(ranks.begin(), ranks.end(),
                    [&](const auto& rank) { return to_text(rank[index]) != to_text(first); })) {
      found = concat("tensor ", index, " differs (", text::join(each, "; "), ")");
    }
  }
  if (found.empty()) {
    std::vector<std::string> counts;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
      counts.push_back(concat("rank ", rank, ": ", ranks[rank].size()));
    found = concat("the number of tensors differs (", text::join(counts, "; "), ")");
  }
  throw DistributedError(
      concat(operation, " in group \"", group.name(), "\" on rank ", group.rank(), " of ",
             group.size(), " needs tensors of the same shape and dtype on every rank, and ", found,
             ". ", advice),
      operation, group.rank());
}

void wait_all(std::vector<Work>& works) {
  for (auto& work : works) work.wait();
}

}  // namespace

std::vector<at::Tensor> gather_tensors(const std::vector<at::Tensor>& tensors, const Group& group) {
  const comm::UserCall call("gather()");
  if (group.size() == 1) return tensors;
  check_alike(tensors, group, "gather",
              "Call pad_across_processes first where ranks may have unequal lengths, or "
              "gather_object for other values.");
  std::vector<at::Tensor> gathered;
  std::vector<Work> works;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) {
      gathered.emplace_back();
      continue;
    }
    const at::Tensor input =
        (tensor.dim() == 0 ? tensor.detach().reshape({1}) : tensor.detach()).contiguous();
    auto shape = input.sizes().vec();
    shape[0] *= group.size();
    gathered.push_back(at::empty(shape, input.options()));
    if (input.numel() > 0) works.push_back(group.all_gather_into(gathered.back(), input));
  }
  wait_all(works);
  return gathered;
}

std::vector<at::Tensor> reduce_tensors(const std::vector<at::Tensor>& tensors, const Group& group,
                                       Reduction reduction, double scale) {
  const comm::UserCall call("reduce()");
  std::vector<at::Tensor> reduced;
  for (const auto& tensor : tensors) {
    const bool fraction = reduction == Reduction::mean || scale != 1.0;
    if (tensor.defined() && fraction && !at::isFloatingType(tensor.scalar_type()) &&
        !at::isComplexType(tensor.scalar_type())) {
      throw ConfigError(
          concat("reduce was asked for the ", reduction == Reduction::mean ? "mean" : "scaled sum",
                 " of a tensor of ", c10::toString(tensor.scalar_type()),
                 ", which cannot hold one. Convert it to a floating dtype, or take the sum."));
    }
    reduced.push_back(tensor.defined() ? tensor.detach().clone(at::MemoryFormat::Contiguous)
                                       : at::Tensor());
  }
  if (group.size() > 1) {
    check_alike(reduced, group, "reduce",
                "Call pad_across_processes first where ranks may have unequal lengths.");
    std::vector<Work> works;
    for (const auto& tensor : reduced) {
      if (!tensor.defined() || tensor.numel() == 0) continue;
      works.push_back(
          group.all_reduce(tensor, reduction == Reduction::mean ? ReduceOp::avg : ReduceOp::sum));
    }
    wait_all(works);
  }
  if (scale != 1.0) {
    for (auto& tensor : reduced) {
      if (tensor.defined()) tensor.mul_(scale);
    }
  }
  return reduced;
}

std::vector<at::Tensor> broadcast_tensors(const std::vector<at::Tensor>& tensors,
                                          const Group& group, int from) {
  const comm::UserCall call("broadcast()");
  if (group.size() == 1) return tensors;
  check_alike(tensors, group, "broadcast",
              "Every rank has to bring tensors for what rank `from` sends.");
  std::vector<at::Tensor> sent;
  std::vector<Work> works;
  for (const auto& tensor : tensors) {
    sent.push_back(tensor.defined() ? tensor.detach().contiguous() : tensor);
    if (tensor.defined() && tensor.numel() > 0) works.push_back(group.broadcast(sent.back(), from));
  }
  wait_all(works);
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    if (!tensors[index].defined() || group.rank() == from) continue;
    if (sent[index].data_ptr() != tensors[index].data_ptr())
      tensors[index].detach().copy_(sent[index]);
  }
  return tensors;
}

std::vector<at::Tensor> pad_tensors_across_processes(const std::vector<at::Tensor>& tensors,
                                                     const std::vector<std::string>& paths,
                                                     const Group& group, std::int64_t dim,
                                                     const PadValues& values, bool pad_first) {
  const comm::UserCall call("pad_across_processes()");
  values.require_known(paths);
  std::vector<std::vector<Described>> ranks;
  for (const auto& bytes : group.all_gather_bytes(signature(tensors)))
    ranks.push_back(read_signature(bytes));
  // Judged from what every rank knows of all, so that all throw or none.
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    bool alike = ranks[rank].size() == ranks.front().size();
    for (std::size_t index = 0; alike && index < ranks[rank].size(); ++index) {
      alike = ranks[rank][index].defined == ranks.front()[index].defined &&
              ranks[rank][index].shape.size() == ranks.front()[index].shape.size();
    }
    if (!alike) {
      throw DistributedError(
          concat("pad_across_processes in group \"", group.name(), "\" on rank ", group.rank(),
                 " needs as many tensors, of as many dims, on every rank, and those of rank ", rank,
                 " differ from those of rank 0."),
          "pad_across_processes", group.rank());
    }
    for (std::size_t index = 0; index < paths.size(); ++index) {
      const Described& tensor = ranks[rank][index];
      const auto dims = static_cast<std::int64_t>(tensor.shape.size());
      if (tensor.defined && dim < dims && dim >= -dims)
        values.require_fits(tensor.dtype, paths[index]);
    }
  }
  std::vector<at::Tensor> padded;
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    const at::Tensor& tensor = tensors[index];
    if (!tensor.defined() || dim >= tensor.dim() || dim < -tensor.dim()) {
      padded.push_back(tensor);
      continue;
    }
    const std::int64_t along = dim < 0 ? dim + tensor.dim() : dim;
    std::int64_t longest = 0;
    for (const auto& rank : ranks)
      longest = std::max(longest, rank[index].shape[static_cast<std::size_t>(along)]);
    const std::int64_t have = tensor.size(along);
    if (have == longest) {
      padded.push_back(tensor);
      continue;
    }
    auto shape = tensor.sizes().vec();
    shape[static_cast<std::size_t>(along)] = longest;
    at::Tensor longer = at::full(shape, values.at(paths[index]), tensor.options());
    longer.narrow(along, pad_first ? longest - have : 0, have).copy_(tensor);
    padded.push_back(std::move(longer));
  }
  return padded;
}

std::vector<Json> gather_object(const Json& object, const Group& group) {
  const comm::UserCall call("gather_object()");
  std::vector<Json> gathered;
  const auto add = [&](Json value) {
    if (value.is_array()) {
      for (auto& element : value) gathered.push_back(std::move(element));
    } else {
      gathered.push_back(std::move(value));
    }
  };
  if (group.size() == 1) {
    add(object);
    return gathered;
  }
  // CBOR keeps what JSON text loses: NaN, infinities, bytes that are not UTF-8.
  std::string bytes;
  Json::to_cbor(object, bytes);
  for (const auto& part : group.all_gather_bytes(bytes)) add(Json::from_cbor(part));
  return gathered;
}

void broadcast_object_list(std::vector<Json>& objects, const Group& group, int from) {
  const comm::UserCall call("broadcast_object_list()");
  if (group.size() == 1) return;
  std::string bytes;
  Json::to_cbor(Json(objects), bytes);
  const Json sent = Json::from_cbor(group.broadcast_bytes(bytes, from));
  if (sent.size() != objects.size()) {
    throw DistributedError(
        concat("broadcast_object_list in group \"", group.name(), "\" on rank ", group.rank(),
               " has a list of ", objects.size(), " and rank ", from, " sent ", sent.size(),
               " objects. Give lists of one length on every rank."),
        "broadcast_object_list", group.rank());
  }
  for (std::size_t index = 0; index < objects.size(); ++index) objects[index] = sent[index];
}

namespace detail {

std::vector<at::Tensor> concatenate_all(const std::vector<std::vector<at::Tensor>>& lists,
                                        std::int64_t dim) {
  if (lists.empty()) throw DataError("concatenate was given no trees. It needs at least one.");
  std::vector<at::Tensor> joined;
  for (std::size_t index = 0; index < lists.front().size(); ++index) {
    std::vector<at::Tensor> parts;
    for (const auto& list : lists) {
      if (list.size() != lists.front().size()) {
        throw DataError(concat("concatenate was given trees of ", lists.front().size(), " and of ",
                               list.size(), " tensors; their structure has to be one."));
      }
      if (list[index].defined())
        parts.push_back(list[index].dim() == 0 ? list[index].reshape({1}) : list[index]);
    }
    joined.push_back(parts.empty() ? at::Tensor() : at::cat(parts, dim));
  }
  return joined;
}

}  // namespace detail
}  // namespace accelerate::comm
