// Modules constructed without memory, and their buffers all the same.

#include <support/message_of.hpp>
#include <support/zoo.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/big_model/init_empty.hpp>
#include <accelerate/big_model/load.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <gtest/gtest.h>
#include <torch/fft.h>
#include <torch/nn.h>
#include <torch/script.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <functional>

namespace accelerate {
namespace {

namespace nn = torch::nn;
using testing::message_of;

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::int64_t bytes_of(const ModuleRecord& module) {
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : module.parameters())
    bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

TEST(InitEmpty, AHundredGigabytesTakeLessThanAHundredthOfThat) {
  const std::int64_t before = resident_bytes();
  const auto net = init_empty_weights([] {
    nn::Sequential layers;
    for (int i = 0; i < 24; ++i) {
      layers->push_back(nn::Linear(32768, 32768));
      layers->push_back(nn::LayerNorm(nn::LayerNormOptions({32768})));
    }
    layers->push_back(nn::Embedding(131072, 32768));
    return layers;
  });
  const ModuleRecord record = big_model::record_of(net);
  EXPECT_GT(bytes_of(record), std::int64_t{100} << 30);
  EXPECT_LT(resident_bytes() - before, bytes_of(record) / 1000);
  for (const auto& [name, parameter] : record.parameters()) {
    EXPECT_TRUE(parameter.is_meta()) << name;
    EXPECT_TRUE(parameter.requires_grad()) << name;
  }
}

// Buffers of every make: of a kind's own, computed in steps, a view, written in parts, like
// another.
struct BufferedImpl : nn::Module {
  nn::Linear linear{8, 8};
  nn::BatchNorm1d norm{8};
  torch::Tensor table, view, like, literal, same;
  BufferedImpl() {
    register_module("linear", linear);
    register_module("norm", norm);
    torch::Tensor positions = torch::zeros({6, 8});
    const torch::Tensor steps = torch::arange(0, 6).unsqueeze(1);
    const torch::Tensor rates = torch::exp(torch::arange(0, 8, 2) * -0.5);
    positions.slice(1, 0, 8, 2).copy_(torch::sin(steps * rates));
    positions.slice(1, 1, 8, 2).copy_(torch::cos(steps * rates));
    table = register_buffer("table", positions);
    view = register_buffer("view", positions.unsqueeze(0).transpose(1, 2));
    like = register_buffer("like", torch::ones_like(linear->weight).mul_(3).triu());
    literal = register_buffer("literal", torch::tensor({1.5, 2.5}) + torch::ones({2}));
    same = register_buffer("same", torch::cat({steps, steps}, 1));
  }
};
TORCH_MODULE(Buffered);

TEST(InitEmpty, BuffersAreWhatTheyWouldHaveBeen) {
  const Buffered plain;
  const Buffered empty = init_empty_weights([] { return Buffered(); });
  EXPECT_TRUE(empty->linear->weight.is_meta());
  const auto expected = plain->named_buffers();
  const auto buffers = empty->named_buffers();
  ASSERT_EQ(buffers.size(), expected.size());
  for (const auto& buffer : expected) {
    const torch::Tensor& actual = buffers[buffer.key()];
    ASSERT_TRUE(actual.is_cpu()) << buffer.key();
    EXPECT_TRUE(torch::equal(actual, buffer.value())) << buffer.key();
    EXPECT_EQ(actual.strides(), buffer.value().strides()) << buffer.key();
  }
  // The member and what was registered are one tensor still, and views of one memory.
  EXPECT_TRUE(torch::equal(empty->table, plain->table));
  EXPECT_TRUE(empty->view.is_alias_of(empty->table));

  const Buffered none = init_empty_weights([] { return Buffered(); }, /*include_buffers=*/true);
  for (const auto& buffer : none->named_buffers())
    EXPECT_TRUE(buffer.value().is_meta() || buffer.key() == "literal") << buffer.key();
}

TEST(InitEmpty, EveryKindOfModule) {
  for (const std::string& name : zoo::names()) {
    SCOPED_TRACE(name);
    if (name.starts_with("script")) continue;  // loaded, not constructed
    const zoo::Specimen plain = zoo::make(name, 1, at::kFloat);
    InitOnDevice scope{at::Device(at::kMeta), /*include_buffers=*/false};
    const zoo::Specimen specimen = zoo::make(name, 1, at::kFloat);
    scope.finish(specimen.record);
    ASSERT_EQ(specimen.record.parameters().size(), plain.record.parameters().size());
    for (std::size_t i = 0; i < plain.record.parameters().size(); ++i) {
      const at::Tensor& parameter = specimen.record.parameters()[i].tensor;
      EXPECT_TRUE(parameter.is_meta()) << plain.record.parameters()[i].name;
      EXPECT_EQ(parameter.sizes(), plain.record.parameters()[i].tensor.sizes());
    }
    for (std::size_t i = 0; i < plain.record.buffers().size(); ++i) {
      EXPECT_TRUE(
          torch::equal(specimen.record.buffers()[i].tensor, plain.record.buffers()[i].tensor))
          << plain.record.buffers()[i].name;
    }
  }
}

TEST(InitEmpty, TorchScriptModulesAreLoadedSo) {
  const std::string folder = std::getenv("ACCELERATE_TEST_MODULES");
  const torch::jit::Module module = torch::jit::load(folder + "/script_branching.pt", torch::kMeta);
  for (const auto& parameter : module.parameters()) EXPECT_TRUE(parameter.is_meta());
}

TEST(InitEmpty, OutsideOfTheScopeAndOnOtherThreadsNothingChanges) {
  {
    InitOnDevice scope{at::Device(at::kMeta)};
    EXPECT_TRUE(torch::empty({2}).is_meta());
    EXPECT_TRUE(torch::empty({2}, torch::kCPU).is_cpu());  // named
    EXPECT_TRUE(torch::tensor({1, 2}).is_cpu());
    bool other_is_cpu = false;
    std::thread([&] { other_is_cpu = torch::empty({2}).is_cpu(); }).join();
    EXPECT_TRUE(other_is_cpu);
  }
  EXPECT_TRUE(torch::empty({2}).is_cpu());
  const nn::Linear on_cpu = init_on_device(torch::kCPU, [] { return nn::Linear(2, 2); });
  EXPECT_TRUE(on_cpu->weight.is_cpu());
}

using torch::indexing::Slice;
using Tensors = std::vector<torch::Tensor>;

// What constructors compute, in the ways of published modules, given a parameter of the module.
struct Recipe {
  const char* name;
  std::function<Tensors(const torch::Tensor& weight)> make;
};

std::vector<Recipe> recipes() {
  const auto one = [](const char* name, auto make) {
    return Recipe{name, [make](const torch::Tensor&) { return Tensors{make()}; }};
  };
  return {
      one("rope",
          [] {
            const auto rates = 1.0 / torch::pow(10000.0, torch::arange(0, 8, 2) / 8.0);
            const auto angles = torch::outer(torch::arange(6.0), rates);
            return torch::polar(torch::ones_like(angles), angles);
          }),
      one("conjugate", [] { return torch::polar(torch::ones({3}), torch::arange(3.0)).conj(); }),
      one("complex",
          [] { return torch::view_as_real(torch::complex(torch::ones({3}), torch::arange(3.0))); }),
      one("causal mask",
          [] {
            const auto ones = torch::ones({4, 4}, torch::kBool).tril();
            return torch::where(ones, torch::zeros({4, 4}), torch::full({4, 4}, -1e9));
          }),
      one("shifted windows",
          [] {
            auto image = torch::zeros({1, 8, 8, 1});
            int count = 0;
            for (const Slice& rows : {Slice(0, -4), Slice(-4, -2), Slice(-2)}) {
              for (const Slice& columns : {Slice(0, -4), Slice(-4, -2), Slice(-2)})
                image.index_put_({Slice(), rows, columns, Slice()}, count++);
            }
            image = torch::roll(image, {-2, -2}, {1, 2});
            const auto windows = image.view({1, 2, 4, 2, 4, 1}).permute({0, 1, 3, 2, 4, 5});
            const auto ids = windows.reshape({-1, 16});
            const auto mask = ids.unsqueeze(1) - ids.unsqueeze(2);
            return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0);
          }),
      one("sparse",
          [] {
            const auto at = torch::stack({torch::arange(3), torch::arange(3)});
            return torch::sparse_coo_tensor(at, torch::arange(3.0), {4, 4}).to_dense();
          }),
      one("one hot", [] { return torch::one_hot(torch::arange(4)); }),
      one("triangle", [] { return torch::tril_indices(3, 3); }),
      one("buckets",
          [] {
            return torch::bucketize(torch::arange(4.0), torch::tensor({1.0, 2.0}));
          }),
      one("found", [] { return torch::nonzero(torch::eye(3)); }),
      one("spectrum", [] { return torch::abs(torch::fft::rfft(torch::arange(8.0))); }),
      one("masked",
          [] {
            auto table = torch::arange(6.0);
            table.index_put_({table > 2}, 0.5);
            return table;
          }),
      one("scalars put",
          [] {
            auto table = torch::zeros({4, 4});
            table.index_put_({Slice(), 0}, 1.0);
            table[1][2] = 5;
            return table;
          }),
      one("foreach",
          [] {
            auto table = torch::ones({4});
            Tensors list{table};
            at::_foreach_mul_(list, 3.0);
            return table;
          }),
      one("value",
          [] {
            const float sum = torch::ones({2}).sum().item<float>();
            return torch::full({2}, sum > 1 ? sum : -1);
          }),
      one("written by name of a device",
          [] {
            const auto table = torch::zeros({3}, torch::kCPU);
            table.copy_(torch::arange(3));
            table.accessor<float, 1>()[0] = 7;
            return table;
          }),
      one("views of one memory",
          [] {
            auto table = torch::arange(6.0);
            torch::roll(table, 1);  // reads it as it is now
            table.slice(0, 0, 3).fill_(2);
            return torch::roll(table, 1) + table.unsqueeze(1).t();
          }),
      {"options of another",
       [](const torch::Tensor& weight) {
         const auto zeros = torch::zeros({4});
         return Tensors{zeros + torch::full({1}, 2.0, zeros.options()),
                        torch::ones({4}, weight.options()), weight.detach().new_full({2}, 3),
                        torch::tensor({1.0, 2.0}).to(zeros.device())};
       }},
      {"order of results",
       [](const torch::Tensor&) {
         const auto [values, indices] = torch::max(torch::arange(6.0).view({2, 3}), 1);
         const auto [q, r] = torch::linalg_qr(torch::eye(3) + torch::ones({3, 3}));
         return Tensors{values, indices, q, r};
       }},
  };
}

// A module whose tensors are registered or only members.
struct MadeImpl : nn::Module {
  explicit MadeImpl(const Recipe& recipe) {
    linear = register_module("linear", nn::Linear(4, 4));
    for (const torch::Tensor& tensor : recipe.make(linear->weight))
      register_buffer(std::to_string(buffers().size()), tensor);
    members = recipe.make(linear->weight);
    for (const torch::Tensor& member : Tensors(members)) members.push_back(member.unsqueeze(0));
  }
  nn::Linear linear{nullptr};
  Tensors members;
};
TORCH_MODULE(Made);

void expect_same(const torch::Tensor& actual, const torch::Tensor& expected) {
  ASSERT_TRUE(actual.is_cpu());
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type());
  ASSERT_EQ(actual.sizes(), expected.sizes());
  EXPECT_TRUE(torch::equal(actual.resolve_conj(), expected.resolve_conj()));
}

