// Compares optimizers, schedules and the rules of accumulation with Python's torch and Accelerate,
// which tests/optim/reference.py runs.
#include "support/python.hpp"

#include <accelerate/base/text.hpp>
#include <accelerate/optim/adafactor.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/optim/scheduler.hpp>
#include <accelerate/optim/schedules.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cmath>

namespace accelerate {
namespace {

using optim::Adafactor;
using optim::AdafactorOptions;
using optim::FusedAdamW;
using optim::FusedAdamWOptions;
using optim::FusedSGD;
using optim::FusedSGDOptions;

class Parity : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!testing::has_python())
      GTEST_SKIP() << "This LibTorch came without Python, so there is nothing to compare with.";
  }
  static const Json& reference() {
    static const Json json = testing::run_python("optim/reference.py");
    return json;
  }
};

// The same formulas as in reference.py.
std::vector<at::Tensor> tensors(at::ScalarType dtype, int step) {
  const std::vector<std::vector<std::int64_t>> shapes{{4, 3}, {5}, {2, 3, 4}, {}};
  std::vector<at::Tensor> result;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    const at::Tensor index =
        at::arange(c10::multiply_integers(shapes[i]), at::kDouble).reshape(shapes[i]);
    const auto offset = static_cast<double>(i);
    result.push_back(
        (step == 0 ? at::sin(index + offset) : at::cos(index * step + offset) * 0.5).to(dtype));
  }
  return result;
}

std::vector<at::Tensor> parameters(at::ScalarType dtype) {
  auto made = tensors(dtype, 0);
  for (at::Tensor& tensor : made) tensor.requires_grad_(true);
  return made;
}

void train(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& parameters, int first,
           int last) {
  for (int step = first; step <= last; ++step) {
    const auto gradients = tensors(parameters[0].scalar_type(), step);
    for (std::size_t i = 0; i < parameters.size(); ++i)
      parameters[i].mutable_grad() = gradients[i].clone();
    optimizer.step();
  }
}

void expect_equal(const std::vector<at::Tensor>& parameters, const Json& expected, double tolerance,
                  const std::string& name) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const auto wanted = expected.at(i).get<std::vector<double>>();
    const at::Tensor found = parameters[i].detach().to(at::kDouble).flatten();
    ASSERT_EQ(found.numel(), static_cast<std::int64_t>(wanted.size())) << name;
    for (std::size_t j = 0; j < wanted.size(); ++j) {
      const double value = found[static_cast<std::int64_t>(j)].item<double>();
      if (tolerance == 0.0) {
        EXPECT_EQ(value, wanted[j]) << name << ", parameter " << i << ", element " << j;
      } else {
        EXPECT_NEAR(value, wanted[j], tolerance)
            << name << ", parameter " << i << ", element " << j;
      }
    }
  }
}

const std::vector<std::pair<std::string, at::ScalarType>> kDtypes{
    {"float32", at::kFloat}, {"float64", at::kDouble}, {"bfloat16", at::kBFloat16}};

TEST_F(Parity, FusedAdamWIsPythonsBitForBit) {
  const std::map<std::string, FusedAdamWOptions> cases{
      {"plain", FusedAdamWOptions(0.02)},
      {"amsgrad",
       FusedAdamWOptions(0.02).betas({0.8, 0.9}).eps(1e-6).weight_decay(0.1).amsgrad(true)},
      {"maximize", FusedAdamWOptions(0.02).maximize(true)}};
  for (const auto& [dtype_name, dtype] : kDtypes) {
    for (const auto& [name, options] : cases) {
      const auto made = parameters(dtype);
      FusedAdamW optimizer(made, options);
      train(optimizer, made, 1, 5);
      const std::string key = "adamw." + name + "." + dtype_name;
      expect_equal(made, reference().at("optimizers").at(key), 0.0, key);
    }
  }
}

TEST_F(Parity, FusedSgdIsPythonsBitForBit) {
  const std::map<std::string, FusedSGDOptions> cases{
      {"plain", FusedSGDOptions(0.1)},
      {"momentum", FusedSGDOptions(0.1).momentum(0.9).dampening(0.1).weight_decay(0.01)},
      {"nesterov", FusedSGDOptions(0.1).momentum(0.9).nesterov(true).maximize(true)}};
  for (const auto& [dtype_name, dtype] : kDtypes) {
    for (const auto& [name, options] : cases) {
      const auto made = parameters(dtype);
      FusedSGD optimizer(made, options);
      train(optimizer, made, 1, 5);
      const std::string key = "sgd." + name + "." + dtype_name;
      expect_equal(made, reference().at("optimizers").at(key), 0.0, key);
    }
  }
}

