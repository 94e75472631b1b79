// Programs whose parameters carry operator policies: the plain program writes the same formulas by
// hand, the other has LibTorch's own layers and attaches policies to them.

#include <programs/program.hpp>
#include <support/policies.hpp>

#include <accelerate/accelerator/prepared_script_module.hpp>
#include <accelerate/parallel/activation_checkpointing.hpp>

#include <torch/torch.h>

namespace programs {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using accelerate::intercept::attach;
using accelerate::intercept::PolicyAttachment;
using torch::Tensor;

enum class Kind { adapters, in_float, both };

Tensor normal(const std::vector<std::int64_t>& sizes) {
  return torch::randn(sizes, torch::kDouble) * 0.3;
}

// Two layers in both forms that LibTorch emits, and a table of words that is the head as well.
struct NetImpl : nn::Module {
  nn::Linear matrix{register_module("matrix", nn::Linear(6, 10))};
  nn::Linear batched{register_module("batched", nn::Linear(10, 6))};
  Tensor words = register_parameter("words", normal({7, 6}));
  Tensor down1 = register_parameter("down1", normal({2, 6}));
  Tensor up1 = register_parameter("up1", normal({10, 2}));
  Tensor down2 = register_parameter("down2", normal({2, 10}));
  Tensor up2 = register_parameter("up2", normal({6, 2}));
  Tensor down3 = register_parameter("down3", normal({2, 6}));
  Tensor up3 = register_parameter("up3", normal({7, 2}));
  Kind kind;
  bool by_hand = false;
  bool checkpointed = false;

  explicit NetImpl(Kind kind) : kind(kind) { to(torch::kDouble); }

  Tensor linear(const nn::Linear& layer, const Tensor& down, const Tensor& up, const Tensor& x) {
    if (!by_hand) return nn::Linear(layer)(x);
    const bool matrix_form = x.dim() == 2;
    const Tensor bias = matrix_form ? layer->bias : Tensor();
    Tensor y = kind == Kind::adapters ? torch::linear(x, layer->weight, bias)
                                      : policies::linear_in(torch::kFloat, x, layer->weight, bias);
    if (kind != Kind::in_float) y = y + 0.5 * x.matmul(down.t()).matmul(up.t());
    if (!matrix_form) y = y + layer->bias;
    return y;
  }
  Tensor layers(const Tensor& x) {
    const Tensor y = linear(matrix, down1, up1, x).tanh();
    return linear(batched, down2, up2, y.unsqueeze(0)).squeeze(0);
  }
  Tensor forward(const Tensor& x) {
    const Tensor ids = torch::arange(x.size(0)).remainder(7);
    Tensor table = words;
    if (by_hand && kind != Kind::in_float) table = table + 0.5 * up3.matmul(down3);
    const Tensor h = x + F::embedding(ids, table);
    const Tensor y = checkpointed
                         ? accelerate::checkpoint([this](const Tensor& x) { return layers(x); }, h)
                         : layers(h);
    if (by_hand && kind == Kind::in_float) return policies::linear_in(torch::kFloat, y, words, {});
    if (by_hand && kind == Kind::both) {
      return policies::linear_in(torch::kFloat, y, words, {}) +
             0.5 * y.matmul(down3.t()).matmul(up3.t());
    }
    return y.matmul(table.t());
  }
};
TORCH_MODULE(Net);

std::vector<PolicyAttachment> attach_all(const Net& net) {
  std::vector<PolicyAttachment> all;
  const auto one = [&](const Tensor& weight, const Tensor& down, const Tensor& up) {
    if (net->kind != Kind::adapters)
      all.push_back(attach(weight, std::make_shared<policies::InDtype>(torch::kFloat)));
    if (net->kind != Kind::in_float)
      all.push_back(attach(weight, std::make_shared<policies::LowRank>(down, up, 0.5)));
  };
  one(net->matrix->weight, net->down1, net->up1);
  one(net->batched->weight, net->down2, net->up2);
  one(net->words, net->down3, net->up3);
  return all;
}

Tensor loss_of(const Tensor& output) { return output.to(torch::kDouble).sub(0.3).square().mean(); }

struct How {
  Kind kind = Kind::both;
  bool attached_first = true;
  bool checkpointed = false;
  bool frozen = false;
  torch::ScalarType dtype = torch::kDouble;
};

auto training(How how) {
  return [how](auto& accelerator) {
    Net net(how.kind);
    net->to(how.dtype);
    net->by_hand = is_plain(accelerator);
    net->checkpointed = how.checkpointed;
    for (const auto& each : net->named_parameters()) {
      const bool adapter = each.key().starts_with("up") || each.key().starts_with("down");
      each.value().requires_grad_(adapter ? how.kind != Kind::in_float : !how.frozen);
    }
    std::vector<Tensor> trained;
    for (const Tensor& each : net->parameters()) {
      if (each.requires_grad()) trained.push_back(each);
    }
    std::vector<PolicyAttachment> attachments;
    if (!net->by_hand && how.attached_first) attachments = attach_all(net);
    torch::optim::AdamW adam(trained, torch::optim::AdamWOptions(1e-2).weight_decay(0.1).eps(1e-4));
    auto [model, optimizer] = accelerator.prepare(net, adam);
    if (!net->by_hand && !how.attached_first) attachments = attach_all(net);
    for (int step = 0; step < 3; ++step) {
      accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}).to(how.dtype))));
      optimizer.step();
      optimizer.zero_grad();
      const torch::NoGradGuard no_grad;
      accelerator.note("evaluated", loss_of(model(batch(accelerator, 9, {3, 6}).to(how.dtype))));
    }
    accelerator.check();
  };
}

