// AdamW whose state is in host memory or on disk: the bits of FusedAdamW, whatever is in between.
#include <accelerate/base/error.hpp>
#include <accelerate/optim/offloaded.hpp>
#include <accelerate/optim/optimizer.hpp>
#include <accelerate/optim/schedules.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/serialize.h>

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <sstream>

namespace accelerate::optim {
namespace {

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "accelerate-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string path() const { return path_.string(); }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::filesystem::path path_;
};

// Blocks so small that parameters are cut into many.
OffloadOptions on_disk(const Folder& folder, bool direct = true) {
  return OffloadOptions()
      .place(StatePlace::disk)
      .folder(folder.path())
      .block_bytes(3 * 4096)
      .direct_io(direct);
}

struct Model {
  std::vector<std::vector<at::Tensor>> groups;

  std::vector<at::Tensor> all() const {
    std::vector<at::Tensor> result;
    for (const auto& group : groups) result.insert(result.end(), group.begin(), group.end());
    return result;
  }
  template <class Optimizer, class... Rest>
  Optimizer optimizer(Rest&&... rest) const {
    std::vector<torch::optim::OptimizerParamGroup> made;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      FusedAdamWOptions options(0.01 * static_cast<double>(i + 1));
      if (i == 1) options.amsgrad(true).weight_decay(0.1).betas({0.8, 0.95});
      made.emplace_back(groups[i], std::make_unique<FusedAdamWOptions>(options));
    }
    return Optimizer(made, FusedAdamWOptions(), std::forward<Rest>(rest)...);
  }
};

// Many sizes, dtypes and layouts; two parameters are parts of one tensor, as shards are, and one is
// empty.
Model model() {
  at::manual_seed(7);
  const at::Tensor flat = at::randn({9001});
  const auto leaf = [](at::Tensor tensor) { return tensor.detach().requires_grad_(true); };
  return {{{leaf(at::randn({37, 111})), leaf(flat.narrow(0, 0, 4001)), leaf(at::randn({})),
            leaf(at::empty({0, 5})), leaf(flat.narrow(0, 4001, 5000)),
            leaf(at::randn({3, 5, 7, 9}).contiguous(at::MemoryFormat::ChannelsLast))},
           {leaf(at::randn({13, 501}).to(at::kBFloat16)), leaf(at::randn({77, 19}, at::kDouble)),
            leaf(at::randn({20000}))}}};
}

// The gradients of a step; some parameters have none in some steps.
void give_gradients(const std::vector<at::Tensor>& parameters, int step) {
  at::manual_seed(100 + step);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor gradient = at::randn(parameters[i].sizes()).to(parameters[i].scalar_type());
    parameters[i].mutable_grad() = (i + step) % 4 == 3 ? at::Tensor() : gradient;
  }
}

void expect_same(const Model& ours, const torch::optim::Optimizer& our_optimizer,
                 const Model& theirs, const torch::optim::Optimizer& their_optimizer) {
  const auto mine = ours.all(), others = theirs.all();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_TRUE(at::equal(mine[i], others[i])) << "parameter " << i;
    const auto state = our_optimizer.state().find(mine[i].unsafeGetTensorImpl());
    const auto other = their_optimizer.state().find(others[i].unsafeGetTensorImpl());
    ASSERT_EQ(state == our_optimizer.state().end(), other == their_optimizer.state().end()) << i;
    if (state == our_optimizer.state().end()) continue;
    const auto& s = static_cast<const FusedAdamWParamState&>(*state->second);
    const auto& o = static_cast<const FusedAdamWParamState&>(*other->second);
    EXPECT_TRUE(at::equal(s.step(), o.step())) << i;
    EXPECT_TRUE(at::equal(s.exp_avg(), o.exp_avg())) << i;
    EXPECT_TRUE(at::equal(s.exp_avg_sq(), o.exp_avg_sq())) << i;
    ASSERT_EQ(s.max_exp_avg_sq().defined(), o.max_exp_avg_sq().defined()) << i;
    if (s.max_exp_avg_sq().defined()) {
      EXPECT_TRUE(at::equal(s.max_exp_avg_sq(), o.max_exp_avg_sq())) << i;
    }
  }
}