TEST_F(Parity, AdafactorIsPythonsBitForBit) {
  const std::map<std::string, AdafactorOptions> cases{{"plain", AdafactorOptions()},
                                                      {"tuned", AdafactorOptions(0.3)
                                                                    .beta2_decay(-0.5)
                                                                    .eps1(1e-4)
                                                                    .eps2(1e-2)
                                                                    .d(1.5)
                                                                    .weight_decay(0.1)
                                                                    .maximize(true)}};
  for (const auto& [dtype_name, dtype] : kDtypes) {
    if (dtype == at::kBFloat16) continue;
    for (const auto& [name, options] : cases) {
      const auto made = parameters(dtype);
      Adafactor optimizer(made, options);
      train(optimizer, made, 1, 5);
      const std::string key = "adafactor." + name + "." + dtype_name;
      expect_equal(made, reference().at("optimizers").at(key), 0.0, key);
    }
  }
}

/// Two groups with rates 0.1 and 0.02, as in reference.py.
template <class O, class Options>
std::unique_ptr<O> two_groups(Options options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (double rate : {0.1, 0.02}) {
    auto own = std::make_unique<Options>(options);
    own->set_lr(rate);
    groups.emplace_back(std::vector<at::Tensor>{at::zeros({1}).requires_grad_(true)},
                        std::move(own));
  }
  return std::make_unique<O>(groups, options);
}

std::unique_ptr<torch::optim::SGD> two_groups() {
  return two_groups<torch::optim::SGD>(torch::optim::SGDOptions(0.0));
}

void expect_schedule(optim::Scheduler& schedule, const std::function<double()>& momentum,
                     const std::string& name, const Json& expected) {
  ASSERT_FALSE(expected.empty()) << name;
  for (std::size_t step = 0; step < expected.size(); ++step) {
    const auto& rates = schedule.get_last_lr();
    for (std::size_t group = 0; group < rates.size(); ++group) {
      const double wanted = expected[step][group].get<double>();
      EXPECT_NEAR(rates[group], wanted, 1e-15) << name << ", step " << step << ", group " << group;
      EXPECT_EQ(schedule.optimizer().param_groups()[group].options().get_lr(), rates[group]);
    }
    if (momentum) {
      EXPECT_NEAR(momentum(), expected[step][2].get<double>(), 1e-15) << name << ", step " << step;
    }
    schedule.step();
  }
}

TEST_F(Parity, SchedulesAreThoseOfTorchAndTransformers) {
  const Json& expected = reference().at("schedules");
  const auto compare = [&](const std::string& name, auto&& make) {
    const auto optimizer = two_groups();
    auto schedule = make(*optimizer);
    expect_schedule(schedule, nullptr, name, expected.at(name));
  };
  using O = torch::optim::Optimizer;
  compare("lambda", [](O& o) {
    return optim::LambdaLR(o, {[](std::int64_t s) { return std::pow(0.9, s); },
                               [](std::int64_t s) { return 1.0 / static_cast<double>(s + 1); }});
  });
  compare("constant", [](O& o) { return optim::constant_schedule_with_warmup(o, 3); });
  compare("linear", [](O& o) { return optim::linear_schedule_with_warmup(o, 3, 10); });
  compare("cosine", [](O& o) { return optim::cosine_schedule_with_warmup(o, 2, 10); });
  compare("cosine.waves", [](O& o) { return optim::cosine_schedule_with_warmup(o, 0, 10, 1.5); });
  compare("restarts",
          [](O& o) { return optim::cosine_with_hard_restarts_schedule_with_warmup(o, 2, 12, 3); });
}

TEST_F(Parity, OneCycleIsTorchsWithMomentum) {
  using Options = optim::OneCycleLROptions;
  const std::vector<double> peaks{0.1, 0.05};
  const std::map<std::string, Options> cases{
      {"plain", Options(peaks, 10)},
      {"linear", Options(peaks, 11)
                     .pct_start(0.4)
                     .anneal_strategy(Options::Anneal::linear)
                     .div_factor(10)
                     .final_div_factor(100)},
      {"three_phase", Options(peaks, 20).three_phase(true).base_momentum(0.7).max_momentum(0.9)},
      {"short", Options(peaks, 2)}};
  for (const auto& [name, options] : cases) {
    const auto& expected = reference().at("schedules");
    const auto with = [&](auto optimizer, auto momentum, const std::string& kind) {
      optim::OneCycleLR schedule(*optimizer, options);
      expect_schedule(
          schedule, [&] { return momentum(optimizer->param_groups()[0].options()); },
          name + "." + kind, expected.at("one_cycle." + name + "." + kind));
    };
    const auto beta1 = [](auto options_of) {
      return [options_of](torch::optim::OptimizerOptions& options) {
        return std::get<0>(options_of(options).betas());
      };
    };
    with(
        two_groups<torch::optim::SGD>(torch::optim::SGDOptions(0.0).momentum(0.5)),
        [](auto& options) { return static_cast<torch::optim::SGDOptions&>(options).momentum(); },
        "sgd");
    with(
        two_groups<FusedSGD>(FusedSGDOptions(0.0).momentum(0.5)),
        [](auto& options) { return static_cast<FusedSGDOptions&>(options).momentum(); }, "sgd");
    with(two_groups<torch::optim::AdamW>(torch::optim::AdamWOptions(0.0)), beta1([
         ](auto& options) -> auto& { return static_cast<torch::optim::AdamWOptions&>(options); }),
         "adamw");
    with(two_groups<FusedAdamW>(FusedAdamWOptions(0.0)),
         beta1([](auto& options) -> auto& { return static_cast<FusedAdamWOptions&>(options); }),
         "adamw");
  }
}

