#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>

namespace torch::optim {
class Optimizer;
}

namespace accelerate {

/// Tells whether an optimizer stepped between two looks at it, by one parameter that has a
/// gradient: by the optimizer's state for it, or where there is none by its values. A few elements
/// on the host are read, nothing on other devices.
class OwnStep {
 public:
  /// The first look.
  void note(torch::optim::Optimizer& optimizer);
  /// The second look. False unless there was a first one since.
  bool happened(torch::optim::Optimizer& optimizer);

 private:
  struct Sample {
    int count = 0;
    std::array<double, 4> values{};
    bool operator==(const Sample&) const = default;
  };
  /// Of a parameter's state: what a step changes and nothing else does.
  struct Progress {
    std::int64_t steps = 0;
    std::uint32_t version = 0;
    Sample buffer;
    bool operator==(const Progress&) const = default;
  };
  static Sample sample(const at::Tensor& tensor);
  static std::optional<Progress> progress(torch::optim::Optimizer& optimizer,
                                          const at::Tensor& parameter);

  at::Tensor parameter_;
  std::optional<Progress> progress_;
  Sample values_, gradient_;
  double rate_ = 0, decay_ = 0;
};

}  // namespace accelerate