TEST(InitEmpty, OrdinaryConstructorsGiveTheirBuffersAndMembers) {
  for (const Recipe& recipe : recipes()) {
    SCOPED_TRACE(recipe.name);
    const Made plain(recipe);
    const Made made = init_empty_weights([&] { return Made(recipe); });
    for (const torch::Tensor& parameter : made->parameters()) EXPECT_TRUE(parameter.is_meta());
    ASSERT_EQ(made->buffers().size(), plain->buffers().size());
    for (std::size_t i = 0; i < plain->buffers().size(); ++i)
      expect_same(made->buffers()[i], plain->buffers()[i]);
    ASSERT_EQ(made->members.size(), plain->members.size());
    for (std::size_t i = 0; i < plain->members.size(); ++i)
      expect_same(made->members[i], plain->members[i]);
    EXPECT_TRUE(made->members.back().is_alias_of(made->members[made->members.size() / 2 - 1]));

    const Made none = init_empty_weights([&] { return Made(recipe); }, /*include_buffers=*/true);
    for (const torch::Tensor& parameter : none->parameters()) EXPECT_TRUE(parameter.is_meta());
    for (std::size_t i = 0; i < plain->buffers().size(); ++i)
      EXPECT_EQ(none->buffers()[i].sizes(), plain->buffers()[i].sizes());
  }
}