TEST_F(Parity, AccumulationFollowsTheOriginalsRule) {
  for (const auto& [key, expected] : reference().at("accumulation").items()) {
    const auto parts = text::split(key, '.');
    const int batches = std::stoi(parts[0]);
    GradientState state(GradientAccumulationOptions()
                            .num_steps(std::stoi(parts[1]))
                            .sync_with_dataloader(parts[2] == "1"));
    std::vector<int> syncs;
    for (int pass = 0; pass < 2; ++pass) {
      LoaderProgress progress;
      state.loader_begins(progress);
      for (int batch = 0; batch < batches; ++batch) {
        progress.end_of_dataloader = batch == batches - 1;
        syncs.push_back(state.begin_micro_batch() ? 1 : 0);
      }
      state.loader_ends(progress);
    }
    EXPECT_EQ(syncs, expected.get<std::vector<int>>())
        << batches << " batches, " << parts[1] << " steps, with loader: " << parts[2];
  }
}

TEST_F(Parity, PreparedSchedulersFollowTheOriginals) {
  // An optimizer whose steps are skipped when told so, as a scaler would.
  const auto run = [](std::int64_t processes, const std::vector<int>& syncs,
                      const std::vector<int>& skipped, bool split, auto make) {
    auto gradients = std::make_shared<GradientState>();
    auto scaler = std::make_shared<GradScaler>();
    const at::Tensor weight = at::zeros({1}).requires_grad_(true);
    auto optimizer = prepare_optimizer(torch::optim::SGD({weight}, torch::optim::SGDOptions(0.1)),
                                       gradients, scaler);
    auto schedule = make(optimizer.optimizer());
    using S = typename decltype(schedule)::element_type;
    PreparedScheduler<S> prepared(
        schedule, std::make_shared<SchedulerCore>(
                      gradients, std::vector{optimizer.core()},
                      SchedulerOptions().num_processes(processes).split_batches(split)));
    std::vector<double> rates;
    for (std::size_t i = 0; i < syncs.size(); ++i) {
      gradients->set_sync_gradients(syncs[i] == 1);
      if (syncs[i] == 1) {
        scaler->scale(at::zeros({}));
        weight.mutable_grad() = at::full({1}, skipped[i] == 1 ? INFINITY : 1.0);
        optimizer.step();
        EXPECT_EQ(optimizer.step_was_skipped(), skipped[i] == 1);
      }
      prepared.step();
      rates.push_back(optimizer.learning_rates()[0]);
    }
    return rates;
  };
  const auto falling = [](torch::optim::Optimizer& o) {
    return std::make_shared<optim::LambdaLR>(
        o, [](std::int64_t step) { return 1.0 - static_cast<double>(step) / 20.0; });
  };
  const auto one_cycle = [](torch::optim::Optimizer& o) {
    return std::make_shared<optim::OneCycleLR>(
        o, optim::OneCycleLROptions(0.1, 20).cycle_momentum(false));
  };
  const std::vector<int> ones(6, 1), zeros(6, 0), pairs{0, 1, 0, 1, 0, 1}, some{0, 1, 0, 1, 1, 0};
  const std::map<std::string, std::vector<double>> found{
      {"processes_2", run(2, ones, zeros, false, falling)},
      {"processes_4_accumulation_2", run(4, pairs, zeros, false, falling)},
      {"skipped", run(2, ones, some, false, falling)},
      {"split", run(2, ones, zeros, true, falling)},
      {"one_cycle", run(3, ones, zeros, false, one_cycle)}};
  const Json& expected = reference().at("prepared_schedulers");
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, rates] : found) {
    const auto wanted = expected.at(name).get<std::vector<double>>();
    ASSERT_EQ(rates.size(), wanted.size());
    for (std::size_t i = 0; i < rates.size(); ++i)
      EXPECT_NEAR(rates[i], wanted[i], 1e-15) << name << ", step " << i;
  }
}

}  // namespace
}  // namespace accelerate
