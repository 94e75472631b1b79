// DeepSpeed's configuration: what is read, filled in and refused.
#include <accelerate/base/error.hpp>
#include <accelerate/parallel/deepspeed.hpp>

#include <gtest/gtest.h>

#include <fstream>

namespace accelerate::parallel {
namespace {

using Device = DeepSpeedOffload::Device;

// The files of Hugging Face's documentation for ZeRO 2 and 3, with everything left to the program.
constexpr const char* kZero2 = R"({
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000,
           "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true,
    "reduce_scatter": true, "reduce_bucket_size": 2e8, "contiguous_gradients": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
})";
constexpr const char* kZero3 = R"({
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto",
                "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 4, "fast_init": false},
    "offload_param": {"device": "cpu", "pin_memory": true},
    "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
    "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
  "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": false, "overlap_events": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"
})";

DeepSpeedContext program() {
  DeepSpeedContext context;
  context.world_size = 4;
  context.micro_batch_size = 8;
  context.gradient_accumulation_steps = 2;
  context.hidden_size = 1000;
  context.lr = 3e-4;
  context.weight_decay = 0.1;
  context.betas = {0.9, 0.95};
  context.eps = 1e-7;
  context.warmup_num_steps = 0;
  context.total_num_steps = 500;
  return context;
}

DeepSpeedConfig read(const std::string& json, const DeepSpeedContext& context = program()) {
  return DeepSpeedConfig::read(Json::parse(json), context);
}

