#pragma once

#include <accelerate/intercept/engine.hpp>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace accelerate::intercept {

/// A unit's gradients as one flat buffer, laid out for one reduce-scatter: for each part, the
/// unit's elements of that part, then one number for each of its parameters, 1 where this process
/// has a gradient for it and 0 where not. So whoever receives a part also learns which parameters
/// no process used, at no further communication.
struct UnitGradients {
  at::Tensor flat;
  /// By parameter: this process has a gradient for it.
  std::vector<bool> used;

  /// Elements of one part, the numbers at its end included.
  static std::int64_t part(const Unit& unit) {
    return unit.layout().part + static_cast<std::int64_t>(unit.parameters().size());
  }
};

/// What becomes of gradients. Called with the interceptor passed by, without gradient mode, on the
/// threads of the backward pass, one call at a time.
class GradientSink {
 public:
  virtual ~GradientSink() = default;
  /// One unit's gradients of this backward (and of those before it that did not reduce) are
  /// complete. Units come in the reverse of the order in which the forward used them, whatever
  /// order their gradients come in: the same on every rank.
  virtual void reduce(const Unit& unit, UnitGradients gradients) = 0;
  /// The backward pass is over; if it `reduced`, all units were given to `reduce`.
  virtual void finish(bool reduced) = 0;
};

/// Collects the gradients of units during backward. Parameters' own `.grad` stay undefined: each is
/// moved into its unit's buffer as soon as it is whole.
class Gradients {
 public:
  /// `dtype` is what gradients are collected and reduced in; the parameters' own unless set.
  Gradients(Engine& engine, GradientSink& sink, std::optional<at::ScalarType> dtype);
  /// Takes its hooks out, and puts back those that were there.
  ~Gradients();
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  /// Whether the next backward gives its gradients to the sink, or keeps them for a later one.
  void set_reduce(bool reduce);
  /// Gradients were kept that no backward has given to the sink yet.
  bool keeps_gradients() const;
  /// Forgets gradients that were kept, and the remains of a backward that failed.
  void clear();

 private:
  struct Hook;
  struct Collected {
    UnitGradients gradients;
    std::vector<bool> expected;  // by this backward: its graph reaches the parameter
    std::vector<bool> arrived;   // in this backward
  };

  void receive(std::size_t unit, std::size_t parameter);
  void begin_backward(int task);
  void end_backward(int task);
  void open(std::size_t unit);
  bool complete(std::size_t unit) const;
  void give(std::size_t unit);

  mutable std::mutex mutex_;
  Engine& engine_;
  GradientSink& sink_;
  std::optional<at::ScalarType> dtype_;
  std::vector<Collected> collected_;
  std::vector<int> order_;      // of reduction, in this backward
  std::size_t next_given_ = 0;  // in order_
  int task_ = -1;               // the backward that is under way
  bool reduce_ = true;
};

}  // namespace accelerate::intercept
