// Checkpoints of one number of processes and one strategy, loaded by another, bit for bit; and what
// happens when they are damaged or belong to something else.

#include <support/distributed.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/checkpoint/optimizer_state.hpp>
#include <accelerate/checkpoint/sharded.hpp>
#include <accelerate/optim/adafactor.hpp>
#include <accelerate/optim/fused.hpp>
#include <accelerate/optim/optimizer.hpp>
#include <accelerate/parallel/ddp.hpp>
#include <accelerate/parallel/fsdp.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

namespace accelerate::checkpoints {
namespace {

namespace fs = std::filesystem;
using accelerate::testing::world;

// A module with what is hard to cut: an odd number of rows, memory in another order, a parameter
// without dimensions, a frozen one, a tied one and buffers.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(std::int64_t seed, std::int64_t width = 13) {
    torch::manual_seed(static_cast<std::uint64_t>(seed));
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3).padding(1)));
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    norm = register_module("norm", torch::nn::BatchNorm2d(5));
    in = register_module("in", torch::nn::Linear(5 * 16, width));
    out = register_module("out", torch::nn::Linear(width, 7));
    scale = register_parameter("scale", at::full({}, 1.5));
    frozen = register_parameter("frozen", at::rand({7}), /*requires_grad=*/false);
    out_twice = register_module("out_twice", out);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = at::relu(norm(conv(x)));
    return out(at::tanh(in(y.flatten(1)))) * scale + frozen;
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear in{nullptr}, out{nullptr}, out_twice{nullptr};
  at::Tensor scale, frozen;
};

enum class Optim { adamw, fused_adamw, sgd, rmsprop };

std::shared_ptr<torch::optim::Optimizer> make_optimizer(Optim kind,
                                                        const std::vector<at::Tensor>& all) {
  using torch::optim::OptimizerParamGroup;
  // Two groups with options of their own.
  std::vector<at::Tensor> first(all.begin(), all.begin() + 3), second(all.begin() + 3, all.end());
  const auto groups = [&](auto one, auto other) {
    using O = decltype(one);
    return std::vector<OptimizerParamGroup>{
        OptimizerParamGroup(first, std::make_unique<O>(one)),
        OptimizerParamGroup(second, std::make_unique<O>(other))};
  };
  switch (kind) {
    case Optim::adamw:
      return std::make_shared<torch::optim::AdamW>(
          groups(torch::optim::AdamWOptions(1e-2), torch::optim::AdamWOptions(3e-3).amsgrad(true)));
    case Optim::fused_adamw:
      return std::make_shared<optim::FusedAdamW>(
          groups(optim::FusedAdamWOptions(1e-2), optim::FusedAdamWOptions(3e-3).amsgrad(true)));
    case Optim::sgd:
      return std::make_shared<torch::optim::SGD>(
          groups(torch::optim::SGDOptions(1e-2).momentum(0.9), torch::optim::SGDOptions(1e-3)),
          torch::optim::SGDOptions(1e-3));
    case Optim::rmsprop:
      return std::make_shared<torch::optim::RMSprop>(
          groups(torch::optim::RMSpropOptions(1e-2).centered(true),
                 torch::optim::RMSpropOptions(1e-3).momentum(0.5)));
  }
  return nullptr;
}

// A module with its strategy and optimizer, as one run has them.
struct Session {
  Session(const comm::Group& group, const std::string& strategy_name, std::int64_t seed,
          Optim kind = Optim::adamw, std::int64_t width = 13)
      : group(group), net(std::make_shared<NetImpl>(seed, width)) {
    const ModuleRecord record{std::shared_ptr<torch::nn::Module>(net)};
    std::vector<at::Tensor> parameters;
    for (const NamedTensor& parameter : record.parameters()) {
      if (parameter.tensor.requires_grad()) parameters.push_back(parameter.tensor);
    }
    optimizer = make_optimizer(kind, parameters);
    if (strategy_name == "single") {
      strategy = std::make_shared<parallel::Strategy>(record);
    } else if (strategy_name == "ddp") {
      strategy = std::make_shared<parallel::Ddp>(record, group, DdpOptions());
    } else {
      parallel::FsdpOptions options;
      if (strategy_name == "zero1" || strategy_name == "zero2")
        options.sharding_strategy(parallel::ShardingStrategy::shard_optimizer);
      if (strategy_name == "zero2") options.reduce_every_backward(true);
      if (strategy_name == "fsdp_units") options.unit_names({"conv", "in"});
      strategy = std::make_shared<parallel::Fsdp>(record, options, group, strategy_name);
    }
    core = std::make_shared<OptimizerCore>(optimizer, std::make_shared<GradientState>());
    core->link(strategy);
  }

