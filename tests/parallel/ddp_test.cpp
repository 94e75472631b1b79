// Data parallelism on several ranks. The truth is the same module on the whole batch in one
// process, which every rank computes for itself.

#include "comm/world_impl.hpp"
#include "support/distributed.hpp"
#include "support/message_of.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/accelerator/prepared_script_module.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <sstream>

namespace accelerate {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using ::testing::Not;
using testing::world;

struct NetImpl : torch::nn::Module {
  torch::nn::Linear first{register_module("first", torch::nn::Linear(6, 16))};
  torch::nn::Linear second{register_module("second", torch::nn::Linear(16, 16))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(16, 3))};
  torch::nn::Linear spare{register_module("spare", torch::nn::Linear(16, 3))};
  torch::Tensor forward(torch::Tensor x, bool use_spare = true) {
    x = torch::tanh(second(torch::tanh(first(x))));
    return use_spare ? last(x) + spare(x) : last(x);
  }
};
TORCH_MODULE(Net);

Net make_net() {
  torch::manual_seed(7);
  Net net;
  net->to(torch::kDouble);
  return net;
}

constexpr int64_t kRows = 4;

torch::Tensor whole_batch(int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(100 + step));
  return torch::randn({kRows * world().size(), 6}, generator, torch::kDouble);
}
torch::Tensor own_rows(const torch::Tensor& batch) {
  return batch.narrow(0, kRows * world().rank(), kRows);
}

/// The largest difference between two modules' parameters.
double difference(const torch::nn::Module& a, const torch::nn::Module& b) {
  double most = 0;
  for (const auto& entry : a.named_parameters()) {
    most = std::max(
        most, (entry.value() - *b.named_parameters().find(entry.key())).abs().max().item<double>());
  }
  return most;
}

/// Trains for some steps on this rank's rows under `options`, and alone on all rows; returns how
/// far apart the modules end.
double train_and_compare(const DdpOptions& options, int64_t steps = 4, double lr = 0.1) {
  Net net = make_net();
  Net alone = make_net();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(lr).momentum(0.9));
  torch::optim::SGD sgd_alone(alone->parameters(), torch::optim::SGDOptions(lr).momentum(0.9));
  Accelerator accelerator(AcceleratorOptions().ddp(options));
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (int64_t step = 0; step < steps; ++step) {
    const auto batch = whole_batch(step);
    accelerator.backward(model(own_rows(batch)).square().mean());
    optimizer.step();
    optimizer.zero_grad();
    alone->forward(batch).square().mean().backward();
    sgd_alone.step();
    sgd_alone.zero_grad();
  }
  accelerator.verify_parameters(model);
  return difference(*net, *alone);
}

TEST(Ddp, TrainsAsOneProcessOnTheWholeBatch) {
  EXPECT_LT(train_and_compare(DdpOptions()), 1e-12);
  EXPECT_LT(train_and_compare(DdpOptions().gradient_as_bucket_view(true)), 1e-12);
  EXPECT_LT(train_and_compare(DdpOptions().bucket_cap_mb(0.001).first_bucket_mb(0.0005)), 1e-12);
  EXPECT_LT(train_and_compare(DdpOptions().find_unused_parameters(true)), 1e-12);
  EXPECT_LT(train_and_compare(DdpOptions().static_graph(true)), 1e-12);
  EXPECT_LT(train_and_compare(DdpOptions().static_graph(true).gradient_as_bucket_view(true)),
            1e-12);
}

TEST(Ddp, CompressionHooksStayNearTheTruth) {
  EXPECT_LT(train_and_compare(DdpOptions().comm_hook(CommHook::fp16)), 2e-3);
  EXPECT_LT(train_and_compare(DdpOptions().comm_hook(CommHook::bf16)), 2e-2);
  if (world().size() > 1) {
    // A hook that did nothing would pass the bounds above.
    EXPECT_GT(train_and_compare(DdpOptions().comm_hook(CommHook::bf16)), 1e-7);
  }
}

TEST(Ddp, PowerSgdWithFullRankLosesNothing) {
  const auto power =
      PowerSgdOptions().start_iteration(2).min_compression_rate(0.0).matrix_approximation_rank(64);
  EXPECT_LT(train_and_compare(DdpOptions().comm_hook(CommHook::power_sgd).power_sgd(power), 6),
            1e-9);
}

