// Operator policies in one process: what is replaced and what is not, and that results and
// gradients are those of the same formulas written by hand.

#include <intercept/key.hpp>
#include <intercept/policies.hpp>
#include <intercept/policy_cases.hpp>
#include <support/message_of.hpp>

#include <accelerate/base/error.hpp>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/optim/sgd.h>

namespace accelerate::intercept {
namespace {

// ---- Both forms that LibTorch emits, C++ and TorchScript.

TEST(Policy, ComputesALinearInAnotherDtype) {
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{3, 5}, {2, 3, 5}, {5}}) {
    Layer layer;
    auto policy = std::make_shared<InDtype>(at::kFloat);
    const Tensor x = leaf(sizes, 5), w = layer.weight(), b = layer.bias();
    // In the form of a matrix and a bias the policy sees both; else the bias comes afterwards.
    const auto by_hand = [&] {
      if (x.dim() == 2) return policies::linear_in(at::kFloat, x, w, b);
      return policies::linear_in(at::kFloat, x, w, {}) + b;
    };
    const auto expected = run(by_hand, {x, w, b});
    EXPECT_FALSE(at::equal(expected[0], layer.linear(x))) << "rounding shows";
    const auto attachment = attach(w, policy);
    expect_same(run([&] { return layer.linear(x); }, {x, w, b}), expected);
    EXPECT_EQ(policy->calls, 1) << "once in forward, and not in backward";
    expect_same(run([&] { return at::linear(x, w, b); }, {x, w, b}),
                run([&] { return policies::linear_in(at::kFloat, x, w, b); }, {x, w, b}));
  }
}

TEST(Policy, AddsLowRankAdapters) {
  for (const bool has_bias : {true, false}) {
    for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{3, 5}, {2, 3, 5}, {5}}) {
      Layer layer(at::kDouble, has_bias);
      const Tensor x = leaf(sizes, 5);
      std::vector<Tensor> inputs{x, layer.weight(), layer.down, layer.up};
      if (has_bias) inputs.push_back(layer.bias());
      const auto expected =
          run([&] { return adapted(x, layer.weight(), layer.bias(), layer.down, layer.up, 0.5); },
              inputs);
      const auto attachment =
          attach(layer.weight(), std::make_shared<LowRank>(layer.down, layer.up, 0.5));
      expect_same(run([&] { return layer.linear(x); }, inputs), expected, 1e-14);
      expect_same(run([&] { return at::linear(x, layer.weight(), layer.bias()); }, inputs),
                  expected, 1e-14);
    }
  }
}

torch::jit::Module script() {
  torch::jit::Module module("Net");
  module.register_parameter("w", leaf({5, 5}, 1), false);
  module.register_parameter("b", leaf({5}, 2), false);
  module.define(R"(
    def forward(self, x):
      y = torch.relu(torch.linear(x, self.w, self.b)) * 2 + 1
      return torch.linear(torch.relu(y), self.w, self.b) * torch.sigmoid(y)
  )");
  return module;
}

TEST(Policy, ReachesTorchScriptBeforeAndAfterItOptimizes) {
  for (const int runs_before : {0, 4}) {
    torch::jit::Module module = script();
    const Tensor w = module.attr("w").toTensor(), b = module.attr("b").toTensor();
    const Tensor down = leaf({2, 5}, 3), up = leaf({5, 2}, 4), x = leaf({3, 5}, 6);
    for (int i = 0; i < runs_before; ++i)
      run([&] { return module.forward({x}).toTensor(); }, {x, w, b});
    run_without_optimization(module);
    const auto expected = run(
        [&] {
          const Tensor y = adapted(x, w, b, down, up, 0.5).relu() * 2 + 1;
          return adapted(y.relu(), w, b, down, up, 0.5) * y.sigmoid();
        },
        {x, w, b, down, up});
    const auto attachment = attach(w, std::make_shared<LowRank>(down, up, 0.5));
    for (int i = 0; i < 4; ++i) {
      SCOPED_TRACE(i);
      expect_same(run([&] { return module.forward({x}).toTensor(); }, {x, w, b, down, up}),
                  expected, 1e-14);
    }
  }
}

