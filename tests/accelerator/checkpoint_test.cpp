// save_state and load_state of the Accelerator: numbering, limits, asynchronous saves, hooks,
// custom objects, where loaders stand, and Python's folders.

#include <support/distributed.hpp>
#include <support/python.hpp>
#include <support/shared_folder.hpp>

#include <accelerate/accelerate.hpp>
#include <accelerate/accelerator/checkpointing.hpp>
#include <accelerate/checkpoint/pt_file.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/data/dataloader_options.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <atomic>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <new>
#include <set>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using accelerate::testing::world;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    hidden = register_module("hidden", torch::nn::Linear(6, 5));
    norm = register_module("norm", torch::nn::BatchNorm1d(5));
    out = register_module("out", torch::nn::Linear(5, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return out(at::tanh(norm(hidden(x)))); }
  torch::nn::Linear hidden{nullptr}, out{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

at::Tensor batch(int step) {
  return (at::arange(24, at::kFloat).reshape({4, 6}) * (step + 1)).sin();
}

struct Numbers {
  at::Tensor get_batch(c10::ArrayRef<std::size_t> indices) {
    return at::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()));
  }
  std::optional<std::size_t> size() const { return 103; }
};

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

class Checkpoints : public testing::WithSharedFolder {
 protected:
  AcceleratorOptions options(ProjectConfiguration project = {}) {
    return AcceleratorOptions().cpu(true).project_config(project);
  }
  ProjectConfiguration numbered() {
    return ProjectConfiguration().project_dir(folder).automatic_checkpoint_naming(true);
  }
  std::set<std::string> names(const fs::path& in) {
    world().barrier();
    const auto all = io::names_in(in);
    world().barrier();
    return {all.begin(), all.end()};
  }
};

template <class Model, class Optimizer>
std::vector<double> train(Accelerator& accelerator, Model& model, Optimizer& optimizer, int from,
                          int to) {
  std::vector<double> losses;
  for (int step = from; step < to; ++step) {
    const at::Tensor loss = model(batch(step)).square().mean();
    accelerator.backward(loss);
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.template item<double>());
  }
  return losses;
}

TEST_F(Checkpoints, EverythingComesBackInTheMiddleOfAnEpoch) {
  Accelerator accelerator(options());
  set_seed(5);
  Net net;
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.05));
  optim::LambdaLR schedule(adam, [](std::int64_t step) { return 1.0 / (1.0 + step); });
  auto plan = data::loader(Numbers(), torch::data::DataLoaderOptions().batch_size(4).workers(2));
  auto [model, optimizer, scheduler, loader] = accelerator.prepare(net, adam, schedule, plan);
  Counter counter;
  Averages averages;
  accelerator.register_for_checkpointing(counter, averages);
  int hooks = 0;
  auto handle = accelerator.register_save_state_pre_hook([&](const fs::path& where) {
    ++hooks;
    if (world().rank() == 0) std::ofstream(where / "notes.txt") << "mine";
  });

  std::vector<at::Tensor> seen;
  int step = 0;
  for (auto& numbers : loader) {
    train(accelerator, model, optimizer, step, step + 1);
    scheduler.step();
    counter.value = ++step;
    averages.mean.fill_(step);
    if (step == 5) accelerator.save_state(folder / "saved");
    if (step > 5) seen.push_back(numbers.clone());
  }
  handle.remove();
  EXPECT_EQ(hooks, 1);
  const auto weights = net->hidden->weight.detach().clone();
  const auto drawn = at::rand({4});

  Accelerator second(options());
  set_seed(77);
  Net other;
  torch::optim::AdamW other_adam(other->parameters(), torch::optim::AdamWOptions(0.5));
  optim::LambdaLR other_schedule(other_adam, [](std::int64_t step) { return 1.0 / (1.0 + step); });
  auto [model2, optimizer2, scheduler2, loader2] =
      second.prepare(other, other_adam, other_schedule, plan);
  Counter counter2;
  Averages averages2;
  second.register_for_checkpointing(counter2, averages2);
  fs::path told;
  second.register_load_state_pre_hook([&](const fs::path& where) { told = where; });
  second.load_state(folder / "saved");
  EXPECT_EQ(told.filename(), "saved");
  EXPECT_TRUE(fs::exists(told / "notes.txt"));
  EXPECT_EQ(counter2.value, 5);
  EXPECT_EQ(averages2.mean[0].item<double>(), 5);
  std::size_t next = 0;
  step = 5;
  for (auto& numbers : loader2) {
    ASSERT_LT(next, seen.size());
    EXPECT_TRUE(at::equal(numbers, seen[next++]));
    train(second, model2, optimizer2, step, step + 1);
    scheduler2.step();
    ++step;
  }
  EXPECT_EQ(next, seen.size());
  EXPECT_TRUE(at::equal(other->hidden->weight, weights));
  EXPECT_TRUE(at::equal(at::rand({4}), drawn));
  EXPECT_EQ(optimizer2.learning_rates(), optimizer.learning_rates());
}

