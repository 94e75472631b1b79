#pragma once

#include <accelerate/accelerator/checkpointing.hpp>
#include <accelerate/accelerator/prepared_module.hpp>
#include <accelerate/data/loader.hpp>
#include <accelerate/optim/optimizer.hpp>
#include <accelerate/optim/scheduler.hpp>

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

/// What `Accelerator::prepare` does with each kind of argument, by its static type.
namespace accelerate {

class Accelerator;

namespace detail {

/// Any of: `X&` (referenced, or owned where it is a module that a shared_ptr owns), `X&&`,
/// unique_ptr<X>, shared_ptr<X> (owned). Gives a shared_ptr<X>.
template <class T>
struct Held {
  using type = T;
};
template <class T>
struct Held<std::shared_ptr<T>> {
  using type = T;
};
template <class T, class D>
struct Held<std::unique_ptr<T, D>> {
  using type = T;
};
template <class T>
using held_t = typename Held<std::remove_cvref_t<T>>::type;

template <class T>
std::shared_ptr<held_t<T>> hold(T&& object) {
  using Object = std::remove_cvref_t<T>;
  if constexpr (!std::is_same_v<Object, held_t<T>>) {
    static_assert(!std::is_lvalue_reference_v<T> || std::is_copy_constructible_v<Object>,
                  "prepare() owns what a unique_ptr holds: hand it over with std::move.");
    return std::shared_ptr<held_t<T>>(std::forward<T>(object));
  } else if constexpr (std::is_lvalue_reference_v<T>) {
    std::shared_ptr<const void> owner;
    if constexpr (std::derived_from<Object, torch::nn::Module>)
      owner = object.weak_from_this().lock();
    return std::shared_ptr<Object>(owner, &object);
  } else {
    return std::make_shared<Object>(std::forward<T>(object));
  }
}

/// TORCH_MODULE's holders: they hold a shared_ptr and give it out.
template <class T>
concept ModuleHolderLike = requires(const T& holder) {
  typename T::ContainedType;
  { holder.ptr() } -> std::convertible_to<std::shared_ptr<typename T::ContainedType>>;
};
template <class T>
concept LibTorchModule = std::derived_from<T, torch::nn::Module>;
template <class T>
concept ScriptModule = std::same_as<T, torch::jit::Module>;
template <class T>
concept AnyPreparedModule = std::derived_from<T, PreparedModuleBase>;
template <class T>
struct IsPrepared : std::false_type {};
template <class T>
struct IsPrepared<PreparedOptimizer<T>> : std::true_type {};
template <class T>
struct IsPrepared<PreparedScheduler<T>> : std::true_type {};

template <class T>
struct IsPreparedLoader : std::false_type {};
template <class Batch>
struct IsPreparedLoader<data::PreparedLoader<Batch>> : std::true_type {};
template <class T>
concept Loadable = requires(T&& object, const data::LoaderContext& context) {
  data::prepare_loader(std::forward<T>(object), context);
};

enum class Kind { none, module, optimizer, loader, scheduler };

template <class T>
constexpr Kind kind_of() {
  using Object = std::remove_cvref_t<T>;
  using Inner = held_t<T>;
  if constexpr (ModuleHolderLike<Object> || LibTorchModule<Inner> || ScriptModule<Inner> ||
                AnyPreparedModule<Object>) {
    return Kind::module;
  } else if constexpr (std::derived_from<Inner, torch::optim::Optimizer>) {
    return Kind::optimizer;
  } else if constexpr (IsPreparedLoader<Object>::value || Loadable<T>) {
    return Kind::loader;
  } else if constexpr (IsPrepared<Object>::value || SchedulerLike<Inner>) {
    return Kind::scheduler;
  } else {
    return Kind::none;
  }
}
template <class T>
inline constexpr Kind kKind = kind_of<T>();
template <class T>
concept Preparable = kKind<T&&>
!= Kind::none;

template <Kind kind>
struct Prepare;

template <>
struct Prepare<Kind::module> {
  template <class A, class T>
  static auto run(A& accelerator, T&& object, bool evaluation_mode = false) {
    using Object = std::remove_cvref_t<T>;
    if constexpr (AnyPreparedModule<Object>) {
      return Object(object);
    } else if constexpr (ModuleHolderLike<Object>) {
      return adapt(accelerator, object.ptr(), evaluation_mode);
    } else if constexpr (ScriptModule<held_t<T>>) {
      // A torch::jit::Module is a handle itself: this copy is the user's module.
      auto module = std::make_shared<torch::jit::Module>(*hold(std::forward<T>(object)));
      const void* identity = module->_ivalue().get();
      auto core = accelerator.adapt_module(ModuleRecord(*module), identity, evaluation_mode);
      return PreparedModule<torch::jit::Module>(std::move(module), std::move(core));
    } else {
      return adapt(accelerator, hold(std::forward<T>(object)), evaluation_mode);
    }
  }

 private:
  template <class A, class M>
  static PreparedModule<M> adapt(A& accelerator, std::shared_ptr<M> module, bool evaluation_mode) {
    auto core = accelerator.adapt_module(ModuleRecord(std::shared_ptr<torch::nn::Module>(module)),
                                         module.get(), evaluation_mode);
    return PreparedModule<M>(std::move(module), std::move(core));
  }
};

template <>
struct Prepare<Kind::optimizer> {
  template <class A, class T>
  static auto run(A& accelerator, T&& object) {
    auto optimizer = hold(std::forward<T>(object));
    auto core = accelerator.adapt_optimizer(optimizer);
    return PreparedOptimizer<held_t<T>>(std::move(optimizer), std::move(core));
  }
};

template <>
struct Prepare<Kind::scheduler> {
  template <class A, class T>
  static auto run(A& accelerator, T&& object) {
    if constexpr (IsPrepared<std::remove_cvref_t<T>>::value) {
      return std::remove_cvref_t<T>(object);
    } else {
      auto scheduler = hold(std::forward<T>(object));
      const torch::optim::Optimizer* optimizer = nullptr;
      if constexpr (requires { scheduler->optimizer(); }) optimizer = &scheduler->optimizer();
      static_assert(SchedulerWithState<held_t<T>>,
                    "prepare() was given a scheduler whose state cannot be saved, so that a run "
                    "could not go on from a checkpoint. Give it state_dict() and "
                    "load_state_dict(const accelerate::Json&), or use one of LibTorch's or of "
                    "<accelerate/optim/schedules.hpp>.");
      auto core = accelerator.adapt_scheduler(optimizer, scheduler);
      PreparedScheduler<held_t<T>> prepared(std::move(scheduler), std::move(core));
      accelerator.checkpointing().add_scheduler(stateful_scheduler(prepared));
      return prepared;
    }
  }
};

template <>
struct Prepare<Kind::loader> {
  template <class A, class T>
  static auto run(A& accelerator, T&& object) {
    if constexpr (IsPreparedLoader<std::remove_cvref_t<T>>::value) {
      return std::remove_cvref_t<T>(object);
    } else {
      auto prepared = data::prepare_loader(std::forward<T>(object), accelerator.loader_context());
      accelerator.checkpointing().add_loader(prepared.core());
      return prepared;
    }
  }
};

template <class T>
using prepared_t =
    decltype(Prepare<kKind<T&&>>::run(std::declval<Accelerator&>(), std::declval<T&&>()));

}  // namespace detail
}  // namespace accelerate