TEST(Ddp, PowerSgdCompressesAndKeepsRanksAlike) {
  if (world().size() == 1) GTEST_SKIP() << "one process sends nothing";
  for (const auto hook : {CommHook::power_sgd, CommHook::batched_power_sgd}) {
    for (const auto wrapper : {CommHook::no, CommHook::fp16, CommHook::bf16}) {
      const auto options = DdpOptions().comm_hook(hook).comm_wrapper(wrapper).power_sgd(
          PowerSgdOptions().start_iteration(2).min_compression_rate(1.0).matrix_approximation_rank(
              2));
      const double apart =
          train_and_compare(options, 8, 0.02);  // verifies that ranks are alike, too
      EXPECT_GT(apart, 1e-6) << "nothing was compressed";
      EXPECT_LT(apart, 0.1);
    }
  }
}

TEST(Ddp, RefusesOptionsThatCannotBe) {
  if (world().size() == 1) GTEST_SKIP() << "one process has no data parallelism";
  const auto attempt = [](const DdpOptions& options) {
    Net net = make_net();
    Accelerator accelerator(AcceleratorOptions().ddp(options));
    (void)accelerator.prepare(net);
  };
  EXPECT_THROW(attempt(DdpOptions().static_graph(true).find_unused_parameters(true)), ConfigError);
  EXPECT_THROW(attempt(DdpOptions().bucket_cap_mb(0)), ConfigError);
  EXPECT_THROW(attempt(DdpOptions().ignored_parameters({"nosuch.weight"})), ConfigError);
  EXPECT_THROW(attempt(DdpOptions().comm_wrapper(CommHook::fp16)), ConfigError);
  EXPECT_THROW(attempt(DdpOptions()
                           .comm_hook(CommHook::power_sgd)
                           .power_sgd(PowerSgdOptions().start_iteration(1))),
               ConfigError);
}

TEST(Ddp, ParameterUsedNowhereKeepsNoGradient) {
  Net net = make_net();
  Accelerator accelerator(AcceleratorOptions().ddp(DdpOptions().find_unused_parameters(true)));
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (int64_t step = 0; step < 3; ++step) {
    accelerator.backward(model(own_rows(whole_batch(step)), /*use_spare=*/false).square().mean());
    EXPECT_FALSE(net->spare->weight.grad().defined());
    optimizer.step();
    optimizer.zero_grad();
  }
}

TEST(Ddp, ParameterUsedOnSomeRanksGetsTheAverage) {
  Net net = make_net();
  Net alone = make_net();
  Accelerator accelerator(AcceleratorOptions().ddp(DdpOptions().find_unused_parameters(true)));
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  const auto batch = whole_batch(0);
  accelerator.backward(model(own_rows(batch), /*use_spare=*/world().rank() == 0).square().mean());
  torch::Tensor expected = torch::zeros_like(alone->spare->weight);
  alone->forward(batch.narrow(0, 0, kRows), true).square().mean().backward();
  expected = alone->spare->weight.grad() / world().size();
  EXPECT_LT((net->spare->weight.grad() - expected).abs().max().item<double>(), 1e-12);
}