TEST_F(Checkpoints, SeveralOfAKindComeBackEachAsItself) {
  const auto make = [&](std::uint64_t seed, auto&& use) {
    Accelerator accelerator(options());
    set_seed(seed);
    Net first, second;
    torch::optim::AdamW adam(first->parameters(), torch::optim::AdamWOptions(0.05));
    torch::optim::AdamW other(second->parameters(), torch::optim::AdamWOptions(0.01));
    auto numbers = data::loader(Numbers(), torch::data::DataLoaderOptions().batch_size(4));
    auto more = data::loader(Numbers(), torch::data::DataLoaderOptions().batch_size(3));
    auto [model, optimizer, loader] = accelerator.prepare(first, adam, numbers);
    auto [model_1, optimizer_1, loader_1] = accelerator.prepare(second, other, more);
    use(accelerator, [&](int from, int to) {
      auto losses = train(accelerator, model, optimizer, from, to);
      const auto others = train(accelerator, model_1, optimizer_1, from + 5, to + 5);
      losses.insert(losses.end(), others.begin(), others.end());
      // One pass of the one, two of the other: their next orders differ.
      for (auto* one : {&loader, &loader_1, &loader_1}) {
        for (auto& batch : *one) losses.push_back(batch.sum().template item<double>());
      }
      return losses;
    });
  };
  const fs::path saved = folder / "saved";
  std::vector<double> expected;
  make(5, [&](Accelerator& accelerator, auto&& go_on) {
    go_on(0, 3);
    accelerator.save_state(saved);
    expected = go_on(3, 5);
  });
  const auto there = names(saved);
  for (const char* name : {"model.safetensors", "model_1.safetensors", "optimizer.json",
                           "optimizer_1.json", "sampler.json", "sampler_1.json"})
    EXPECT_TRUE(there.contains(name)) << name;
  make(6, [&](Accelerator& accelerator, auto&& go_on) {
    accelerator.load_state(saved);
    EXPECT_EQ(go_on(3, 5), expected);
  });
}

TEST_F(Checkpoints, TheGradientScalerComesBack) {
  GradientState gradients;
  const auto prepared = [&](const GradScalerOptions& scaler) {
    detail::Prepared one;
    one.gradients = &gradients;
    one.scaler = std::make_shared<GradScaler>(scaler);
    return one;
  };
  const auto saved = prepared(GradScalerOptions().init_scale(8).growth_interval(7));
  detail::Checkpointing checkpointing({}, {.world = world()});
  checkpointing.save(folder / "saved", {}, saved);
  const auto loaded = prepared(GradScalerOptions());
  EXPECT_NE(loaded.scaler->state_dict(), saved.scaler->state_dict());
  checkpointing.load(folder / "saved", {}, loaded);
  EXPECT_EQ(loaded.scaler->state_dict(), saved.scaler->state_dict());
}

std::atomic<int> dies_in{0};
int die_at(io::faults::Operation, const fs::path&, std::size_t&) {
  if (dies_in-- == 0) ::raise(SIGKILL);
  return 0;
}

