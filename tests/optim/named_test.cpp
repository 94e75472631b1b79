// Optimizers and schedules by DeepSpeed's names. The rates are what its lr_schedules.py gives.
#include <accelerate/base/error.hpp>
#include <accelerate/optim/named.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <nlohmann/json.hpp>

namespace accelerate::optim {
namespace {

std::vector<torch::optim::OptimizerParamGroup> one_group() {
  return {torch::optim::OptimizerParamGroup({at::ones({3}).requires_grad_(true)})};
}

std::unique_ptr<torch::optim::Optimizer> made(const std::string& type, const std::string& params,
                                              const std::optional<OffloadOptions>& offload = {}) {
  return make_optimizer(type, Json::parse(params), one_group(), offload);
}

TEST(Named, MakesOptimizersWithDeepSpeedsDefaults) {
  const auto adamw = made("AdamW", R"({"lr": 0.1, "betas": [0.8, 0.9], "eps": 1e-6})");
  ASSERT_NE(dynamic_cast<FusedAdamW*>(adamw.get()), nullptr);
  const auto& options = static_cast<FusedAdamWOptions&>(adamw->param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.1);
  EXPECT_EQ(options.betas(), (std::tuple{0.8, 0.9}));
  EXPECT_EQ(options.eps(), 1e-6);
  EXPECT_EQ(options.weight_decay(), 0.0);

  EXPECT_NE(dynamic_cast<FusedAdamW*>(made("Adam", R"({"weight_decay": 0.1})").get()), nullptr);
  EXPECT_NE(dynamic_cast<torch::optim::Adam*>(
                made("Adam", R"({"weight_decay": 0.1, "adam_w_mode": false})").get()),
            nullptr);
  const auto sgd = made("sgd", R"({"lr": 0.5, "momentum": 0.9, "nesterov": true})");
  EXPECT_EQ(static_cast<FusedSGDOptions&>(sgd->param_groups()[0].options()).momentum(), 0.9);

  const auto offloaded = made("AdamW", "{}", OffloadOptions().block_bytes(1 << 20));
  ASSERT_NE(dynamic_cast<OffloadedAdamW*>(offloaded.get()), nullptr);
  EXPECT_EQ(static_cast<OffloadedAdamW&>(*offloaded).offload().block_bytes(), 1 << 20);
}

TEST(Named, RefusesByName) {
  EXPECT_THROW(made("Lamb", "{}"), ConfigError);
  EXPECT_THROW(made("AdamW", R"({"lr": "high"})"), ConfigError);
  EXPECT_THROW(made("AdamW", R"({"betas": [0.9]})"), ConfigError);
  EXPECT_THROW(made("AdamW", R"({"bias_correction": false})"), ConfigError);
  EXPECT_THROW(made("AdamW", R"({"lr": -1})"), ConfigError);
  EXPECT_THROW(made("SGD", "{}", OffloadOptions()), UnsupportedError);
  EXPECT_THROW(made("Adam", R"({"weight_decay": 0.1, "adam_w_mode": false})", OffloadOptions()),
               UnsupportedError);
  try {
    made("AdamW", R"({"learning_rate": 1})");
    ADD_FAILURE();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("\"learning_rate\", which is not supported"),
              std::string::npos);
  }
  const auto optimizer = made("SGD", "{}");
  const auto schedule = [&](const char* type, const char* params) {
    return make_schedule(type, Json::parse(params), *optimizer);
  };
  EXPECT_THROW(schedule("OneCycle", "{}"), ConfigError);
  EXPECT_THROW(schedule("WarmupDecayLR", "{}"), ConfigError);
  EXPECT_THROW(schedule("WarmupLR", R"({"warmup_num_steps": 0})"), ConfigError);
  EXPECT_THROW(schedule("WarmupLR", R"({"warmup_num_steps": 1.5})"), ConfigError);
  EXPECT_THROW(schedule("WarmupLR", R"({"warmup_type": "cubic"})"), ConfigError);
  EXPECT_THROW(schedule("WarmupLR", R"({"warmup_max_lr": [1, 2]})"), ConfigError);
  EXPECT_THROW(schedule("WarmupLR", R"({"total_num_steps": 5})"), ConfigError);
}

TEST(Named, SchedulesGiveDeepSpeedsRates) {
  struct Row {
    const char* type;
    const char* params;
    std::vector<double> first, second;
  };
  const Row rows[] = {
      {"WarmupLR",
       R"({"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_num_steps": 5})",
       {0.01, 0.01, 0.09182854603394468, 0.13969517695233724, 0.17365709206788937, 0.2, 0.2},
       {0.01, 0.01, 0.09182854603394468, 0.13969517695233724, 0.17365709206788937, 0.2, 0.2}},
      {"WarmupLR",
       R"({"warmup_num_steps": 4, "warmup_type": "linear"})",
       {0.0, 0.0, 0.025, 0.05, 0.075, 0.1, 0.1},
       {0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01}},
      {"WarmupDecayLR",
       R"({"total_num_steps": 10, "warmup_min_lr": [0.0, 0.001], "warmup_max_lr": [0.1, 0.02],
           "warmup_num_steps": 4, "warmup_type": "linear"})",
       {0.0, 0.0, 0.025, 0.05, 0.075, 0.1, 1.0 / 12, 1.0 / 15, 0.05, 1.0 / 30, 1.0 / 60, 0.0, 0.0},
       {0.001, 0.001, 0.00575, 0.0105, 0.01525, 0.02, 0.016833333333333336, 0.013666666666666667,
        0.0105, 0.007333333333333333, 0.004166666666666667, 0.001, 0.001}},
      {"WarmupCosineLR",
       R"({"total_num_steps": 10, "warmup_min_ratio": 0.1, "warmup_num_steps": 4, "cos_min_ratio": 0.05})",
       {0.0, 0.01, 0.055, 0.08132331253245204, 0.1, 0.09363620667976086, 0.07625, 0.0525, 0.02875,
        0.011363793320239162, 0.005, 0.005},
       {0.0, 0.001, 0.0055, 0.008132331253245204, 0.01, 0.009363620667976085, 0.007625, 0.00525,
        0.002875, 0.0011363793320239163, 0.0005, 0.0005}},
      {"WarmupCosineLR",
       R"({"total_num_steps": 8, "warmup_num_steps": 1, "warmup_type": "linear"})",
       {0.0, 0.0, 0.05, 0.09330194006220302, 0.0750025, 0.050005, 0.0250075, 0.006708059937796987,
        1e-05, 1e-05},
       {0.0, 0.0, 0.005, 0.009330194006220302, 0.00750025, 0.0050005, 0.00250075,
        0.0006708059937796987, 1e-06, 1e-06}},
  };
  for (const auto& [type, params, first, second] : rows) {
    SCOPED_TRACE(params);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (double rate : {0.1, 0.01})
      groups.emplace_back(std::vector{at::ones({1}).requires_grad_(true)},
                          std::make_unique<FusedSGDOptions>(rate));
    const auto optimizer = make_optimizer("SGD", Json::object(), groups);
    auto schedule = make_schedule(type, Json::parse(params), *optimizer);
    for (std::size_t step = 0; step < first.size(); ++step) {
      EXPECT_NEAR(optimizer->param_groups()[0].options().get_lr(), first[step], 1e-12) << step;
      EXPECT_NEAR(optimizer->param_groups()[1].options().get_lr(), second[step], 1e-12) << step;
      schedule->step();
    }
    // Its place in the schedule is state.
    const Json state = schedule->state_dict();
    schedule->step();
    schedule->load_state_dict(state);
    EXPECT_EQ(schedule->last_step(), static_cast<std::int64_t>(first.size()));
  }
}

}  // namespace
}  // namespace accelerate::optim