TEST(Policy, TorchScriptsOwnGradientsAreRefused) {
  for (const bool attached_first : {true, false}) {
    torch::jit::Module module = script();
    const Tensor w = module.attr("w").toTensor();
    const Tensor x = leaf({3, 5}, 6);
    const auto policy = std::make_shared<LowRank>(leaf({2, 5}, 3), leaf({5, 2}, 4), 0.5);
    PolicyAttachment attachment;
    if (attached_first) attachment = attach(w, policy);
    const auto step = [&] { run([&] { return module.forward({x}).toTensor(); }, {x}); };
    std::string message;
    for (int i = 0; i < 5; ++i) {
      if (i == 4 && !attached_first) attachment = attach(w, policy);
      try {
        step();
      } catch (const std::exception& error) {
        message = describe(error);
      }
    }
    EXPECT_NE(message.find("run_without_optimization"), std::string::npos) << message;
    attachment.detach();
    step();
  }
}

// ---- What is replaced, and what is not.

TEST(Policy, PartsOfAFusedWeight) {
  const Tensor w = leaf({6, 5}, 1), x = leaf({3, 5}, 2), z = leaf({3, 6}, 7);
  const Tensor down = leaf({2, 5}, 3), up = leaf({6, 2}, 4);
  const Tensor ids = at::tensor({1, 5, 0, 1});
  const auto forward = [&](const Tensor& w) {
    const auto qkv = w.chunk(3);
    std::vector<Tensor> parts;
    for (const Tensor& part : qkv) parts.push_back(x.matmul(part.t()));
    parts.push_back(at::linear(x, w.narrow(0, 1, 3)));
    parts.push_back(x.mm(w.slice(0, 0, 6, 2).t()));
    parts.push_back(z.matmul(w));                                // the transpose
    parts.push_back(x.slice(1, 1, 4).mm(w.slice(1, 1, 4).t()));  // some of the inputs
    parts.push_back(x.matmul(w[2].unsqueeze(1)));
    parts.push_back(at::embedding(w, ids).sum().expand({3, 1}));
    return at::cat(parts, 1);
  };
  const std::vector<Tensor> inputs{x, w, z, down, up};
  const auto expected = run([&] { return forward(w + 0.5 * up.matmul(down)); }, inputs);
  const auto policy = std::make_shared<LowRank>(down, up, 0.5);
  const auto attachment = attach(w, policy);
  expect_same(run([&] { return forward(w); }, inputs), expected, 1e-13);
  EXPECT_EQ(policy->calls, 9);
}

TEST(Policy, ParametersThatDoNotLieRowByRow) {
  const Tensor stored = leaf({5, 6}, 1).detach();
  const Tensor w = stored.t().requires_grad_(true), x = leaf({3, 5}, 2);
  const Tensor down = leaf({2, 5}, 3), up = leaf({6, 2}, 4);
  const auto forward = [&](const Tensor& w) {
    return at::cat({at::linear(x, w), x.mm(w.narrow(0, 2, 3).t())}, 1);
  };
  const auto expected = run([&] { return forward(w + 0.5 * up.matmul(down)); }, {x, w, down, up});
  const auto attachment = attach(w, std::make_shared<LowRank>(down, up, 0.5));
  expect_same(run([&] { return forward(w); }, {x, w, down, up}), expected, 1e-13);
}

TEST(Policy, OtherOperatorsAndOtherTensorsAreLeftAlone) {
  Layer layer;
  const auto policy = std::make_shared<InDtype>(at::kFloat);
  const Tensor x = leaf({3, 5}, 5), w = layer.weight();
  const Tensor other = w.detach().clone();
  const auto attachment = attach(w, policy);
  at::embedding(w, at::tensor({1, 2}));
  at::linear(x, other);
  at::mul(w, 2).sum();
  w.clone(), w.detach(), w.t().contiguous(), at::zeros_like(w), w.to(at::kHalf);
  w.norm(), w.sum(), w.isfinite(), w.argmax();
  EXPECT_EQ(policy->calls, 0);
  EXPECT_FALSE(is_tagged(w.clone()));
  const Tensor copy = w.clone();
  at::linear(x, copy);
  EXPECT_EQ(policy->calls, 0) << "a clone is a tensor of its own";
  at::linear(x, w.detach());
  EXPECT_EQ(policy->calls, 1) << "a detached view is not";
}