  double step(std::int64_t number) {
    torch::manual_seed(static_cast<std::uint64_t>(100 * number + group.rank()));
    const at::Tensor x = at::randn({4, 3, 4, 4});
    strategy->before_forward({});
    const at::Tensor y = net->forward(x);
    strategy->after_forward({}, {y});
    const at::Tensor loss = y.square().mean();
    loss.backward();
    strategy->after_backward();
    core->step();
    core->zero_grad();
    return loss.item<double>();
  }

  void save(const fs::path& folder) {
    Save save(group, folder);
    save.add(module_group(*strategy, "model"));
    auto state = optimizer_state(*optimizer, {{"", strategy}}, group, "optimizer");
    save.add(std::move(state.tensors));
    save.add_file("optimizer.json", state.description.dump());
    save.plan();
    save.write(group);
  }

  void load(const fs::path& folder) {
    Load load(group, folder);
    load.want_all(module_group(*strategy, "model"), /*strict=*/true);
    IncomingOptimizerState state(*optimizer, {{"", strategy}},
                                 Json::parse(load.text("optimizer.json")), "optimizer", load);
    load.verify();
    load.read();
    state.apply();
    strategy->load_state_dict(
        {}, parallel::StateDictOptions().type(parallel::StateDictType::sharded), false);
  }

  comm::Group group;
  std::shared_ptr<NetImpl> net;
  std::shared_ptr<torch::optim::Optimizer> optimizer;
  std::shared_ptr<parallel::Strategy> strategy;
  std::shared_ptr<OptimizerCore> core;
};

