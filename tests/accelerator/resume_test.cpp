// Going on from a checkpoint in the ways that programs do: with Python's skipping, with schedulers
// of LibTorch, with random augmentation, with other programs than the one that saved, and beside
// another run.

#include <support/distributed.hpp>
#include <support/shared_folder.hpp>

#include <accelerate/accelerate.hpp>
#include <accelerate/accelerator/checkpointing.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/device_map/estimate.hpp>

#include "io/file_lock.hpp"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/data/dataloader_options.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/transforms/lambda.h>
#include <torch/data/transforms/stack.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using accelerate::testing::world;

class Resume : public testing::WithSharedFolder {
 protected:
  AcceleratorOptions options(ProjectConfiguration project = {}) {
    return AcceleratorOptions().cpu(true).project_config(project);
  }
  ProjectConfiguration numbered() {
    return ProjectConfiguration().project_dir(folder).automatic_checkpoint_naming(true);
  }
  // What the first process does while the others wait.
  void alone(const std::function<void()>& work) {
    world().barrier();
    if (world().rank() == 0) work();
    world().barrier();
  }
};

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const CheckpointError& error) {
    return describe(error);
  } catch (const std::exception& error) {
    return text::concat("not a CheckpointError: ", error.what());
  }
  return "nothing was thrown";
}

void expect_says(const std::string& said, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(said.find(part), std::string::npos) << '"' << part << "\" is not in: " << said;
}

struct Numbers {
  std::size_t count = 40;
  at::Tensor get_batch(c10::ArrayRef<std::size_t> indices) {
    return at::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()));
  }
  std::optional<std::size_t> size() const { return count; }
};

std::vector<std::int64_t> values(const at::Tensor& batch) {
  return {batch.const_data_ptr<std::int64_t>(),
          batch.const_data_ptr<std::int64_t>() + batch.numel()};
}

template <class Loader>
std::vector<std::vector<std::int64_t>> pass(Loader& loader) {
  std::vector<std::vector<std::int64_t>> seen;
  for (auto& batch : loader) seen.push_back(values(batch));
  return seen;
}

auto plan_of(std::size_t count, std::int64_t batch = 4) {
  return data::loader(Numbers{count}, torch::data::DataLoaderOptions().batch_size(batch));
}

// ------------------------------------------------------------------------------------- skipping

TEST_F(Resume, PythonsSkippingAfterLoadStateSkipsOnce) {
  Accelerator accelerator(options());
  auto loader = accelerator.prepare(plan_of(40));
  std::vector<std::vector<std::int64_t>> rest;
  for (auto& batch : loader) {
    if (loader.progress().batches == 2) {
      accelerator.save_state(folder / "saved");
    } else if (loader.progress().batches > 2) {
      rest.push_back(values(batch));
    }
  }
  const auto next = pass(loader);
  for (const std::int64_t skipped : {2, 1, 4}) {
    Accelerator second(options());
    auto other = second.prepare(plan_of(40));
    second.load_state(folder / "saved");
    other.set_epoch(0);  // as Python's loops do
    ::testing::internal::CaptureStderr();
    data::skip_first_batches(other, skipped);
    const std::string said = ::testing::internal::GetCapturedStderr();
    EXPECT_EQ(said.find("stays where it was resumed") != std::string::npos,
              skipped != 2 && world().rank() == 0)
        << said;
    EXPECT_EQ(pass(other), rest) << skipped;
    // From then on it skips as ever.
    other.skip_first_batches(1);
    EXPECT_EQ(pass(other), std::vector(next.begin() + 1, next.end()));
  }
  // Between two epochs nothing was skipped yet.
  accelerator.save_state(folder / "between");
  const auto third = pass(loader);
  Accelerator fresh(options());
  auto other = fresh.prepare(plan_of(40));
  fresh.load_state(folder / "between");
  other.skip_first_batches(1);
  EXPECT_EQ(pass(other), std::vector(third.begin() + 1, third.end()));
}

// ------------------------------------------------------------------------- LibTorch's schedulers

