// Random programs, each a random module and a random loop made from a seed, run by LibTorch alone
// and through the Accelerator under a random strategy:
//
//   accelerate-cpp launch -n N program_fuzz --seeds 1,5,9 [--without step2,clip] [--list]
//
// All seeds want the N processes that fuzz::ranks_of says. For each it prints
//   begin SEED, and then one of
//   ok SEED                       the same numbers
//   refused SEED TYPE: MESSAGE    an error of the library, on every rank
//   failed SEED WHAT              anything else
// and it ends after the first that is not ok, since what the ranks have in common is in doubt then.
// fuzz.py starts it, again for the rest, and knows which refusals are documented.

#include <programs/fuzz.hpp>
#include <programs/fuzz_net.hpp>
#include <programs/program.hpp>
#include <support/distributed.hpp>

#include <accelerate/accelerator/accelerator.hpp>
#include <accelerate/base/text.hpp>

#include <torch/torch.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <thread>

namespace {
std::optional<accelerate::Accelerator> the_accelerator;
}

namespace accelerate::testing {
const comm::Group& world() { return the_accelerator->world(); }
const comm::Group& data_parallel() { return the_accelerator->data_parallel_group(); }
}  // namespace accelerate::testing

namespace fuzz {
namespace {

using accelerate::AcceleratorOptions;
using accelerate::DdpOptions;
using accelerate::FsdpOptions;
using accelerate::StrategyKind;
using accelerate::text::concat;
using programs::batch_of;

Tensor loss_of(const Tensor& output) { return output.sub(0.3).square().mean(); }

/// How the loop goes, as far as it is the same in every step.
struct Loop {
  int steps, accumulation, zero;
  bool by_hand, counts, breaks_forward, breaks_backward, frozen, sometimes_detached, skips, methods;
  explicit Loop(const Draws& d) {
    steps = 3 + d.pick("steps", 3);
    accumulation = d.chance("accumulates", 20) ? 2 + d.pick("window", 2) : 1;
    by_hand = accumulation == 1 && d.chance("no_sync", 15);
    counts = !by_hand && d.chance("counts", 10);
    zero = d.chance("zero_elsewhere", 40) ? 1 + d.pick("zero", 3) : 0;
    breaks_forward = d.chance("forward_throws", 12);
    breaks_backward = accumulation == 1 && !by_hand && !counts && d.chance("backward_throws", 10);
    frozen = d.chance("freezes", 20);
    sometimes_detached = d.chance("detaches", 10);
    skips = d.chance("skips", 10);
    methods = d.chance("methods", 6);
  }
  /// Some parameter may get no gradient in some step.
  bool leaves_unused(const NetImpl& net) const {
    return frozen || sometimes_detached || skips || methods || net.has(BlockImpl::branch) ||
           net.has(BlockImpl::caught) || net.has(BlockImpl::detached) ||
           net.has(BlockImpl::looked_up) || net.has(BlockImpl::again);
  }
};

AcceleratorOptions options_of(const Draws& d, int ranks) {
  Draws plain(d.seed());
  const Loop loop(d);
  AcceleratorOptions options;
  if (loop.accumulation > 1) options.gradient_accumulation_steps(loop.accumulation);
  DdpOptions ddp;
  torch::manual_seed(1);
  const Net probe(d, "net");
  const bool two = d.chance("two_modules", 12);
  bool unused = loop.leaves_unused(*probe) || d.chance("ranks=differ", 3);
  if (two) unused = unused || loop.leaves_unused(*Net(d, "second"));
  ddp.find_unused_parameters(unused || d.chance("finds_unused", 15));
  ddp.gradient_as_bucket_view(d.chance("bucket_views", 25));
  if (d.chance("small_buckets", 40)) ddp.first_bucket_mb(0.0002).bucket_cap_mb(0.0004);
  // With running statistics of each rank, as the plain run has them.
  ddp.broadcast_buffers(false);
  options.ddp(ddp);

  constexpr StrategyKind kKinds[] = {StrategyKind::fsdp,  StrategyKind::zero3, StrategyKind::fsdp,
                                     StrategyKind::zero1, StrategyKind::zero2, StrategyKind::ddp,
                                     StrategyKind::ddp};
  StrategyKind kind = kKinds[d.pick("strategy", 7)];
  if (kind == StrategyKind::ddp && unused && !d.chance("ddp_unused", 100))
    kind = StrategyKind::zero3;
  if (d.chance("alone", ranks == 1 ? 15 : 0)) kind = StrategyKind::single;
  options.strategy(kind);
  if (kind == StrategyKind::ddp || kind == StrategyKind::single) return options;
  FsdpOptions fsdp;
  const bool parts = d.chance("parts_of_blocks", 45);
  if (parts)
    fsdp.min_num_params(20);
  else if (d.chance("blocks_as_units", 80))
    fsdp.unit_types({"BlockImpl"});
  if (kind == StrategyKind::fsdp) {
    if (d.chance("keeps_parameters", 20)) fsdp.reshard_after_forward(false);
    if (ranks == 2 && d.chance("hybrid", 10))
      fsdp.sharding_strategy(accelerate::parallel::ShardingStrategy::hybrid_shard)
          .shard_group_size(1 + d.pick("group", 2));
  }
  if (d.chance("no_prefetch", 20))
    fsdp.forward_prefetch(false).backward_prefetch(accelerate::parallel::BackwardPrefetch::none);
  if (d.chance("prefetches_two", 20)) fsdp.prefetch_units(2);
  if (d.chance("cpu_offload", 10)) fsdp.cpu_offload(true);
  if (kind != StrategyKind::zero2 && d.chance("reduces_each", 15)) fsdp.reduce_every_backward(true);
  if (d.chance("verifies", 10)) fsdp.verify_control_flow(true);
  const bool ways = probe->has(BlockImpl::branch) || d.chance("ranks=differ", 3);
  if (ranks > 1 && ways && d.chance("all_units", 70)) fsdp.all_units_every_pass(true);
  options.fsdp(fsdp);
  return options;
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(
    int kind, std::vector<torch::optim::OptimizerParamGroup> groups) {
  namespace optim = torch::optim;
  switch (kind) {
    case 0:
      return std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(1e-2).eps(1e-4));
    case 1:
      return std::make_unique<optim::SGD>(groups, optim::SGDOptions(0.05).momentum(0.9));
    case 2:
      return std::make_unique<optim::RMSprop>(groups, optim::RMSpropOptions(1e-3).eps(1e-3));
    default:
      return std::make_unique<optim::Adagrad>(groups, optim::AdagradOptions(1e-2).eps(1e-3));
  }
}

template <class A>
struct Program {
  A& accelerator;
  const Draws& d;
  const std::filesystem::path folder;
  bool saved = false;
  bool has_complex = false;
  bool scheduled = false;

