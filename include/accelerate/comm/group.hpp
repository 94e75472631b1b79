#pragma once

#include <accelerate/comm/work.hpp>

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace accelerate::comm {

enum class ReduceOp { sum, avg, min, max, product };

/// What went through a group since the last reset, by kind of operation ("all_reduce", ...), the
/// traffic of c10d::Reducer included.
struct Traffic {
  struct Count {
    std::int64_t calls = 0;
    /// Bytes of the full tensor of each call: what is reduced, broadcast, or gathered in all. The
    /// bytes on the wire follow from it and the algorithm, for example 2 (p - 1) / p of it for a
    /// ring all-reduce.
    std::int64_t bytes = 0;
  };
  std::map<std::string, Count> by_kind;
};

/// Who uses the group that a split gives.
enum class Sharing {
  /// The caller alone. The group ends with its last handle; its connections are closed at the next
  /// split after all its ranks have let go of it.
  none,
  /// The caller alone, until its last handle goes; then the group waits for the next split of this
  /// name and these processes. For what begins and ends many times, such as a prepared module.
  in_turn,
  /// All callers that split off these processes; the group itself where these are all of it. It
  /// ends with the group that it was split from.
  together
};

/// A set of processes that communicate. A cheap handle: copies share one group. In a group of one
/// every operation is the identity, so that one program serves one process and a thousand.
///
/// Collectives are asynchronous: they return Work. All ranks of the group call the same collectives
/// in the same order. Every failure is a DistributedError naming the operation and the rank.
class Group {
 public:
  struct Impl;
  /// A group of this process alone.
  Group();
  explicit Group(std::shared_ptr<Impl> impl);

  int rank() const noexcept;
  int size() const noexcept;
  /// "world", "dp_shard", ...
  const std::string& name() const noexcept;
  /// "gloo", "mpi", "nccl"; "none" for a group of one.
  const std::string& backend() const noexcept;
  /// Ranks in the world of this group's members, in order.
  const std::vector<int>& global_ranks() const noexcept;
  std::chrono::milliseconds timeout() const noexcept;
  /// The processes that give the same color, ordered by key, then by rank. Collective over this
  /// group.
  Group split(int color, int key, const std::string& name, Sharing sharing = Sharing::none) const;

  /// In place: `tensor` becomes the reduction over all ranks. avg is sum divided by size().
  Work all_reduce(const at::Tensor& tensor, ReduceOp op = ReduceOp::sum) const;
  /// In place: `tensor` becomes that of rank `source`.
  Work broadcast(const at::Tensor& tensor, int source = 0) const;
  /// `output` holds size() times the elements of `input`, rank after rank.
  Work all_gather_into(const at::Tensor& output, const at::Tensor& input) const;
  /// `input` holds size() times the elements of `output`; each rank receives its part, reduced.
  Work reduce_scatter_into(const at::Tensor& output, const at::Tensor& input,
                           ReduceOp op = ReduceOp::sum) const;
  /// Exchanges slices along dim 0. Empty splits mean equal parts.
  Work all_to_all_into(const at::Tensor& output, const at::Tensor& input,
                       std::vector<std::int64_t> output_splits = {},
                       std::vector<std::int64_t> input_splits = {}) const;
  Work send(const at::Tensor& tensor, int destination, int tag = 0) const;
  Work recv(const at::Tensor& tensor, int source, int tag = 0) const;
  /// Returns when every rank has come. The error names the ranks that did not, where the backend
  /// can tell.
  void barrier() const;

  /// Strings of any length from every rank, in rank order.
  std::vector<std::string> all_gather_bytes(const std::string& bytes) const;
  /// The string of rank `source`, on every rank.
  std::string broadcast_bytes(const std::string& bytes, int source = 0) const;
  /// One string for each rank from `source` (its `parts` has size() entries; the others' are
  /// ignored).
  std::string scatter_bytes(const std::vector<std::string>& parts, int source = 0) const;

  /// Calls and bytes since the last reset, those of groups split from this one included.
  Traffic traffic() const;
  void reset_traffic() const;

  const std::shared_ptr<Impl>& impl() const noexcept { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

}  // namespace accelerate::comm