TEST_F(Resume, ALibTorchSchedulerThatHasChangedTheRateComesBack) {
  const auto run = [&](bool resumed) {
    Accelerator accelerator(options());
    torch::nn::Linear net(3, 2);
    torch::optim::SGD sgd(net->parameters(), 0.8);
    torch::optim::StepLR steps(sgd, /*step_size=*/2 * world().size(), /*gamma=*/0.5);
    auto [model, optimizer, scheduler] = accelerator.prepare(net, sgd, steps);
    std::vector<double> rates;
    const auto train = [&](int count) {
      for (int i = 0; i < count; ++i) {
        accelerator.backward(model(at::ones({1, 3})).sum());
        optimizer.step();
        optimizer.zero_grad();
        scheduler.step();
        rates.push_back(optimizer.learning_rates().front());
      }
    };
    if (resumed) {
      accelerator.load_state(folder / "saved");
      EXPECT_EQ(optimizer.learning_rates(), std::vector<double>{0.4});
    } else {
      train(3);
      rates.clear();
      accelerator.save_state(folder / "saved");
    }
    train(4);
    return rates;
  };
  const auto expected = run(false);
  EXPECT_EQ(expected, (std::vector<double>{0.4, 0.2, 0.2, 0.1}));
  EXPECT_EQ(run(true), expected);
}

// --------------------------------------------------------------------------------- augmentation

// An unchanged dataset of LibTorch's that draws from the default generator.
struct Noisy : torch::data::datasets::Dataset<Noisy> {
  torch::data::Example<> get(std::size_t index) override {
    at::Tensor order = at::randperm(5).to(at::kDouble);
    return {at::cat({order, at::rand({2}, at::kDouble), at::randn({1}, at::kDouble)}),
            at::full({}, static_cast<std::int64_t>(index), at::kLong)};
  }
  std::optional<std::size_t> size() const override { return 23; }
};

auto noisy_plan(std::size_t workers, std::int64_t batch = 2) {
  auto flipped =
      torch::data::transforms::Lambda<torch::data::Example<>>([](torch::data::Example<> example) {
        example.data = at::cat({example.data, at::rand({1}, at::kDouble)});
        return example;
      });
  return data::loader(
      Noisy().map(std::move(flipped)).map(torch::data::transforms::Stack<>()),
      torch::data::DataLoaderOptions().batch_size(batch).workers(workers).max_jobs(workers + 2));
}

using Drawn = std::map<std::int64_t, std::vector<double>>;

Drawn drawn_by(const torch::data::Example<>& batch) {
  Drawn drawn;
  for (std::int64_t row = 0; row < batch.target.size(0); ++row) {
    const at::Tensor data = batch.data[row].contiguous();
    drawn[batch.target[row].item<std::int64_t>()] = {data.const_data_ptr<double>(),
                                                     data.const_data_ptr<double>() + data.numel()};
  }
  return drawn;
}

template <class Loader>
Drawn drawn_in_pass(Loader& loader) {
  Drawn drawn;
  for (auto& batch : loader) drawn.merge(drawn_by(batch));
  return drawn;
}

TEST_F(Resume, RandomAugmentationIsTheSameForAnyNumberOfWorkersAndProcesses) {
  data::LoaderContext own;  // one process with all the data
  own.seed = 7;
  auto whole = data::prepare_loader(noisy_plan(0), own);
  const Drawn expected = drawn_in_pass(whole);
  ASSERT_EQ(expected.size(), 23U);
  const Drawn second_epoch = drawn_in_pass(whole);
  EXPECT_NE(expected.begin()->second, second_epoch.begin()->second);
  EXPECT_NE(expected.begin()->second, std::next(expected.begin())->second);
  for (const std::size_t workers : {0, 1, 3}) {
    for (const bool dispatched : {false, true}) {
      data::LoaderContext context;
      context.group = world();
      context.seed = 7;
      context.configuration.dispatch_batches(dispatched);
      auto loader = data::prepare_loader(noisy_plan(workers), context);
      at::manual_seed(3);
      for (const auto& [index, numbers] : drawn_in_pass(loader))
        EXPECT_EQ(numbers, expected.at(index)) << "sample " << index << ", workers " << workers;
      // What training draws is its own.
      const at::Tensor after = at::rand({3});
      at::manual_seed(3);
      EXPECT_TRUE(at::equal(after, at::rand({3})));
      for (const auto& [index, numbers] : drawn_in_pass(loader))
        EXPECT_EQ(numbers, second_epoch.at(index));
    }
  }
}

