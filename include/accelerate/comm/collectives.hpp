#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/comm/group.hpp>
#include <accelerate/core/pad_values.hpp>
#include <accelerate/core/tree.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

/// Collectives over trees of tensors and JSON values. All are blocking; all ranks call them with
/// trees of the same structure. In a group of one they return what they were given.
namespace accelerate::comm {

/// How `reduce` combines.
enum class Reduction { sum, mean };

/// The same on a list of tensors; the templates below walk the tree.
std::vector<at::Tensor> gather_tensors(const std::vector<at::Tensor>& tensors, const Group& group);
std::vector<at::Tensor> reduce_tensors(const std::vector<at::Tensor>& tensors, const Group& group,
                                       Reduction reduction, double scale);
std::vector<at::Tensor> broadcast_tensors(const std::vector<at::Tensor>& tensors,
                                          const Group& group, int from);
/// `paths`: of each tensor.
std::vector<at::Tensor> pad_tensors_across_processes(const std::vector<at::Tensor>& tensors,
                                                     const std::vector<std::string>& paths,
                                                     const Group& group, std::int64_t dim,
                                                     const PadValues& values, bool pad_first);

namespace detail {
/// `node` with its tensors replaced, in order.
template <class T>
T with_tensors(T node, const std::vector<at::Tensor>& tensors) {
  std::size_t next = 0;
  tree::for_each_tensor(node, [&](at::Tensor& tensor) { tensor = tensors[next++]; });
  return node;
}
}  // namespace detail

/// Every tensor of all ranks, concatenated along dim 0 in rank order; 0-dim tensors become 1-dim.
/// Shapes and dtypes must be equal on all ranks: otherwise every rank throws a DistributedError
/// that lists each rank's (pad_across_processes first makes them equal). Undefined tensors stay
/// undefined.
template <TensorTree T>
T gather(const T& node, const Group& group) {
  return detail::with_tensors(node, gather_tensors(tree::tensors(node), group));
}

/// Every tensor summed over all ranks, or their mean, times `scale`; the given tensors stay as they
/// are. The mean of integers is refused.
template <TensorTree T>
T reduce(const T& node, const Group& group, Reduction reduction = Reduction::sum,
         double scale = 1.0) {
  return detail::with_tensors(node, reduce_tensors(tree::tensors(node), group, reduction, scale));
}

/// Every tensor as rank `from` has it. The other ranks' tensors, which must have the same shapes
/// and dtypes (checked, as in `gather`), are written to in place.
template <TensorTree T>
T broadcast(const T& node, const Group& group, int from = 0) {
  return detail::with_tensors(node, broadcast_tensors(tree::tensors(node), group, from));
}

/// Every tensor made as long along `dim` as the longest of any rank, by entries put after it, or
/// before it with `pad_first`: of one value, or of `PadValues(0).field("labels", -100)`. Tensors
/// without that dim are returned as they are. Throws ConfigError when a value does not fit a
/// tensor's dtype, or a field is named that the tree does not have.
template <TensorTree T>
T pad_across_processes(const T& node, const Group& group, std::int64_t dim = 0,
                       const PadValues& values = 0, bool pad_first = false) {
  return detail::with_tensors(
      node, pad_tensors_across_processes(tree::tensors(node), tree::tensor_paths(node), group, dim,
                                         values, pad_first));
}

/// JSON values of all ranks in rank order. The elements of an array are put one after another, so
/// that lists are concatenated; any other value is one entry.
std::vector<Json> gather_object(const Json& object, const Group& group);

/// `objects` as rank `from` has them; the other ranks' list, of the same length, is replaced.
void broadcast_object_list(std::vector<Json>& objects, const Group& group, int from = 0);

/// Rows [begin, end) of every tensor.
template <TensorTree T>
T slice(const T& node, std::int64_t begin, std::int64_t end) {
  return tree::map(node, [&](const at::Tensor& tensor) { return tensor.slice(0, begin, end); });
}

/// Trees of one structure, their tensors concatenated along `dim`; other leaves are the first
/// tree's. Throws DataError for an empty list or trees with unlike numbers of tensors.
template <TensorTree T>
T concatenate(const std::vector<T>& nodes, std::int64_t dim = 0);

namespace detail {
std::vector<at::Tensor> concatenate_all(const std::vector<std::vector<at::Tensor>>& lists,
                                        std::int64_t dim);
}

template <TensorTree T>
T concatenate(const std::vector<T>& nodes, std::int64_t dim) {
  std::vector<std::vector<at::Tensor>> lists;
  for (const auto& node : nodes) lists.push_back(tree::tensors(node));
  auto joined = detail::concatenate_all(lists, dim);
  return detail::with_tensors(nodes.front(), joined);
}

}  // namespace accelerate::comm