// While the new one is written, `latest` moves or the old one is deleted.
TEST_F(Checkpoints, ADeathAtAnyOperationOfANumberedSaveLeavesACompleteOneAndNoRest) {
  if (world().size() > 1) GTEST_SKIP() << "forks a process of its own";
  GradientState gradients;
  detail::Prepared nothing;
  nothing.gradients = &gradients;
  for (const bool asynchronous : {false, true}) {
    std::set<std::string> seen;
    bool survived = false;
    for (int at = 0; !survived; ++at) {
      ASSERT_LT(at, 100);
      const testing::SharedFolder own;
      const auto project = ProjectConfiguration()
                               .project_dir(own.path())
                               .automatic_checkpoint_naming(true)
                               .total_limit(1);
      const pid_t child = ::fork();
      if (child == 0) {
        detail::Checkpointing checkpointing(project, {});
        checkpointing.save({}, {}, nothing);
        dies_in = at;
        io::faults::set_hook(die_at);
        checkpointing.save({}, SaveStateOptions().asynchronous(asynchronous), nothing);
        checkpointing.wait();
        ::_exit(0);
      }
      int status = 0;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      survived = WIFEXITED(status);
      detail::Checkpointing checkpointing(project, {});
      seen.insert(checkpointing.load({}, {}, nothing).filename().string());
      const auto next = checkpointing.save({}, {}, nothing).filename().string();
      EXPECT_EQ(names(own.path() / "checkpoints"), (std::set<std::string>{next, "latest"})) << at;
      EXPECT_EQ(io::read_file(own.path() / "checkpoints" / "latest"), next + "\n");
    }
    EXPECT_EQ(seen, (std::set<std::string>{"checkpoint_0", "checkpoint_1"}));
  }
}

TEST_F(Checkpoints, NumberingGoesOnAndTheLimitKeepsTheNewestAndTheBest) {
  const auto project = numbered().total_limit(2).keep_best(1);
  const fs::path parent = folder / "checkpoints";
  const auto run = [&](int saves, double first_metric, bool resume) {
    Accelerator accelerator(options(project));
    Net net;
    auto model = accelerator.prepare(net);
    if (resume) accelerator.load_state();
    for (int i = 0; i < saves; ++i)
      accelerator.save_state({}, SaveStateOptions().metric(first_metric - i));
  };
  EXPECT_THROW(run(0, 0, true), CheckpointError);  // nothing to go on from
  run(4, 10, false);                               // metrics 10, 9, 8, 7
  EXPECT_EQ(names(parent),
            (std::set<std::string>{"checkpoint_1", "checkpoint_2", "checkpoint_3", "latest"}));
  run(3, 20, true);  // worse: 20, 19, 18
  EXPECT_EQ(names(parent),
            (std::set<std::string>{"checkpoint_3", "checkpoint_5", "checkpoint_6", "latest"}));
  EXPECT_EQ(io::read_file(parent / "latest"), "checkpoint_6\n");

  // A process that dies before `latest` moves leaves it behind. The newest that is complete counts.
  world().barrier();
  if (world().rank() == 0) {
    io::write_file(parent / "latest", "checkpoint_5\n");
    fs::create_directories(parent / "checkpoint_7");  // not complete
  }
  world().barrier();
  Accelerator accelerator(options(project));
  Net net;
  auto model = accelerator.prepare(net);
  EXPECT_EQ(accelerator.load_state().filename(), "checkpoint_6");
}

struct Anything {
  Json state;
  bool refuses = false;
  Json state_dict() const { return state; }
  void load_state_dict(const Json& saved) {
    if (refuses) throw std::runtime_error("this object wants nothing of it");
    state = saved;
  }
};