// Adds, as SGD's weight decay does, and multiplies.
class Counting final : public OperatorPolicy {
 public:
  explicit Counting(std::vector<std::string> names) : names_(std::move(names)) {}
  std::vector<std::string> operators() const override { return names_; }
  Tensor apply(OperatorCall& call) override {
    calls.push_back(call.name());
    return call.proceed();
  }
  std::vector<std::string> calls;

 private:
  std::vector<std::string> names_;
};

TEST(Policy, WritesAndOptimizersPassItBy) {
  Layer layer;
  const auto policy = std::make_shared<Counting>(
      std::vector<std::string>{"aten::mul.Tensor", "aten::add", "aten::addcdiv"});
  const auto attachment = attach(layer.weight(), policy);
  layer.linear(leaf({3, 5}, 5)).sum().backward();
  {
    const at::NoGradGuard no_grad;
    const Tensor w = layer.weight();
    w.mul_(2), w.add_(1), w.copy_(at::ones({4, 5})), w.zero_(), w.addcdiv_(w, at::ones({4, 5}));
    at::add_out(const_cast<Tensor&>(w), at::ones({4, 5}), at::ones({4, 5}));
  }
  torch::optim::SGD(layer.linear->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)).step();
  EXPECT_EQ(policy->calls, std::vector<std::string>());
  {
    const WithoutPolicies none;
    torch::optim::SGD(layer.linear->parameters(), torch::optim::SGDOptions(0.1).weight_decay(0.1))
        .step();
    const ForwardScope forward;  // a closure's
    at::mul(layer.weight(), layer.weight());
  }
  EXPECT_EQ(policy->calls, std::vector<std::string>{"aten::mul"});
}

TEST(Policy, FormulasOfBackwardAreNotReplaced) {
  // Square, used as x·W, so that backward's formula looks like a linear layer.
  const Tensor w = leaf({5, 5}, 1), x = leaf({3, 5}, 2);
  const Tensor down = leaf({2, 5}, 3), up = leaf({5, 2}, 4);
  const std::vector<Tensor> inputs{x, w, down, up};
  const auto twice = [&](const std::function<Tensor(const Tensor&)>& product) {
    const Tensor y = product(product(x.tanh())).pow(2).sum();
    const auto first = torch::autograd::grad({y}, inputs, {}, true, /*create_graph=*/true);
    Tensor sum = at::zeros({}, at::kDouble);
    for (const Tensor& gradient : first) sum = sum + gradient.pow(2).sum();
    auto second = torch::autograd::grad({sum}, inputs);
    second.insert(second.end(), first.begin(), first.end());
    return second;
  };
  const auto expected = twice([&](const Tensor& x) { return x.mm(w + 0.5 * up.mm(down)); });
  const auto policy = std::make_shared<LowRank>(down, up, 0.5);
  const auto attachment = attach(w, policy);
  expect_same(twice([&](const Tensor& x) { return x.mm(w); }), expected, 1e-7);
  EXPECT_EQ(policy->calls, 2);
}

// ---- Several policies, and policies that call themselves.