std::string refusal(const std::string& json, const DeepSpeedContext& context = program()) {
  try {
    read(json, context);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(DeepSpeed, FillsInWhatTheDocumentedZero2FileLeavesOpen) {
  DeepSpeedContext context = program();
  context.mixed_precision = MixedPrecision::fp16;
  const DeepSpeedConfig config = read(kZero2, context);
  EXPECT_EQ(config.stage, 2);
  EXPECT_EQ(config.optimizer_offload.device, Device::cpu);
  EXPECT_EQ(config.parameter_offload.device, Device::none);
  EXPECT_EQ(config.micro_batch_size, 8);
  EXPECT_EQ(config.gradient_accumulation_steps, 2);
  EXPECT_EQ(config.train_batch_size, 64);
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_EQ(config.mixed_precision, MixedPrecision::fp16);
  EXPECT_EQ(config.loss_scale.initial, 65536.0);
  EXPECT_EQ(config.loss_scale.window, 1000);
  EXPECT_EQ(config.loss_scale.hysteresis, 2);
  EXPECT_EQ(config.loss_scale.minimum, 1.0);
  EXPECT_EQ(config.reduce_bucket_size, 200000000);
  ASSERT_TRUE(config.optimizer.has_value());
  EXPECT_EQ(config.optimizer->type, "AdamW");
  EXPECT_EQ(config.optimizer->params,
            Json::parse(R"({"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": 0.1})"));
  ASSERT_TRUE(config.scheduler.has_value());
  EXPECT_EQ(config.scheduler->params,
            Json::parse(R"({"warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 1})"));
  EXPECT_EQ(config.without_effect,
            (std::vector<std::string>{
                "zero_optimization.offload_optimizer.pin_memory", "zero_optimization.overlap_comm",
                "zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter",
                "zero_optimization.allgather_partitions", "zero_optimization.allgather_bucket_size",
                "steps_per_print", "wall_clock_breakdown"}));
}

TEST(DeepSpeed, FillsInWhatTheDocumentedZero3FileLeavesOpen) {
  DeepSpeedContext context = program();
  context.mixed_precision = MixedPrecision::bf16;
  const DeepSpeedConfig config = read(kZero3, context);
  EXPECT_EQ(config.stage, 3);
  EXPECT_EQ(config.optimizer_offload.device, Device::nvme);
  EXPECT_EQ(config.optimizer_offload.nvme_path, "/local_nvme");
  EXPECT_EQ(config.parameter_offload.device, Device::cpu);
  EXPECT_EQ(config.mixed_precision, MixedPrecision::bf16);
  EXPECT_EQ(config.reduce_bucket_size, 1000000);
  EXPECT_EQ(config.max_live_parameters, 1000000000);
  EXPECT_TRUE(config.prefetch);
  EXPECT_TRUE(config.gather_on_save);
  EXPECT_EQ(config.scheduler->params.at("total_num_steps"), 500);

  // The same file trains in fp32 when the program says nothing.
  EXPECT_EQ(read(kZero3).mixed_precision, MixedPrecision::no);
}

TEST(DeepSpeed, NamesEveryAutoThatNobodyKnows) {
  DeepSpeedContext nothing;
  nothing.micro_batch_size = 1;
  const std::string message = refusal(kZero3, nothing);
  for (const char* key :
       {"optimizer.params.lr", "optimizer.params.weight_decay", "scheduler.params.total_num_steps",
        "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps",
        "zero_optimization.reduce_bucket_size", "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold"}) {
    EXPECT_NE(message.find(std::string("\"") + key + "\" is \"auto\""), std::string::npos)
        << key << " in: " << message;
  }
  EXPECT_EQ(message.find("warmup_min_lr"), std::string::npos);
}

TEST(DeepSpeed, ChecksBatchSizes) {
  struct Row {
    const char* json;
    std::int64_t micro, steps, total;
  };
  for (
      const auto& [json, micro, steps, total] : std::vector<Row>{
          {R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2})",
           8, 2, 64},
          {R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4})", 4, 4, 64},
          {R"({"train_batch_size": 64, "gradient_accumulation_steps": 4})", 4, 4, 64},
          {R"({"train_batch_size": 64})", 16, 1, 64},
          {R"({"train_micro_batch_size_per_gpu": 3})", 3, 1, 12},
          {R"({"gradient_accumulation_steps": "auto"})", 8, 2, 64},
          {"{}", 8, 1, 32}}) {
    SCOPED_TRACE(json);
    const auto config = read(json);
    EXPECT_EQ(config.micro_batch_size, micro);
    EXPECT_EQ(config.gradient_accumulation_steps, steps);
    EXPECT_EQ(config.train_batch_size, total);
    EXPECT_FALSE(config.gradient_clipping.has_value());
    EXPECT_EQ(config.stage, 0);
  }
  EXPECT_NE(
      refusal(
          R"({"train_batch_size": 60, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2})")
          .find("\"train_batch_size\" is 60, and 8 samples a process, times 2 accumulation steps, "
                "times 4 processes is 64"),
      std::string::npos);
  EXPECT_NE(
      refusal("{}", DeepSpeedContext()).find("\"train_micro_batch_size_per_gpu\" is not known"),
      std::string::npos);
}