// One folder for all ranks, removed at the end by the first.
class SharedFolder {
 public:
  SharedFolder() {
    std::string name;
    if (world().rank() == 0) {
      // In memory where that can be had: this is not about disks, and syncing one is slow.
      own_.emplace(fs::is_directory("/dev/shm") ? fs::path("/dev/shm") : fs::temp_directory_path());
      name = own_->path().string();
    }
    path_ = world().broadcast_bytes(name);
  }
  ~SharedFolder() {
    try {
      world().barrier();
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
  const fs::path& path() const { return path_; }

 private:
  std::optional<io::TemporaryFolder> own_;
  fs::path path_;
};

// The groups of the first 1, 2, ... ranks, made once.
const comm::Group& first_ranks(int count) {
  static const std::vector<comm::Group> groups = [] {
    std::vector<comm::Group> all;
    for (int n = 1; n <= world().size(); ++n)
      all.push_back(n == world().size() ? world()
                                        : world().split(world().rank() < n ? 0 : 1, world().rank(),
                                                        "first" + std::to_string(n)));
    return all;
  }();
  return groups[static_cast<std::size_t>(count - 1)];
}

// Every tensor of a checkpoint, whole and in row-major order, by "group/name".
std::map<std::string, at::Tensor> everything(const fs::path& folder) {
  Load load(comm::Group(), folder);
  std::map<std::string, at::Tensor> all;
  for (const auto& [group, tensors] : load.manifest().groups) {
    for (const auto& [name, saved] : tensors) {
      at::Tensor tensor = at::empty(
          saved.shape, at::TensorOptions().dtype(
                           saved.dtype == io::safetensors::Dtype::kI64 ? at::kLong : at::kFloat));
      load.want(group, whole_part(name, tensor));
      all.emplace(group + "/" + name, tensor);
    }
  }
  load.verify();
  load.read();
  return all;
}

void expect_equal(const fs::path& a, const fs::path& b, const std::string& what) {
  const auto left = everything(a);
  const auto right = everything(b);
  ASSERT_GT(left.size(), 12U);
  ASSERT_EQ(left.size(), right.size()) << what;
  for (const auto& [name, tensor] : left) {
    ASSERT_TRUE(right.contains(name)) << what << ": " << name;
    EXPECT_TRUE(at::equal(tensor, right.at(name))) << what << ": " << name;
  }
}

struct Shape {
  int processes;
  std::string strategy;
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    return out << shape.strategy << " on " << shape.processes;
  }
};

std::vector<Shape> shapes() {
  std::vector<Shape> all{{1, "single"}, {1, "fsdp"}};
  for (int n = 2; n <= world().size(); ++n) {
    for (const char* strategy : {"ddp", "fsdp", "fsdp_units", "zero1", "zero2"})
      all.push_back({n, strategy});
  }
  return all;
}

bool full() {
  const char* value = std::getenv("ACCELERATE_TEST_FULL");
  return value != nullptr && std::string_view(value) != "0" && *value != '\0';
}

TEST(Sharded, AnyNumberOfProcessesAndStrategyLoadsWhatAnyOtherSaved) {
  const SharedFolder folder;
  const auto all = shapes();
  first_ranks(1);  // all ranks make the groups
  // Every shape saves; a covering choice of those that load, or all of them.
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto& from = all[i];
    const auto kind = static_cast<Optim>(i % 4);
    const fs::path saved = folder.path() / ("saved" + std::to_string(i));
    if (world().rank() < from.processes) {
      Session run(first_ranks(from.processes), from.strategy, 1, kind);
      run.step(1);
      run.step(2);
      run.save(saved);
    }
    world().barrier();
    for (std::size_t j = 0; j < all.size(); ++j) {
      if (!full() && (i * 5 + j * 3) % all.size() > 2) continue;
      const auto& to = all[j];
      const fs::path again = folder.path() / "again";
      if (world().rank() < to.processes) {
        Session run(first_ranks(to.processes), to.strategy, 2, kind);
        run.step(7);  // what it had is replaced
        run.load(saved);
        run.save(again);
      }
      world().barrier();
      if (world().rank() == 0)
        expect_equal(saved, again,
                     ::testing::PrintToString(from) + " to " + ::testing::PrintToString(to));
      world().barrier();
    }
  }
}

TEST(Sharded, TrainingGoesOnBitForBit) {
  const SharedFolder folder;
  first_ranks(1);
  for (const Shape& shape : shapes()) {
    if (!full() && shape.processes != world().size()) continue;
    const fs::path saved = folder.path() / "saved";
    if (world().rank() < shape.processes) {
      const auto& group = first_ranks(shape.processes);
      Session whole(group, shape.strategy, 1, Optim::fused_adamw);
      for (int step = 0; step < 2; ++step) whole.step(step);
      whole.save(saved);
      Session resumed(group, shape.strategy, 2, Optim::fused_adamw);
      resumed.load(saved);
      // DDP learns in its first step in which order gradients arrive and lays its buckets out anew;
      // with three processes or more the layout decides in which order they are added.
      const bool exact = shape.strategy != "ddp" || shape.processes < 3;
      for (int step = 2; step < 5; ++step) {
        const double expected = whole.step(step);
        const double found = resumed.step(step);
        EXPECT_NEAR(expected, found, exact ? 0 : 1e-6) << shape << " step " << step;
      }
    }
    world().barrier();
  }
}

// The message of what `work` throws; it must be thrown on every rank.
template <class Work>
std::string message_of(Work&& work) {
  try {
    work();
  } catch (const Error& error) {
    return describe(error);
  }
  ADD_FAILURE() << "nothing was thrown on rank " << world().rank();
  return {};
}

void expect_says(const std::string& message, std::initializer_list<const char*> parts) {
  for (const char* part : parts)
    EXPECT_NE(message.find(part), std::string::npos) << '"' << part << "\" is not in: " << message;
}

std::string own_strategy() { return world().size() == 1 ? "single" : "fsdp"; }

