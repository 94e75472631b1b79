#pragma once

#include <accelerate/intercept/engine.hpp>

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
                  const at::Tensor& contents) override {
    Unit::over(flats[unit.index()], parameter).copy_(Unit::over(contents, parameter));
  }
  at::Tensor bring_full(const Unit& unit) override { return flats[unit.index()].clone(); }
  void write_back_full(const Unit& unit, const at::Tensor& full) override {
    flats[unit.index()].copy_(full);
  }

 private:
  std::minstd_rand random_{1};
};