TEST(OffloadedAdamW, GivesTheBitsOfFusedAdamW) {
  const Folder folder;
  struct Case {
    const char* name;
    OffloadOptions options;
    const char* io_uring;
  };
  const Case cases[] = {
      {"cpu", OffloadOptions().block_bytes(10000), "1"},
      {"disk, direct", on_disk(folder), "1"},
      {"disk, page cache", on_disk(folder, false), "1"},
      {"disk, threads", on_disk(folder), "0"},
      {"disk, one block", on_disk(folder).block_bytes(1 << 20), "1"},
  };
  for (const auto& [name, options, io_uring] : cases) {
    SCOPED_TRACE(name);
    ::setenv("ACCELERATE_IO_URING", io_uring, 1);
    const Model theirs = model(), ours = model();
    auto expected = theirs.optimizer<FusedAdamW>();
    auto optimizer = ours.optimizer<OffloadedAdamW>(options);
    for (int step = 0; step < 3; ++step) {
      for (auto* each : {static_cast<torch::optim::Optimizer*>(&expected),
                         static_cast<torch::optim::Optimizer*>(&optimizer)})
        each->param_groups()[0].options().set_lr(0.02 / (step + 1));
      give_gradients(theirs.all(), step);
      give_gradients(ours.all(), step);
      expected.step();
      optimizer.step();
      expect_same(ours, optimizer, theirs, expected);
    }
    EXPECT_TRUE(folder.empty());
    const bool disk = options.place() == StatePlace::disk;
    EXPECT_EQ(optimizer.disk_bytes() > 0, disk);
    EXPECT_LE(optimizer.block_memory_bytes(), disk ? 3 * options.block_bytes() + 9 * 4096 : 0);
  }
  ::unsetenv("ACCELERATE_IO_URING");
}

TEST(OffloadedAdamW, KeepsParametersInFp32) {
  const Folder folder;
  for (const auto& options :
       {on_disk(folder).fp32_parameters(true), OffloadOptions().fp32_parameters(true)}) {
    at::manual_seed(3);
    const at::Tensor half = at::randn({5000}).to(at::kBFloat16).requires_grad_(true);
    const at::Tensor whole = at::randn({100}).requires_grad_(true);
    const at::Tensor copy = half.detach().to(at::kFloat).requires_grad_(true);
    const at::Tensor other = whole.detach().clone().requires_grad_(true);
    OffloadedAdamW optimizer({half, whole}, FusedAdamWOptions(1e-4), options);
    FusedAdamW expected({copy, other}, FusedAdamWOptions(1e-4));
    for (int step = 0; step < 4; ++step) {
      half.mutable_grad() = at::randn({5000}).to(at::kBFloat16);
      whole.mutable_grad() = at::randn({100});
      copy.mutable_grad() = half.grad().to(at::kFloat);
      other.mutable_grad() = whole.grad();
      optimizer.step();
      expected.step();
    }
    const auto& state =
        static_cast<FusedAdamWParamState&>(*optimizer.state().at(half.unsafeGetTensorImpl()));
    EXPECT_TRUE(at::equal(state.fp32_parameter(), copy));
    EXPECT_TRUE(at::equal(half, copy.to(at::kBFloat16)));
    EXPECT_TRUE(at::equal(whole, other));
    EXPECT_FALSE(
        static_cast<FusedAdamWParamState&>(*optimizer.state().at(whole.unsafeGetTensorImpl()))
            .fp32_parameter()
            .defined());
  }
}

template <class From, class To>
void carry_over(const From& from, To& to) {
  std::stringstream stream;
  {
    torch::serialize::OutputArchive archive;
    from.save(archive);
    archive.save_to(stream);
  }
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  to.load(archive);
}

