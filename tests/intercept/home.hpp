#pragma once

#include <intercept/engine.hpp>
#include <intercept/gradients.hpp>

#include <ATen/ops/empty.h>

#include <chrono>
#include <map>
#include <random>
#include <thread>

/// One process plays all ranks: the parameters of an absent unit lie whole in a home copy.
class Home : public accelerate::intercept::Residency {
 public:
  using Unit = accelerate::intercept::Unit;
  using UnitParameter = accelerate::intercept::UnitParameter;

  std::map<int, at::Tensor> flats;
  int delay_up_to_microseconds = 0;
  int fail_at = -1;  ///< the unit whose arrival fails, once

  void adopt(const Unit& unit, at::Tensor flat) { flats[unit.index()] = std::move(flat); }

  at::Tensor start_bring(const Unit& unit, at::Tensor reuse) override {
    return reuse.defined()
               ? reuse
               : at::empty({unit.layout().total()}, at::TensorOptions(unit.compute_dtype()));
  }
  void finish_bring(const Unit& unit, const at::Tensor& contents) override {
    if (unit.index() == fail_at) {
      fail_at = -1;
      throw std::runtime_error("the home of '" + unit.name() + "' burned down");
    }
    if (delay_up_to_microseconds > 0) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(random_() % static_cast<unsigned>(delay_up_to_microseconds)));
    }
    contents.copy_(flats[unit.index()]);
  }
  void write_back(const Unit& unit, const UnitParameter& parameter,
                  const accelerate::intercept::Written&, const at::Tensor& contents) override {
    Unit::over(flats[unit.index()], parameter).copy_(Unit::over(contents, parameter));
  }
  at::Tensor bring_full(const Unit& unit) override { return flats[unit.index()].clone(); }
  void write_back_full(const Unit& unit, const at::Tensor& full) override {
    flats[unit.index()].copy_(full);
  }

 private:
  std::minstd_rand random_{1};
};

/// Optimizer leaves over the home copy, and the gradients that belong to them.
class Leaves : public accelerate::intercept::GradientSink {
 public:
  using Unit = accelerate::intercept::Unit;
  using UnitGradients = accelerate::intercept::UnitGradients;

  Leaves(const accelerate::intercept::Engine& engine, Home& home) {
    for (const auto& unit : engine.units()) {
      for (const auto& parameter : unit->parameters()) {
        leaves[unit->index()].push_back(
            Unit::over(home.flats[unit->index()], parameter)
                .detach()
                .set_requires_grad(parameter.parameter.requires_grad()));
      }
    }
  }
  std::vector<at::Tensor> all() const {
    std::vector<at::Tensor> flat;
    for (const auto& [unit, tensors] : leaves)
      flat.insert(flat.end(), tensors.begin(), tensors.end());
    return flat;
  }
  void reduce(const Unit& unit, UnitGradients gradients) override {
    order.push_back(unit.index());
    const auto parts = gradients.flat.view({unit.layout().parts, UnitGradients::part(unit)});
    const at::Tensor flat = parts.slice(1, 0, unit.layout().part).reshape({-1});
    for (std::size_t p = 0; p < unit.parameters().size(); ++p) {
      at::Tensor& leaf = leaves[unit.index()][p];
      const double flag =
          parts[0][unit.layout().part + static_cast<std::int64_t>(p)].item<double>();
      if (flag == 0) continue;
      const at::Tensor gradient = Unit::over(flat, unit.parameters()[p]).to(leaf.scalar_type());
      leaf.mutable_grad() = leaf.grad().defined() ? leaf.grad().add(gradient) : gradient.clone();
    }
  }
  void finish(bool reduced) override { finished += reduced; }

  std::map<int, std::vector<at::Tensor>> leaves;
  std::vector<int> order;
  int finished = 0;
};
