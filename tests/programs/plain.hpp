#pragma once

// A program's run that is right by construction: LibTorch alone, in the place of the Accelerator
// and of what it prepares. Each rank computes its own part with its own whole copy, and gradients
// are averaged parameter by parameter where a window ends.

#include <programs/values.hpp>

#include <accelerate/accelerator/options.hpp>
#include <accelerate/accelerator/prepare.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/comm/group.hpp>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace programs {

/// What has the names, tensors and optimizers of one plain module.
struct PlainTensors {
  std::vector<std::pair<std::string, at::Tensor>> parameters;
  std::vector<std::pair<std::string, at::Tensor>> buffers;
};
PlainTensors tensors_of(const torch::nn::Module& module);
PlainTensors tensors_of(const torch::jit::Module& module);

/// While it lives, operators compute as mixed precision says.
class PlainAutocast {
 public:
  explicit PlainAutocast(accelerate::MixedPrecision precision);
  ~PlainAutocast();
  PlainAutocast(const PlainAutocast&) = delete;
  PlainAutocast& operator=(const PlainAutocast&) = delete;

 private:
  bool on_;
};

class Plain;

/// In the place of PreparedModule<M>.
template <class M>
class PlainModule {
 public:
  PlainModule(std::shared_ptr<M> module, accelerate::MixedPrecision precision)
      : module_(std::move(module)), precision_(precision) {}

  template <class... Arguments>
  auto forward(Arguments&&... arguments) {
    return run([&]() -> decltype(auto) {
      if constexpr (std::is_same_v<M, torch::jit::Module>)
        return module_->forward({c10::IValue(at::Tensor(std::forward<Arguments>(arguments)))...});
      else
        return module_->forward(std::forward<Arguments>(arguments)...);
    });
  }
  template <class... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }
  template <auto Method, class... Arguments>
  auto call(Arguments&&... arguments) {
    return run([&]() -> decltype(auto) {
      return ((*module_).*Method)(std::forward<Arguments>(arguments)...);
    });
  }
  PlainModule* operator->() noexcept { return this; }
  M& module() const noexcept { return *module_; }
  const std::shared_ptr<M>& unwrap() const noexcept { return module_; }

  void train(bool on = true) { module_->train(on); }
  void eval() { module_->train(false); }
  bool is_training() const { return module_->is_training(); }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& [name, tensor] : tensors_of(*module_).parameters) all.push_back(tensor);
    return all;
  }
  std::vector<accelerate::NamedTensor> state_dict() const {
    std::vector<accelerate::NamedTensor> all;
    const PlainTensors tensors = tensors_of(*module_);
    for (const auto& [name, tensor] : tensors.parameters) all.push_back({name, tensor});
    for (const auto& [name, tensor] : tensors.buffers) all.push_back({name, tensor});
    return all;
  }
  void load_state_dict(const std::vector<accelerate::NamedTensor>& state) {
    const at::NoGradGuard no_grad;
    std::map<std::string, at::Tensor> mine;
    for (const auto& [name, tensor] : state_dict()) mine[name] = tensor;
    for (const auto& [name, tensor] : state) mine.at(name).copy_(tensor);
  }
  std::shared_ptr<void> summon_full_params(bool write_back = false) { return nullptr; }
  void restore() {}

 private:
  template <class Function>
  auto run(Function&& function) {
    if (precision_ == accelerate::MixedPrecision::no) return function();
    auto result = [&] {
      const PlainAutocast autocast(precision_);
      return function();
    }();
    if constexpr (std::is_same_v<decltype(result), at::Tensor>) {
      if (at::isReducedFloatingType(result.scalar_type())) result = result.to(at::kFloat);
    }
    return result;
  }

  std::shared_ptr<M> module_;
  accelerate::MixedPrecision precision_;
};

/// In the place of PreparedOptimizer<O>.
template <class O>
class PlainOptimizer {
 public:
  PlainOptimizer(std::shared_ptr<O> optimizer, Plain& plain)
      : optimizer_(std::move(optimizer)), plain_(&plain) {}
  at::Tensor step(const std::function<at::Tensor()>& closure = nullptr);
  void zero_grad(bool set_to_none = true);
  bool step_was_skipped() const { return false; }
  O& optimizer() const noexcept { return *optimizer_; }
  decltype(auto) param_groups() const { return optimizer_->param_groups(); }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all;
    for (const auto& group : optimizer_->param_groups())
      all.insert(all.end(), group.params().begin(), group.params().end());
    return all;
  }
  std::vector<double> learning_rates() const {
    std::vector<double> rates;
    for (const auto& group : optimizer_->param_groups()) rates.push_back(group.options().get_lr());
    return rates;
  }
  void set_learning_rates(const std::vector<double>& rates) {
    for (std::size_t i = 0; i < rates.size(); ++i)
      optimizer_->param_groups()[i].options().set_lr(rates[i]);
  }

 private:
  std::shared_ptr<O> optimizer_;
  Plain* plain_;
};

