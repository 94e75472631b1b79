// Checkpoints of one number of processes and one strategy, loaded by another, bit for bit; and what
// happens when they are damaged or belong to something else.

#include "checkpoint/session.hpp"

#include <accelerate/base/text.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/optim/adafactor.hpp>

#include <torch/optim/lbfgs.h>

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>

namespace accelerate::checkpoints {
namespace {

struct Shape {
  int processes;
  std::string strategy;
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    return out << shape.strategy << " on " << shape.processes;
  }
};

std::vector<Shape> shapes() {
  std::vector<Shape> all{{1, "single"}};
  for (int n = 1; n <= world().size(); ++n) {
    for (const char* strategy : {"ddp", "fsdp", "fsdp_units", "zero1", "zero2", "zero3"}) {
      // One process has nothing to reduce: there, ddp is single.
      if (n > 1 || std::string_view(strategy) != "ddp") all.push_back({n, strategy});
    }
  }
  return all;
}

TEST(Sharded, AnyNumberOfProcessesAndStrategyLoadsWhatAnyOtherSaved) {
  const SharedFolder folder;
  const auto all = shapes();
  first_ranks(1);  // all ranks make the groups
  int pairs = 0;
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
      if (!full() && (i * 5 + j * 3) % all.size() > 1) continue;
      ++pairs;
      const auto& to = all[j];
      const fs::path again = folder.path() / "again";
      if (world().rank() < to.processes) {
        Session run(first_ranks(to.processes), to.strategy, 2, kind);
        // What it had is replaced; or it is a new run, whose optimizer has no state yet.
        if (j % 2 == 0) run.step(7);
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
  RecordProperty("pairs", pairs);
  if (world().rank() == 0) std::cout << pairs << " pairs of " << all.size() * all.size() << "\n";
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
      for (int step = 2; step < 5; ++step)
        EXPECT_EQ(whole.step(step), resumed.step(step)) << shape << " step " << step;
    }
    world().barrier();
  }
}

// Somebody evaluates `last` while training saves there again.
TEST(Sharded, WhatIsReadIsWhatWasVerified) {
  const SharedFolder folder;
  const fs::path saved = folder.path() / "saved";
  Session run(world(), own_strategy(), 1);
  run.step(1);
  run.save(saved);
  const at::Tensor first = run.net->conv->bias.detach().clone();
  Session other(world(), own_strategy(), 2);
  Load load(world(), saved);
  load.want_all(module_group(*other.strategy, "model"), /*strict=*/true);
  load.verify();
  run.step(2);
  run.save(saved);
  load.read();
  Load second(world(), saved);
  second.want_all(module_group(*other.strategy, "model"), /*strict=*/true);
  if (own_strategy() == "single") {
    EXPECT_TRUE(at::equal(other.net->conv->bias, first));
    EXPECT_FALSE(at::equal(run.net->conv->bias, first));
  }
  run.step(3);
  run.save(saved);
  expect_says(message_of([&] { second.verify(); }), {"replaced by another"});
  expect_says(message_of([&] { second.text("optimizer.json"); }), {"replaced by another"});
}

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
      if (where == 0.3) {  // what a new optimizer gets is filled early, and must not arrive either
        Session fresh(world(), own_strategy(), 2);
        expect_says(message_of([&] { fresh.load(saved); }), {name.c_str()});
        EXPECT_TRUE(fresh.optimizer->state().empty());
      }
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
    group.parts.push_back(whole_tensor("more", at::zeros({2})));
    std::erase_if(group.parts, [](const LocalTensor& part) { return part.name == "in.bias"; });
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
  expect_says(message_of([&] { run.save(folder.path() / "file" / "deeper"); }),
              {"Could not make the folder", "Not a directory"});
  // Folders that may only be read are no obstacle to root, who runs tests in containers.
  if (world().rank() == 0) {
    io::faults::set_hook([](io::faults::Operation operation, const fs::path&, std::size_t&) {
      return operation == io::faults::Operation::kCreate ? EROFS : 0;
    });
  }
  expect_says(message_of([&] { run.save(folder.path() / "again"); }),
              {"Could not make the folder", "Read-only file system"});
  io::faults::set_hook(nullptr);
  if (::geteuid() != 0) {
    if (world().rank() == 0)
      fs::permissions(folder.path(), fs::perms::owner_read | fs::perms::owner_exec);
    world().barrier();
    expect_says(message_of([&] { run.save(folder.path() / "again"); }), {"Permission denied"});
    world().barrier();
    if (world().rank() == 0) fs::permissions(folder.path(), fs::perms::owner_all);
  }
  EXPECT_TRUE(fs::exists(folder.path() / "other" / "notes.txt"));
  if (world().rank() == 0) std::fstream(saved / "manifest.json") << "damaged";
  world().barrier();
  const std::string message = message_of([&] { run.save(saved); });
  expect_says(message,
              {"manifest.json", "is damaged", "Nothing was changed", "Remove that folder"});
  EXPECT_EQ(message.find("loaded"), std::string::npos) << message;
  EXPECT_TRUE(fs::exists(saved / "optimizer.json"));
  world().barrier();
}