TEST(Policy, TheLastAttachedIsAskedFirst) {
  Layer layer;
  const Tensor x = leaf({3, 5}, 5), w = layer.weight(), b = layer.bias();
  const std::vector<Tensor> inputs{x, w, b, layer.down, layer.up};
  const auto adapters = std::make_shared<LowRank>(layer.down, layer.up, 0.5);
  const auto in_float = std::make_shared<InDtype>(at::kFloat);
  const auto forward = [&] { return layer.linear(x); };
  const auto cast = [&] { return policies::linear_in(at::kFloat, x, w, b); };
  const auto both = [&] { return cast() + 0.5 * x.matmul(layer.down.t()).matmul(layer.up.t()); };
  const auto expected_both = run(both, inputs), expected_cast = run(cast, inputs);
  {
    const auto first = attach(w, in_float);
    const auto second = attach(w, adapters);
    expect_same(run(forward, inputs), expected_both);
  }
  {
    // This one computes all by itself and asks no one.
    const auto first = attach(w, adapters);
    auto second = attach(w, in_float);
    const int before = adapters->calls;
    expect_same(run(forward, inputs), expected_cast);
    EXPECT_EQ(adapters->calls, before);
    second.detach();
    EXPECT_EQ(in_float->calls, 2);
    run(forward, inputs);
    EXPECT_EQ(adapters->calls, before + 1);
  }
  EXPECT_FALSE(is_tagged(w));
  expect_same(run(forward, inputs), run([&] { return at::addmm(b, x, w.t()); }, inputs));
}

TEST(Policy, WhatItCallsWithTheWeightGoesBelow) {
  Layer layer;
  const Tensor x = leaf({3, 5}, 5), w = layer.weight(), b = layer.bias();
  const auto expected = run([&] { return 3 * at::addmm(b, x, w.t()); }, {x, w, b});
  const auto policy = calls([](OperatorCall& call) {
    const auto linear = as_linear(call);
    return at::linear(linear->input, call.parameter(), linear->bias) + call.proceed() +
           at::addmm(linear->bias, linear->input, call.parameter().t());
  });
  const auto attachment = attach(w, policy);
  expect_same(run([&] { return layer.linear(x); }, {x, w, b}), expected, 1e-14);
  EXPECT_EQ(policy->calls, 1);
}

TEST(Policy, TwoParametersInOneOperator) {
  const Tensor one = leaf({4, 5}, 1), other = leaf({5, 3}, 2);
  std::vector<int> order;
  const auto noting = [&](int number) {
    return calls([&order, number](OperatorCall& call) {
      order.push_back(number);
      return call.proceed() * (number + 1);
    });
  };
  const auto first = attach(other, noting(2));
  const auto second = attach(one, noting(1));
  expect_same({at::mm(one, other).detach()}, {one.detach().clone().mm(other.detach().clone()) * 6},
              1e-14);
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
  order.clear();
  at::mm(one, one.t());
  EXPECT_EQ(order, (std::vector<int>{1})) << "twice in one operator is one call";
}

TEST(Policy, AnErrorInItLeavesNothingBehind) {
  Layer layer;
  bool throws = true;
  const auto policy = calls([&](OperatorCall& call) {
    if (throws) throw std::runtime_error("not today");
    return call.proceed() * 2;
  });
  const auto attachment = attach(layer.weight(), policy);
  const Tensor x = leaf({3, 5}, 5);
  EXPECT_THROW(layer.linear(x), std::runtime_error);
  throws = false;
  const Tensor y = layer.linear(x);
  const WithoutPolicies none;
  EXPECT_TRUE(at::equal(y, layer.linear(x) * 2));
}

TEST(Policy, OneThatGivesNothingIsNamed) {
  Layer layer;
  const auto attachment = attach(layer.weight(), calls([](OperatorCall&) { return Tensor(); }));
  EXPECT_EQ(testing::message_of<StateError>([&] {
              layer.linear(leaf({3, 5}, 5));
            }),
            "The policy of a parameter of shape [4, 5] gave no tensor for 'aten::addmm'.");
}

// ---- Results that are written to: matmul is followed by `output += bias`.