TEST(Ddp, TheUnusedParametersMayChange) {
  Net net = make_net();
  Net alone = make_net();
  Accelerator accelerator(AcceleratorOptions().ddp(DdpOptions().find_unused_parameters(true)));
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::SGD sgd_alone(alone->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (int64_t step = 0; step < 6; ++step) {
    const auto used_by = [&](int rank) { return (step + rank) % 3 == 0; };
    const auto batch = whole_batch(step);
    accelerator.backward(model(own_rows(batch), used_by(world().rank())).square().mean());
    optimizer.step();
    optimizer.zero_grad();
    torch::Tensor loss = torch::zeros({}, torch::kDouble);
    for (int rank = 0; rank < world().size(); ++rank) {
      const auto rows = batch.narrow(0, kRows * rank, kRows);
      loss = loss + alone->forward(rows, used_by(rank)).square().mean() / world().size();
    }
    loss.backward();
    sgd_alone.step();
    sgd_alone.zero_grad();
  }
  EXPECT_LT(difference(*net, *alone), 1e-12);
}

TEST(Ddp, UnusedParameterWithoutTheFlagIsAnErrorAtTheStep) {
  if (world().size() == 1) GTEST_SKIP() << "one process may leave parameters unused";
  Net net = make_net();
  Accelerator accelerator;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  accelerator.backward(model(own_rows(whole_batch(0)), /*use_spare=*/false).square().mean());
  const auto next = [&, &model = model] { (void)model(own_rows(whole_batch(1))); };
  for (const std::string& message :
       {message_of<StateError>([&, &optimizer = optimizer] { optimizer.step(); }),
        message_of<StateError>(next)}) {
    EXPECT_THAT(message, HasSubstr("DdpOptions::find_unused_parameters"));
    EXPECT_THAT(message, HasSubstr("spare.weight, spare.bias"));
    EXPECT_THAT(message, Not(HasSubstr("last.weight")));
    EXPECT_THAT(message, Not(HasSubstr("Distributed")));
  }
}

TEST(Ddp, LoadedParametersAreAveragedOn) {
  // torch::load and set_ give a parameter other memory, and autograd another node for its gradient.
  for (const bool unused : {false, true}) {
    Net net = make_net();
    Net alone = make_net();
    Accelerator accelerator(AcceleratorOptions().ddp(DdpOptions().find_unused_parameters(unused)));
    torch::optim::SGD sgd(net->parameters(), 0.1);
    torch::optim::SGD sgd_alone(alone->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    for (int64_t step = 0; step < 5; ++step) {
      if (step == 0 || step == 2) {
        std::stringstream file;
        torch::save(alone, file);
        torch::load(net, file);
      } else if (step == 3) {
        const torch::NoGradGuard no_grad;
        net->first->weight.set_(net->first->weight.detach().clone());
      }
      accelerator.backward(model(own_rows(whole_batch(step))).square().mean());
      optimizer.step();
      optimizer.zero_grad();
      alone->forward(whole_batch(step)).square().mean().backward();
      sgd_alone.step();
      sgd_alone.zero_grad();
    }
    EXPECT_LT(difference(*net, *alone), 1e-12);
    accelerator.verify_parameters(model);
  }
}

TEST(Ddp, ParametersOfAnotherShapeAreRefused) {
  if (world().size() == 1) GTEST_SKIP() << "one process averages nothing";
  Net net = make_net();
  Accelerator accelerator;
  auto model = accelerator.prepare(net);
  {
    const torch::NoGradGuard no_grad;
    net->second->weight.set_(torch::zeros({16, 8}, torch::kDouble));
  }
  EXPECT_THAT(message_of<StateError>([&] { (void)model(own_rows(whole_batch(0))); }),
              HasSubstr("'second.weight' had the shape [16, 16]"));
}

TEST(Ddp, AHookOfTheUsersRunsBesideOurs) {
  struct Count final : torch::autograd::PostAccumulateGradHook {
    explicit Count(int& calls) : calls(calls) {}
    void operator()(const torch::Tensor&) override { ++calls; }
    int& calls;
  };
  Net net = make_net();
  Accelerator accelerator;
  auto model = accelerator.prepare(net);
  int calls = 0;
  torch::autograd::impl::set_post_acc_grad_hooks(net->first->weight,
                                                 std::make_unique<Count>(calls));
  accelerator.backward(model(own_rows(whole_batch(0))).square().mean());
  EXPECT_EQ(calls, 1);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto optimizer = accelerator.prepare(sgd);
  optimizer.zero_grad();
  if (world().size() == 1) return;
  net->forward(own_rows(whole_batch(0))).square().mean().backward();
  EXPECT_THROW(optimizer.step(), StateError);
}

TEST(Ddp, SparseGradientsAreAveraged) {
  using torch::nn::EmbeddingOptions;
  const auto run = [](bool alone) {
    torch::manual_seed(2);
    torch::nn::Embedding table(EmbeddingOptions(10, 4).sparse(true));
    table->to(torch::kDouble);
    torch::optim::SGD sgd(table->parameters(), 0.5);
    const auto rows = [](int64_t step) {
      return torch::arange(2 * world().size()).mul(3).add(step).remainder(10);
    };
    if (alone) {
      for (int64_t step = 0; step < 3; ++step) {
        table->forward(rows(step)).square().mean().backward();
        sgd.step();
        sgd.zero_grad();
      }
      return table->weight.detach().clone();
    }
    Accelerator accelerator;
    auto [model, optimizer] = accelerator.prepare(table, sgd);
    for (int64_t step = 0; step < 3; ++step) {
      accelerator.backward(model(rows(step).narrow(0, 2 * world().rank(), 2)).square().mean());
      optimizer.step();
      optimizer.zero_grad();
    }
    accelerator.verify_parameters(model);
    return table->weight.detach().clone();
  };
  EXPECT_LT((run(false) - run(true)).abs().max().item<double>(), 1e-12);
}

struct Fails : torch::autograd::Function<Fails> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw DataError("thrown on purpose");
  }
};

