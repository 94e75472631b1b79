// Operator policies in the modes in which a program may compute, and wherever the parameter lies.

#include <intercept/home.hpp>
#include <intercept/key.hpp>
#include <intercept/policies.hpp>
#include <intercept/policy_cases.hpp>

#include <accelerate/base/error.hpp>
#include <accelerate/parallel/activation_checkpointing.hpp>

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/serialize.h>

#include <sstream>
#include <thread>

namespace accelerate::intercept {
namespace {

// ---- Modes: no gradients, inference, autocast, computing again.

TEST(PolicyModes, WithoutGradientsAndInInferenceMode) {
  Layer layer;
  const auto attachment =
      attach(layer.weight(), std::make_shared<LowRank>(layer.down, layer.up, 0.5));
  const Tensor x = leaf({2, 3, 5}, 5);
  const Tensor expected = layer.linear(x).detach();
  {
    const at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(layer.linear(x), expected));
    EXPECT_FALSE(layer.linear(x).requires_grad());
  }
  const c10::InferenceMode inference;
  EXPECT_TRUE(at::equal(layer.linear(x), expected));
}

struct CpuAutocast {
  CpuAutocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~CpuAutocast() {
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

TEST(PolicyModes, UnderAutocast) {
  for (const auto& sizes : std::vector<std::vector<std::int64_t>>{{3, 5}, {2, 3, 5}}) {
    Layer layer(at::kFloat);
    const Tensor x = leaf(sizes, 5, at::kFloat), w = layer.weight(), b = layer.bias();
    const std::vector<Tensor> inputs{x, w, b, layer.down, layer.up};
    // Autocast keeps the cast copy of a leaf, and would not of what a layer before gave.
    Tensor in;
    const auto under = [&](const std::function<Tensor()>& forward) {
      return [&x, &in, forward] {
        in = x * 1;
        const CpuAutocast autocast;
        return forward();
      };
    };
    // The operators as a C++ linear layer calls them, then those of the adapters.
    const auto base = [&] { return at::linear(in, w, b); };
    const auto with_adapters = [&] {
      if (x.dim() == 2) return base() + 0.5 * in.matmul(layer.down.t()).matmul(layer.up.t());
      Tensor y = in.matmul(w.t()) + 0.5 * in.matmul(layer.down.t()).matmul(layer.up.t());
      return y += b;
    };
    const auto cast = [&] {
      if (x.dim() == 2) return policies::linear_in(at::kDouble, in, w, b);
      Tensor y = policies::linear_in(at::kDouble, in, w, {});
      return y += b;
    };
    const auto expected = run(under(with_adapters), inputs);
    const auto expected_cast = run(under(cast), inputs);
    EXPECT_EQ(expected[0].scalar_type(), at::kBFloat16);
    {
      const auto attachment = attach(w, std::make_shared<LowRank>(layer.down, layer.up, 0.5));
      expect_same(run(under([&] { return layer.linear(in); }), inputs), expected);
    }
    const auto attachment = attach(w, std::make_shared<InDtype>(at::kDouble));
    expect_same(run(under([&] { return layer.linear(in); }), inputs), expected_cast);
  }
}

// A checkpoint as programs write it themselves.
struct Again : torch::autograd::Function<Again> {
  using Forward = std::function<Tensor(const Tensor&)>;
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Forward* forward) {
    context->save_for_backward({x});
    context->saved_data["forward"] = reinterpret_cast<std::int64_t>(forward);
    return (*forward)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto* forward = reinterpret_cast<const Forward*>(context->saved_data["forward"].toInt());
    const Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    const at::AutoGradMode with_gradients(true);
    torch::autograd::backward({(*forward)(x)}, {gradients[0]});
    return {x.grad(), Tensor()};
  }
};

TEST(PolicyModes, ComputedAgainInBackward) {
  Layer layer;
  const Tensor x = leaf({3, 5}, 5);
  const Again::Forward forward = [&](const Tensor& x) {
    return layer.linear(layer.linear(x).matmul(leaf({4, 5}, 9).detach()).relu());
  };
  const std::vector<Tensor> all{x, layer.weight(), layer.bias(), layer.down, layer.up};
  const auto gradients = [&](const std::function<Tensor()>& run_it) {
    run_it().pow(2).sum().backward();
    std::vector<Tensor> result;
    for (Tensor each : all) {
      result.push_back(each.grad().clone());
      each.mutable_grad().reset();
    }
    return result;
  };
  const auto policy = std::make_shared<LowRank>(layer.down, layer.up, 0.5);
  const auto in_float = std::make_shared<InDtype>(at::kFloat);
  const auto first = attach(layer.weight(), in_float);
  const auto second = attach(layer.weight(), policy);
  const auto expected = gradients([&] { return forward(x); });
  EXPECT_EQ(policy->calls, 2);
  expect_same(gradients([&] { return accelerate::checkpoint(forward, x); }), expected);
  EXPECT_EQ(policy->calls, 6);
  expect_same(gradients([&] { return Again::apply(x * 1, &forward); }), expected);
  EXPECT_EQ(policy->calls, 10);
  EXPECT_EQ(in_float->calls, 10);
}

TEST(PolicyModes, ThatComputesItselfAgain) {
  Layer layer;
  const Tensor x = leaf({3, 5}, 5);
  const auto expected =
      run([&] { return (layer.linear(x) * 2).tanh(); }, {x, layer.weight(), layer.bias()});
  const auto policy = calls([](OperatorCall& call) {
    return accelerate::checkpoint([call](const Tensor&) { return (call.proceed() * 2).tanh(); },
                                  call.arguments()[1].toTensor());
  });
  const auto attachment = attach(layer.weight(), policy);
  expect_same(run([&] { return layer.linear(x); }, {x, layer.weight(), layer.bias()}), expected);
  EXPECT_EQ(policy->calls, 1);
}

// The weight is cast again in backward instead of being kept cast.
struct CastAgain : torch::autograd::Function<CastAgain> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x,
                        const Tensor& w) {
    context->save_for_backward({x, w});
    return x.matmul(w.to(at::kFloat).to(at::kDouble).t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const WithoutPolicies none;
    return {gradients[0].matmul(saved[1].to(at::kFloat).to(at::kDouble)),
            gradients[0].t().matmul(saved[0])};
  }
};

TEST(PolicyModes, FunctionsOfItsOwnMayUseTheWeightInBackward) {
  Layer layer;
  const Tensor x = leaf({3, 5}, 5), w = layer.weight(), b = layer.bias();
  const auto twice = [&](const std::function<Tensor()>& forward) {
    const auto first = torch::autograd::grad({forward().pow(2).sum()}, {x}, {}, true, true)[0];
    return torch::autograd::grad({first.pow(2).sum()}, {x, w, b});
  };
  const auto by_hand = [&] { return CastAgain::apply(x, w) + b; };
  const auto expected = run(by_hand, {x, w, b}), expected_twice = twice(by_hand);
  const auto policy = calls([](OperatorCall& call) {
    const auto linear = as_linear(call);
    return CastAgain::apply(linear->input, linear->weight) + linear->bias;
  });
  const auto attachment = attach(w, policy);
  expect_same(run([&] { return layer.linear(x); }, {x, w, b}), expected, 1e-14);
  expect_same(twice([&] { return layer.linear(x); }), expected_twice, 1e-13);
  EXPECT_EQ(policy->calls, 2);
}

TEST(PolicyModes, AForwardInsideAHook) {
  Layer layer;
  const auto policy = std::make_shared<LowRank>(layer.down, layer.up, 0.5);
  const auto attachment = attach(layer.weight(), policy);
  const Tensor x = leaf({3, 5}, 5);
  const Tensor expected = layer.linear(x).detach();
  Tensor inside, of_leaf;
  Tensor y = layer.linear(x).tanh();
  y.register_hook([&](const Tensor&) {
    const ForwardScope forward;
    inside = layer.linear(x);
  });
  x.register_hook([&](const Tensor&) { of_leaf = layer.linear(x); });
  y.sum().backward();
  EXPECT_TRUE(at::equal(inside, expected));
  EXPECT_TRUE(at::equal(of_leaf, expected));
}

// ---- Where the parameter lies: other data, units that come and go.

TEST(PolicyModes, FollowsTheParameterToOtherData) {
  Layer layer;
  const auto policy = std::make_shared<LowRank>(layer.down, layer.up, 0.5);
  const auto attachment = attach(layer.weight(), policy);
  const Tensor x = leaf({3, 5}, 5);
  const auto check = [&](const char* what) {
    SCOPED_TRACE(what);
    const int before = policy->calls;
    const Tensor w = layer.weight().detach().clone(), b = layer.bias();
    const Tensor input = x.to(w.scalar_type());
    expect_same({layer.linear(input).detach()},
                {adapted(input, w, b, layer.down, layer.up, 0.5).detach()}, 1e-5);
    EXPECT_EQ(policy->calls, before + 1);
    EXPECT_TRUE(layer.weight().requires_grad() && layer.weight().is_leaf());
  };
  check("as it is");
  layer.weight().set_data(at::randn({4, 5}, at::kDouble));
  check("set_data");
  {
    const at::NoGradGuard no_grad;
    Tensor(layer.weight()).set_(at::randn({4, 5}, at::kDouble));
  }
  check("set_");
  const Tensor flat = at::randn({30}, at::kDouble);
  layer.weight().set_data(flat.narrow(0, 7, 20).view({4, 5}));
  check("in a larger buffer");
  std::stringstream stream;
  torch::save(layer.linear, stream);
  torch::load(layer.linear, stream);
  check("torch::load");
  layer.linear->to(at::kFloat);
  for (Tensor* each : {&layer.down, &layer.up}) each->set_data(each->detach().to(at::kFloat));
  check("another dtype");
  EXPECT_FALSE(is_tagged(flat));
  EXPECT_EQ(dynamic_cast<MarkedStorage*>(flat.storage().unsafeGetStorageImpl()->allocator()),
            nullptr)
      << "what it left is as it was";
  nn::Linear copy(std::dynamic_pointer_cast<nn::LinearImpl>(layer.linear->clone()));
  const int before = policy->calls;
  copy(x.to(at::kFloat));
  EXPECT_EQ(policy->calls, before) << "a copied module has no policies";
}

TEST(PolicyModes, LivesOnWithUnitsThatComeAndGo) {
  for (const bool attached_first : {true, false}) {
    Layer layer, plain;
    const Tensor x = leaf({3, 5}, 5);
    const std::vector<Tensor> all{layer.weight(), layer.bias(), layer.down, layer.up};
    const std::vector<Tensor> theirs{plain.weight(), plain.bias(), plain.down, plain.up};
    const auto in_float = std::make_shared<InDtype>(at::kFloat);
    const auto adapters = std::make_shared<LowRank>(layer.down, layer.up, 0.5);
    std::vector<PolicyAttachment> attachments;
    const auto attach_both = [&] {
      attachments.push_back(attach(layer.weight(), in_float));
      attachments.push_back(attach(layer.weight(), adapters));
    };
    if (attached_first) attach_both();
    Home home;
    Engine engine({{"layer", {{"weight", layer.weight()}, {"bias", layer.bias()}}},
                   {"adapters", {{"down", layer.down}, {"up", layer.up}}}},
                  {.parts = 2}, home,
                  [&](const Unit& unit, Tensor flat) { home.adopt(unit, std::move(flat)); });
    if (!attached_first) attach_both();
    const auto expected = run(
        [&] {
          const Tensor y = policies::linear_in(at::kFloat, x, plain.weight(), plain.bias());
          return y + 0.5 * x.matmul(plain.down.t()).matmul(plain.up.t());
        },
        theirs);
    const auto check = [&](const char* what) {
      SCOPED_TRACE(what);
      const int before = adapters->calls;
      expect_same(run([&] { return layer.linear(x); }, all), expected);
      EXPECT_EQ(adapters->calls, before + 1);
    };
    for (int step = 0; step < 3; ++step) {
      engine.begin_pass(Engine::Pass::training);
      check("a pass");
      engine.end_pass();
      EXPECT_ANY_THROW(layer.weight().data_ptr<double>()) << "it is absent";
    }
    EXPECT_GT(engine.statistics().brought, 0);
    {
      const auto whole = engine.full_parameters(false);
      EXPECT_NO_THROW(layer.weight().data_ptr<double>());
      check("whole");
    }
    check("sharded again");
    layer.weight().set_data(plain.weight().detach().clone());
    check("assigned");
    engine.check_tagged();
    check("taken");
    engine.restore();
    check("restored");
    attachments.pop_back();
    attachments.pop_back();
    EXPECT_FALSE(is_tagged(layer.weight()));
  }
}

TEST(PolicyModes, WithOtherPrecisionInTheUnit) {
  Layer layer(at::kFloat);
  const Tensor w = layer.weight().detach().clone(), b = layer.bias().detach().clone();
  const Tensor x = leaf({3, 5}, 5, at::kBFloat16);
  const auto attachment = attach(layer.weight(), std::make_shared<InDtype>(at::kFloat));
  Home home;
  Engine engine({{"layer", {{"weight", layer.weight()}, {"bias", layer.bias()}}}},
                {.compute_dtype = at::kBFloat16}, home,
                [&](const Unit& unit, Tensor flat) { home.adopt(unit, std::move(flat)); });
  const Tensor low = w.to(at::kBFloat16).requires_grad_(true);
  const Tensor low_bias = b.to(at::kBFloat16).requires_grad_(true);
  engine.begin_pass(Engine::Pass::training);
  expect_same(
      run([&] { return layer.linear(x); }, {x, layer.weight(), layer.bias()}),
      run([&] { return policies::linear_in(at::kFloat, x, low, low_bias); }, {x, low, low_bias}));
  engine.end_pass();
  engine.restore();
  EXPECT_TRUE(at::equal(layer.weight(), w)) << "the master's bits";
}

TEST(PolicyModes, OutlivesTheEngineAndItsParameterTheModule) {
  auto layer = std::make_unique<Layer>();
  const Tensor x = leaf({3, 5}, 5);
  PolicyAttachment attachment = attach(layer->weight(), std::make_shared<InDtype>(at::kFloat));
  {
    Home home;
    Engine engine({{"layer", {{"weight", layer->weight()}, {"bias", layer->bias()}}}}, {}, home,
                  [&](const Unit& unit, Tensor flat) { home.adopt(unit, std::move(flat)); });
    layer->linear(x);
  }
  EXPECT_THROW(layer->linear(x), StateError) << "the strategy is gone, as without a policy";
  layer.reset();
  attachment.detach();
  attachment.detach();
}

TEST(PolicyModes, OfADispatchedModulesGuardedWeight) {
  Layer layer;
  guard(layer.weight(), true);
  auto attachment = attach(layer.weight(), std::make_shared<InDtype>(at::kFloat));
  EXPECT_THROW(layer.linear->to(at::kFloat), StateError);
  attachment.detach();
  EXPECT_THROW(layer.linear->to(at::kFloat), StateError);
  attachment = attach(layer.weight(), std::make_shared<InDtype>(at::kFloat));
  guard(layer.weight(), false);
  layer.linear->to(at::kFloat);
  EXPECT_TRUE(is_tagged(layer.weight()));
  attachment.detach();
  EXPECT_FALSE(is_tagged(layer.weight()));
}

// ---- Threads and regions.

TEST(PolicyModes, InSeveralThreads) {
  Layer layer;
  const auto policy = std::make_shared<LowRank>(layer.down, layer.up, 0.5);
  const auto attachment = attach(layer.weight(), policy);
  const Tensor x = leaf({3, 5}, 5);
  const std::vector<Tensor> inputs{x, layer.weight(), layer.down};
  const auto expected = run([&] { return layer.linear(x); }, inputs);
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        const auto now = run([&] { return layer.linear(x); }, inputs);
        for (std::size_t k = 0; k < now.size(); ++k) wrong += !at::equal(now[k], expected[k]);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(policy->calls, 81);
}

TEST(PolicyModes, RegionsSeeWhatItCalls) {
  struct Names final : RegionPolicy {
    std::vector<std::string> seen;
    void call(const c10::OperatorHandle& op, c10::DispatchKeySet below,
              torch::jit::Stack& stack) override {
      seen.push_back(op.schema().name());
      op.redispatchBoxed(below, &stack);
    }
  } names;
  Layer layer;
  const Tensor x = leaf({3, 5}, 5);
  const auto attachment =
      attach(layer.weight(), calls([](OperatorCall& call) { return call.proceed().mul(2); }));
  {
    const Region region(names);
    layer.linear(x);
  }
  EXPECT_EQ(names.seen, (std::vector<std::string>{"aten::addmm", "aten::mul"}));
}

}  // namespace
}  // namespace accelerate::intercept