TEST_F(Resume, RandomAugmentationGoesOnWhereItWasSaved) {
  for (const std::size_t workers : {0, 2}) {
    Accelerator accelerator(options());
    set_seed(11);
    auto loader = accelerator.prepare(noisy_plan(workers));
    std::vector<Drawn> rest;
    for (auto& batch : loader) {
      if (loader.progress().batches == 3) {
        accelerator.save_state(folder / "saved");
      } else if (loader.progress().batches > 3) {
        rest.push_back(drawn_by(batch));
      }
    }
    Accelerator second(options());
    set_seed(12);
    auto other = second.prepare(noisy_plan(2 - workers));
    second.load_state(folder / "saved");
    std::vector<Drawn> seen;
    for (auto& batch : other) seen.push_back(drawn_by(batch));
    EXPECT_EQ(seen, rest);
  }
}

// A stream draws as it is read.
struct NoisyStream {
  std::int64_t at = 0;
  std::optional<torch::data::Example<>> next() {
    if (at == 17) return std::nullopt;
    return torch::data::Example<>{at::rand({2}, at::kDouble), at::full({}, at++, at::kLong)};
  }
  void reset() { at = 0; }
};

TEST_F(Resume, WhatAStreamDrawsBelongsToItsPlaceInTheStream) {
  const auto plan = [](std::size_t workers) {
    return data::loader(NoisyStream(),
                        torch::data::DataLoaderOptions().batch_size(2).workers(workers))
        .collate(data::collate::stack());
  };
  data::LoaderContext own;
  own.seed = 7;
  auto whole = data::prepare_loader(plan(0), own);
  const Drawn expected = drawn_in_pass(whole);
  for (const std::size_t workers : {0, 2}) {
    data::LoaderContext context;
    context.group = world();
    context.seed = 7;
    context.configuration.dispatch_batches(false);
    auto loader = data::prepare_loader(plan(workers), context);
    loader.skip_first_batches(1);
    const Drawn seen = drawn_in_pass(loader);
    EXPECT_GT(seen.size(), 5U);
    for (const auto& [index, numbers] : seen) EXPECT_EQ(numbers, expected.at(index));
  }
}

// ------------------------------------------------------------------------- another program loads

torch::nn::Sequential small_net() {
  return torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
}

struct Counter {
  std::int64_t value = 0;
  Json state_dict() const { return {{"value", value}}; }
  void load_state_dict(const Json& state) { value = state.at("value").get<std::int64_t>(); }
};
struct Averages {
  at::Tensor mean = at::zeros({3});
  std::vector<NamedTensor> state_dict() const { return {{"mean", mean}}; }
  void load_state_dict(const std::vector<NamedTensor>& state) { mean.copy_(state.at(0).tensor); }
};