  void run() {
    const Loop loop(d);
    Net net(d, "net");
    std::optional<Net> second;
    if (d.chance("two_modules", 12)) second.emplace(d, "second");
    if (loop.frozen && d.chance("frozen_first", 50)) set_frozen(net, true);

    // One optimizer over everything, or two that share the blocks out.
    std::vector<std::vector<Tensor>> shares(d.chance("two_optimizers", 25) ? 2 : 1);
    const auto share = [&](const Net& module) {
      for (std::size_t i = 0; i < module->blocks().size(); ++i) {
        for (const auto& p : module->blocks()[i]->parameters()) {
          const auto same = [&](const Tensor& one) { return one.is_same(p); };
          if (std::none_of(shares.begin(), shares.end(), [&](const auto& some) {
                return std::any_of(some.begin(), some.end(), same);
              }))
            shares[i % shares.size()].push_back(p);
        }
      }
      for (const auto& p : module->head->parameters()) shares.back().push_back(p);
    };
    share(net);
    if (second) share(*second);
    // What writes to its weight in forward cannot be called twice before a backward.
    const bool once = net->has(BlockImpl::normed);
    const auto has = [&](BlockImpl::Kind kind) { return net->has(kind); };
    const bool threads = accelerator.num_processes() == 1 && !once && !has(BlockImpl::batch_norm) &&
                         !has(BlockImpl::running) && !has(BlockImpl::dropout) &&
                         d.chance("threads", 40);
    const bool differ = d.chance("ranks=differ", 3);
    has_complex = net->has(BlockImpl::complex);
    std::vector<std::shared_ptr<torch::optim::Optimizer>> optimizers;
    for (std::size_t i = 0; i < shares.size(); ++i) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      const std::size_t half = shares[i].size() / 2;
      if (half > 0 && d.chance(concat("groups", i), 25)) {
        groups.emplace_back(std::vector<Tensor>(
            shares[i].begin(), shares[i].begin() + static_cast<std::ptrdiff_t>(half)));
        groups.emplace_back(std::vector<Tensor>(
            shares[i].begin() + static_cast<std::ptrdiff_t>(half), shares[i].end()));
      } else {
        groups.emplace_back(shares[i]);
      }
      // LibTorch's AdamW and Adagrad have no complex numbers in mind.
      int kind = d.pick(concat("optimizer", i), 4);
      if (kind == 3 && !d.chance("adagrad", 100)) kind = 0;
      if (net->has(BlockImpl::complex) || (second && (*second)->has(BlockImpl::complex))) kind = 1;
      optimizers.push_back(optimizer_of(kind, groups));
    }
    if (d.chance("hooks", 8))
      net->head->weight.register_hook([](const Tensor& g) { return g * 2; });
    auto model = accelerator.prepare(net);
    auto other = second ? std::optional(accelerator.prepare(*second)) : std::nullopt;
    using Optimizer = decltype(accelerator.prepare(optimizers[0]));
    std::vector<Optimizer> steppers;
    for (auto& optimizer : optimizers) steppers.push_back(accelerator.prepare(optimizer));
    scheduled = d.chance("scheduler", 12);
    std::optional<torch::optim::StepLR> schedule;
    if (scheduled) schedule.emplace(*optimizers[0], 2, 0.5);
    auto scheduler = scheduled ? std::optional(accelerator.prepare(*schedule)) : std::nullopt;