TEST(OffloadedAdamW, SavesAndLoadsWhatFusedAdamWDoes) {
  const Folder folder;
  const Model reference = model();
  auto expected = reference.optimizer<FusedAdamW>();
  const auto train = [](const Model& model, torch::optim::Optimizer& optimizer, int from, int to) {
    for (int step = from; step < to; ++step) {
      give_gradients(model.all(), step);
      optimizer.step();
    }
  };
  train(reference, expected, 0, 6);

  // From memory to disk, to another disk, and back to memory: two steps in each.
  const Model trained = model();
  auto first = trained.optimizer<FusedAdamW>();
  train(trained, first, 0, 2);
  auto second = trained.optimizer<OffloadedAdamW>(on_disk(folder));
  carry_over(first, second);
  train(trained, second, 2, 3);
  auto third = trained.optimizer<OffloadedAdamW>(on_disk(folder));
  give_gradients(trained.all(), 99);
  carry_over(second, third);
  train(trained, third, 3, 4);
  carry_over(third, third);
  auto fourth = trained.optimizer<FusedAdamW>();
  carry_over(third, fourth);
  train(trained, fourth, 4, 6);
  expect_same(trained, fourth, reference, expected);

  // State that was put in place by hand is taken, too.
  const at::Tensor weight = at::ones({5000}).requires_grad_(true);
  OffloadedAdamW optimizer({weight}, FusedAdamWOptions(), on_disk(folder));
  weight.mutable_grad() = at::ones({5000});
  optimizer.step();
  auto& state =
      static_cast<FusedAdamWParamState&>(*optimizer.state().at(weight.unsafeGetTensorImpl()));
  state.exp_avg(at::full({5000}, 5.0));
  state.exp_avg_sq().fill_(4.0);
  optimizer.step();
  EXPECT_TRUE(at::allclose(state.exp_avg(), at::full({5000}, 0.9 * 5 + 0.1)));
  EXPECT_TRUE(at::allclose(state.exp_avg_sq(), at::full({5000}, 0.999 * 4 + 0.001)));
}

TEST(OffloadedAdamW, TakesParametersThatComeLater) {
  const Folder folder;
  const Model ours = model(), theirs = model();
  const auto make = [&](const Model& model, auto&&... rest) { return Model{{model.groups[0]}}; };
  auto optimizer = make(ours).optimizer<OffloadedAdamW>(on_disk(folder));
  auto expected = make(theirs).optimizer<FusedAdamW>();
  for (int step = 0; step < 4; ++step) {
    give_gradients(ours.all(), step);
    give_gradients(theirs.all(), step);
    if (step == 2) {
      const auto options = [] { return std::make_unique<FusedAdamWOptions>(0.5); };
      optimizer.add_param_group({ours.groups[1], options()});
      expected.add_param_group({theirs.groups[1], options()});
    }
    optimizer.step();
    expected.step();
  }
  expect_same(ours, optimizer, theirs, expected);
}

struct Sharded : parallel::Strategy {
  Sharded(at::Tensor whole, at::Tensor part)
      : Strategy(ModuleRecord(std::make_shared<torch::nn::Module>())),
        whole(std::move(whole)),
        part(std::move(part)) {}
  at::Tensor optimizer_leaf(const at::Tensor& parameter) const override {
    return parameter.is_same(whole) ? part : at::Tensor();
  }
  at::Tensor whole, part;
};

TEST(OffloadedAdamW, IsPreparedAsAnyOptimizer) {
  const Folder folder;
  const at::Tensor whole = at::ones({6000}).requires_grad_(true);
  const at::Tensor part = whole.detach().narrow(0, 1000, 3000).requires_grad_(true);
  auto prepared = prepare_optimizer(
      OffloadedAdamW({whole}, FusedAdamWOptions(0.1).weight_decay(0), on_disk(folder)),
      std::make_shared<GradientState>());
  const auto sharded = std::make_shared<Sharded>(whole, part);
  EXPECT_TRUE(prepared.core()->link(sharded));
  auto schedule = linear_schedule_with_warmup(prepared.optimizer(), 0, 10);
  sharded->before_forward({});
  part.mutable_grad() = at::ones({3000});
  prepared.step();
  EXPECT_TRUE(at::allclose(whole.narrow(0, 1000, 3000), at::full({3000}, 0.9)));
  EXPECT_TRUE(at::equal(whole.narrow(0, 0, 1000), at::ones({1000})));
  // The layout was made for the part, and the state is the part's.
  EXPECT_LT(prepared.optimizer().disk_bytes(), 6000 * 2 * 4);
  EXPECT_THROW(prepared.core()->link(std::make_shared<Sharded>(part, whole)), StateError);

  // A step that the scaler says to leave out changes nothing.
  const at::Tensor before = part.clone();
  prepared.optimizer().set_found_inf(at::ones({}));
  prepared.step();
  EXPECT_TRUE(at::equal(part, before));
  const auto& state = static_cast<FusedAdamWParamState&>(
      *prepared.optimizer().state().at(part.unsafeGetTensorImpl()));
  EXPECT_EQ(state.step().item<float>(), 1.0F);
  prepared.step();
  EXPECT_FALSE(at::equal(part, before));
}

