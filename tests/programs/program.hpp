#pragma once

// The zoo of programs: small training programs, as users write them, that have to come out the same
// under every strategy.
//
// A program is a generic lambda over an accelerator:
//
//   const programs::Program tied("tied_weights", [](auto& accelerator) {
//     Tied net;                                   // modules and optimizers as anywhere else
//     net->to(torch::kDouble);
//     torch::optim::AdamW adam(net->parameters(), 1e-2);
//     auto [model, optimizer] = accelerator.prepare(net, adam);
//     for (int step = 0; step < 3; ++step) {
//       const auto x = programs::batch(accelerator, step, {4, 6});   // this rank's own samples
//       accelerator.backward(model(x).square().mean());
//       optimizer.step();
//       optimizer.zero_grad();
//     }
//     accelerator.check();                        // at least once, while what was prepared lives
//   });
//
// To add one, write that into tests/programs/<theme>_programs.cpp, inside a namespace without name,
// and name the file in tests/programs/CMakeLists.txt. A program whose name is `tied_weights` is the
// cases tied_weights.single, .ddp, .fsdp, .zero1, .zero2 and .zero3 of programs_test, each on 1, 2
// and 3 processes:
//
//   accelerate-cpp launch -n 2 build/bin/programs_test --gtest_filter='tied_weights.*'
//
// The lambda is compiled twice. With `Plain` (plain.hpp) it is LibTorch alone: each rank trains its
// own whole copy, and gradients are averaged one by one. With `Sharded` it is the public API: a
// Sharded is an Accelerator, and prepare() returns what it returns to users. `if constexpr
// (programs::is_plain(accelerator))` tells them apart, for what only one has; Plain has no loaders
// and no collectives but gather() and mean() of a tensor.
//
// Compared are, on every rank, at 1e-9 or the tolerance that the program states:
// - the loss of every accelerator.backward();
// - what the program notes: accelerator.note("norm", tensor or double);
// - at every accelerator.check(): parameters (gathered), buffers (on rank 0) and the
//   optimizers' states (this rank's part) of all that is prepared and still alive.
//
// Every program starts after torch::manual_seed(1), so modules are alike on all ranks and in both
// runs. Random numbers in the loop: call manual_seed, or programs::batch, which does, in each step.
//
// Options, as designated initializers after the name:
//   .options     AcceleratorOptions (accumulation, precision, ddp, ...); the strategy is set for
//   you .fsdp        FsdpOptions of fsdp and zero1 to zero3. Default: units from 20 parameters on
//   .tolerance   for low precision: that of the plain program in the same precision
//   .strategies  where it makes sense. Default: all
//   .least_ranks, .most_ranks
//   .raises      programs::error<accelerate::ShardingError>("part of the message"): the program has
//                to end with this error, on every rank. A program may catch an error itself, go on
//                and be compared, which shows more
//   .raises_when where it does; elsewhere it is compared: [](const programs::Where& where) {...}
//
// A program that throws anything else than it says fails, and so does one that hangs: the ranks
// tell each other how they ended, and who waits for longer than `kPatience` ends the run. An
// unexpected error ends the run too, since what the ranks have in common is in doubt afterwards.

#include <programs/plain.hpp>
#include <programs/values.hpp>

#include <accelerate/accelerator/accelerator.hpp>
#include <accelerate/base/error.hpp>

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

namespace programs {

constexpr std::chrono::seconds kPatience{20};

/// An Accelerator whose run is noted.
class Sharded : public accelerate::Accelerator {
 public:
  static constexpr bool kPlain = false;
  using Accelerator::Accelerator;

  template <class... T>
  auto prepare(T&&... objects) {
    auto prepared = Accelerator::prepare(std::forward<T>(objects)...);
    if constexpr (sizeof...(T) == 1)
      watch(prepared);
    else
      std::apply([&](auto&... each) { (watch(each), ...); }, prepared);
    return prepared;
  }
  template <class M>
  auto prepare_for_evaluation(M&& module) {
    auto prepared = Accelerator::prepare_for_evaluation(std::forward<M>(module));
    watch(prepared);
    return prepared;
  }

  void backward(const at::Tensor& loss);
  void backward(const at::Tensor& loss_sum, double count);
  /// The mean over all ranks of a tensor.
  at::Tensor mean(const at::Tensor& tensor) const;