const Program adapters("policy_adapters", training({.kind = Kind::adapters}));
const Program adapters_alone("policy_adapters_alone_are_trained",
                             training({.kind = Kind::adapters, .frozen = true}));
const Program adapters_later("policy_attached_after_prepare",
                             training({.kind = Kind::adapters, .attached_first = false}));
const Program adapters_again("policy_adapters_computed_again",
                             training({.kind = Kind::adapters, .checkpointed = true}));
// Rounding to float32 turns what differs in the last bits of float64 into more.
const Program in_float("policy_another_dtype", {.tolerance = 1e-6},
                       training({.kind = Kind::in_float}));
const Program both("policy_both_on_one_weight", {.tolerance = 1e-6},
                   training({.checkpointed = true}));
// Sharded, units are in bf16 over a master in float32.
const Program under_autocast(
    "policy_both_under_autocast",
    {.options = accelerate::AcceleratorOptions().mixed_precision(accelerate::MixedPrecision::bf16),
     .tolerance = 3e-2},
    training({.dtype = torch::kFloat}));
// What else a program may do with a module that has policies.
struct OddImpl : nn::Module {
  nn::Linear linear{register_module("linear", nn::Linear(6, 6))};
  nn::Conv1d conv{register_module("conv", nn::Conv1d(1, 2, 3))};
  Tensor scale = register_parameter("scale", torch::full({}, 1.5, torch::kDouble));
  Tensor down = register_parameter("down", normal({2, 6}));
  Tensor up = register_parameter("up", normal({6, 2}));
  bool by_hand = false;
  OddImpl() { to(torch::kDouble); }
  Tensor forward(const Tensor& x) {
    Tensor y = linear(x);
    if (by_hand) y = y + 2 * 0.5 * x.matmul(down.t()).matmul(up.t());
    Tensor z = conv(y.unsqueeze(1));
    if (by_hand) z = z * 3;
    return z * (by_hand ? scale * 2 : scale);
  }
};
TORCH_MODULE(Odd);

// Computes the operator and multiplies what it gives.
class Times final : public accelerate::intercept::OperatorPolicy {
 public:
  Times(std::string name, double factor) : name_(std::move(name)), factor_(factor) {}
  std::vector<std::string> operators() const override { return {name_}; }
  Tensor apply(accelerate::intercept::OperatorCall& call) override {
    return call.proceed() * factor_;
  }

