// What interception costs: the same operator on the same memory, tagged and plain, in turns. Prints
// a line of JSON for each: the first for an operator on plain tensors before and after the
// interceptor was installed, the others for operators on tagged ones, and on ones with an operator
// policy.

#include <accelerate/intercept/operator_policy.hpp>
#include <intercept/engine.hpp>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

namespace {

using namespace accelerate;

struct Memory final : intercept::Residency {
  at::Tensor flat;
  at::Tensor start_bring(const intercept::Unit&, at::Tensor) override { return flat.clone(); }
  void finish_bring(const intercept::Unit&, const at::Tensor&) override {}
  void write_back(const intercept::Unit&, const intercept::UnitParameter&,
                  const intercept::Written&, const at::Tensor&) override {}
  at::Tensor bring_full(const intercept::Unit&) override { return flat.clone(); }
  void write_back_full(const intercept::Unit&, const at::Tensor&) override {}
};

struct PassesOn final : intercept::OperatorPolicy {
  explicit PassesOn(std::string name) : name(std::move(name)) {}
  std::string name;
  std::vector<std::string> operators() const override { return {name}; }
  at::Tensor apply(intercept::OperatorCall& call) override { return call.proceed(); }
};

double nanoseconds(const std::function<void()>& call, int count) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < count; ++i) call();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin)
             .count() /
         count;
}

// The least of several rounds: what disturbs a round only ever adds to it.
std::pair<double, double> compare(const std::function<void()>& one,
                                  const std::function<void()>& other) {
  std::pair<double, double> least{1e9, 1e9};
  for (int round = 0; round < 15; ++round) {
    least.first = std::min(least.first, nanoseconds(one, 20000));
    least.second = std::min(least.second, nanoseconds(other, 20000));
  }
  return least;
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::randn({8, 8});
  const at::Tensor plain = at::randn({8, 8});
  const at::Tensor plain_bias = at::randn({8});
  const at::Tensor ids = at::tensor({1, 5, 3});

  const auto [before, unused] = compare([&] { at::mm(x, plain); }, [] {});
  const at::Tensor weight = plain.clone();
  const at::Tensor bias = plain_bias.clone();
  Memory memory;
  intercept::Engine engine(
      {{"unit", {{"weight", weight}, {"bias", bias}}}}, {}, memory,
      [&](const intercept::Unit&, at::Tensor flat) { memory.flat = std::move(flat); });
  const auto [after, again] = compare([&] { at::mm(x, plain); }, [] {});

  struct Row {
    const char* name;
    std::function<void()> plain, tagged;
  };
  const Row rows[] = {
      {"mm", [&] { at::mm(x, plain); }, [&] { at::mm(x, weight); }},
      {"addmm, view (nn::Linear)", [&] { at::addmm(plain_bias, x, plain.t()); },
       [&] { at::addmm(bias, x, weight.t()); }},
      {"linear", [&] { at::linear(x, plain, plain_bias); }, [&] { at::linear(x, weight, bias); }},
      {"layer_norm", [&] { at::layer_norm(x, {8}, plain_bias, plain_bias); },
       [&] { at::layer_norm(x, {8}, bias, bias); }},
      {"embedding", [&] { at::embedding(plain, ids); }, [&] { at::embedding(weight, ids); }},
      {"t (view)", [&] { plain.t(); }, [&] { weight.t(); }},
      {"sub (boxed)", [&] { at::sub(x, plain); }, [&] { at::sub(x, weight); }},
      {"maximum (boxed)", [&] { at::maximum(x, plain); }, [&] { at::maximum(x, weight); }},
  };
  const auto print = [](const char* name, bool tagged, double without, double with) {
    std::printf(
        "{\"operator\": \"%s\", \"tagged\": %s, \"plain_ns\": %.0f, \"with_ns\": %.0f, "
        "\"extra_ns\": %.0f}\n",
        name, tagged ? "true" : "false", without, with, with - without);
  };
  print("mm", false, before, after);
  for (const Row& row : rows) {
    const auto [without, with] = compare(row.plain, row.tagged);
    print(row.name, true, without, with);
  }
  const at::Tensor other = plain.clone();
  const at::Tensor replaced = plain.clone();
  const auto first = intercept::attach(other, std::make_shared<PassesOn>("aten::embedding"));
  const auto second = intercept::attach(replaced, std::make_shared<PassesOn>("aten::mm"));
  const Row with_policies[] = {
      {"mm, while others have policies", [&] { at::mm(x, plain); }, [&] { at::mm(x, weight); }},
      {"mm, which its policy does not name", [&] { at::mm(x, weight); }, [&] { at::mm(x, other); }},
      {"mm, which its policy replaces by the same", [&] { at::mm(x, weight); },
       [&] { at::mm(x, replaced); }},
      {"t (view) with a policy", [&] { plain.t(); }, [&] { replaced.t(); }},
  };
  for (const Row& row : with_policies) {
    const auto [without, with] = compare(row.plain, row.tagged);
    print(row.name, true, without, with);
  }
  engine.restore();
  return 0;
}
