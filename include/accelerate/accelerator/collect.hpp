#pragma once

#include <accelerate/comm/group.hpp>
#include <accelerate/core/tree.hpp>
#include <accelerate/optim/gradient_state.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace accelerate {

namespace detail {

/// The tensors of all ranks, concatenated, without the rows that only fill up the loader's batch.
/// `progress` is null outside of a loader. Throws DataError when such rows are to be left out of a
/// tensor that does not have one row a sample, for example a loss.
std::vector<at::Tensor> gather_real_rows(const std::vector<at::Tensor>& tensors,
                                         const LoaderProgress* progress, const comm::Group& group);

/// The untyped half of MetricsCollector.
class RowCollector {
 public:
  explicit RowCollector(comm::Group group, std::shared_ptr<GradientState> gradients)
      : group_(std::move(group)), gradients_(std::move(gradients)) {}

  void add(const std::vector<at::Tensor>& tensors);
  std::vector<at::Tensor> gather();

 private:
  comm::Group group_;
  std::shared_ptr<GradientState> gradients_;
  std::vector<std::vector<at::Tensor>> batches_;
  std::vector<std::int64_t> rows_;
};

}  // namespace detail

/// Predictions of a whole pass: kept on the host batch by batch, gathered over the ranks once, in
/// the order of the dataset, without repeated samples. Made by `Accelerator::collect_for_metrics`.
template <TensorTree T>
class MetricsCollector {
 public:
  MetricsCollector(comm::Group group, std::shared_ptr<GradientState> gradients)
      : rows_(std::move(group), std::move(gradients)) {}

  /// Adds this batch's rows (dim 0 of every tensor is the sample) and copies them to the host. Rows
  /// that were repeated to fill the batch are left out.
  void add(const T& tree) {
    shape_ = tree;
    rows_.add(tree::tensors(tree));
  }
  /// Collective. All rows of all ranks, on the host, and the collector is empty again. Throws
  /// DataError on every rank when nothing was added on any.
  T gather() {
    const std::vector<at::Tensor> gathered = rows_.gather();
    T result = std::move(shape_);
    std::size_t next = 0;
    tree::for_each_tensor(result, [&](at::Tensor& tensor) { tensor = gathered[next++]; });
    return result;
  }

 private:
  detail::RowCollector rows_;
  T shape_{};
};

}  // namespace accelerate
