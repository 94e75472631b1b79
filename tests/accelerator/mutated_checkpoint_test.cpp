// Checkpoints that were changed and signed again, so that no checksum tells: each is loaded, or
// refused by a CheckpointError that leaves everything as it was, bit by bit.

#include <support/distributed.hpp>
#include <support/shared_folder.hpp>

#include <accelerate/accelerate.hpp>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/data/dataloader_options.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/utils.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <set>

namespace accelerate {
namespace {

namespace fs = std::filesystem;
using accelerate::testing::world;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    in = register_module("in", torch::nn::Linear(3, 4));
    out = register_module("out", torch::nn::Linear(4, 2));
  }
  at::Tensor forward(const at::Tensor& x) { return out(at::tanh(in(x))); }
  torch::nn::Linear in{nullptr}, out{nullptr};
};
TORCH_MODULE(Net);

struct Numbers {
  at::Tensor get_batch(c10::ArrayRef<std::size_t> indices) {
    return at::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()));
  }
  std::optional<std::size_t> size() const { return 40; }
};
struct Counter {
  std::int64_t value = 0;
  std::string note = "none";
  Json state_dict() const { return {{"value", value}, {"note", note}}; }
  void load_state_dict(const Json& state) {
    value = state.at("value").get<std::int64_t>();  // changed before the next line refuses
    note = state.at("note").get<std::string>();
  }
};
struct Averages {
  at::Tensor mean = at::zeros({3}), count = at::zeros({1}, at::kLong);
  std::vector<NamedTensor> state_dict() const { return {{"mean", mean}, {"count", count}}; }
  void load_state_dict(const std::vector<NamedTensor>& state) {
    mean.copy_(state.at(0).tensor);
    count.copy_(state.at(1).tensor);
  }
};

std::string signed_text(const Json& body) {
  Json unsigned_body = body;
  unsigned_body.erase("checksum");
  const std::string rest = unsigned_body.dump().substr(1) + "\n";
  return text::concat("{\"checksum\":\"",
                      io::checksum_text(io::checksum(std::as_bytes(std::span(rest)))), "\",\n",
                      rest);
}

void write(const fs::path& path, const std::string& contents) {
  io::File file = io::File::create(path);
  file.write(contents.data(), contents.size(), 0);
  file.close();
}

using Random = std::mt19937_64;
std::size_t below(Random& random, std::size_t count) { return random() % count; }

// Every value below `json`, itself included.
void collect(Json& json, std::vector<Json*>& found) {
  found.push_back(&json);
  if (!json.is_structured()) return;
  for (Json& item : json) collect(item, found);
}

std::string mutate(Json& json, Random& random) {
  std::vector<Json*> all;
  collect(json, all);
  Json& value = *all[below(random, all.size())];
  const std::string before = value.dump().substr(0, 60);
  const std::vector<Json> others = {Json(),
                                    true,
                                    -1,
                                    3,
                                    std::int64_t{1} << 62,
                                    0.5,
                                    1e300,
                                    "text",
                                    "",
                                    Json::array(),
                                    Json::array({1, 2, 3}),
                                    Json::object(),
                                    "I32",
                                    "F16",
                                    "like",
                                    "whole"};
  if (value.is_structured() && !value.empty() && below(random, 2) == 0) {
    if (value.is_array() && below(random, 2) == 0) {
      value.push_back(value[0]);
    } else {
      auto gone = value.begin();
      std::advance(gone, static_cast<std::ptrdiff_t>(below(random, value.size())));
      value.erase(gone);
    }
  } else if (value.is_number_integer() && below(random, 2) == 0) {
    value = value.get<std::int64_t>() + (below(random, 2) == 0 ? 1 : -1);
  } else if (value.is_string() && value.get_ref<const std::string&>().size() > 2 &&
             below(random, 2) == 0) {
    auto& text = value.get_ref<std::string&>();
    text.erase(below(random, text.size()), 1 + below(random, 8));
  } else {
    value = others[below(random, others.size())];
  }
  return before + " became " + value.dump().substr(0, 60);
}