    const auto zero = [&](const std::string& where) {
      for (auto& optimizer : steppers) optimizer.zero_grad(!d.chance(where + ".to_zero", 15));
    };
    const auto evaluate = [&](const std::string& where, int step) {
      if (!d.chance(where, 15)) return;
      const torch::NoGradGuard no_grad;
      const bool eval = d.chance(where + ".mode", 70);
      if (eval) model.eval();
      torch::manual_seed(77);
      accelerator.note(
          where, loss_of(model(batch_of(accelerator.process_index(), 50 + step, {4, kWidth}, 0))));
      if (eval) model.train();
    };

    const auto advance = [&] {
      if (scheduler) scheduler->step();
    };
    for (int step = 0; step < loop.steps; ++step) {
      const std::string at = concat("step", step);
      if (!d.chance(at, 100)) continue;
      between(at, loop, net, model, steppers);
      if (loop.zero == 1 && loop.accumulation == 1) zero(at);
      const int micros = loop.accumulation > 1 ? loop.accumulation : loop.by_hand ? 2 : 1;
      bool broken = false;
      for (int micro = 0; micro < micros && !broken; ++micro) {
        const std::string here = concat(at, ".", micro);
        using Window = decltype(accelerator.accumulate(model));
        std::unique_ptr<Window> window;
        if (loop.accumulation > 1) window.reset(new Window(accelerator.accumulate(model)));
        if (loop.by_hand && micro + 1 < micros)
          window.reset(new Window(accelerator.no_sync(model)));
        evaluate(here + ".evaluates", step);
        Tensor x = batch_of(accelerator.process_index(), step, {4, kWidth}, micro);
        Turn turn;
        turn.throws = loop.breaks_forward && d.chance(here + ".throws", 30);
        turn.detaches = loop.sometimes_detached && d.chance(here + ".detaches", 40);
        if (loop.skips) turn.skips = d.pick(at + ".skip", 6) - 1;
        Tensor y;
        if (turn.throws) {
          // The batch is tried, fails, and is tried again.
          const bool mine =
              once || !d.chance("ranks=one_throws", 10) || accelerator.process_index() == 0;
          try {
            if (mine) y = model(x, turn);
          } catch (const Thrown&) {
            // Once more.
          }
          turn.throws = false;
          torch::manual_seed(step);
        }
        if (differ) turn.skips = accelerator.process_index() - 1;
        const bool whole = !loop.methods || !d.chance(here + ".method", 30);
        const auto forward = [&](const Tensor& input) {
          if (whole) return model(input, turn);
          return model.template call<&NetImpl::features>(input, turn);
        };
        if (threads && d.chance(here + ".threads", 50)) {
          // Two threads at once, as in a server that learns; what they throw is not of the draws.
          Tensor left, right;
          std::thread thread([&] { left = forward(x); });
          right = forward(-x);
          thread.join();
          y = left + right;
        } else {
          y = forward(x);
        }
        if (other) y = (*other)(y.tanh());
        if (!once && d.chance(here + ".pair", 12)) y = y + model(-x, turn);
        if (loop.zero == 2 && loop.accumulation == 1 && micro == 0) zero(at);
        evaluate(here + ".evaluates_before_backward", step);
        Tensor loss = loss_of(y);
        if (!once && d.chance(here + ".penalty", 8) && !net->has(BlockImpl::recomputed) && !other) {
          const Tensor z =
              batch_of(accelerator.process_index(), step + 20, {4, kWidth}, 0).requires_grad_();
          const Tensor gradient =
              torch::autograd::grad({model(z, turn).sum()}, {z}, {}, true, true, true)[0];
          if (gradient.defined()) loss = loss + gradient.square().mean();
        }
        const bool breaks = loop.breaks_backward && d.chance(here + ".breaks", 40);
        if (breaks) {
          try {
            accelerator.backward(loss_of(Breaks::apply(y)) + loss);
          } catch (const Thrown&) {
            broken = true;
          }
          if (!broken) throw std::logic_error("the backward that throws did not throw");
          for (auto& optimizer : steppers) optimizer.zero_grad();
          break;
        }
        if (loop.counts)
          accelerator.backward(loss * 4, 4 + accelerator.process_index());
        else
          accelerator.backward(loss);
        if (loop.accumulation > 1) finish(at, model, steppers, zero, loop, advance);
      }
      if (broken || loop.accumulation > 1) continue;
      if (d.chance(at + ".second_backward", 8) && !loop.counts)
        accelerator.backward(
            loss_of(model(batch_of(accelerator.process_index(), step, {4, kWidth}, 9))));
      finish(at, model, steppers, zero, loop, advance);
    }
    accelerator.check();
  }