  template <class V>
  void note(const std::string& name, const V& value) {
    values_.note(accelerate::text::concat(name, " (note ", notes_++, ")"), value);
  }
  void check();
  const Values& values() const noexcept { return values_; }
  int checks() const noexcept { return checks_; }

 private:
  // What is noted must not keep alive what the program lets go.
  template <class P>
  void watch(const P& prepared) {
    if constexpr (std::is_base_of_v<accelerate::PreparedModuleBase, P>)
      modules_.push_back(prepared.core());
    else if constexpr (requires { prepared.core()->optimizer(); })
      optimizers_.push_back(prepared.core());
  }

  std::vector<std::weak_ptr<accelerate::detail::PreparedModuleCore>> modules_;
  std::vector<std::weak_ptr<accelerate::OptimizerCore>> optimizers_;
  Values values_;
  int notes_ = 0;
  int losses_ = 0;
  int checks_ = 0;
};

template <class A>
constexpr bool is_plain(const A&) {
  return A::kPlain;
}

/// Normal numbers in float64, this rank's own; the same in every run of the program.
template <class A>
at::Tensor batch(const A& accelerator, int step, const std::vector<std::int64_t>& sizes,
                 int micro_batch = 0);
at::Tensor batch_of(int rank, int step, const std::vector<std::int64_t>& sizes, int micro_batch);

/// A folder that the ranks of this launch share; removed when the launch ends well.
std::filesystem::path temporary_folder(const std::string& name);

/// Where a program runs.
struct Where {
  accelerate::StrategyKind strategy;
  int ranks;
  /// Parameters are cut over several ranks.
  bool sharded() const { return ranks > 1 && strategy != accelerate::StrategyKind::ddp; }
  /// A strategy that cuts, also where there is one rank.
  bool cuts() const {
    return strategy != accelerate::StrategyKind::ddp &&
           strategy != accelerate::StrategyKind::single;
  }
};

/// Empty when the error is the right one, else what is wrong with it.
using ErrorCheck = std::function<std::string(const std::exception&)>;

std::string check_message(const std::exception& error, const std::string& part);
std::string name_of_type(const std::type_info& type);

template <class E>
ErrorCheck error(std::string part) {
  return [part = std::move(part)](const std::exception& raised) -> std::string {
    if (dynamic_cast<const E*>(&raised) == nullptr)
      return "it is no " + name_of_type(typeid(E)) + " but a " + name_of_type(typeid(raised));
    return check_message(raised, part);
  };
}

struct ProgramOptions {
  accelerate::AcceleratorOptions options = {};
  accelerate::FsdpOptions fsdp = accelerate::FsdpOptions().min_num_params(20);
  double tolerance = 1e-9;
  std::vector<accelerate::StrategyKind> strategies = {
      accelerate::StrategyKind::single, accelerate::StrategyKind::ddp,
      accelerate::StrategyKind::fsdp,   accelerate::StrategyKind::zero1,
      accelerate::StrategyKind::zero2,  accelerate::StrategyKind::zero3};
  int least_ranks = 1;
  int most_ranks = 1000;
  ErrorCheck raises = nullptr;
  std::function<bool(const Where&)> raises_when = nullptr;
};

/// A program of the zoo: making one registers its cases.
class Program {
 public:
  template <class Run>
  Program(std::string name, Run run) : Program(std::move(name), ProgramOptions(), std::move(run)) {}
  template <class Run>
  Program(std::string name, ProgramOptions options, Run run) {
    add({std::move(name), std::move(options), [run](Plain& plain) { run(plain); },
         [run](Sharded& sharded) { run(sharded); }});
  }

  struct Entry {
    std::string name;
    ProgramOptions options;
    std::function<void(Plain&)> plain;
    std::function<void(Sharded&)> sharded;
    std::shared_ptr<Values> right = nullptr;  ///< of the plain run, once it ran
  };

 private:
  static void add(Entry entry);
};

/// How all ranks ended: "" for well, else the error. Nothing for a rank that did not say so within
/// `kPatience`. Collective, and works where the process group does not.
std::vector<std::optional<std::string>> tell_all(const std::string& outcome);

template <class A>
at::Tensor batch(const A& accelerator, int step, const std::vector<std::int64_t>& sizes,
                 int micro_batch) {
  return batch_of(accelerator.data_parallel_rank(), step, sizes, micro_batch);
}

}  // namespace programs
