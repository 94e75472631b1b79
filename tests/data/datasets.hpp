#pragma once

#include <accelerate/data/loader_core.hpp>

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/tensor.h>
#include <torch/data/dataloader_options.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/stateful.h>
#include <torch/data/samplers/random.h>
#include <torch/data/samplers/sequential.h>
#include <torch/data/transforms/stack.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace data_test {

using Example = torch::data::Example<>;

/// Sample i is [i, i] with target i; counts what is read.
struct Numbers : torch::data::datasets::Dataset<Numbers> {
  explicit Numbers(std::size_t size) : size_(size) {}
  Example get(std::size_t index) override {
    ++*reads;
    const auto value = static_cast<std::int64_t>(index);
    return {at::full({2}, value, at::kFloat), at::full({}, value, at::kLong)};
  }
  std::optional<std::size_t> size() const override { return size_; }
  std::shared_ptr<std::atomic<std::int64_t>> reads = std::make_shared<std::atomic<std::int64_t>>(0);
  std::size_t size_;
};

inline auto stacked(std::size_t size) {
  return Numbers(size).map(torch::data::transforms::Stack<>());
}

inline std::vector<std::int64_t> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kCPU, at::kLong).contiguous();
  return {flat.const_data_ptr<std::int64_t>(), flat.const_data_ptr<std::int64_t>() + flat.numel()};
}

/// The targets of every batch of a pass.
template <class Loader>
std::vector<std::vector<std::int64_t>> pass(Loader& loader) {
  std::vector<std::vector<std::int64_t>> batches;
  for (auto& batch : loader) batches.push_back(values(batch.target));
  return batches;
}

using Batches = std::vector<std::vector<std::int64_t>>;

inline std::vector<std::int64_t> flat(const Batches& batches) {
  std::vector<std::int64_t> all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

inline accelerate::data::LoaderContext context(std::int64_t seed = 42) {
  accelerate::data::LoaderContext context;
  context.seed = seed;
  return context;
}

template <class Function>
std::string message_of(Function&& function) {
  try {
    function();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing was thrown";
}

inline torch::data::DataLoaderOptions options(std::size_t batch, std::size_t workers = 0) {
  return torch::data::DataLoaderOptions().batch_size(batch).workers(workers);
}

}  // namespace data_test