/// In the place of PreparedScheduler<S>.
template <class S>
class PlainScheduler {
 public:
  PlainScheduler(std::shared_ptr<S> scheduler, Plain& plain)
      : scheduler_(std::move(scheduler)), plain_(&plain) {}
  void step();
  S& scheduler() const noexcept { return *scheduler_; }

 private:
  std::shared_ptr<S> scheduler_;
  Plain* plain_;
};

/// In the place of the Accelerator: the part of its interface that programs of the zoo use.
class Plain {
 public:
  static constexpr bool kPlain = true;

  /// `world`: who averages.
  Plain(const accelerate::AcceleratorOptions& options, accelerate::comm::Group world);

  template <class... T>
  auto prepare(T&&... objects) {
    if constexpr (sizeof...(T) == 1)
      return prepare_one(std::forward<T>(objects)...);
    else
      return std::tuple{prepare_one(std::forward<T>(objects))...};  // from left to right
  }
  template <class M>
  auto prepare_for_evaluation(M&& module) {
    return prepare_one(std::forward<M>(module), /*trained=*/false);
  }

  void backward(const at::Tensor& loss);
  void backward(const at::Tensor& loss_sum, double count);

  template <class... M>
  std::shared_ptr<void> accumulate(PlainModule<M>&...) {
    sync_ = ++micro_batches_ % steps_ == 0;
    return nullptr;
  }
  /// Gradients of the backwards inside it stay here.
  template <class... M>
  std::shared_ptr<void> no_sync(PlainModule<M>&...) {
    const bool before = std::exchange(local_, true);
    return std::shared_ptr<void>(nullptr, [this, before](void*) { local_ = before; });
  }
  bool sync_gradients() const noexcept { return sync_; }
  std::int64_t gradient_accumulation_steps() const noexcept { return steps_; }
  void set_gradient_accumulation_steps(std::int64_t steps) { steps_ = steps; }
  /// Drops what was accumulated.
  void discard_gradients();
  bool optimizer_step_was_skipped() const { return false; }

  void unscale_gradients();
  template <class M>
  at::Tensor clip_grad_norm_(PlainModule<M>& model, double max_norm, double norm_type = 2.0) {
    return clip_norm(model.parameters(), max_norm, norm_type);
  }
  template <class M>
  void clip_grad_value_(PlainModule<M>& model, double limit) {
    clip_value(model.parameters(), limit);
  }

  at::Tensor gather(const at::Tensor& tensor) const;
  /// The mean over all ranks of a tensor.
  at::Tensor mean(const at::Tensor& tensor) const;

  std::filesystem::path save_state(const std::filesystem::path& folder);
  std::filesystem::path load_state(const std::filesystem::path& folder);

  const accelerate::comm::Group& world() const noexcept { return world_; }
  at::Device device() const noexcept { return at::kCPU; }
  int data_parallel_size() const noexcept { return world_.size(); }
  int data_parallel_rank() const noexcept { return world_.rank(); }
  int num_processes() const noexcept { return data_parallel_size(); }
  int process_index() const noexcept { return data_parallel_rank(); }
  bool is_main_process() const noexcept {
    return world_.global_ranks()[static_cast<std::size_t>(world_.rank())] == 0;
  }
  void wait_for_everyone() const {}
  template <class... Parts>
  void print(const Parts&...) const {}
  void free_memory() {
    modules_.clear();
    optimizers_.clear();
  }
  const accelerate::AcceleratorOptions& options() const noexcept { return options_; }

  /// Notes a value that must be equal in every run.
  template <class V>
  void note(const std::string& name, const V& value) {
    values_.note(accelerate::text::concat(name, " (note ", notes_++, ")"), value);
  }
  /// Notes parameters, buffers and optimizers' states of all that is prepared and alive.
  void check();
  const Values& values() const noexcept { return values_; }
  int checks() const noexcept { return checks_; }