TEST(OffloadedAdamW, RefusesWhatCannotWork) {
  const Folder folder;
  const at::Tensor weight = at::ones({4}).requires_grad_(true);
  EXPECT_THROW(
      OffloadedAdamW({weight}, FusedAdamWOptions(), OffloadOptions().place(StatePlace::disk)),
      ConfigError);
  EXPECT_THROW(OffloadedAdamW({weight}, FusedAdamWOptions(), OffloadOptions().block_bytes(0)),
               ConfigError);
  EXPECT_THROW(OffloadedAdamW({weight}, FusedAdamWOptions(-1.0)), ConfigError);
  OffloadedAdamW optimizer({weight}, FusedAdamWOptions(), on_disk(folder));
  weight.mutable_grad() = at::ones({4}).to_sparse();
  EXPECT_THROW(optimizer.step(), UnsupportedError);
  weight.mutable_grad() = at::ones({4});
  optimizer.step();
  static_cast<FusedAdamWOptions&>(optimizer.param_groups()[0].options()).amsgrad(true);
  EXPECT_THROW(optimizer.step(), StateError);
  static_cast<FusedAdamWOptions&>(optimizer.param_groups()[0].options()).amsgrad(false);
  optimizer.step();

#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "The thread sanitizer has no room for so large an address space.";
#endif
  // More state than there is disk: address space that nothing backs stands in for the parameter.
  constexpr std::size_t kBytes = std::size_t{1} << 44;
  void* memory =
      ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const at::Tensor large =
      at::from_blob(memory, {static_cast<std::int64_t>(kBytes / 4)}, at::kFloat)
          .requires_grad_(true);
  large.mutable_grad() = large.detach();
  OffloadedAdamW hopeless({large}, FusedAdamWOptions(), on_disk(folder).block_bytes(1 << 30));
  try {
    hopeless.step();
    ADD_FAILURE() << "32 TiB fitted";
  } catch (const FileError& error) {
    EXPECT_NE(std::string(error.what())
                  .find("A scratch file of 32.00 TiB was to be made in " + folder.path()),
              std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(hopeless.state().empty());
  ::munmap(memory, kBytes);
}

TEST(OffloadedAdamW, StopsWhenTheDiskFails) {
  const Folder folder;
  const at::Tensor weight = at::ones({100000}).requires_grad_(true);
  weight.mutable_grad() = at::ones({100000});
  OffloadedAdamW optimizer({weight}, FusedAdamWOptions(0.1), on_disk(folder));
  optimizer.step();
  std::stringstream saved;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(saved);
  const at::Tensor before = weight.detach().clone();

  // Writes above a limit fail, as those to a broken disk would.
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  rlimit low = limit;
  low.rlim_cur = 500000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  EXPECT_THROW(optimizer.step(), FileError);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_THROW(optimizer.step(), StateError);

  // What was saved brings it back.
  {
    const at::NoGradGuard no_grad;
    weight.copy_(before);
  }
  torch::serialize::InputArchive input;
  input.load_from(saved);
  optimizer.load(input);
  optimizer.step();
  const at::Tensor other = at::ones({100000}).requires_grad_(true);
  other.mutable_grad() = at::ones({100000});
  FusedAdamW expected({other}, FusedAdamWOptions(0.1));
  expected.step();
  expected.step();
  EXPECT_TRUE(at::equal(weight, other));
}

}  // namespace
}  // namespace accelerate::optim