 private:
  std::string name_;
  double factor_;
};

std::vector<PolicyAttachment> attach_odd(const Odd& net) {
  const auto adapters = std::make_shared<policies::LowRank>(net->down, net->up, 0.5);
  std::vector<PolicyAttachment> all;
  all.push_back(attach(net->linear->weight, adapters));
  all.push_back(attach(net->linear->weight, adapters));  // twice
  all.push_back(attach(net->conv->weight, std::make_shared<Times>("aten::conv1d", 3)));
  // A number, which weight decay multiplies and adds as well.
  all.push_back(attach(net->scale, std::make_shared<Times>("aten::mul.Tensor", 2)));
  all.push_back(attach(net->scale, std::make_shared<Times>("aten::add", 100)));
  return all;
}

const Program odd("policy_through_everything_a_program_does", [](auto& accelerator) {
  Odd net;
  net->by_hand = is_plain(accelerator);
  std::vector<PolicyAttachment> attachments;
  if (!net->by_hand) attachments = attach_odd(net);
  torch::optim::SGD sgd(net->parameters(),
                        torch::optim::SGDOptions(0.02).momentum(0.9).weight_decay(0.1));
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  for (int step = 0; step < 3; ++step) {
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6}))));
    accelerator.clip_grad_norm_(model, 0.5);
    optimizer.step();
    optimizer.zero_grad();
    const auto state = model.state_dict();
    model.load_state_dict(state);
    {
      const auto whole = model.summon_full_params(/*write_back=*/true);
      const torch::NoGradGuard no_grad;
      net->linear->weight.mul_(0.99);
      accelerator.note("whole", loss_of(net->forward(torch::ones({2, 6}, torch::kDouble))));
    }
    const torch::NoGradGuard no_grad;
    net->conv->bias.add_(0.01);
    net->scale.mul_(0.98);
  }
  accelerator.check();
  model.restore();
  const torch::NoGradGuard no_grad;
  accelerator.note("restored", loss_of(net->forward(torch::ones({2, 6}, torch::kDouble))));
});

// TorchScript: the plain module's text has the adapters, the other's has not.
constexpr const char* kByHand = R"(
  def forward(self, x):
    y = torch.linear(x, self.w, self.b) + 0.5 * torch.linear(torch.linear(x, self.down), self.up)
    y = torch.relu(y) * 2 + 1
    return torch.linear(y, self.w, self.b) + 0.5 * torch.linear(torch.linear(y, self.down), self.up)
)";
constexpr const char* kWithoutAdapters = R"(
  def forward(self, x):
    y = torch.linear(x, self.w, self.b)
    y = torch.relu(y) * 2 + 1
    return torch.linear(y, self.w, self.b)
)";

const Program script("policy_adapters_on_torchscript", [](auto& accelerator) {
  const bool by_hand = is_plain(accelerator);
  torch::jit::Module net("Net");
  std::vector<Tensor> parameters;
  for (const auto& [name, sizes] : std::vector<std::pair<std::string, std::vector<std::int64_t>>>{
           {"w", {6, 6}}, {"b", {6}}, {"down", {2, 6}}, {"up", {6, 2}}}) {
    parameters.push_back(normal(sizes).requires_grad_(true));
    net.register_parameter(name, parameters.back(), false);
  }
  net.define(by_hand ? kByHand : kWithoutAdapters);
  PolicyAttachment attachment;
  if (!by_hand) {
    accelerate::intercept::run_without_optimization(net);
    attachment = attach(parameters[0],
                        std::make_shared<policies::LowRank>(parameters[2], parameters[3], 0.5));
  }
  torch::optim::AdamW adam(parameters, torch::optim::AdamWOptions(1e-2).eps(1e-4));
  auto [model, optimizer] = accelerator.prepare(net, adam);
  for (int step = 0; step < 5; ++step) {
    accelerator.backward(loss_of(model(batch(accelerator, step, {4, 6})).toTensor()));
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.check();
});

}  // namespace
}  // namespace programs