TEST(Policy, ItsResultCanBeWrittenTo) {
  Layer layer;
  const Tensor x = leaf({2, 3, 5}, 5);
  {
    const auto attachment = attach(layer.weight(), calls([](OperatorCall& call) {
                                     return call.arguments()[0].toTensor().narrow(-1, 0, 4);
                                   }));
    const Tensor plain = x.detach();
    const Tensor before = plain.clone();
    const Tensor y = layer.linear(plain);
    EXPECT_TRUE(at::equal(plain, before)) << "the bias was added to the input";
    EXPECT_TRUE(at::equal(y, plain.narrow(-1, 0, 4) + layer.bias()));
  }
  struct View : torch::autograd::Function<View> {
    static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) {
      return x.narrow(-1, 0, 4);
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   torch::autograd::variable_list gradients) {
      return {at::constant_pad_nd(gradients[0], {0, 1})};
    }
  };
  const auto attachment = attach(layer.weight(), calls([](OperatorCall& call) {
                                   return View::apply(call.arguments()[0].toTensor() * 1);
                                 }));
  expect_same(run([&] { return layer.linear(x); }, {x, layer.bias()}),
              run([&] { return x.narrow(-1, 0, 4) + layer.bias(); }, {x, layer.bias()}));
}

// ---- What cannot be.

void attaches(const Tensor& tensor, const std::shared_ptr<OperatorPolicy>& policy) {
  const PolicyAttachment attachment = attach(tensor, policy);
}

TEST(Policy, WhatCannotCarryOneIsRefused) {
  const auto policy = std::make_shared<InDtype>(at::kFloat);
  EXPECT_THROW(attaches(Tensor(), policy), ConfigError);
  EXPECT_THROW(attaches(at::zeros({0, 3}), policy), ConfigError);
  EXPECT_THROW(attaches(leaf({3}, 1) * 2, policy), ConfigError);
  EXPECT_THROW(attaches(leaf({3, 3}, 1).detach().to_sparse(), policy), ConfigError);
  EXPECT_THROW(attaches(leaf({3, 3}, 1), nullptr), ConfigError);
  const Tensor buffer = at::zeros({12});
  const Tensor one = buffer.narrow(0, 0, 8).detach(), beside = buffer.narrow(0, 8, 4).detach();
  const Tensor across = buffer.narrow(0, 6, 4).detach();
  const auto first = attach(one, policy), second = attach(beside, policy);
  EXPECT_THROW(attaches(across, policy), ConfigError);
  EXPECT_FALSE(is_tagged(across));
  const auto naming = [&](std::vector<std::string> names) {
    return testing::message_of<ConfigError>([&] {
      attaches(leaf({3, 3}, 1), std::make_shared<Counting>(names));
    });
  };
  EXPECT_EQ(naming({"aten::linaer"}),
            "A policy names the operator 'aten::linaer', which LibTorch does not have. Names are "
            "like 'aten::linear' or 'aten::add.Tensor'.");
  for (const char* name : {"aten::t", "aten::add_.Tensor", "aten::add.out", "aten::lstm.input",
                           "aten::zeros_like", "aten::size.int", "aten::contiguous"})
    EXPECT_NE(naming({name}).find("cannot be replaced"), std::string::npos) << name;
  EXPECT_EQ(naming({}), "The policy names no operators, so it would do nothing.");
}

TEST(Policy, ViewsOfOtherShapesAreRefused) {
  Layer layer;
  std::string shape, place;
  const auto attachment = attach(
      layer.weight(), calls([&](OperatorCall& call) {
        shape = testing::message_of<ConfigError>([&] { call.same_view(at::zeros({3, 3}), 2); });
        place = testing::message_of<ConfigError>([&] { call.same_view(at::zeros({4, 5}), 1); });
        return call.proceed();
      }));
  layer.linear(leaf({3, 5}, 5));
  EXPECT_NE(shape.find("cannot be taken of [3, 3]"), std::string::npos) << shape;
  EXPECT_EQ(place, "Argument 1 of 'aten::addmm' is not the parameter or a view of it.");
}

TEST(Policy, NothingIsPaidByATensorWithoutOne) {
  Layer layer, other;
  const auto attachment = attach(layer.weight(), std::make_shared<InDtype>(at::kFloat));
  EXPECT_FALSE(is_tagged(other.weight()));
  EXPECT_EQ(record_of(other.weight()), nullptr);
}

}  // namespace
}  // namespace accelerate::intercept