TEST(DeepSpeed, RefusesByName) {
  const std::pair<const char*, const char*> rows[] = {
      {R"({"zero_optimization": {"stage": 4}})",
       R"("zero_optimization.stage" is 4, and should be 0, 1, 2 or 3.)"},
      {R"({"zero_optimization": {"stage": "three"}})",
       R"("zero_optimization.stage" is "three", and should be a whole number.)"},
      {R"({"zero_optimization": 2})", R"("zero_optimization" is 2, and should be an object.)"},
      {R"({"zero_optimization": {"stage": 2, "typo": 1}})",
       R"("zero_optimization.typo" is not supported.)"},
      {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "speed": 1}}})",
       R"("zero_optimization.offload_param.speed" is not supported.)"},
      {R"({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})",
       R"("zero_optimization.offload_param.device" is "cpu" with ZeRO stage 2. Parameters can leave the device from stage 3 on.)"},
      {R"({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})",
       R"(Optimizer state can leave the device from stage 1 on.)"},
      {R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}})",
       R"("zero_optimization.offload_optimizer.nvme_path" is missing)"},
      {R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "tape"}}})",
       R"(is "tape", and should be none, cpu or nvme.)"},
      {R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}})",
       R"("zero_optimization.offload_param.device" is "nvme". Parameters can go to "cpu")"},
      {R"({"zero_optimization": {"stage": 3, "zero_quantized_weights": true}})",
       R"("zero_optimization.zero_quantized_weights" is true, which is not supported.)"},
      {R"({"zero_optimization": {"cpu_offload": true}})",
       R"(Write offload_optimizer: {"device": "cpu"}.)"},
      {R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})",
       R"("fp16.enabled" and "bf16.enabled" are both true.)"},
      {R"({"fp16": {"enabled": true, "loss_scale": 128}})",
       R"("fp16.loss_scale" is 128, which is not supported.)"},
      {R"({"fp16": {"enabled": 1}})", R"("fp16.enabled" is 1, and should be true or false.)"},
      {R"({"fp16": {"hysteresis": 0}})", R"("fp16.hysteresis" is 0, and must be at least 1.)"},
      {R"({"gradient_clipping": -1})", R"("gradient_clipping" is -1, and must be at least 0.)"},
      {R"({"gradient_clipping": "much"})",
       R"("gradient_clipping" is "much", and should be a number.)"},
      {R"({"communication_data_type": "fp8"})",
       R"("communication_data_type" is "fp8", and should be fp32, fp16 or bf16.)"},
      {R"({"activation_checkpointing": {}})", R"("activation_checkpointing" is not supported.)"},
      {R"({"wandb": {"enabled": true}})",
       R"("wandb" is not supported. Remove it, or set its "enabled" to false.)"},
      {R"({"optimizer": {"params": {}}})", R"("optimizer.type" is missing.)"},
      {R"({"optimizer": {"type": "AdamW", "params": 3}})",
       R"("optimizer.params" is 3, and should be an object.)"},
      {R"({"train_batch_size": 1.5})",
       R"("train_batch_size" is 1.5, and should be a whole number.)"},
      {R"([1])", R"(should be a JSON object, and is [1].)"},
  };
  for (const auto& [json, expected] : rows) {
    const std::string message = refusal(json);
    EXPECT_NE(message.find(expected), std::string::npos) << json << "\n" << message;
  }
  // All at once.
  const std::string both = refusal(R"({"a": 1, "zero_optimization": {"b": 2}})");
  EXPECT_NE(both.find("\"a\" is not supported."), std::string::npos);
  EXPECT_NE(both.find("\"zero_optimization.b\" is not supported."), std::string::npos);
}

TEST(DeepSpeed, FileAndProgramMayNotContradictEachOther) {
  DeepSpeedContext context = program();
  context.mixed_precision = MixedPrecision::bf16;
  EXPECT_EQ(read("{}", context).mixed_precision, MixedPrecision::bf16);
  for (const char* json : {R"({"fp16": {"enabled": true}})", R"({"bf16": {"enabled": false}})"})
    EXPECT_NE(refusal(json, context), "accepted") << json;
  context.mixed_precision = MixedPrecision::no;
  EXPECT_NE(refusal(R"({"fp16": {"enabled": true}})", context)
                .find("contradict the mixed precision that the program asks for"),
            std::string::npos);
  context.mixed_precision = MixedPrecision::fp8;
  EXPECT_EQ(read("{}", context).mixed_precision, MixedPrecision::fp8);
  EXPECT_EQ(
      read(R"({"wandb": {"enabled": false}, "prescale_gradients": false, "fp16": {"enabled": true},
                     "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}})")
          .prefetch,
      false);
}

TEST(DeepSpeed, ErrorsOfAFileNameIt) {
  const auto path = std::filesystem::path(::testing::TempDir()) / "accelerate_deepspeed_test.json";
  const auto message_for = [&](const std::string& content) -> std::string {
    std::ofstream(path) << content;
    try {
      DeepSpeedConfig::read_file(path, program());
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(message_for(kZero2), "accepted");
  EXPECT_NE(message_for("{\"a\": ").find(path.string() + " cannot be read"), std::string::npos);
  EXPECT_EQ(message_for("{\"a\": 1}").find(path.string() + ": DeepSpeed's configuration"), 0);
  std::filesystem::remove(path);
  EXPECT_THROW(DeepSpeedConfig::read_file(path, program()), ConfigError);
}

}  // namespace
}  // namespace accelerate::parallel