// Changes one value of one file of the checkpoint and signs what it signs.
std::string mutate_checkpoint(const fs::path& folder, Random& random) {
  const fs::path list = folder / io::Manifest::kFileName;
  Json manifest = Json::parse(io::read_file(list));
  std::vector<std::size_t> texts;
  for (std::size_t i = 0; i < manifest["files"].size(); ++i) {
    const auto& name = manifest["files"][i]["name"].get_ref<const std::string&>();
    if (name.ends_with(".json")) texts.push_back(i);
  }
  std::string what;
  if (below(random, 3) == 0) {
    Json& part = manifest[std::vector<std::string>{"about", "groups", "groups", "files",
                                                   "aliases"}[below(random, 5)]];
    what = "manifest.json: " + mutate(part, random);
  } else {
    Json& file = manifest["files"][texts[below(random, texts.size())]];
    const std::string name = file["name"];
    Json state = Json::parse(io::read_file(folder / name));
    what = name + ": " + mutate(state, random);
    const std::string contents = state.dump();
    write(folder / name, contents);
    file["bytes"] = contents.size();
    std::string sums;
    for (const auto sum : io::block_checksums(std::as_bytes(std::span(contents))))
      sums += io::checksum_text(sum);
    file["checksums"] = sums;
  }
  write(list, signed_text(manifest));
  return what;
}

class Mutants : public testing::WithSharedFolder {};

TEST_F(Mutants, AreLoadedOrRefusedAndThenNothingHasChanged) {
  Accelerator accelerator(AcceleratorOptions().cpu(true));
  set_seed(3);
  Net net;
  torch::optim::AdamW adam(net->parameters(), torch::optim::AdamWOptions(0.05).amsgrad(true));
  torch::optim::StepLR steps(adam, 2, 0.5);
  auto [model, optimizer, scheduler, loader] = accelerator.prepare(
      net, adam, steps, data::loader(Numbers(), torch::data::DataLoaderOptions().batch_size(4)));
  Counter counter;
  Averages averages;
  accelerator.register_for_checkpointing(counter, averages);
  const auto train = [&] {
    for (auto& batch : loader) {
      (void)batch;
      accelerator.backward(model(at::rand({2, 3})).square().sum());
      optimizer.step();
      optimizer.zero_grad();
      scheduler.step();
      ++counter.value;
      averages.mean.add_(0.5);
      if (loader.progress().batches == 3) break;
    }
  };
  train();
  counter.note = "saved";
  accelerator.save_state(folder / "saved");
  train();
  counter.note = "now";

  // Everything a checkpoint has of the program is what there is to change.
  const auto state = [&] {
    accelerator.save_state(folder / "now");
    std::string all;
    if (world().rank() == 0) {
      const Json manifest = Json::parse(io::read_file(folder / "now" / io::Manifest::kFileName));
      all = manifest["about"].dump() + manifest["files"].dump();
    }
    return world().broadcast_bytes(all);
  };
  accelerator.save_state(folder / "good");
  const std::string before = state();
  ASSERT_EQ(before, state());

  const char* full = std::getenv("ACCELERATE_TEST_FULL");
  const bool many = full != nullptr && *full != '\0' && std::string_view(full) != "0";
  const std::uint64_t count = many ? 20000 : world().size() == 1 ? 200 : 60;
  std::uint64_t refused = 0;
  std::string kinds;
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    const fs::path mutant = folder / "mutant";
    std::string what;
    world().barrier();
    if (world().rank() == 0) {
      fs::remove_all(mutant);
      fs::copy(folder / "saved", mutant, fs::copy_options::recursive);
      Random random(seed);
      what = mutate_checkpoint(mutant, random);
    }
    what = world().broadcast_bytes(what);
    const std::string told = text::concat("seed ", seed, ", ", what);
    bool loaded = false;
    try {
      accelerator.load_state(mutant);
      loaded = true;
    } catch (const CheckpointError&) {
      ++refused;
    } catch (const std::exception& error) {
      ADD_FAILURE() << told << ": not a CheckpointError: " << error.what();
    }
    if (loaded) accelerator.load_state(folder / "good");
    ASSERT_EQ(state(), before) << told << (loaded ? " (loaded)" : " (refused)");
  }
  EXPECT_GT(refused, count / 3);
  EXPECT_LT(refused, count);
  if (world().rank() == 0)
    std::cout << refused << " of " << count << " mutants refused, the others loaded\n";
}

