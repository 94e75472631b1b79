#pragma once

// The loops that tests of sharded training share: the same module unsharded, where every rank
// computes its own part of the batch and gradients are averaged parameter by parameter, and
// sharded, as the accelerator drives it.

#include <support/distributed.hpp>
#include <support/zoo.hpp>

#include <accelerate/parallel/fsdp.hpp>
#include <intercept/key.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/utils.h>

#include <optional>
#include <vector>

namespace accelerate::parallel {

using accelerate::testing::world;

inline std::vector<at::Tensor> parameters_of(const ModuleRecord& record) {
  std::vector<at::Tensor> all;
  for (const NamedTensor& parameter : record.parameters()) all.push_back(parameter.tensor);
  return all;
}

inline std::vector<at::Tensor> leaves_of(const Fsdp& fsdp) {
  std::vector<at::Tensor> all;
  for (const NamedTensor& parameter : fsdp.module().parameters())
    all.push_back(fsdp.optimizer_leaf(parameter.tensor));
  return all;
}

// The mean over the ranks; undefined where no rank has one.
inline void average(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad() || parameter.numel() == 0) continue;
    const at::Tensor used = at::full({1}, parameter.grad().defined() ? 1.0 : 0.0);
    world().all_reduce(used).wait();
    if (used.item<double>() == 0) continue;
    at::Tensor gradient = parameter.grad().defined()
                              ? parameter.grad().contiguous()
                              : at::zeros(parameter.sizes(), parameter.options());
    gradient = gradient.detach();
    world().all_reduce(gradient, comm::ReduceOp::avg).wait();
    at::Tensor(parameter).mutable_grad() = gradient;
  }
}

inline at::Tensor global_norm(const std::vector<at::Tensor>& parameters, double p) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined() && parameter.numel() > 0)
      norms.push_back(at::linalg_vector_norm(parameter.grad(), p));
  }
  return at::linalg_vector_norm(at::stack(norms), p);
}

// With Adam's own eps, a gradient that is nothing but rounding (of a bias before a batch norm)
// would move its parameter by something that can be seen.
inline torch::optim::AdamWOptions adam_options() {
  return torch::optim::AdamWOptions(1e-2).eps(1e-4);
}

// Micro-batches of a step: as many as asked for, or one and two in turns.
constexpr int kInTurns = 0;
inline int micro_batches_of(int step, int asked) {
  return asked == kInTurns ? 1 + step % 2 : asked;
}

inline void seed_for(int step, int micro) {
  torch::manual_seed(1000 * step + 10 * micro + world().rank());
}

struct History {
  std::vector<double> losses;
  std::vector<double> norms;
};

inline History train_plain(zoo::Specimen& specimen, int steps, int micro_batches) {
  History run;
  const auto parameters = parameters_of(specimen.record);
  torch::optim::AdamW adam(parameters, adam_options());
  for (int step = 0; step < steps; ++step) {
    const int count = micro_batches_of(step, micro_batches);
    for (int micro = 0; micro < count; ++micro) {
      seed_for(step, micro);
      const at::Tensor loss = zoo::loss_of(specimen.forward(specimen.input(3)));
      loss.backward();
      run.losses.push_back(loss.item<double>());
    }
    average(parameters);
    run.norms.push_back(global_norm(parameters, 2).item<double>());
    adam.step();
    adam.zero_grad();
  }
  return run;
}

// The prepared loop, as the accelerator drives it.
inline History train_sharded(zoo::Specimen& specimen, Fsdp& fsdp, int steps, int micro_batches,
                             intercept::RegionPolicy* around_operators = nullptr) {
  History run;
  torch::optim::AdamW adam(leaves_of(fsdp), adam_options());
  for (int step = 0; step < steps; ++step) {
    const int count = micro_batches_of(step, micro_batches);
    for (int micro = 0; micro < count; ++micro) {
      seed_for(step, micro);
      const at::Tensor input = specimen.input(3);
      const ForwardContext context{.grad_enabled = true, .sync = micro + 1 == count};
      fsdp.before_forward(context);
      at::Tensor output;
      {
        std::optional<intercept::Region> region;
        if (around_operators != nullptr) region.emplace(*around_operators);
        output = specimen.forward(input);
      }
      fsdp.after_forward(context, {});
      const at::Tensor loss = zoo::loss_of(output);
      loss.backward();
      fsdp.after_backward();
      run.losses.push_back(loss.item<double>());
    }
    fsdp.check_gradients(leaves_of(fsdp));
    run.norms.push_back(fsdp.grad_norm(2).item<double>());
    adam.step();
    fsdp.after_step(leaves_of(fsdp));
    adam.zero_grad();
  }
  return run;
}

inline void expect_equal(const History& run, const History& expected, double tolerance) {
  ASSERT_EQ(run.losses.size(), expected.losses.size());
  for (std::size_t i = 0; i < run.losses.size(); ++i)
    EXPECT_NEAR(run.losses[i], expected.losses[i], tolerance) << "loss " << i;
  for (std::size_t i = 0; i < run.norms.size(); ++i)
    EXPECT_NEAR(run.norms[i], expected.norms[i], tolerance) << "norm " << i;
}

inline void expect_equal(const ModuleRecord& trained, const ModuleRecord& expected,
                         double tolerance) {
  for (std::size_t i = 0; i < expected.parameters().size(); ++i) {
    const at::Tensor& one = trained.parameters()[i].tensor;
    const at::Tensor& other = expected.parameters()[i].tensor;
    ASSERT_EQ(one.sizes(), other.sizes());
    EXPECT_FALSE(intercept::is_tagged(one));
    EXPECT_TRUE(at::allclose(one, other, 0, tolerance)) << expected.parameters()[i].name;
  }
  for (std::size_t i = 0; i < expected.buffers().size(); ++i) {
    EXPECT_TRUE(
        at::allclose(trained.buffers()[i].tensor, expected.buffers()[i].tensor, 0, tolerance));
  }
}

inline FsdpOptions small_units() { return FsdpOptions().min_num_params(40); }

}  // namespace accelerate::parallel
