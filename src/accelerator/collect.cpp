#include <accelerate/accelerator/collect.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/comm/collectives.hpp>

#include "base/parse_json.hpp"
#include "comm/user_call.hpp"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

namespace accelerate::detail {
namespace {

// The rows of every rank, on the host. They differ in number, and a rank may have none at all, so
// they travel as bytes behind a line that says what they are.
std::vector<at::Tensor> gather_rows(const at::Tensor& own, const comm::Group& group) {
  if (group.size() == 1) return {own};
  std::string message = "null\n";
  if (own.defined()) {
    const at::Tensor rows = own.contiguous();
    message = Json{{"dtype", static_cast<int>(rows.scalar_type())}, {"shape", rows.sizes().vec()}}
                  .dump() +
              "\n";
    if (rows.nbytes() > 0)
      message.append(static_cast<const char*>(rows.const_data_ptr()), rows.nbytes());
  }
  std::vector<at::Tensor> by_rank;
  at::Tensor some;
  for (const std::string& other : group.all_gather_bytes(message)) {
    const std::size_t end = other.find('\n');
    const Json header = parse_json(other.substr(0, end));
    at::Tensor rows;
    if (!header.is_null()) {
      rows = at::empty(header.at("shape").get<std::vector<std::int64_t>>(),
                       static_cast<at::ScalarType>(header.at("dtype").get<int>()));
      if (rows.nbytes() > 0)  // without rows there is no memory to copy to
        std::memcpy(rows.mutable_data_ptr(), other.data() + end + 1, rows.nbytes());
      some = rows;
    }
    by_rank.push_back(rows);
  }
  for (at::Tensor& rows : by_rank) {
    if (!rows.defined()) rows = some.narrow(0, 0, 0);
  }
  return by_rank;
}

// The first `real` of `all` rows.
at::Tensor first_rows(const at::Tensor& tensor, std::int64_t real, std::int64_t all) {
  if (real == all) return tensor;
  if (tensor.dim() == 0 || tensor.size(0) != all) {
    throw DataError(text::concat(
        "gather_for_metrics() was given a tensor of shape [", text::join(tensor.sizes()),
        "], and the batch has ", all, " samples of which ", all - real,
        " only fill it up. Give tensors with one row for each sample, or use gather()."));
  }
  return tensor.narrow(0, 0, real);
}

}  // namespace

std::vector<at::Tensor> gather_real_rows(const std::vector<at::Tensor>& tensors,
                                         const LoaderProgress* progress, const comm::Group& group) {
  const comm::UserCall call("gather_for_metrics()");
  const bool in_order = progress == nullptr || progress->fill_is_last;
  if (!in_order) {
    // Each rank has a fill of its own, and perhaps another number of rows.
    std::vector<at::Tensor> own;
    for (const at::Tensor& tensor : tensors) {
      own.push_back(first_rows(tensor, progress->local_real_samples, progress->local_samples));
    }
    std::vector<std::int64_t> rows;
    for (const Json& other : comm::gather_object(Json(progress->local_real_samples), group)) {
      rows.push_back(other.get<std::int64_t>());
    }
    const std::int64_t most = *std::max_element(rows.begin(), rows.end());
    std::vector<at::Tensor> result;
    for (const at::Tensor& all : comm::gather_tensors(
             comm::pad_tensors_across_processes(own, std::vector<std::string>(own.size()), group,
                                                /*dim=*/0, /*values=*/0, /*pad_first=*/false),
             group)) {
      std::vector<at::Tensor> pieces;
      for (std::size_t rank = 0; rank < rows.size(); ++rank) {
        pieces.push_back(all.narrow(0, static_cast<std::int64_t>(rank) * most, rows[rank]));
      }
      result.push_back(at::cat(pieces));
    }
    return result;
  }
  std::vector<at::Tensor> result = comm::gather_tensors(tensors, group);
  if (progress == nullptr || progress->real_samples < 0 ||
      progress->real_samples == progress->global_samples) {
    return result;
  }
  for (at::Tensor& tensor : result)
    tensor = first_rows(tensor, progress->real_samples, progress->global_samples);
  return result;
}

void RowCollector::add(const std::vector<at::Tensor>& tensors) {
  const LoaderProgress* progress = gradients_->progress();
  std::vector<at::Tensor> batch;
  std::int64_t rows = -1;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.dim() == 0 || (rows >= 0 && tensor.size(0) != rows)) {
      throw DataError(
          "A batch of predictions to be collected has a tensor without one row for each sample. "
          "Give tensors whose "
          "first dimension is the sample.");
    }
    rows = tensor.size(0);
    std::int64_t real = rows;
    if (progress != nullptr && progress->local_samples == rows &&
        progress->local_real_samples >= 0) {
      real = progress->local_real_samples;
    }
    at::Tensor kept = tensor.detach().narrow(0, 0, real).to(at::kCPU);
    batch.push_back(kept.is_same(tensor) || kept.is_alias_of(tensor) ? kept.clone() : kept);
  }
  if (rows < 0) return;
  rows_.push_back(batch.front().size(0));
  batches_.push_back(std::move(batch));
}

std::vector<at::Tensor> RowCollector::gather() {
  const comm::UserCall call("gather() of a collector for metrics");
  // Rows of each batch on each rank: batches of one round lie rank after rank in the dataset.
  std::vector<std::vector<std::int64_t>> rows;
  std::size_t rounds = 0;
  std::size_t tensors = 0;
  const Json own{{"rows", rows_}, {"tensors", batches_.empty() ? 0 : batches_.front().size()}};
  for (const Json& other : comm::gather_object(own, group_)) {
    rows.push_back(other.at("rows").get<std::vector<std::int64_t>>());
    rounds = std::max(rounds, rows.back().size());
    tensors = std::max(tensors, other.at("tensors").get<std::size_t>());
  }
  if (rounds == 0)
    throw DataError("Predictions were to be gathered, and none were added on any rank.");

  std::vector<at::Tensor> result;
  for (std::size_t which = 0; which < tensors; ++which) {
    std::vector<at::Tensor> own_rows;
    for (const auto& batch : batches_) own_rows.push_back(batch.at(which));
    const std::vector<at::Tensor> by_rank =
        gather_rows(own_rows.empty() ? at::Tensor() : at::cat(own_rows), group_);
    std::vector<std::int64_t> taken(by_rank.size(), 0);
    std::vector<at::Tensor> pieces;
    for (std::size_t round = 0; round < rounds; ++round) {
      for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
        if (round >= rows[rank].size() || rows[rank][round] == 0) continue;
        pieces.push_back(by_rank[rank].narrow(0, taken[rank], rows[rank][round]));
        taken[rank] += rows[rank][round];
      }
    }
    result.push_back(pieces.empty() ? by_rank.front() : at::cat(pieces));
  }
  batches_.clear();
  rows_.clear();
  return result;
}

}  // namespace accelerate::detail