std::string refusal(const std::function<void()>& action) {
  try {
    action();
  } catch (const CheckpointError& error) {
    return describe(error);
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST_F(Checkpoints, NumbersThatJsonHasNoWordForComeBack) {
  Accelerator accelerator(options());
  const double inf = std::numeric_limits<double>::infinity();
  Anything object;
  const Json state{
      {"best", inf}, {"worst", -inf}, {"list", {1.5, std::nan(""), {{"deep", inf}}}}, {"none", {}}};
  object.state = state;
  accelerator.register_for_checkpointing(object);
  accelerator.save_state(folder / "saved");
  object.state = {};
  accelerator.load_state(folder / "saved");
  EXPECT_EQ(object.state["best"].get<double>(), inf);
  EXPECT_EQ(object.state["worst"].get<double>(), -inf);
  EXPECT_TRUE(std::isnan(object.state["list"][1].get<double>()));
  EXPECT_EQ(object.state["list"][2]["deep"].get<double>(), inf);
  EXPECT_TRUE(object.state["none"].is_null());
  for (const Json& bad : {Json{{"$number", "inf"}}, Json("\xff")}) {
    object.state = bad;
    EXPECT_NE(refusal([&] { accelerator.save_state(folder / "bad"); }).find("custom_checkpoint_0"),
              std::string::npos);
  }
}

TEST_F(Checkpoints, WhoRefusesLeavesTheParametersOfAllProcesses) {
  Accelerator accelerator(options());
  Net net;
  torch::optim::AdamW adam(net->parameters(), 0.05);
  auto [model, optimizer] = accelerator.prepare(net, adam);
  Anything object;
  accelerator.register_for_checkpointing(object);
  accelerator.save_state(folder / "saved");
  train(accelerator, model, optimizer, 0, 1);
  const auto weight = net->out->weight.detach().clone();
  const bool last = world().rank() == world().size() - 1;
  {
    auto hook = accelerator.register_load_state_pre_hook([&](const fs::path&) {
      if (last) throw std::runtime_error("this hook wants nothing of it");
    });
    EXPECT_NE(refusal([&] { accelerator.load_state(folder / "saved"); }).find("this hook"),
              std::string::npos);
    hook.remove();
  }
  object.refuses = last;
  EXPECT_NE(refusal([&] { accelerator.load_state(folder / "saved"); }).find("this object"),
            std::string::npos);
  EXPECT_TRUE(at::equal(net->out->weight, weight));
  object.refuses = false;
  accelerator.load_state(folder / "saved");
  EXPECT_FALSE(at::equal(net->out->weight, weight));
}

TEST_F(Checkpoints, OneThatLostItsManifestIsNeitherPythonsNorPassedOver) {
  Accelerator accelerator(options(numbered()));
  Net net;
  auto model = accelerator.prepare(net);
  accelerator.save_state();
  accelerator.save_state();
  world().barrier();
  const fs::path newest = folder / "checkpoints" / "checkpoint_1";
  if (world().rank() == 0) fs::remove(newest / "manifest.json");
  world().barrier();
  for (const fs::path& named : {fs::path(), newest}) {
    const std::string said = refusal([&] { accelerator.load_state(named); });
    EXPECT_NE(said.find("checkpoint_1"), std::string::npos) << said;
    EXPECT_NE(said.find("manifest.json"), std::string::npos) << said;
  }
}

TEST_F(Checkpoints, AllProcessesMustFindTheSame) {
  if (world().size() == 1) GTEST_SKIP() << "there is one process";
  Accelerator accelerator(options());
  Net net;
  auto model = accelerator.prepare(net);
  accelerator.save_state(folder / "a");
  at::rand({1});  // which the random state has
  accelerator.save_state(folder / "b");
  const std::string said =
      refusal([&] { accelerator.load_state(folder / (world().rank() == 0 ? "a" : "b")); });
  EXPECT_NE(said.find("another checkpoint"), std::string::npos) << said;
}

TEST_F(Checkpoints, EachNodeHasItsFolderAndAllGoOnFromTheNewestThatAllHave) {
  if (world().size() == 1) GTEST_SKIP() << "there is one process";
  GradientState gradients;
  detail::Prepared nothing;
  nothing.gradients = &gradients;
  const fs::path own = folder / text::concat("node", world().rank());
  detail::Checkpointing node(
      ProjectConfiguration()
          .project_dir(own)
          .automatic_checkpoint_naming(true)
          .total_limit(2)
          .save_on_each_node(true),
      {.world = world(), .node_rank = world().rank(), .num_nodes = world().size()});
  for (const bool asynchronous : {false, true, false})
    node.save({}, SaveStateOptions().asynchronous(asynchronous), nothing);
  const auto here = [&] { return io::names_in(own / "checkpoints"); };
  EXPECT_EQ(here(), (std::vector<std::string>{"checkpoint_1", "checkpoint_2", "latest"}));
  // One node cannot save: all are told, and none deletes what the others go on from.
  if (world().rank() == 1) {
    io::faults::set_hook([](io::faults::Operation operation, const fs::path&, std::size_t&) {
      return operation == io::faults::Operation::kWrite ? ENOSPC : 0;
    });
  }
  EXPECT_NE(refusal([&] { node.save({}, {}, nothing); }).find("No space left"), std::string::npos);
  io::faults::set_hook(nullptr);
  EXPECT_EQ(here().size(), world().rank() == 1 ? 3U : 4U);
  EXPECT_EQ(node.load({}, {}, nothing).filename(), "checkpoint_2");
}

TEST_F(Checkpoints, WithoutStrictWhatIsLeftOutIsSaid) {
  Accelerator accelerator(options());
  Net net;
  auto model = accelerator.prepare(net);
  accelerator.save_state(folder / "saved");
  const auto load = [&](const std::string& name) {
    Accelerator other(options());
    torch::nn::Sequential nets;
    nets->push_back(std::string(name), torch::nn::Linear(6, 5));
    nets->push_back(std::string("new"), torch::nn::Linear(6, 5));
    auto prepared = other.prepare(nets);
    ::testing::internal::CaptureStderr();
    std::string said =
        refusal([&] { other.load_state(folder / "saved", LoadStateOptions().strict(false)); });
    EXPECT_EQ(at::equal(nets->parameters()[0], net->hidden->weight), name == "hidden");
    return ::testing::internal::GetCapturedStderr() + said;
  };
  const std::string said = load("hidden");
  if (world().rank() == 0) {
    for (const char* part : {"Left as it is here", "new.weight", "out.bias"})
      EXPECT_NE(said.find(part), std::string::npos) << said;
  }
  EXPECT_NE(load("foreign").find("is not that of this model"), std::string::npos);
}

TEST_F(Checkpoints, ASchedulerOfAnotherKindIsRefused) {
  Accelerator accelerator(options());
  Net net;
  torch::optim::SGD sgd(net->parameters(), 0.1);
  optim::LambdaLR schedule(sgd, [](std::int64_t) { return 1.0; });
  auto prepared = accelerator.prepare(net, sgd, schedule);
  accelerator.save_state(folder / "saved");
  Accelerator other(options());
  torch::optim::StepLR steps(sgd, 5);
  auto again = other.prepare(net, sgd, steps);
  const std::string said = refusal([&] { other.load_state(folder / "saved"); });
  for (const char* part : {"LambdaLR", "StepLR"})
    EXPECT_NE(said.find(part), std::string::npos) << said;
}

TEST_F(Checkpoints, ADamagedOldCheckpointStopsNoLaterSave) {
  Accelerator accelerator(options(numbered().total_limit(2).keep_best(1)));
  Net net;
  auto model = accelerator.prepare(net);
  const fs::path parent = folder / "checkpoints";
  double metric = 10;
  const auto save = [&] { accelerator.save_state({}, SaveStateOptions().metric(metric--)); };
  for (int i = 0; i < 3; ++i) save();
  world().barrier();
  if (world().rank() == 0) std::fstream(parent / "checkpoint_1" / "manifest.json") << "damaged";
  world().barrier();
  ::testing::internal::CaptureStderr();
  for (int i = 0; i < 3; ++i) save();
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(said.find("checkpoint_1 may be among the best and is kept") != std::string::npos,
            world().rank() == 0)
      << said;
  // The damaged one, the best, and the two newest.
  EXPECT_EQ(names(parent), (std::set<std::string>{"checkpoint_1", "checkpoint_3", "checkpoint_4",
                                                  "checkpoint_5", "latest"}));
}

TEST_F(Checkpoints, ALargerWorldDerivesTheRandomStatesOfItsNewRanksAndSaysSo) {
  if (world().size() == 1) GTEST_SKIP() << "nobody is new";
  GradientState gradients;
  detail::Prepared nothing;
  nothing.gradients = &gradients;
  set_seed(11);
  at::Tensor next;
  if (world().rank() == 0) {
    detail::Checkpointing alone({}, {});
    alone.save(folder / "saved", {}, nothing);
    next = at::rand({4});
  }
  world().barrier();
  const auto resumed = [&] {
    set_seed(500 + world().rank());
    detail::Checkpointing together({}, {.world = world()});
    together.load(folder / "saved", {}, nothing);
    return at::rand({4});
  };
  const auto before = log::level();
  log::set_level(log::Level::info);
  ::testing::internal::CaptureStderr();
  const at::Tensor first = resumed();
  const std::string said = ::testing::internal::GetCapturedStderr();
  log::set_level(before);
  EXPECT_EQ(said.find("derived from the saved seed") != std::string::npos, world().rank() > 0)
      << said;
  EXPECT_TRUE(at::equal(first, resumed()));
  const auto all =
      world().all_gather_bytes({static_cast<const char*>(first.const_data_ptr()), first.nbytes()});
  EXPECT_EQ(std::set(all.begin(), all.end()).size(), all.size());
  if (world().rank() == 0) {
    EXPECT_TRUE(at::equal(first, next));
  }
}

TEST_F(Checkpoints, AnAsynchronousSaveHasTheStateAtTheCallAndItsErrorComesAtTheNext) {
  Accelerator accelerator(options(numbered()));
  Net net;
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.05));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  train(accelerator, model, optimizer, 0, 2);
  const at::Tensor weight = net->hidden->weight.detach().clone();
  const auto later = SaveStateOptions().asynchronous(true);
  accelerator.save_state({}, later);
  const auto losses = train(accelerator, model, optimizer, 2, 6);
  EXPECT_GT(accelerator.save_progress().total, 0U);
  accelerator.save_state({}, later);  // waits for the first
  accelerator.wait_for_checkpoint();
  EXPECT_FALSE(accelerator.save_progress().running);
  EXPECT_FALSE(at::equal(net->hidden->weight, weight));
  accelerator.load_state(folder / "checkpoints" / "checkpoint_0");
  EXPECT_TRUE(at::equal(net->hidden->weight, weight));
  EXPECT_EQ(train(accelerator, model, optimizer, 2, 6), losses);

  io::faults::set_hook([](io::faults::Operation operation, const fs::path&, std::size_t&) {
    return operation == io::faults::Operation::kSync ? EIO : 0;
  });
  accelerator.save_state({}, later);
  EXPECT_THROW(accelerator.wait_for_checkpoint(), CheckpointError);
  io::faults::set_hook(nullptr);
  EXPECT_EQ(names(folder / "checkpoints"),
            (std::set<std::string>{"checkpoint_0", "checkpoint_1", "latest"}));
}