TEST_F(Resume, WithoutStrictAProgramTakesWhatItHasInCommon) {
  const auto off = LoadStateOptions().strict(false);
  const fs::path saved = folder / "saved";
  at::Tensor weight;
  std::vector<std::vector<std::int64_t>> rest;
  {
    Accelerator accelerator(options());
    auto net = small_net();
    torch::optim::AdamW adam(net->parameters(), 0.25);
    optim::LambdaLR schedule(adam, [](std::int64_t) { return 1.0; });
    auto [model, optimizer, scheduler, train, held_out] = accelerator.prepare(
        net, adam, schedule, plan_of(40).name("train"), plan_of(24).name("held out"));
    Counter counter{5};
    accelerator.register_for_checkpointing(counter);
    accelerator.backward(model(at::ones({2, 4})).sum());
    optimizer.step();
    optimizer.zero_grad();
    pass(train);
    pass(held_out);
    accelerator.save_state(saved);
    weight = net->parameters()[0].detach().clone();
    rest = pass(held_out);
  }
  std::vector<std::unique_ptr<Accelerator>> kept;
  const auto loaded = [&](auto&& prepare) {
    Accelerator& accelerator = *kept.emplace_back(std::make_unique<Accelerator>(options()));
    set_seed(1);
    auto net = small_net();
    auto prepared = prepare(accelerator, net);
    expect_says(refusal([&] { accelerator.load_state(saved); }), {"strict off"});
    EXPECT_FALSE(at::equal(net->parameters()[0], weight));
    ::testing::internal::CaptureStderr();
    accelerator.load_state(saved, off);
    EXPECT_TRUE(at::equal(net->parameters()[0], weight));
    const std::string said = ::testing::internal::GetCapturedStderr();
    return std::pair(std::move(prepared), world().rank() == 0 ? said : std::string());
  };
  {  // the weights alone
    const auto [model, said] = loaded([](auto& on, auto& net) { return on.prepare(net); });
    if (world().rank() == 0) expect_says(said, {"not used", "optimizer", "scheduler", "sampler_1"});
  }
  {  // one loader fewer, and it is the second
    auto [all, said] =
        loaded([&](auto& on, auto& net) { return on.prepare(net, plan_of(24).name("held out")); });
    EXPECT_EQ(pass(std::get<1>(all)), rest);
  }
  {  // another optimizer and a new scheduler
    torch::optim::SGD* made = nullptr;
    std::shared_ptr<torch::optim::SGD> sgd;
    std::shared_ptr<torch::optim::StepLR> steps;
    auto [all, said] = loaded([&](auto& on, auto& net) {
      sgd = std::make_shared<torch::optim::SGD>(net->parameters(), 0.5);
      steps = std::make_shared<torch::optim::StepLR>(*sgd, 3);
      made = sgd.get();
      return on.prepare(net, sgd, steps);
    });
    EXPECT_EQ(made->param_groups()[0].options().get_lr(), 0.5);
    if (world().rank() == 0) expect_says(said, {"Left as it is here", "AdamW", "StepLR"});
  }
  {  // more than was saved
    Averages averages;
    auto [all, said] = loaded([&](auto& on, auto& net) {
      on.register_for_checkpointing(averages);
      return on.prepare(net, plan_of(40).name("train"), plan_of(24).name("held out"),
                        plan_of(8).name("third"));
    });
    if (world().rank() == 0) expect_says(said, {"'third'", "custom object 0"});
  }
}

TEST_F(Resume, ADatasetThatGrewIsTakenWithAWarning) {
  std::vector<std::vector<std::int64_t>> rest;
  {
    Accelerator accelerator(options());
    auto loader = accelerator.prepare(plan_of(41));
    for (auto& batch : loader) {
      if (loader.progress().batches == 2) {
        accelerator.save_state(folder / "saved");
      } else if (loader.progress().batches > 2) {
        rest.push_back(values(batch));
      }
    }
  }
  Accelerator accelerator(options());
  auto loader = accelerator.prepare(plan_of(50));
  ::testing::internal::CaptureStderr();
  accelerator.load_state(folder / "saved");
  const std::string said = ::testing::internal::GetCapturedStderr();
  if (world().rank() == 0) expect_says(said, {"has grown from 41 to 50"});
  // Saved again before and in the rest of the pass, it is still that pass.
  accelerator.save_state(folder / "again");
  accelerator.load_state(folder / "again");
  std::vector<std::vector<std::int64_t>> seen;
  for (auto& batch : loader) {
    seen.push_back(values(batch));
    EXPECT_EQ(loader.progress().end_of_dataloader, seen.size() == rest.size());
  }
  EXPECT_EQ(seen, rest);
  std::set<std::int64_t> next;
  for (const auto& batch : pass(loader)) next.insert(batch.begin(), batch.end());
  EXPECT_EQ(world().size() == 1 ? 50U : next.size(), next.size());
  EXPECT_GT(*next.rbegin(), 40);
  Accelerator other(options());
  auto smaller = other.prepare(plan_of(30));
  expect_says(refusal([&] { other.load_state(folder / "saved"); }), {"had 41 samples", "has 30"});
}