TEST(InitEmpty, SourcesMayBeChangedAndFreedAfterwards) {
  const auto make = [] {
    nn::Module module;
    auto values = std::make_unique<std::vector<float>>(1000, 2.0F);
    module.register_buffer("blob", torch::from_blob(values->data(), {1000}) * torch::ones({1000}));
    values->assign(1000, 9);
    values.reset();
    torch::Tensor literal = torch::tensor({1.0, 2.0});
    module.register_buffer("literal", literal + torch::ones({2}));
    literal.zero_();
    return std::make_shared<nn::Module>(module);
  };
  const auto plain = make(), empty = init_empty_weights(make);
  for (const auto& buffer : plain->named_buffers())
    expect_same(empty->named_buffers()[buffer.key()], buffer.value());
}

TEST(InitEmpty, AModuleWithMembersComputes) {
  struct Shift : nn::Module {
    torch::Tensor weight = register_parameter("weight", torch::ones({4}));
    torch::Tensor steps = torch::arange(4.0), later = steps.slice(0, 1);
    torch::Tensor alias = weight.detach();
    torch::Tensor forward(const torch::Tensor& x) { return x * weight + steps + later.sum(); }
  };
  const auto net = init_empty_weights([] { return std::make_shared<Shift>(); });
  EXPECT_TRUE(net->weight.is_meta());
  EXPECT_TRUE(net->alias.is_meta());  // a parameter's memory
  const io::TemporaryFolder folder;
  checkpoints::save_file({{"weight", torch::ones({4})}}, folder.path() / "model.safetensors");
  load_checkpoint_in_model(net, folder.path() / "model.safetensors");
  expect_same(net->forward(torch::zeros({4})), torch::arange(4.0) + 6);
}