TEST_F(Mutants, BoxesThatCannotBeAreRefusedInASentence) {
  Accelerator accelerator(AcceleratorOptions().cpu(true).fsdp(FsdpOptions()));
  Net net;
  torch::optim::AdamW adam(net->parameters(), 0.05);
  auto [model, optimizer] = accelerator.prepare(net, adam);
  const auto step = [&] {
    accelerator.backward(model(at::rand({2, 3})).square().sum());
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  accelerator.save_state(folder / "saved");
  step();
  const auto state = [&] {
    accelerator.save_state(folder / "now");
    std::string all;
    if (world().rank() == 0) {
      const Json manifest = Json::parse(io::read_file(folder / "now" / io::Manifest::kFileName));
      all = manifest["groups"].dump() + manifest["files"].dump();
    }
    return world().broadcast_bytes(all);
  };
  const std::string before = state();
  // Of "out.weight", which has the shape [2, 4]: a box is [file, position, offsets, sizes].
  using Change = std::function<void(Json & tensor)>;
  const auto box = [](Json& tensor) -> Json& { return tensor["boxes"][0]; };
  const std::vector<std::pair<Change, const char*>> changes{
      {[&](Json& tensor) { box(tensor)[2][0] = -1; }, "does not lie in a tensor of shape [2, 4]"},
      {[&](Json& tensor) { box(tensor)[2][1] = std::int64_t{1} << 62; },
       "does not lie in a tensor"},
      {[&](Json& tensor) { box(tensor)[3][0] = std::int64_t{1} << 62; },
       "does not lie in a tensor"},
      {[&](Json& tensor) { box(tensor)[3][1] = ~std::uint64_t{0}; }, "is too large"},
      {[&](Json& tensor) { box(tensor)[3][0] = -2; }, "does not lie in a tensor"},
      {[&](Json& tensor) { box(tensor)[2].push_back(0); }, "does not lie in a tensor"},
      {[&](Json& tensor) { box(tensor)[3].erase(1); }, "does not lie in a tensor"},
      {[&](Json& tensor) {
         tensor["shape"] = {2, 4, 1};
       },
       "does not lie in a tensor"},
      {[&](Json& tensor) {
         tensor["shape"] = {1 << 30, 1 << 30, 1 << 30};
       },
       "cannot be"},
      {[&](Json& tensor) { tensor["boxes"].erase(0); }, "of the 8 elements"},
      {[&](Json& tensor) { tensor["boxes"].push_back(box(tensor)); }, "more than the 8"},
      {[&](Json& tensor) {
         tensor["boxes"] = Json::array({{0, 0, {0, 0}, {1, 4}}, {0, 0, {0, 0}, {1, 4}}});
       },
       "[0:1, 0:4] and [0:1, 0:4] overlap"},
      {[&](Json& tensor) { box(tensor)[0] = 1000; }, "lies outside of its file"},
      {[&](Json& tensor) { box(tensor)[1] = std::int64_t{1} << 61; }, "lies outside of its file"},
      {[&](Json& tensor) { box(tensor)[1] = -4; }, "where no negative number belongs"},
      {[&](Json& tensor) { tensor["boxes"] = "text"; }, "a box belongs"},
  };
  for (std::size_t i = 0; i < changes.size(); ++i) {
    const fs::path mutant = folder / ("mutant" + std::to_string(i));
    world().barrier();
    if (world().rank() == 0) {
      fs::copy(folder / "saved", mutant, fs::copy_options::recursive);
      Json manifest = Json::parse(io::read_file(mutant / io::Manifest::kFileName));
      Json& tensor = manifest["groups"]["model"]["out.weight"];
      ASSERT_EQ(tensor["shape"], Json::array({2, 4}));
      changes[i].first(tensor);
      write(mutant / io::Manifest::kFileName, signed_text(manifest));
    }
    world().barrier();
    try {
      accelerator.load_state(mutant);
      ADD_FAILURE() << "nothing was thrown for change " << i;
    } catch (const CheckpointError& error) {
      const std::string said = describe(error);
      EXPECT_NE(said.find(changes[i].second), std::string::npos) << i << ": " << said;
      EXPECT_NE(said.find("manifest.json"), std::string::npos) << i << ": " << said;
    }
    EXPECT_EQ(state(), before) << i;
  }
  accelerator.load_state(folder / "saved");
}

TEST_F(Mutants, MomentsOfIntegersAreRefused) {
  Accelerator accelerator(AcceleratorOptions().cpu(true));
  Net net;
  torch::optim::AdamW adam(net->parameters(), 0.05);
  auto [model, optimizer] = accelerator.prepare(net, adam);
  accelerator.backward(model(at::rand({2, 3})).square().sum());
  optimizer.step();
  optimizer.zero_grad();
  accelerator.save_state(folder / "saved");
  for (const auto& [group, tensor] :
       {std::pair("optimizer", "in.weight/exp_avg"), std::pair("model", "in.weight")}) {
    world().barrier();
    if (world().rank() == 0) {
      const fs::path mutant = folder / group;
      fs::copy(folder / "saved", mutant, fs::copy_options::recursive);
      Json manifest = Json::parse(io::read_file(mutant / io::Manifest::kFileName));
      manifest["groups"][group][tensor]["dtype"] = "I32";
      write(mutant / io::Manifest::kFileName, signed_text(manifest));
    }
    world().barrier();
    try {
      accelerator.load_state(folder / group);
      FAIL() << "nothing was thrown for " << tensor;
    } catch (const CheckpointError& error) {
      const std::string said = describe(error);
      EXPECT_NE(said.find("in.weight"), std::string::npos) << said;
    }
  }
}

// By leaving everything of one parameter out.
TEST_F(Mutants, AStateThatIsGoneIsMissed) {
  Accelerator accelerator(AcceleratorOptions().cpu(true));
  Net net;
  net->in->bias.requires_grad_(false);  // has no state, and says so
  torch::optim::AdamW adam(net->parameters(), 0.05);
  auto [model, optimizer] = accelerator.prepare(net, adam);
  accelerator.backward(model(at::rand({2, 3})).square().sum());
  optimizer.step();
  optimizer.zero_grad();
  accelerator.save_state(folder / "saved");
  accelerator.load_state(folder / "saved");
  EXPECT_EQ(adam.state().size(), 3U);
  for (const bool as_none : {false, true}) {
    const fs::path mutant = folder / (as_none ? "none" : "gone");
    world().barrier();
    if (world().rank() == 0) {
      fs::copy(folder / "saved", mutant, fs::copy_options::recursive);
      Json manifest = Json::parse(io::read_file(mutant / io::Manifest::kFileName));
      Json state = Json::parse(io::read_file(mutant / "optimizer.json"));
      state["state"].erase("out.weight");
      if (as_none) {
        state["without_state"].push_back("out.weight");  // and its tensors stay
      } else {
        Json& tensors = manifest["groups"]["optimizer"];
        for (const char* each : {"exp_avg", "exp_avg_sq"})
          tensors.erase(text::concat("out.weight/", each));
      }
      const std::string contents = state.dump();
      write(mutant / "optimizer.json", contents);
      for (Json& file : manifest["files"]) {
        if (file["name"] != "optimizer.json") continue;
        file["bytes"] = contents.size();
        file["checksums"] =
            io::checksum_text(io::block_checksums(std::as_bytes(std::span(contents)))[0]);
      }
      write(mutant / io::Manifest::kFileName, signed_text(manifest));
    }
    world().barrier();
    try {
      accelerator.load_state(mutant);
      FAIL() << "nothing was thrown";
    } catch (const CheckpointError& error) {
      EXPECT_NE(describe(error).find("'out.weight'"), std::string::npos) << describe(error);
    }
  }
}

}  // namespace
}  // namespace accelerate