TEST(Ddp, ABackwardThatFailsOnOneRankIsToldToTheOthers) {
  if (world().size() == 1 || world().backend() == "mpi") return;
  const auto group = world().split(0, world().rank(), "one_fails");
  Net net = make_net();
  parallel::Ddp ddp(ModuleRecord(net.ptr()), group, DdpOptions());
  const parallel::ForwardContext context{.grad_enabled = true, .sync = true};
  ddp.before_forward(context);
  torch::Tensor output = net->forward(own_rows(whole_batch(0)));
  ddp.after_forward(context, {output});
  const bool fails = world().rank() == 0;
  if (fails) output = Fails::apply(output);
  const auto begin = std::chrono::steady_clock::now();
  const auto backward = [&] {
    try {
      output.sum().backward();
    } catch (...) {
      ddp.backward_failed();
      throw;
    }
  };
  if (fails) {
    EXPECT_THROW(backward(), DataError);
  } else {
    EXPECT_THAT(message_of<DistributedError>(backward),
                HasSubstr("the backward pass of rank 0 failed"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
    // The group is given up for good.
    EXPECT_THROW(group.barrier(), DistributedError);
    EXPECT_THROW(ddp.before_zero_grad({}), DistributedError);
    world().impl()->watch->say_failed_pass();  // for the tests that follow in the world
  }
  if (fails) ddp.before_zero_grad({});  // waits for the others
  world().barrier();
}

TEST(Ddp, NoSyncThenSyncIsAccumulation) {
  Net net = make_net();
  Net alone = make_net();
  Accelerator accelerator;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (int64_t micro = 0; micro < 3; ++micro) {
    const auto batch = whole_batch(micro);
    if (micro < 2) {
      auto local = accelerator.no_sync(model);
      accelerator.backward(model(own_rows(batch)).square().mean());
    } else {
      accelerator.backward(model(own_rows(batch)).square().mean());
    }
    alone->forward(batch).square().mean().backward();
  }
  for (const auto& entry : net->named_parameters()) {
    const auto expected = alone->named_parameters().find(entry.key())->grad();
    EXPECT_LT((entry.value().grad() - expected).abs().max().item<double>(), 1e-12) << entry.key();
  }
  optimizer.step();
}

TEST(Ddp, TriggeredSyncReducesForwardsMadeWithoutSync) {
  Net net = make_net();
  Net alone = make_net();
  Accelerator accelerator;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  torch::Tensor first, second;
  {
    auto local = accelerator.no_sync(model);
    first = model(own_rows(whole_batch(0))).square().mean();
    second = model(own_rows(whole_batch(1))).square().mean();
    accelerator.backward(first);
  }
  accelerator.trigger_sync_in_backward(model);
  accelerator.backward(second);
  alone->forward(whole_batch(0)).square().mean().backward();
  alone->forward(whole_batch(1)).square().mean().backward();
  EXPECT_LT((net->first->weight.grad() - alone->first->weight.grad()).abs().max().item<double>(),
            1e-12);
  optimizer.step();
  accelerator.verify_parameters(model);
}

TEST(Ddp, StepOnGradientsThatWereNeverReducedRaises) {
  Net net = make_net();
  Accelerator accelerator;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  net->forward(own_rows(whole_batch(0))).square().mean().backward();  // the bare module
  EXPECT_THROW(optimizer.step(), StateError);
  optimizer.zero_grad();
  // Cleared gradients are forgotten; the prepared way goes on working.
  accelerator.backward(model(own_rows(whole_batch(0))).square().mean());
  EXPECT_NO_THROW(optimizer.step());
  optimizer.zero_grad();
  if (world().size() == 1) return;  // nothing was to be averaged
  // Half the gradients from the bare module, after the prepared backward.
  accelerator.backward(model(own_rows(whole_batch(0))).square().mean());
  net->forward(own_rows(whole_batch(1))).square().mean().backward();
  EXPECT_THROW(optimizer.step(), StateError);
}

TEST(Ddp, RanksWithDifferentModulesAllRaiseAndNameTheFirstDifference) {
  if (world().size() == 1) GTEST_SKIP() << "one process cannot differ";
  Accelerator accelerator;
  const bool last = world().rank() == world().size() - 1;
  torch::nn::Sequential wide(torch::nn::Linear(4, 4), torch::nn::Linear(4, last ? 5 : 3));
  EXPECT_THAT(message_of<DistributedError>([&] { (void)accelerator.prepare(wide); }),
              HasSubstr("1.weight"));
  torch::nn::Sequential deep(torch::nn::Linear(4, 4));
  if (last) deep->push_back(torch::nn::Linear(4, 4));
  EXPECT_THAT(message_of<DistributedError>([&] { (void)accelerator.prepare(deep); }),
              HasSubstr("1.weight"));
  torch::nn::Sequential frozen(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
  if (last) frozen->parameters()[2].set_requires_grad(false);
  EXPECT_THAT(message_of<DistributedError>([&] { (void)accelerator.prepare(frozen); }),
              HasSubstr("1.weight"));
  torch::nn::Linear typed(4, 4);
  if (last) typed->to(torch::kDouble);
  EXPECT_THAT(message_of<DistributedError>([&] { (void)accelerator.prepare(typed); }),
              HasSubstr("weight"));
}

TEST(Ddp, EveryRankStartsFromRankZero) {
  Accelerator accelerator;
  torch::manual_seed(1000 + world().rank());
  torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  auto model = accelerator.prepare(net);
  EXPECT_NO_THROW(accelerator.verify_parameters(model));
}

TEST(Ddp, VerifyParametersNamesWhatDriftedApart) {
  if (world().size() == 1) GTEST_SKIP() << "one process cannot drift";
  Accelerator accelerator;
  Net net = make_net();
  auto model = accelerator.prepare(net);
  if (world().rank() == world().size() - 1) {
    torch::NoGradGuard no_grad;
    net->second->bias[3] += 1e-9;
  }
  try {
    accelerator.verify_parameters(model);
    ADD_FAILURE() << "the difference was not seen";
  } catch (const DistributedError& error) {
    EXPECT_THAT(error.what(), HasSubstr("second.bias"));
  }
}

TEST(Ddp, RunningStatisticsFollowRankZero) {
  Accelerator accelerator;
  torch::manual_seed(3);
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::BatchNorm1d(8),
                            torch::nn::Linear(8, 2));
  net->to(torch::kDouble);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (int64_t step = 0; step < 2; ++step) {
    accelerator.backward(model(own_rows(whole_batch(step))).square().mean());
    optimizer.step();
    optimizer.zero_grad();
  }
  model.eval();
  torch::NoGradGuard no_grad;
  (void)model(own_rows(whole_batch(9)));
  EXPECT_NO_THROW(accelerator.verify_parameters(model));
  // Ranks may evaluate different numbers of batches.
  for (int i = 0; i < world().rank(); ++i) (void)model(own_rows(whole_batch(9)));
}

TEST(Ddp, IgnoredParametersStayAsTheyAre) {
  if (world().size() == 1) GTEST_SKIP() << "one process ignores nothing";
  Net net = make_net();
  {
    torch::NoGradGuard no_grad;
    net->spare->weight.fill_(world().rank());
  }
  Accelerator accelerator(
      AcceleratorOptions().ddp(DdpOptions().ignored_parameters({"spare.weight", "spare.bias"})));
  auto model = accelerator.prepare(net);
  EXPECT_EQ(net->spare->weight[0][0].item<double>(), world().rank());
  accelerator.backward(model(own_rows(whole_batch(0))).square().mean());
  EXPECT_TRUE(net->spare->weight.grad().defined());
}

TEST(Ddp, RanksWithMoreBatchesGoOnWithoutTheOthers) {
  const int rank = world().rank();
  const int size = world().size();
  for (const bool unused : {false, true}) {
    Net net = make_net();
    Net alone = make_net();
    Accelerator accelerator(
        AcceleratorOptions().ddp(DdpOptions().find_unused_parameters(unused).bucket_cap_mb(0.001)));
    torch::optim::SGD sgd(net->parameters(), 0.1);
    torch::optim::SGD sgd_alone(alone->parameters(), 0.1);
    auto [model, optimizer] = accelerator.prepare(net, sgd);
    accelerator.join_uneven_inputs(model, [&, &model = model, &optimizer = optimizer] {
      for (int64_t step = 0; step < 2 + rank; ++step) {
        accelerator.backward(model(own_rows(whole_batch(step))).square().mean());
        optimizer.step();
        optimizer.zero_grad();
      }
    });
    // A rank that has run out adds nothing; the sum is divided by all ranks all the same.
    for (int64_t step = 0; step < 2 + size - 1; ++step) {
      torch::Tensor loss = torch::zeros({}, torch::kDouble);
      for (int other = 0; other < size; ++other) {
        if (step < 2 + other) {
          loss = loss +
                 alone->forward(whole_batch(step).narrow(0, kRows * other, kRows)).square().mean();
        }
      }
      (loss / size).backward();
      sgd_alone.step();
      sgd_alone.zero_grad();
    }
    EXPECT_LT(difference(*net, *alone), 1e-12);
    accelerator.verify_parameters(model);
  }
}

TEST(Ddp, TorchScriptModulesTrain) {
  Accelerator accelerator;
  torch::jit::Module script("Affine");
  torch::manual_seed(5);
  script.register_parameter("weight", torch::randn({6, 2}, torch::kDouble).requires_grad_(true),
                            /*is_buffer=*/false);
  script.define("def forward(self, x):\n  return torch.tanh(x.matmul(self.weight))\n");
  const auto weight = script.attr("weight").toTensor();
  const auto copy = weight.detach().clone().requires_grad_(true);
  std::vector<torch::Tensor> parameters{weight};
  torch::optim::SGD sgd(parameters, 0.1);
  auto [model, optimizer] = accelerator.prepare(script, sgd);
  const auto batch = whole_batch(0);
  accelerator.backward(model(own_rows(batch)).toTensor().square().mean());
  torch::tanh(batch.matmul(copy)).square().mean().backward();
  EXPECT_LT((weight.grad() - copy.grad()).abs().max().item<double>(), 1e-12);
  optimizer.step();
  accelerator.verify_parameters(model);
}

TEST(Ddp, ClippingSeesTheWholeGradient) {
  Net net = make_net();
  Net alone = make_net();
  Accelerator accelerator;
  auto model = accelerator.prepare(net);
  const auto batch = whole_batch(0);
  accelerator.backward(model(own_rows(batch)).square().mean());
  alone->forward(batch).square().mean().backward();
  for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    double expected = 0;
    for (const auto& parameter : alone->parameters()) {
      const double norm = torch::linalg_vector_norm(parameter.grad(), p).item<double>();
      expected = std::isinf(p) ? std::max(expected, norm) : expected + std::pow(norm, p);
    }
    if (!std::isinf(p)) expected = std::pow(expected, 1 / p);
    const auto found =
        accelerator.clip_grad_norm_(model, std::numeric_limits<double>::infinity(), p);
    EXPECT_NEAR(found.item<double>(), expected, 1e-12) << p;
  }
  const double before = accelerator.clip_grad_norm_(model, 0.01).item<double>();
  EXPECT_NEAR(model.strategy().grad_norm(2).item<double>(), 0.01 * before / (before + 1e-6), 1e-12);
  accelerator.clip_grad_value_(model, 1e-4);
  EXPECT_LE(model.strategy().grad_norm(std::numeric_limits<double>::infinity()).item<double>(),
            1e-4);
}

}  // namespace
}  // namespace accelerate