TEST(InitEmpty, RandomNumbersAreThoseOfThePlainModule) {
  struct Random : nn::Module {
    Random() {
      register_buffer("first", torch::rand({3}));
      torch::manual_seed(5);
      const auto order = torch::randperm(16);
      front = order[0].item<std::int64_t>();
      register_buffer("order", order);
      register_buffer("like", torch::rand_like(order, torch::kFloat));
      for (const char* name : {"seeded", "again"}) {
        torch::manual_seed(7);
        register_buffer(name, torch::randn({3}));
      }
      auto generator = at::detail::createCPUGenerator(11);
      register_buffer("own", torch::randn({3}, generator) + torch::randn({3}, generator));
      register_parameter("weight", torch::rand({2}));
      register_buffer("bernoulli", torch::bernoulli(torch::full({16}, 0.5), generator));
    }
    std::int64_t front = 0;
  };
  torch::manual_seed(3);
  const Random plain;
  torch::manual_seed(3);
  const auto empty = init_empty_weights([] { return std::make_shared<Random>(); });
  for (const auto& buffer : plain.named_buffers()) {
    SCOPED_TRACE(buffer.key());
    expect_same(empty->named_buffers()[buffer.key()], buffer.value());
  }
  EXPECT_EQ(empty->front, plain.front);

  // The program's own numbers go on as if the parameters had drawn none.
  torch::manual_seed(3);
  const torch::Tensor expected = torch::rand({2});
  torch::manual_seed(3);
  static_cast<void>(init_empty_weights([] { return nn::Linear(4, 4); }));
  EXPECT_TRUE(torch::equal(torch::rand({2}), expected));
}

TEST(InitEmpty, TheDefaultDtypeIsThatOfTheCall) {
  const auto make = [] {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    auto module = std::make_shared<nn::Module>();
    module->register_buffer("table", torch::arange(3) / 7 + torch::ones({3}));
    torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
    return module;
  };
  const auto plain = make(), empty = init_empty_weights(make);
  EXPECT_EQ(plain->buffers()[0].scalar_type(), torch::kDouble);
  expect_same(empty->buffers()[0], plain->buffers()[0]);
}

TEST(InitEmpty, ComputingWithAParametersValuesKeepsNone) {
  tracking::count_cpu_tensors();
  constexpr std::int64_t kWeight = 1024 * 1024 * 4;
  struct Scaled : nn::Module {
    Scaled() {
      for (int i = 0; i < 16; ++i) {
        auto linear = register_module(std::to_string(i),
                                      nn::Linear(nn::LinearOptions(1024, 1024).bias(false)));
        register_buffer("scale" + std::to_string(i), linear->weight.detach().abs().max());
        if (i % 8 == 0) largest = std::max(largest, linear->weight.max().item<float>());
      }
    }
    float largest = 0;
  };
  tracking::reset_peak();
  const std::int64_t before = tracking::tensor_bytes().current;
  const auto net = init_empty_weights([] { return std::make_shared<Scaled>(); });
  // One weight and what abs() makes of it.
  EXPECT_LT(tracking::tensor_bytes().peak - before, 3 * kWeight);
  EXPECT_GE(tracking::tensor_bytes().peak - before, kWeight);
  EXPECT_LT(tracking::tensor_bytes().current - before, kWeight / 10);
  EXPECT_GT(net->largest, 0);
  for (const torch::Tensor& parameter : net->parameters()) EXPECT_TRUE(parameter.is_meta());
  for (const torch::Tensor& buffer : net->buffers()) EXPECT_GT(buffer.item<float>(), 0);
}