// Fails once, where `armed` bytes are asked for.
struct OutOfMemoryOnce final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    if (std::size_t asked = bytes; asked > 0 && armed.compare_exchange_strong(asked, 0))
      throw std::bad_alloc();
    return own->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return own->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    own->copy_data(to, from, bytes);
  }
  c10::Allocator* own = c10::GetCPUAllocator();
  std::atomic<std::size_t> armed{0};
};

TEST_F(Checkpoints, AProcessWithoutMemoryForTheCopyStopsTheAsynchronousSaveOnAll) {
  Accelerator accelerator(options());
  Net net;
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.05));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  train(accelerator, model, optimizer, 0, 1);
  static OutOfMemoryOnce allocator;
  c10::SetCPUAllocator(&allocator, /*priority=*/1);
  auto handle = accelerator.register_save_state_pre_hook([&](const fs::path&) {
    if (world().rank() == world().size() - 1) allocator.armed = net->hidden->weight.nbytes();
  });
  const auto later = SaveStateOptions().asynchronous(true);
  EXPECT_THROW(accelerator.save_state(folder / "saved", later), std::exception);
  EXPECT_EQ(allocator.armed, 0U);
  handle.remove();
  accelerator.wait_for_checkpoint();  // there is none
  accelerator.save_state(folder / "saved", later);
  accelerator.wait_for_checkpoint();
  accelerator.load_state(folder / "saved");
  c10::SetCPUAllocator(allocator.own, 1);
}