// ------------------------------------------------------------------------------- numbered folders

TEST_F(Resume, TheBestCheckpointHasAName) {
  Accelerator accelerator(options(numbered().total_limit(1).keep_best(1)));
  auto net = small_net();
  auto model = accelerator.prepare(net);
  EXPECT_EQ(accelerator.best_checkpoint(), std::nullopt);
  accelerator.save_state();
  EXPECT_EQ(accelerator.best_checkpoint(), std::nullopt);
  for (const double metric : {3.0, 1.5, 1.5, 7.0})
    accelerator.save_state({}, SaveStateOptions().metric(metric));
  const fs::path parent = folder / "checkpoints";
  // Of equal ones the older was deleted, or the newer is named.
  const auto best = accelerator.best_checkpoint();
  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(io::Manifest::read(*best).about.at("metric"), 1.5);
  EXPECT_EQ(accelerator.load_state(*best), *best);
  Accelerator higher(options(numbered().lower_is_better(false)));
  EXPECT_EQ(higher.best_checkpoint(), parent / "checkpoint_4");
}

TEST_F(Resume, RotationKeepsWhatTheUserPutThere) {
  Accelerator accelerator(options(numbered().total_limit(1)));
  auto net = small_net();
  auto model = accelerator.prepare(net);
  accelerator.save_state();
  const fs::path first = folder / "checkpoints" / "checkpoint_0";
  alone([&] {
    std::ofstream(first / "notes.txt") << "mine";
    fs::create_directories(first / "plots");
    std::ofstream(first / "plots" / "loss.svg") << "<svg/>";
  });
  accelerator.save_state();
  accelerator.save_state();
  world().barrier();
  EXPECT_EQ(io::files_in(first), (std::vector<std::string>{"notes.txt", "plots/loss.svg"}));
  EXPECT_FALSE(fs::exists(folder / "checkpoints" / "checkpoint_1"));
  EXPECT_EQ(accelerator.load_state().filename(), "checkpoint_2");
}

TEST_F(Resume, TwoRunsThatSaveInOneFolderAreToldOfEachOther) {
  const auto project = numbered();
  GradientState gradients;
  detail::Prepared nothing;
  nothing.gradients = &gradients;
  detail::Checkpointing other(project, {.world = world()});
  other.save({}, {}, nothing);
  // Another run is in the middle of saving the next one.
  const fs::path partial = folder / "checkpoints" / ".checkpoint_1.partial";
  std::optional<checkpoints::Save> running;
  running.emplace(world(), folder / "checkpoints" / "checkpoint_1");
  running->add_file("state.json", "{}");
  running->set_about(Json::object());
  running->plan();
  const std::string pid = text::concat("process ", world().rank() == 0 ? ::getpid() : 0);
  for (const fs::path& named : {fs::path(), folder / "checkpoints" / "checkpoint_1"}) {
    const std::string said = refusal([&] { other.save(named, {}, nothing); });
    expect_says(said, {"is being saved by process", "since 20"});
    if (world().rank() == 0) expect_says(said, {pid.c_str()});
    EXPECT_TRUE(fs::exists(partial));
  }
  world().barrier();
  running->write(world());
  running.reset();
  EXPECT_EQ(other.save({}, {}, nothing).filename(), "checkpoint_2");
  world().barrier();
  EXPECT_EQ(io::names_in(folder / "checkpoints"),
            (std::vector<std::string>{"checkpoint_0", "checkpoint_1", "checkpoint_2", "latest"}));
}