TEST(Sharded, AFlippedBitInAnyFileIsNamedBeforeAnythingChanges) {
  const SharedFolder folder;
  const fs::path saved = folder.path() / "saved";
  Session run(world(), own_strategy(), 1);
  run.step(1);
  run.save(saved);
  Session other(world(), own_strategy(), 2);
  other.step(1);
  other.save(folder.path() / "before");
  for (const std::string& name : io::names_in(saved)) {
    world().barrier();
    const auto size = fs::file_size(saved / name);
    for (const double where : {0.0, 0.3, 0.7, 1.0}) {
      const auto at = std::min<std::uint64_t>(static_cast<std::uint64_t>(size * where), size - 1);
      const auto flip = [&] {
        if (world().rank() == 0) {
          io::File file = io::File::open_writable(saved / name);
          char byte = 0;
          file.read(&byte, 1, at);
          byte = static_cast<char>(byte ^ 4);
          file.write(&byte, 1, at);
        }
        world().barrier();
      };
      flip();
      expect_says(message_of([&] { other.load(saved); }), {name.c_str()});
      world().barrier();
      flip();
    }
  }
  other.save(folder.path() / "after");
  world().barrier();
  if (world().rank() == 0) {
    expect_equal(folder.path() / "before", folder.path() / "after", "after refused loads");
  }
  other.load(saved);
}

TEST(Sharded, EachWrongCheckpointHasItsOwnSentence) {
  const SharedFolder folder;
  const fs::path saved = folder.path() / "saved";
  Session run(world(), own_strategy(), 1);
  run.step(1);
  run.save(saved);

  expect_says(message_of([&] { run.load(folder.path() / "nothing"); }), {"There is no checkpoint"});
  expect_says(message_of([&] { run.load(saved / "manifest.json"); }), {"is a file"});
  expect_says(message_of([&] { run.load(folder.path()); }), {"manifest.json", "not a complete"});
  {
    Session wider(world(), own_strategy(), 1, Optim::adamw, 17);
    expect_says(message_of([&] { wider.load(saved); }), {"in.weight", "[13, 80]", "[17, 80]"});
  }
  {
    Session sgd(world(), own_strategy(), 1, Optim::sgd);
    expect_says(message_of([&] { sgd.load(saved); }), {"torch::optim::AdamW", "torch::optim::SGD"});
  }
  {
    auto group = module_group(*run.strategy, "model");
    group.parts.push_back(whole_part("more", at::zeros({2})));
    std::erase_if(group.parts, [](const TensorPart& part) { return part.name == "in.bias"; });
    Load load(world(), saved);
    expect_says(message_of([&] { load.want_all(group, true); }),
                {"Missing: more", "Unexpected: in.bias"});
    EXPECT_NO_THROW(load.want_all(group, false));
  }
  world().barrier();
  const std::string one = world().size() == 1 ? "model.safetensors" : "model.rank0.safetensors";
  if (world().rank() == 0) fs::rename(saved / one, folder.path() / "away");
  world().barrier();
  expect_says(message_of([&] { run.load(saved); }), {"lacks its file", one.c_str()});
  world().barrier();
  if (world().rank() == 0) {
    fs::rename(folder.path() / "away", saved / one);
    fs::resize_file(saved / one, fs::file_size(saved / one) - 1);
  }
  world().barrier();
  expect_says(message_of([&] { run.load(saved); }), {"bytes, and", "were written"});
  world().barrier();

  // Where a checkpoint cannot be saved.
  if (world().rank() == 0) {
    std::ofstream(folder.path() / "file") << "text";
    fs::create_directories(folder.path() / "other");
    std::ofstream(folder.path() / "other" / "notes.txt") << "text";
  }
  world().barrier();
  expect_says(message_of([&] { run.save(folder.path() / "file"); }), {"that is a file"});
  expect_says(message_of([&] { run.save(folder.path() / "other"); }), {"notes.txt"});
  EXPECT_TRUE(fs::exists(folder.path() / "other" / "notes.txt"));
  world().barrier();
}

