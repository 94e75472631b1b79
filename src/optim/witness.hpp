#pragma once

#include <memory>
#include <optional>

namespace torch::optim {
class Optimizer;
}

namespace accelerate {

/// Expires when `optimizer` is destroyed, wherever it has been moved to. The same for every call.
/// Nothing for an optimizer whose class of options is not known here.
std::optional<std::weak_ptr<const void>> witness_of(torch::optim::Optimizer& optimizer);
/// The same where `witness_of` has been called for it before, else nothing.
std::optional<std::weak_ptr<const void>> known_witness_of(const torch::optim::Optimizer& optimizer);

}  // namespace accelerate