TEST_F(Checkpoints, WhatDoesNotFitIsSaidBeforeAnythingChanges) {
  Accelerator accelerator(options());
  Net net;
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.05));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  EXPECT_THROW(accelerator.save_state(), ConfigError);
  accelerator.save_state(folder / "saved");
  Counter counter;
  accelerator.register_for_checkpointing(counter);
  EXPECT_THROW(accelerator.register_for_checkpointing(counter), StateError);
  EXPECT_THROW(accelerator.load_state(folder / "saved"), CheckpointError);
  EXPECT_THROW(accelerator.load_state(folder / "absent"), CheckpointError);
}

TEST_F(Checkpoints, SaveModelReplacesAnEarlierOne) {
  Accelerator accelerator(options());
  Net net;
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.05));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  const fs::path where = folder / "model";
  const auto files = accelerator.save_model(model, where, "150B");
  EXPECT_EQ(files.front(), "model.safetensors.index.json");
  EXPECT_GT(files.size(), 2U);
  EXPECT_EQ(accelerator.save_model(model, where), std::vector<std::string>{"model.safetensors"});
  EXPECT_EQ(names(where), std::set<std::string>{"model.safetensors"});
  accelerator.save_model(model, where, "10GB", /*safe_serialization=*/false);
  EXPECT_EQ(names(where), std::set<std::string>{"pytorch_model.bin"});
  const auto saved = checkpoints::named_tensors(checkpoints::load_pt(where / "pytorch_model.bin"));
  EXPECT_EQ(saved.at(0).name, "hidden.weight");
  EXPECT_TRUE(at::equal(saved.at(0).tensor, model.state_dict()[0].tensor));
}