  void set_frozen(const Net& net, bool frozen) {
    const auto& block = net->blocks()[static_cast<std::size_t>(
        d.pick("frozen", static_cast<int>(net->blocks().size())))];
    for (auto& p : block->parameters()) p.set_requires_grad(!frozen);
  }

  template <class Model, class Steppers>
  void between(const std::string& at, const Loop& loop, const Net& net, Model& model,
               Steppers& steppers) {
    if (loop.frozen && d.chance(at + ".toggles", 35))
      set_frozen(net, net->blocks()[static_cast<std::size_t>(
                                        d.pick("frozen", static_cast<int>(net->blocks().size())))]
                          ->parameters()[0]
                          .requires_grad());
    if (!scheduled && d.chance(at + ".rate", 12))
      steppers[0].set_learning_rates(
          std::vector<double>(steppers[0].learning_rates().size(), 0.004));
    if (d.chance(at + ".writes", 12)) {
      const torch::NoGradGuard no_grad;
      net->head->weight.mul_(0.9);
      net->head->weight[1].zero_();
      net->blocks()[0]->a->bias.clamp_(-0.2, 0.2);
    }
    if (d.chance(at + ".summons", 10)) {
      const torch::NoGradGuard no_grad;
      const bool back = d.chance(at + ".writes_back", 50);
      const auto whole = model.summon_full_params(back);
      accelerator.note("norm of the head", net->head->weight.norm());
      if (back) net->head->bias.add_(0.01);
    }
    if (d.chance(at + ".reloads", 6)) {
      auto state = model.state_dict();
      model.load_state_dict(state);
    }
    if (d.chance(at + ".looks", 8))
      accelerator.note("a look at a weight", net->head->weight.detach().sum());
    // A checkpoint has the buffers of process 0.
    const bool own_buffers = accelerator.num_processes() > 1 && net->has(BlockImpl::running);
    if (!scheduled && !own_buffers && !net->has(BlockImpl::complex) && d.chance(at + ".saves", 8)) {
      accelerator.save_state(folder);
      saved = true;
    } else if (saved && d.chance(at + ".loads", 40)) {
      accelerator.load_state(folder);
    }
  }