TEST(Sharded, WhatHooksPutThereIsVerifiedOrRefusedByName) {
  const SharedFolder folder;
  const fs::path saved = folder.path() / "saved";
  Session run(world(), own_strategy(), 1);
  const auto save = [&](auto&& hook) {
    Save save(world(), saved);
    save.add(module_group(*run.strategy, "model"));
    save.plan();
    if (world().rank() == 0) hook(save.partial_folder());
    save.write(world());
  };
  // It loads, and can be replaced.
  for (int times = 0; times < 2; ++times) {
    save([](const fs::path& in) {
      fs::create_directories(in / "tokens" / "none");
      for (const char* name : {"vocab..txt", "...", "tokens/words"})
        std::ofstream(in / name) << "x";
      std::ofstream(in / "empty");
    });
    Load load(world(), saved);
    load.verify();
    for (const char* name : {"vocab..txt", "...", "tokens/words", "empty"})
      EXPECT_TRUE(load.has_file(name)) << name;
  }
  const std::vector<std::pair<const char*, std::function<void(const fs::path&)>>> bad{
      {"manifest.json", [](const fs::path& file) { std::ofstream(file) << "x"; }},
      {"caf\xe9.txt", [](const fs::path& file) { std::ofstream(file) << "x"; }},
      {"folder", [](const fs::path& file) { fs::create_directory_symlink("/tmp", file); }},
      {"link", [](const fs::path& file) { fs::create_symlink("/proc/self/exe", file); }},
      {"dangling", [](const fs::path& file) { fs::create_symlink("/nothing", file); }}};
  for (const auto& [name, put] : bad) {
    const auto message = message_of(
        [&, put = put, name = name] { save([&](const fs::path& in) { put(in / name); }); });
    expect_says(message, {"A hook put", name, "not saved"});
  }
  Load(world(), saved).verify();
  world().barrier();
  // A file further down would be lost, too.
  if (world().rank() == 0) std::ofstream(saved / "tokens" / "mine") << "x";
  expect_says(message_of([&] { save([](const fs::path&) {}); }), {"tokens/mine", "no part"});
  world().barrier();
}

