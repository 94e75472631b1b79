#include <accelerate/data/detail/sample_random.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <mutex>
#include <utility>

namespace accelerate::data::detail {
namespace {

// LibTorch names this key and registers nothing for it. It lies below autograd, so that composite
// functions arrive here as the few operators that draw.
constexpr c10::DispatchKey kKey = c10::DispatchKey::Fake;
constexpr c10::DispatchKeySet kBelow = c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);

thread_local SampleRandom* innermost = nullptr;

// SplitMix64's last step: neighbours become unlike.
std::uint64_t mixed(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15ULL;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
  return value ^ (value >> 31);
}

bool takes_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

void draw(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (SampleRandom* random = SampleRandom::current()) {
    const auto& arguments = op.schema().arguments();
    c10::IValue* const values = stack->data() + (stack->size() - arguments.size());
    c10::IValue* generator = nullptr;
    bool on_host = false, elsewhere = false;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (values[i].isTensor()) {
        const at::Tensor& tensor = values[i].toTensor();
        if (tensor.defined()) (tensor.device().is_cpu() ? on_host : elsewhere) = true;
      } else if (values[i].isNone() && takes_generator(arguments[i])) {
        generator = &values[i];
      }
    }
    if (generator != nullptr && on_host && !elsewhere) *generator = random->generator();
  }
  op.redispatchBoxed(keys & kBelow, stack);
}

// Every operator of LibTorch that takes a generator and a tensor; a test compares the list.
constexpr const char* kThatDraw[] = {"_fused_dropout",
                                     "_fused_dropout.out",
                                     "_sample_dirichlet",
                                     "_sample_dirichlet.out",
                                     "_standard_gamma",
                                     "_standard_gamma.out",
                                     "bernoulli",
                                     "bernoulli.Tensor",
                                     "bernoulli.Tensor_out",
                                     "bernoulli.float_out",
                                     "bernoulli.out",
                                     "bernoulli.p",
                                     "bernoulli_.Tensor",
                                     "bernoulli_.float",
                                     "binomial",
                                     "binomial.out",
                                     "cauchy",
                                     "cauchy.out",
                                     "cauchy_",
                                     "exponential",
                                     "exponential.out",
                                     "exponential_",
                                     "geometric",
                                     "geometric.out",
                                     "geometric_",
                                     "log_normal",
                                     "log_normal.out",
                                     "log_normal_",
                                     "multinomial",
                                     "multinomial.out",
                                     "normal.Tensor_Tensor",
                                     "normal.Tensor_Tensor_out",
                                     "normal.Tensor_float",
                                     "normal.Tensor_float_out",
                                     "normal.float_Tensor",
                                     "normal.float_Tensor_out",
                                     "normal.float_float_out",
                                     "normal.out",
                                     "normal_",
                                     "normal_functional",
                                     "poisson",
                                     "poisson.out",
                                     "rand.generator_out",
                                     "rand.generator_with_names_out",
                                     "rand_like.generator",
                                     "rand_like.generator_out",
                                     "randint.generator_out",
                                     "randint.low_generator_out",
                                     "randint_like.Tensor_generator",
                                     "randint_like.Tensor_generator_out",
                                     "randint_like.generator",
                                     "randint_like.generator_out",
                                     "randint_like.low_generator_dtype",
                                     "randint_like.low_generator_dtype_out",
                                     "randn.generator_out",
                                     "randn.generator_with_names_out",
                                     "randn_like.generator",
                                     "randn_like.generator_out",
                                     "random",
                                     "random.from",
                                     "random.from_out",
                                     "random.out",
                                     "random.to",
                                     "random.to_out",
                                     "random_",
                                     "random_.from",
                                     "random_.to",
                                     "randperm.generator_out",
                                     "rrelu",
                                     "rrelu_",
                                     "rrelu_with_noise",
                                     "rrelu_with_noise.out",
                                     "rrelu_with_noise_",
                                     "rrelu_with_noise_functional",
                                     "uniform",
                                     "uniform.out",
                                     "uniform_"};

TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, Fake, library) {
  for (const char* name : kThatDraw)
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&draw>());
}

}  // namespace

SampleRandom::SampleRandom(std::int64_t seed)
    : seed_(seed), outer_(std::exchange(innermost, this)) {
  if (outer_ == nullptr) c10::impl::tls_set_dispatch_key_included(kKey, true);
}

SampleRandom::~SampleRandom() {
  innermost = outer_;
  if (outer_ == nullptr) c10::impl::tls_set_dispatch_key_included(kKey, false);
}

void SampleRandom::at(std::int64_t position, std::int64_t part) noexcept {
  position_ = position;
  part_ = part;
  seeded_ = false;
}

const at::Generator& SampleRandom::generator() {
  if (!seeded_) {
    if (!generator_.defined()) generator_ = at::detail::createCPUGenerator();
    const auto key = [](std::int64_t value) { return static_cast<std::uint64_t>(value); };
    const std::uint64_t unit = mixed(mixed(mixed(key(seed_)) ^ key(position_)) ^ key(part_));
    const std::scoped_lock lock(generator_.mutex());
    generator_.set_current_seed(unit);
    seeded_ = true;
  }
  return generator_;
}

SampleRandom* SampleRandom::current() noexcept { return innermost; }

}  // namespace accelerate::data::detail
