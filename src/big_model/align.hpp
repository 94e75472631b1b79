#pragma once

#include <accelerate/core/module.hpp>
#include <intercept/key.hpp>

#include <unordered_map>
#include <vector>

namespace accelerate::big_model {

/// For modules over several devices: an operator runs where its weight is, and its other arguments
/// are sent there; one without a weight whose arguments are on several devices runs where the last
/// weight was.
class AlignDevices final : public intercept::RegionPolicy {
 public:
  /// `weights` are on the devices where they are computed with, or tagged for one.
  explicit AlignDevices(const std::vector<NamedTensor>& weights);
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet below,
            std::vector<c10::IValue>& stack) override;

 private:
  bool is_weight(const at::Tensor& tensor) const;

  std::unordered_map<const void*, bool> storages_;
  static thread_local at::Device last_;
};

}  // namespace accelerate::big_model