TEST_F(Checkpoints, SaveModelLeavesACheckpointAlone) {
  Accelerator accelerator(options());
  Net net;
  auto model = accelerator.prepare(net);
  const fs::path saved = folder / "saved";
  accelerator.save_state(saved);
  const auto before = names(saved);
  for (const bool safe : {true, false})
    EXPECT_THROW(accelerator.save_model(model, saved, "10GB", safe), CheckpointError);
  EXPECT_EQ(names(saved), before);
  accelerator.load_state(saved);
}

TEST_F(Checkpoints, ASignalAsksAllRanksToStop) {
  Accelerator accelerator(options());
  EXPECT_FALSE(accelerator.stop_requested());
  accelerator.stop_on_signals({SIGUSR1});
  EXPECT_FALSE(accelerator.stop_requested());
  if (world().rank() == world().size() - 1) ::raise(SIGUSR1);
  EXPECT_TRUE(accelerator.stop_requested());
  EXPECT_THROW(accelerator.stop_on_signals({SIGKILL}), ConfigError);
}

TEST_F(Checkpoints, PythonReadsOursAndWeReadPythons) {
  if (world().size() > 1) GTEST_SKIP() << "one process on the other side";
  if (!testing::has_python()) GTEST_SKIP() << "there is no Python";
  const auto python = [&](const char* action, const fs::path& where) {
    return testing::run_python("accelerator/checkpoint_reference.py",
                               text::concat(action, " '", where.string(), "'"));
  };
  const auto expect_near = [](const std::vector<double>& ours, const Json& theirs) {
    ASSERT_EQ(ours.size(), theirs.size());
    for (std::size_t i = 0; i < ours.size(); ++i)
      EXPECT_NEAR(ours[i], theirs[i].get<double>(), 1e-6) << "step " << i;
  };
  Accelerator accelerator(options());
  Net net;
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  train(accelerator, model, optimizer, 0, 2);
  accelerator.save_state(folder / "ours");
  const Json loaded = python("load", folder / "ours");
  EXPECT_EQ(loaded.at("lr"), 0.02);
  EXPECT_EQ(loaded.at("step"), 2.0);
  expect_near(train(accelerator, model, optimizer, 2, 6), loaded.at("losses"));

  const Json saved = python("save", folder / "theirs");
  accelerator.load_state(folder / "theirs");
  expect_near(train(accelerator, model, optimizer, 2, 6), saved.at("losses"));
  EXPECT_EQ(optimizer.learning_rates(), std::vector<double>{0.05});
}

}  // namespace
}  // namespace accelerate