TEST(InitEmpty, AnExceptionClosesTheScope) {
  torch::Tensor kept;
  const auto fail = [&]() -> nn::Linear {
    kept = torch::ones({2});
    EXPECT_TRUE(kept.is_meta());
    throw std::out_of_range("mine");
  };
  EXPECT_EQ(message_of<std::out_of_range>([&] { init_empty_weights(fail); }), "mine");
  EXPECT_TRUE(torch::ones({2}).is_cpu());
  EXPECT_TRUE((torch::rand({2}) + 1).unsqueeze(0).is_cpu());
  const nn::BatchNorm1d next = init_empty_weights([] { return nn::BatchNorm1d(4); });
  EXPECT_TRUE(next->weight.is_meta());
  expect_same(next->running_var, torch::ones({4}));
}

TEST(InitEmpty, TheDeviceIsTheOneThatIsAskedFor) {
  const auto make = [] { return nn::BatchNorm1d(4); };
  const nn::BatchNorm1d all = init_on_device(torch::kMeta, make);
  EXPECT_TRUE(all->weight.is_meta());
  EXPECT_TRUE(all->running_mean.is_meta());
  const nn::BatchNorm1d parameters = init_on_device(torch::kMeta, make, /*include_buffers=*/false);
  EXPECT_TRUE(parameters->weight.is_meta());
  EXPECT_TRUE(parameters->running_mean.is_cpu());
  // The CPU inside of a scope where it is not the default, and the other way round.
  const nn::BatchNorm1d outer = init_on_device(torch::kMeta, [&] {
    const nn::BatchNorm1d inner = init_on_device(torch::kCPU, make);
    expect_same(inner->weight, torch::ones({4}));
    EXPECT_TRUE(inner->running_mean.is_cpu());
    return make();
  });
  EXPECT_TRUE(outer->weight.is_meta());
  const nn::BatchNorm1d around = init_on_device(torch::kCPU, [&] {
    EXPECT_TRUE(init_on_device(torch::kMeta, make)->weight.is_meta());
    return make();
  });
  EXPECT_TRUE(around->weight.is_cpu());
  if (torch::hasCUDA()) {
    const nn::BatchNorm1d on_gpu = init_on_device(torch::kCUDA, make, /*include_buffers=*/false);
    EXPECT_TRUE(on_gpu->weight.is_cuda());
    EXPECT_TRUE(on_gpu->running_mean.is_cpu());
  }
}

TEST(InitEmpty, WhatCannotBeSaysSo) {
  const torch::Tensor stranger = torch::ones({2}, torch::kMeta);
  const std::string unknown = message_of<UnsupportedError>([&] {
    init_empty_weights([&] {
      auto module = std::make_shared<nn::Module>();
      module->register_buffer("table", torch::where(stranger > 0, stranger, torch::ones({2})));
      return module;
    });
  });
  EXPECT_NE(unknown.find("'aten::gt' needs the values"), std::string::npos) << unknown;
  EXPECT_NE(unknown.find("torch::kCPU"), std::string::npos) << unknown;

  for (const bool typed : {false, true}) {
    const std::string data = message_of<UnsupportedError>([&] {
      init_empty_weights([&] {
        const auto table = torch::zeros({4});
        if (typed) {
          table.accessor<float, 1>()[0] = 1;
        } else {
          static_cast<char*>(table.data_ptr())[0] = 1;
        }
        return nn::Linear(2, 2);
      });
    });
    EXPECT_NE(data.find("torch::zeros({n}, torch::kCPU)"), std::string::npos) << data;
  }

  // The program's own mistakes are what they are without the scope.
  const auto mistake = [] {
    torch::mm(torch::ones({2, 3}), torch::ones({2, 3}));
    return nn::Linear(2, 2);
  };
  const auto first_line = [](const std::string& text) { return text.substr(0, text.find('\n')); };
  EXPECT_EQ(first_line(message_of<c10::Error>([&] { init_empty_weights(mistake); })),
            first_line(message_of<c10::Error>([&] { mistake(); })));

  InitOnDevice scope{at::Device(at::kMeta), false};
  const Buffered net;
  scope.finish(big_model::record_of(net));
  EXPECT_THROW(scope.finish(big_model::record_of(net)), StateError);
}

}  // namespace
}  // namespace accelerate