TEST(Sharded, ALinkToAFolderStaysOne) {
  const SharedFolder folder;
  const fs::path real = folder.path() / "disk" / "real", link = folder.path() / "link";
  if (world().rank() == 0) fs::create_directory_symlink(real, link);
  world().barrier();
  Session run(world(), own_strategy(), 1);
  run.step(1);
  expect_says(message_of([&] { run.save(link); }), {"a link to what is not there"});
  world().barrier();
  if (world().rank() == 0) fs::create_directories(real);
  world().barrier();
  for (int i = 0; i < 2; ++i) run.save(link);
  world().barrier();  // rank 0 takes its lock away last
  EXPECT_TRUE(fs::is_symlink(link));
  EXPECT_TRUE(fs::exists(real / "manifest.json"));
  EXPECT_EQ(io::names_in(folder.path()), (std::vector<std::string>{"disk", "link"}));
  EXPECT_EQ(io::names_in(real.parent_path()), std::vector<std::string>{"real"});
  run.load(link);
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

// What a process has of a tensor, of the elements of `whole`.
LocalTensor part_of(const std::string& name, const Placement& placement, const at::Tensor& whole,
                    bool turned = false) {
  LocalTensor part{name, placement, at::empty({placement.count()}, whole.options())};
  if (turned) {
    const auto shape = placement.local_shape();
    part.tensor = at::empty({shape.at(1), shape.at(0)}, whole.options()).t();
  }
  for (const PlacedBox& placed : part.boxes()) {
    at::Tensor values = whole;
    for (std::size_t d = 0; d < placed.box.sizes.size(); ++d)
      values =
          values.narrow(static_cast<std::int64_t>(d), placed.box.offsets[d], placed.box.sizes[d]);
    part.view(placed).copy_(values);
  }
  return part;
}

TEST(Sharded, WhatThreeProcessesCutLoadsOnTwoThatCutOtherwise) {
  if (world().size() < 3) GTEST_SKIP() << "needs three processes";
  const SharedFolder folder;
  first_ranks(1);
  const auto numbers = [](std::vector<std::int64_t> shape, double from) {
    return (at::arange(c10::multiply_integers(shape), at::kFloat) + from).view(shape);
  };
  // A fused weight of queries, keys and values; a vocabulary that three do not divide; a matrix
  // whose columns lie one after another.
  const at::Tensor qkv = numbers({24, 2048}, 0), words = numbers({11, 64}, 50'000),
                   turned = numbers({6, 4}, 60'000);
  const int rank = world().rank();
  if (rank < 3) {
    Session run(first_ranks(3), "fsdp", 1);
    run.step(1);
    run.save(folder.path() / "trained");
    TensorGroup group{.name = "model", .parts = {}, .aliases = {}};
    group.parts.push_back(part_of("qkv", Placement({24, 2048}).cut({"tp", 0, 3, rank, 3}), qkv));
    group.parts.push_back(part_of("words", Placement({11, 64}).cut({"tp", 0, 3, rank}), words));
    group.parts.push_back(part_of("turned", Placement({6, 4}, {1, 0}).run(8 * rank, 8), turned));
    Save save(first_ranks(3), folder.path() / "cut");
    save.add(std::move(group));
    save.plan();
    save.write(first_ranks(3));
  }
  world().barrier();
  if (rank < 2) {
    Session run(first_ranks(2), "fsdp", 2);
    run.load(folder.path() / "trained");
    run.save(folder.path() / "again");
    const auto expect_loaded = [&](const std::vector<LocalTensor>& expected) {
      Load load(first_ranks(2), folder.path() / "cut");
      std::vector<LocalTensor> parts = expected;
      std::uint64_t bytes = 0;
      for (LocalTensor& part : parts) {
        part.tensor = at::empty_strided(part.tensor.sizes(), part.tensor.strides()).fill_(-1);
        load.want("model", part);
        bytes += part.tensor.nbytes();
      }
      load.verify();
      EXPECT_EQ(load.bytes_read(), 0U);
      load.read();
      for (std::size_t i = 0; i < parts.size(); ++i)
        EXPECT_TRUE(at::equal(parts[i].tensor, expected[i].tensor)) << parts[i].name;
      return std::pair(load.bytes_read(), bytes);
    };
    const Placement columns = Placement({24, 2048}).cut({"tp", 1, 2, rank});
    const Placement rows = Placement({11, 64}).run(352 * rank, 352);
    // Only the bytes of what is wanted are read: of the fused weight half of each row, which is
    // in another place for each of nine boxes.
    const auto [read, wanted] =
        expect_loaded({part_of("qkv", columns, qkv), part_of("words", rows, words)});
    EXPECT_EQ(read, wanted);
    // Cut twice, and then a run; and with strides of its own.
    const Placement twice =
        Placement({24, 2048}).cut({"tp", 0, 2, rank, 3}).cut({"cp", 1, 4, 1, 2});
    expect_loaded({part_of("qkv", twice.run(100, 700), qkv)});
    expect_loaded({part_of("qkv", twice, qkv, /*turned=*/true),
                   part_of("turned", Placement({6, 4}).cut({"tp", 0, 2, rank}), turned)});
  }
  world().barrier();
  if (rank == 0)
    expect_equal(folder.path() / "trained", folder.path() / "again", "three processes to two");
  world().barrier();
}

// What the command line program says, and its exit code.
std::pair<int, std::string> command(const std::string& arguments, const fs::path& folder) {
  const fs::path log = folder / "log";
  const int status =
      std::system(("'" ACCELERATE_CLI "' " + arguments + " >'" + log.string() + "' 2>&1").c_str());
  return {WEXITSTATUS(status), io::read_file(log)};
}

TEST(Sharded, MergedWeightsAreTheCheckpointsAndReplaceEarlierOnes) {
  const SharedFolder folder;
  const std::vector<fs::path> saved{folder.path() / "first", folder.path() / "second"};
  Session run(world(), own_strategy(), 1);
  for (const fs::path& where : saved) {
    run.step(1);
    run.save(where);
  }
  // Cut by columns.
  const std::int64_t count = 24 / world().size();
  TensorGroup columns{.name = "model", .parts = {}, .aliases = {}};
  columns.parts.push_back({"turned", Placement({6, 4}, {1, 0}).run(count * world().rank(), count),
                           at::arange(count) + count * world().rank()});
  if (world().size() == 1)
    columns.parts[0] = whole_tensor("turned", at::arange(24).view({4, 6}).t());
  Save turned(world(), folder.path() / "turned");
  turned.add(std::move(columns));
  turned.plan();
  turned.write(world());
  world().barrier();
  if (world().rank() == 0) {
    const fs::path merged = folder.path() / "merged";
    const auto merge = [&](const fs::path& from, const fs::path& to, const std::string& more = {}) {
      return command(text::concat("merge-weights '", from.string(), "' '", to.string(), "' ", more),
                     folder.path());
    };
    const auto expect_weights_of = [&](const fs::path& from) {
      std::map<std::string, at::Tensor> expected;
      for (const auto& [name, tensor] : everything(from)) {
        if (name.starts_with("model/")) expected.emplace(name.substr(6), tensor);
      }
      std::size_t found = 0;
      for (const NamedTensor& tensor : load_file(merged)) {
        if (tensor.name.starts_with("out_twice")) continue;  // another name of `out`
        ++found;
        ASSERT_TRUE(expected.contains(tensor.name)) << tensor.name;
        EXPECT_TRUE(at::equal(tensor.tensor, expected.at(tensor.name))) << tensor.name;
      }
      EXPECT_EQ(found, expected.size());
    };
    EXPECT_EQ(merge(saved[0], merged).first, 0);
    EXPECT_EQ(io::names_in(merged), std::vector<std::string>{"model.safetensors"});
    expect_weights_of(saved[0]);
    EXPECT_EQ(merge(saved[1], merged, "--max-shard-size 2KB").first, 0);
    EXPECT_FALSE(fs::exists(merged / "model.safetensors"));
    expect_weights_of(saved[1]);
    const auto before = io::names_in(merged);
    EXPECT_EQ(merge(saved[0], merged, "--max-shard-size 1KB").first, 0);
    EXPECT_NE(io::names_in(merged), before);
    expect_weights_of(saved[0]);
    EXPECT_EQ(merge(folder.path() / "turned", folder.path() / "rows").first, 0);
    EXPECT_TRUE(
        at::equal(load_file(folder.path() / "rows").at(0).tensor, at::arange(24).view({4, 6}).t()));

    // Neither into another checkpoint nor into itself.
    for (const fs::path& from : saved) {
      const auto [code, said] = merge(from, saved[0]);
      EXPECT_EQ(code, 1);
      expect_says(said, {"first", "holds a checkpoint", "Name another folder"});
    }
    const auto [code, said] = merge(folder.path() / "nothing", merged);
    EXPECT_EQ(code, 1);
    expect_says(said, {"There is no complete checkpoint", "nothing"});
    EXPECT_EQ(said.find("Caused by"), std::string::npos) << said;
    const auto tensors = load_file(merged);
    EXPECT_THROW(save_sharded(tensors, saved[0], "5GB"), CheckpointError);
    Load(comm::Group(), saved[0]).verify();
  }
  world().barrier();
}

TEST(Sharded, EveryDtypeComesBackByteForByte) {
  const SharedFolder folder;
  const fs::path saved = folder.path() / "saved";
  const std::vector<at::ScalarType> dtypes{at::kBool,
                                           at::kByte,
                                           at::kChar,
                                           at::kShort,
                                           at::kInt,
                                           at::kLong,
                                           at::kUInt16,
                                           at::kUInt32,
                                           at::kUInt64,
                                           at::kHalf,
                                           at::kFloat,
                                           at::kDouble,
                                           at::kBFloat16,
                                           at::kComplexFloat,
                                           at::kFloat8_e5m2,
                                           at::kFloat8_e4m3fn,
                                           at::kFloat8_e4m3fnuz,
                                           at::kFloat8_e5m2fnuz,
                                           at::kFloat8_e8m0fnu,
                                           at::kFloat4_e2m1fn_x2};
  std::vector<at::Tensor> bytes;
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    bytes.push_back(
        at::arange(6 * 16, at::kByte).view({6, 16}).remainder(dtypes[i] == at::kBool ? 2 : 111));
  const auto group = [&] {
    TensorGroup tensors{.name = "model", .parts = {}, .aliases = {}};
    for (std::size_t i = 0; i < dtypes.size(); ++i)
      tensors.parts.push_back(whole_tensor(c10::toString(dtypes[i]), bytes[i].view(dtypes[i])));
    return tensors;
  };
  {
    Save save(world(), saved);
    save.add(group());
    save.plan();
    save.write(world());
  }
  std::vector<at::Tensor> before;
  for (at::Tensor& tensor : bytes) {
    before.push_back(tensor.clone());
    tensor.zero_();
  }
  Load load(world(), saved);
  load.want_all(group(), true);
  load.verify();
  load.read();
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    EXPECT_TRUE(at::equal(bytes[i], before[i])) << c10::toString(dtypes[i]);

  // What cannot be saved is named before anything is written.
  Save save(world(), saved);
  TensorGroup other{.name = "model", .parts = {}, .aliases = {}};
  other.parts.push_back(whole_tensor("phases", at::zeros({2}, at::kComplexDouble)));
  save.add(std::move(other));
  expect_says(message_of([&] { save.plan(); }), {"'phases'", "ComplexDouble"});
  EXPECT_FALSE(fs::exists(save.partial_folder()));
  load.verify();
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