  template <class Model, class Steppers, class Zero>
  void finish(const std::string& at, Model& model, Steppers& steppers, const Zero& zero,
              const Loop& loop, const std::function<void()>& schedule) {
    if (accelerator.sync_gradients()) {
      if (d.chance(at + ".clips", 25))
        accelerator.note("norm", accelerator.clip_grad_norm_(
                                     model, 0.05, d.chance(at + ".inf", 20) ? INFINITY : 2.0));
      else if (!has_complex && d.chance(at + ".clips_values", 8))
        accelerator.clip_grad_value_(model, 0.01);
    }
    for (std::size_t i = 0; i < steppers.size(); ++i) {
      if (steppers.size() > 1 && d.chance(concat(at, ".rests", i), 25)) continue;
      steppers[i].step();
      if (loop.zero == 3) steppers[i].zero_grad();
    }
    schedule();
    if (loop.zero == 0 || loop.accumulation > 1) zero(at);
  }
};

std::string one_line(std::string text) {
  for (char& c : text) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  return text;
}

struct Settings {
  std::vector<std::uint64_t> seeds;
  std::set<std::string> without;
  bool list = false;
};

void say(const std::string& line) { std::cout << line << std::endl; }

// "" for well. Prints, on rank 0, how the seed went; ends the process when that is not well.
void run_seed(std::uint64_t seed, const Settings& settings) {
  const auto& world = accelerate::testing::world();
  const bool first = world.rank() == 0;
  if (first) say(concat("begin ", seed));
  const Draws draws(seed, settings.without);
  const AcceleratorOptions options = options_of(draws, world.size());
  const auto folder = programs::temporary_folder(concat("fuzz", seed));

  std::string outcome;
  std::vector<std::string> wrong;
  programs::Plain plain(options, world);
  try {
    torch::manual_seed(1);
    Program<programs::Plain>{plain, draws, folder}.run();
  } catch (const std::exception& error) {
    outcome = concat("failed the plain program raises ", programs::name_of_type(typeid(error)),
                     ": ", error.what());
  }
  if (outcome.empty()) {
    try {
      programs::Sharded accelerator(options);
      torch::manual_seed(1);
      Program<programs::Sharded>{accelerator, draws, folder}.run();
      for (const std::string& one : accelerator.values().differences(plain.values(), 1e-9))
        wrong.push_back(one);
      accelerator.free_memory();
    } catch (const accelerate::Error& error) {
      outcome = concat("refused ", programs::name_of_type(typeid(error)), ": ",
                       accelerate::describe(error));
    } catch (const std::exception& error) {
      outcome = concat("failed it raised ", programs::name_of_type(typeid(error)),
                       ", which is none of ours: ", error.what());
    }
  }
  if (!wrong.empty()) outcome = concat("failed wrong: ", accelerate::text::join(wrong, "; "));
  if (settings.list && first) {
    std::string names;
    for (const std::string& name : draws.taken()) names += (names.empty() ? "" : ",") + name;
    say("features " + names);
  }
  if (settings.list && first) say(concat("strategy ", accelerate::to_string(*options.strategy())));
  const auto all = programs::tell_all(one_line(outcome));
  std::string verdict = "ok";
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    // A rank that has ended tells those that wait for it in vain.
    if (!all[rank])
      verdict = concat("failed rank ", rank, " has not ended; rank ", world.rank(), ": ",
                       outcome.empty() ? "ok" : one_line(outcome));
  }
  if (verdict == "ok") {
    std::size_t refused = 0, failed = 0;
    for (const auto& one : all) {
      refused += one->starts_with("refused");
      failed += one->starts_with("failed");
    }
    for (std::size_t rank = 0; rank < all.size() && verdict == "ok"; ++rank) {
      if (failed > 0 ? all[rank]->starts_with("failed") : !all[rank]->empty())
        verdict = failed > 0 || refused == all.size()
                      ? *all[rank]
                      : concat("failed only some ranks raise: rank ", rank, " ", *all[rank]);
    }
  }
  if (verdict == "ok") {
    if (first) say(concat("ok ", seed));
    return;
  }
  const auto space = verdict.find(' ');
  say(concat(verdict.substr(0, space), " ", seed, verdict.substr(space)));
  std::_Exit(4);
}

}  // namespace
}  // namespace fuzz

int main(int argc, char** argv) {
  fuzz::Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--list") {
      settings.list = true;
      continue;
    }
    if (i + 1 == argc) break;
    std::stringstream values(argv[++i]);
    for (std::string value; std::getline(values, value, ',');) {
      if (name == "--seeds") settings.seeds.push_back(std::stoull(value));
      if (name == "--without") settings.without.insert(value);
    }
  }
  if (settings.seeds.empty()) {
    std::cerr << "usage: program_fuzz --seeds 1,5,9 [--without NAME,...] [--list]\n";
    return 2;
  }
  the_accelerator.emplace();
  for (const std::uint64_t seed : settings.seeds) {
    if (fuzz::ranks_of(seed) != the_accelerator->num_processes()) {
      std::cerr << "Seed " << seed << " wants " << fuzz::ranks_of(seed) << " processes.\n";
      return 2;
    }
    fuzz::run_seed(seed, settings);
  }
  the_accelerator.reset();
  accelerate::State::shutdown();
  return 0;
}