 private:
  template <class O>
  friend class PlainOptimizer;
  template <class S>
  friend class PlainScheduler;

  struct Module {
    std::weak_ptr<void> alive;
    std::function<PlainTensors()> tensors;
    bool trained = true;
  };
  struct Optimizer {
    std::weak_ptr<torch::optim::Optimizer> alive;
  };

  template <class T>
  auto prepare_one(T&& object, bool trained = true) {
    using accelerate::detail::Kind;
    constexpr Kind kind = accelerate::detail::kKind<T&&>;
    using Object = std::remove_cvref_t<T>;
    static_assert(kind != Kind::none, "Plain does not know this kind of object.");
    static_assert(kind != Kind::loader,
                  "Programs of the zoo make their batches themselves; tests/data tests loaders.");
    if constexpr (kind == Kind::module) {
      if constexpr (accelerate::detail::ModuleHolderLike<Object>)
        return add_module(object.ptr(), trained);
      else
        return add_module(accelerate::detail::hold(std::forward<T>(object)), trained);
    } else if constexpr (kind == Kind::optimizer) {
      auto optimizer = accelerate::detail::hold(std::forward<T>(object));
      add_optimizer(optimizer);
      return PlainOptimizer<accelerate::detail::held_t<T>>(std::move(optimizer), *this);
    } else {
      return PlainScheduler<accelerate::detail::held_t<T>>(
          accelerate::detail::hold(std::forward<T>(object)), *this);
    }
  }
  template <class M>
  PlainModule<M> add_module(std::shared_ptr<M> module, bool trained) {
    const M* address = module.get();
    modules_.push_back({keep(module), [address] { return tensors_of(*address); }, trained});
    return PlainModule<M>(std::move(module), precision_);
  }
  // An object that is not owned, such as an lvalue, lives as long as the program says: to the end.
  template <class T>
  std::weak_ptr<T> keep(const std::shared_ptr<T>& object) {
    if (object.use_count() > 0) return object;
    borrowed_.push_back(std::make_shared<std::shared_ptr<void>>(object));
    return std::shared_ptr<T>(borrowed_.back(), object.get());
  }
  template <class O>
  void add_optimizer(const std::shared_ptr<O>& optimizer) {
    optimizers_.push_back({keep<torch::optim::Optimizer>(optimizer)});
  }
  void average();
  void run_backward(const at::Tensor& loss);
  at::Tensor clip_norm(const std::vector<at::Tensor>& parameters, double limit, double p);
  void clip_value(const std::vector<at::Tensor>& parameters, double limit);
  void finish_window() { fresh_window_ = true; }

  accelerate::AcceleratorOptions options_;
  accelerate::comm::Group world_;
  accelerate::MixedPrecision precision_;
  std::int64_t steps_ = 1;
  std::int64_t micro_batches_ = 0;
  bool sync_ = true;
  bool local_ = false;
  bool fresh_window_ = false;
  bool counted_ = false;
  double count_ = 0;
  std::vector<Module> modules_;
  std::vector<Optimizer> optimizers_;
  std::vector<std::shared_ptr<std::shared_ptr<void>>> borrowed_;
  struct Saved {
    std::vector<std::vector<at::Tensor>> modules;
    std::vector<std::string> optimizers;
    at::Tensor generator;
    std::int64_t micro_batches;
  };
  std::map<std::string, Saved> saved_;
  Values values_;
  int notes_ = 0;
  int losses_ = 0;
  int checks_ = 0;
};

template <class O>
at::Tensor PlainOptimizer<O>::step(const std::function<at::Tensor()>& closure) {
  if (!plain_->sync_) return {};
  at::Tensor result;
  if (closure) {
    result = optimizer_->step(closure);
  } else {
    plain_->unscale_gradients();
    result = optimizer_->step();
  }
  plain_->finish_window();
  return result;
}

template <class O>
void PlainOptimizer<O>::zero_grad(bool set_to_none) {
  if (!plain_->sync_) return;
  optimizer_->zero_grad(set_to_none);
  plain_->finish_window();
}

template <class S>
void PlainScheduler<S>::step() {
  if (!plain_->sync_) return;
  const bool each = plain_->options_.per_process_scheduler_steps() &&
                    plain_->options_.step_scheduler_with_optimizer();
  for (int i = 0; i < (each ? plain_->data_parallel_size() : 1); ++i) scheduler_->step();
}

}  // namespace programs
