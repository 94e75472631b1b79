#pragma once

#include <intercept/engine.hpp>

#include <memory>
#include <mutex>
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
  /// order their gradients come in: the same on every rank. A unit comes a second time where
  /// several backwards that belong together reached it; both are to be added.
  virtual void reduce(const Unit& unit, UnitGradients gradients) = 0;
  /// The backward pass is over; if it `reduced`, all units were given to `reduce`.
  virtual void finish(bool reduced) = 0;
  /// The last backward failed: what `reduce` began is to be ended, and nothing more will come.
  virtual void abandon() {}
  /// A backward fails now; no other rank knows. Must not wait.
  virtual void failed() noexcept {}
  /// Whether a parameter has a gradient that `reduce` brought.
  virtual bool has_gradient(const Unit&, std::size_t /*parameter*/) const { return false; }
  /// The program has cleared a parameter's gradient through the parameter, as
  /// `module->zero_grad()` does.
  virtual void cleared(const Unit&, std::size_t /*parameter*/) {}
};

/// Parameters of an engine's units: by unit, by parameter.
using ParameterSet = std::vector<std::vector<bool>>;

/// Collects the gradients of units during backward: each is moved into its unit's buffer as soon as
/// it is whole. What is left in the parameter's own `.grad` stands for it: whoever resets that has
/// cleared the gradient, and an operator that uses it throws a StateError which names the right
/// call.
///
/// Backwards that overlap (one inside another, or on several threads), and those inside one
/// `begin`, are a session: units are given to the sink once for all of them, and the session ends
/// with the last. A backward that fails gives nothing more; the parameters that it was to reach are
/// `partial` until they are cleared.
class Gradients {
 public:
  Gradients(Engine& engine, GradientSink& sink);
  /// Takes its hooks out, and puts back those that were there.
  ~Gradients();
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  /// Whether the next backward gives its gradients to the sink, or keeps them for a later one.
  void set_reduce(bool reduce);
  /// What backwards run until `end` belongs together. Calls nest. `failed`: an exception ended it.
  /// Without them a backward ends when autograd says so.
  void begin();
  void end(bool failed);
  /// Ends what a backward that failed left open. May wait for the other ranks.
  void settle();

  /// Gradients of one of these were kept that no backward has given to the sink yet.
  bool keeps(const ParameterSet& parameters) const;
  /// One of these whose gradient is only a part, because a backward failed; null when there is
  /// none.
  const UnitParameter* partial(const ParameterSet& parameters) const;
  /// Forgets what was kept of these, and that they are partial.
  void clear(const ParameterSet& parameters);
  /// No parameter, to be filled in.
  ParameterSet none() const;
  /// Gives the sink what is kept for one unit, or zeros; for the units in the order of a reduction,
  /// outside of a backward.
  void give_kept(const Unit& unit);
  /// As `give_kept`, for every unit that is trained.
  void give_all_kept();

  /// A parameter has a gradient, or none any more: sees to what stands for it. Between passes.
  void stand_for(const Unit& unit, std::size_t parameter, bool there);
  /// Clears what the program has cleared through the parameters since.
  void notice_cleared();

 private:
  struct Hook;
  struct Link;
  struct Collected {
    UnitGradients gradients;
    std::vector<bool> partial;
    bool given = false;  // in this session
    std::vector<at::Tensor> stand_ins;
    std::vector<bool> standing;      // the parameter's .grad was last seen to be its stand-in
    std::vector<std::size_t> hooks;  // the places of those that run before accumulation
  };
  // A backward pass: one graph task of autograd.
  struct Task {
    int id = -1;
    ParameterSet expected;  // its graph reaches them
    ParameterSet awaited;   // of these, what has not come yet
  };

  void make_way(std::size_t unit, std::size_t parameter);
  void notice_cleared(std::size_t unit, std::size_t parameter);
  void receive(std::size_t unit, std::size_t parameter);
  void collect(std::size_t unit, std::size_t parameter);
  Task& present_task();
  void begin_session();
  void task_over(int id, bool failed);
  bool end_session_if_over();
  void note_failure() noexcept;
  void spoil(const ParameterSet& parameters);
  std::vector<int> reduction_order() const;
  void open(std::size_t unit);
  bool complete(std::size_t unit) const;
  void give(std::size_t unit);

  mutable std::mutex mutex_;
  Engine& engine_;
  GradientSink& sink_;
  std::shared_ptr<Link> link_;
  std::vector<Collected> collected_;
  std::vector<Task> tasks_;  // that are under way
  int scopes_ = 0;
  bool in_session_ = false;
  ParameterSet reached_;        // by any task of this session
  std::vector<int> order_;      // of reduction, in this session
  std::size_t next_given_ = 0;  // in order_
  // Gradients of a unit may come after it seemed complete: this session has several backwards, and
  // the last one had. Then units are given when all is over.
  bool several_ = false;
  bool had_several_ = false;
  bool failed_ = false;  // and `settle` has not been called since
  bool reduce_ = true;
};

}  // namespace accelerate::intercept
