#pragma once

#include <accelerate/base/json.hpp>
#include <accelerate/comm/group.hpp>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace accelerate {

/// Settings of the gradient scaler (the original's GradScalerKwargs).
class GradScalerOptions {
  /// The first scale. Default: 65536.
  TORCH_ARG(double, init_scale) = 65536.0;
  /// The scale is multiplied by this after `growth_interval` good steps in a row. Above 1.
  /// Default: 2.
  TORCH_ARG(double, growth_factor) = 2.0;
  /// The scale is multiplied by this after a step whose gradients had an inf or a NaN. In (0, 1).
  /// Default: 0.5.
  TORCH_ARG(double, backoff_factor) = 0.5;
  /// Good steps in a row before the scale grows. Default: 2000.
  TORCH_ARG(std::int64_t, growth_interval) = 2000;
  /// Overflows it takes for the scale to back off, as in DeepSpeed: those before the last only skip
  /// their step, and when the scale has grown it takes as many again. At least 1. Default: 1.
  TORCH_ARG(std::int64_t, hysteresis) = 1;
  /// Every good step, and not only growth, brings the hysteresis back. Default: false.
  TORCH_ARG(bool, consecutive_hysteresis) = false;
  /// Backing off does not go below. Default: 0.
  TORCH_ARG(double, min_scale) = 0.0;
  /// Off: `scale` gives back what it gets, nothing is unscaled, no step is skipped. Default: true.
  TORCH_ARG(bool, enabled) = true;
  /// Unscales fp16 gradients too, as parameters kept in fp16 (sharded ones) have. Otherwise they
  /// are an error, since unscaling makes them underflow. Default: false.
  TORCH_ARG(bool, allow_fp16_gradients) = false;
};

/// Scales losses so that fp16 gradients do not underflow, and skips steps whose gradients
/// overflowed; the algorithm of torch.amp.GradScaler, on any device. All ranks of `group` agree on
/// whether a gradient overflowed, so that they step or skip together and keep equal scales.
///
/// An optimizer is known by a key, any address that stays the same (`PreparedOptimizer` uses that
/// of its core). Between two updates it goes from ready, by `unscale_`, to unscaled, by
/// `step`, to stepped.
class GradScaler {
 public:
  /// Throws ConfigError for factors and intervals out of range.
  explicit GradScaler(const GradScalerOptions& options = {}, comm::Group group = {});

  bool enabled() const noexcept { return options_.enabled(); }

  /// `loss` times the scale, on the device of `loss`. Applies an update that was left for later.
  /// Throws PrecisionError when an optimizer has unscaled gradients that it has not stepped with,
  /// to which the backward pass would add scaled ones.
  at::Tensor scale(const at::Tensor& loss);

  /// Divides the gradients of `parameters` by the scale, in place, and notes whether any of them,
  /// on any rank, has an inf or a NaN. Parameters without gradient are passed over. Collective over
  /// the group. Throws PrecisionError when this optimizer was unscaled or stepped since the last
  /// update, when nothing was scaled before, and for fp16 gradients unless they are allowed.
  void unscale_(const void* optimizer, const std::vector<at::Tensor>& parameters);
  /// Notes that the optimizer's gradients were cleared: they may be unscaled anew, unless it has
  /// stepped.
  void forget(const void* optimizer);
  /// True when `unscale_` was called for this optimizer since the last update.
  bool unscaled(const void* optimizer) const;
  /// 0-dim fp32 tensor on the gradients' device: above zero when `unscale_` found an inf or a NaN.
  /// Reading it waits for the device.
  at::Tensor found_inf(const void* optimizer) const;

  /// Notes that the optimizer has stepped or skipped. Throws PrecisionError when it was not
  /// unscaled, or has already stepped since the last update.
  void mark_stepped(const void* optimizer);
  /// Runs `step` unless a gradient overflowed, unscaling first if nobody has. Returns whether it
  /// ran.
  bool step(const void* optimizer, const std::vector<at::Tensor>& parameters,
            const std::function<void()>& step);

  /// Adapts the scale: backs off when a gradient of any optimizer overflowed since the last update,
  /// and grows after `growth_interval` updates without. Throws PrecisionError when no optimizer was
  /// unscaled.
  void update();
  /// Sets the scale.
  void update(double new_scale);
  /// Has `update` run before the scale is next used or read. So several optimizers can step after
  /// one backward: all are unscaled by the scale it was scaled with, and the scale adapts once.
  void update_later();

  /// The scale; 1 when not enabled. Waits for the device.
  double get_scale();
  /// Good steps in a row since the scale last changed. Waits for the device.
  std::int64_t growth_tracker();

  /// {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}, as in
  /// Python, and "_hysteresis_left" if there is hysteresis; empty when not enabled.
  Json state_dict();
  /// Does nothing when not enabled. Throws CheckpointError when `state` lacks an entry.
  void load_state_dict(const Json& state);
  /// Throws what `load_state_dict` would throw, and changes nothing.
  void check_state_dict(const Json& state) const;

 private:
  struct Loaded {
    GradScalerOptions options;
    std::int64_t tracker = 0, hysteresis = 1;
  };
  Loaded read_state(const Json& state) const;
  enum class Stage { ready, unscaled, stepped };
  struct OptimizerState {
    Stage stage = Stage::ready;
    bool has_gradients = false;
    at::Tensor found_inf;
  };
  void start(const at::Device& device);
  void apply_pending_update();

  GradScalerOptions options_;
  comm::Group group_;
  double start_scale_;
  std::int64_t start_tracker_ = 0;
  std::int64_t start_hysteresis_;
  // All live on the device of the first loss; undefined until then.
  at::Tensor scale_;
  at::Tensor growth_tracker_;
  at::Tensor hysteresis_left_;
  std::map<const void*, OptimizerState> optimizers_;
  bool update_pending_ = false;
};

}  // namespace accelerate