TEST(Sharded, ASaveOverAnOlderOneLeavesNothingOfIt) {
  const SharedFolder folder;
  const fs::path saved = folder.path() / "saved";
  {
    Session run(world(), own_strategy(), 1);
    run.step(1);
    run.save(saved);
  }
  world().barrier();
  if (world().rank() == 0) {
    Session run(comm::Group(), "single", 3);
    run.save(saved);
    EXPECT_EQ(io::names_in(saved), (std::vector<std::string>{"manifest.json", "model.safetensors",
                                                             "optimizer.bin", "optimizer.json"}));
    EXPECT_EQ(io::names_in(folder.path()), (std::vector<std::string>{"saved"}));
  }
  world().barrier();
}

// ------------------------------------------------------------------- faults at every operation

std::atomic<int> calls{0};
std::atomic<int> failing{-1};

int fail_one(io::faults::Operation, const fs::path&, std::size_t& bytes) {
  if (bytes > 4096) bytes /= 2;
  return calls++ == failing ? ENOSPC : 0;
}

TEST(Sharded, AFailureAtAnyCallOnOneProcessLeavesThePreviousCheckpoint) {
  const SharedFolder folder;
  const fs::path saved = folder.path() / "saved";
  Session run(world(), own_strategy(), 1);
  run.step(1);
  run.save(saved);
  run.save(folder.path() / "copy");
  run.step(2);
  // One process fails, the others are told.
  const int culprit = world().size() - 1;
  for (const int rank : {0, culprit}) {
    for (int at = 0;; ++at) {
      calls = 0;
      failing = world().rank() == rank ? at : -1;
      io::faults::set_hook(fail_one);
      std::string message;
      try {
        run.save(saved);
      } catch (const CheckpointError& error) {
        message = describe(error);
      }
      io::faults::set_hook(nullptr);
      world().barrier();
      if (message.empty()) {
        // Past the last call; or removing what was replaced failed, once the new one was complete.
        const bool reached = world().broadcast_bytes(calls > at ? "1" : "0", rank) == "1";
        ASSERT_FALSE(reached) << "call " << at << " of process " << rank
                              << " failed and nobody was told";
        break;
      }
      expect_says(message, {"No space left on device"});
      if (world().rank() == 0) {
        const auto now = everything(saved);  // complete and verified: the old one or the new one
        EXPECT_GT(now.size(), 12U) << "call " << at;
      }
      ASSERT_LT(at, 500);
    }
    // The last save went through.
    if (world().rank() == 0) {
      EXPECT_FALSE(at::equal(everything(saved).at("model/in.weight"),
                             everything(folder.path() / "copy").at("model/in.weight")));
    }
    world().barrier();
  }
}

// ------------------------------------------------------------------------------ sudden ends

// What a child process does until it is killed: saves over and over in one folder, and says through
// the pipe which save is complete.
[[noreturn]] void save_until_killed(const fs::path& folder, int pipe, int first) {
  Session run(comm::Group(), "single", 1);
  for (int number = first;; ++number) {
    Save save(comm::Group(), folder);
    save.add(module_group(*run.strategy, "model"));
    save.set_about({{"number", number}});
    save.plan();
    save.write(comm::Group());
    if (::write(pipe, &number, sizeof number) != sizeof number) ::_exit(1);
  }
}

// Forks a child that saves, has `meanwhile` end it, and checks what is left. Returns the number of
// the checkpoint that is there.
template <class Meanwhile>
int check_after_death(const fs::path& folder, int first, bool kills_itself, Meanwhile&& meanwhile) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    if (kills_itself) meanwhile(child);
    save_until_killed(folder, ends[1], first);
  }
  ::close(ends[1]);
  if (!kills_itself) meanwhile(child);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  int finished = first - 1;
  for (int number = 0; ::read(ends[0], &number, sizeof number) == sizeof number;) finished = number;
  ::close(ends[0]);
  Load load(comm::Group(), folder);
  load.verify();
  const int there = load.manifest().about.at("number").template get<int>();
  EXPECT_GE(there, finished);
  EXPECT_LE(there, finished + 1);
  return there;
}

