#include "optim/witness.hpp"

#include <accelerate/optim/adafactor.hpp>
#include <accelerate/optim/fused.hpp>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <typeinfo>

namespace accelerate {
namespace {

using torch::optim::OptimizerOptions;

// LibTorch's optimizers have no place for what is others'. They own the default options of their
// groups, which nobody can exchange, and copy no more than the options out of them. So the token is
// in an object of a class derived from those.
struct Token {
  virtual ~Token() = default;
  std::shared_ptr<const void> life = std::make_shared<char>();
};

template <class Options>
struct Witnessed final : Options, Token {
  explicit Witnessed(const Options& options) : Options(options) {}
};

// Naming a protected member through a subclass is the way in that the language has.
struct Access : torch::optim::Optimizer {
  static std::unique_ptr<OptimizerOptions>& defaults(torch::optim::Optimizer& optimizer) {
    return optimizer.*(&Access::defaults_);
  }
  static const OptimizerOptions* defaults(const torch::optim::Optimizer& optimizer) {
    return (optimizer.*(&Access::defaults_)).get();
  }
};

template <class Options>
bool plant(std::unique_ptr<OptimizerOptions>& defaults) {
  const OptimizerOptions& options = *defaults;
  if (typeid(options) != typeid(Options)) return false;
  defaults = std::make_unique<Witnessed<Options>>(static_cast<const Options&>(options));
  return true;
}

template <class... Options>
bool plant_one_of(std::unique_ptr<OptimizerOptions>& defaults) {
  return (plant<Options>(defaults) || ...);
}

}  // namespace

std::optional<std::weak_ptr<const void>> known_witness_of(
    const torch::optim::Optimizer& optimizer) {
  const auto* token = dynamic_cast<const Token*>(Access::defaults(optimizer));
  if (token == nullptr) return std::nullopt;
  return token->life;
}

std::optional<std::weak_ptr<const void>> witness_of(torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  auto& defaults = Access::defaults(optimizer);
  if (defaults == nullptr) return std::nullopt;
  if (dynamic_cast<const Token*>(defaults.get()) == nullptr)
    plant_one_of<AdagradOptions, AdamOptions, AdamWOptions, LBFGSOptions, RMSpropOptions,
                 SGDOptions, optim::FusedAdamWOptions, optim::FusedSGDOptions,
                 optim::AdafactorOptions>(defaults);
  return known_witness_of(optimizer);
}

}  // namespace accelerate