TEST_F(Resume, TwoRunsThatSaveInTurnsInOneProjectAreToldOfEachOther) {
  GradientState gradients;
  detail::Prepared nothing;
  nothing.gradients = &gradients;
  // Another run of this project, between two saves.
  std::optional<io::FileLock> other;
  if (world().rank() == 0) {
    fs::create_directories(folder);
    other.emplace(folder / ".checkpoints.lock", "", "");
  }
  std::optional<detail::Checkpointing> run(std::in_place, numbered().total_limit(1),
                                           detail::Savers{.world = world()});
  const std::string said = refusal([&] { run->save({}, {}, nothing); });
  expect_says(said, {"is being saved to by process", "since 20", "project_dir of its own"});
  EXPECT_FALSE(fs::exists(folder / "checkpoints"));
  world().barrier();
  other.reset();
  EXPECT_EQ(run->save({}, {}, nothing).filename(), "checkpoint_0");
  // A second Accelerator of the same process is the same run.
  detail::Checkpointing second(numbered().total_limit(1), {.world = world()});
  EXPECT_EQ(second.save({}, {}, nothing).filename(), "checkpoint_1");
  run.reset();
  EXPECT_EQ(second.save({}, {}, nothing).filename(), "checkpoint_2");
  world().barrier();
  EXPECT_EQ(io::names_in(folder / "checkpoints"),
            (std::vector<std::string>{"checkpoint_2", "latest"}));
}

TEST_F(Resume, InspectionReadsOurOwnCheckpoints) {
  for (const auto strategy : {StrategyKind::ddp, StrategyKind::fsdp}) {
    if (world().size() == 1 && strategy == StrategyKind::ddp) continue;
    Accelerator accelerator(options().strategy(strategy));
    auto net = small_net();
    torch::optim::AdamW adam(net->parameters(), 0.25);
    auto [model, optimizer] = accelerator.prepare(net, adam);
    accelerator.save_state(folder / "saved");
    const ModelTree tree = checkpoint_tree(folder / "saved");
    std::map<std::string, std::vector<std::int64_t>> found;
    for (const auto& tensor : tree.tensors()) found.emplace(tensor.name, tensor.shape);
    EXPECT_EQ(found,
              (std::map<std::string, std::vector<std::int64_t>>{
                  {"0.weight", {3, 4}}, {"0.bias", {3}}, {"1.weight", {2, 3}}, {"1.bias", {2}}}));
    EXPECT_EQ(estimate_memory(tree).elements, 23);
  }
}

// Python saves tied weights under every name. A module here may have the weight once.
TEST_F(Resume, TiedNamesInPythonsFilesAreNoneTooMany) {
  const fs::path theirs = folder / "theirs";
  const at::Tensor shared = at::arange(12, at::kFloat).reshape({3, 4}), bias = at::ones({3});
  alone([&] {
    fs::create_directories(theirs);
    checkpoints::save_pt(
        checkpoints::state_dict({{"weight", shared}, {"head.weight", shared}, {"bias", bias}}),
        theirs / "pytorch_model.bin");
  });
  const auto from = checkpoints::named_tensors(checkpoints::load_pt(theirs / "pytorch_model.bin"));
  const at::Tensor weight = at::zeros({3, 4});
  const auto mismatch = checkpoints::load_into({{"weight", weight}, {"bias", at::zeros({3})}}, from,
                                               theirs, /*strict=*/true);
  EXPECT_TRUE(mismatch.unexpected.empty());
  EXPECT_TRUE(at::equal(weight, shared));
  Accelerator accelerator(options());
  torch::nn::Linear net(4, 3);
  auto model = accelerator.prepare(net);
  accelerator.load_state(theirs);
  EXPECT_TRUE(at::equal(net->weight, shared));
  // A name of its own is too many as ever.
  alone([&] {
    checkpoints::save_pt(checkpoints::state_dict(
                             {{"weight", shared}, {"head.weight", shared.clone()}, {"bias", bias}}),
                         theirs / "pytorch_model.bin");
  });
  expect_says(refusal([&] { accelerator.load_state(theirs); }), {"'head.weight' is unexpected"});
}

TEST_F(Resume, EveryOperatorThatDrawsIsGivenTheSamplesGenerator) {
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    bool draws = false, takes_tensor = false;
    for (const auto& argument : op->schema().arguments()) {
      draws = draws || argument.type()->str() == "Generator?";
      takes_tensor = takes_tensor || argument.type()->str() == "Tensor";
    }
    if (draws && takes_tensor) {
      EXPECT_TRUE(op->hasKernelForDispatchKey(c10::DispatchKey::Fake)) << name;
    }
  }
}

}  // namespace
}  // namespace accelerate