TEST(Sharded, AfterAKillAtAnyInstantACompleteCheckpointLoads) {
  if (world().size() > 1) GTEST_SKIP() << "forks a process of its own";
  const SharedFolder folder;
  const fs::path saved = folder.path() / "saved";
  {
    Save save(comm::Group(), saved);
    save.set_about({{"number", 0}});
    save.plan();
    save.write(comm::Group());
  }
  std::mt19937 random(17);
  int there = 0;
  for (int round = 0; round < (full() ? 400 : 40); ++round) {
    const auto delay = std::chrono::microseconds(random() % 15000);
    there = check_after_death(saved, there + 1, false, [&](pid_t child) {
      std::this_thread::sleep_for(delay);
      ::kill(child, SIGKILL);
    });
    ASSERT_FALSE(::testing::Test::HasFailure()) << "round " << round;
  }
  EXPECT_GT(there, 20);  // some saves came to an end
}

int dies_in = 0;
int die_at(io::faults::Operation, const fs::path&, std::size_t& bytes) {
  if (bytes > 4096) bytes /= 2;
  if (dies_in-- == 0) ::raise(SIGKILL);
  return 0;
}

TEST(Sharded, AfterADeathAtEveryOperationACompleteCheckpointLoads) {
  if (world().size() > 1) GTEST_SKIP() << "forks a process of its own";
  const SharedFolder folder;
  const fs::path saved = folder.path() / "saved";
  {
    Save save(comm::Group(), saved);
    save.set_about({{"number", 0}});
    save.plan();
    save.write(comm::Group());
  }
  int there = 0;
  int operations = 0;
  for (; operations < 300; ++operations) {
    const int last = there;
    there = check_after_death(saved, last + 1, true, [&](pid_t) {
      dies_in = operations;
      io::faults::set_hook(die_at);
    });
    ASSERT_FALSE(::testing::Test::HasFailure()) << "operation " << operations;
    if (there > last + 1) break;  // two saves came to an end: every operation of one had its turn
  }
  EXPECT_GT(operations, 8);
}

TEST(Sharded, StatesOfOtherShapesAreHeldOrRefusedByName) {
  const SharedFolder folder;
  const auto make = [&](std::int64_t seed) {
    Session run(world(), own_strategy(), seed);
    std::vector<at::Tensor> leaves = run.core->parameters();
    run.optimizer = std::make_shared<optim::Adafactor>(leaves);
    run.core = std::make_shared<OptimizerCore>(run.optimizer, std::make_shared<GradientState>());
    run.core->link(run.strategy);
    return run;
  };
  Session run = make(1);
  run.step(1);
  run.save(folder.path() / "saved");
  Session same = make(2);
  same.load(folder.path() / "saved");
  EXPECT_EQ(run.step(2), same.step(2));
  if (world().size() == 1) return;
  const auto message = [&]() -> std::string {
    if (world().rank() != 0) return {};
    Session alone(comm::Group(), "single", 1);
    alone.optimizer = std::make_shared<optim::Adafactor>(alone.core->parameters());
    return message_of([&] { alone.load(folder.path() / "saved"); });
  }();
  if (world().rank() == 0) expect_says(message, {"parts of the parameter"});
  world().barrier();
}

TEST(Sharded, LbfgsComesBack) {
  if (world().size() > 1) GTEST_SKIP() << "needs closures over whole parameters";
  const SharedFolder folder;
  const auto train = [](Session& run, int steps) {
    double last = 0;
    for (int step = 0; step < steps; ++step) {
      run.optimizer->step([&] {
        run.optimizer->zero_grad();
        torch::manual_seed(5);
        at::Tensor loss = run.net->forward(at::randn({4, 3, 4, 4})).square().mean();
        loss.backward();
        last = loss.item<double>();
        return loss;
      });
    }
    return last;
  };
  const auto make = [](std::int64_t seed) {
    Session run(world(), "single", seed);
    run.optimizer = std::make_shared<torch::optim::LBFGS>(
        run.net->in->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
    return run;
  };
  Session run = make(1);
  train(run, 2);
  run.save(folder.path() / "saved");
  Session resumed = make(2);
  resumed.load(folder.path() / "saved");
  EXPECT_EQ(train(run, 2), train(resumed, 2));
}

}  // namespace
}  // namespace accelerate::checkpoints
