#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/optim/named.hpp>

#include <torch/optim/adam.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <set>
#include <tuple>
#include <utility>

namespace accelerate::optim {
namespace {

using torch::optim::OptimizerParamGroup;

/// The settings of one type. Every one is asked for; `finish` refuses those that were not.
class Settings {
 public:
  Settings(std::string type, const Json& params) : type_(std::move(type)), params_(params) {
    if (!params_.is_object())
      throw ConfigError("The settings of " + type_ + " should be a JSON object.");
  }

  template <class T>
  T get(const char* key, T otherwise) {
    known_.insert(key);
    const auto found = params_.find(key);
    if (found == params_.end() || found->is_null()) return otherwise;
    bool fits = true;
    if constexpr (std::is_same_v<T, bool>) {
      fits = found->is_boolean();
    } else if constexpr (std::is_same_v<T, double>) {
      fits = found->is_number();
    } else if constexpr (std::is_same_v<T, std::int64_t>) {
      fits = found->is_number() && found->get<double>() == std::floor(found->get<double>());
    } else if constexpr (std::is_same_v<T, std::string>) {
      fits = found->is_string();
    } else {
      fits = found->is_array() && std::all_of(found->begin(), found->end(),
                                              [](const Json& item) { return item.is_number(); });
    }
    if (!fits) refuse(key, found->dump());
    return found->get<T>();
  }

  /// One number for all groups, or one for each.
  std::vector<double> each(const char* key, std::vector<double> otherwise) {
    known_.insert(key);
    const auto found = params_.find(key);
    if (found == params_.end() || found->is_null()) return otherwise;
    if (!found->is_array()) return std::vector<double>(otherwise.size(), get<double>(key, 0.0));
    auto values = get<std::vector<double>>(key, {});
    if (values.size() != otherwise.size()) refuse(key, found->dump());
    return values;
  }

  [[noreturn]] void refuse(const std::string& key, const std::string& value) const {
    throw ConfigError(text::concat(type_, " was given \"", key, "\": ", value,
                                   ", which is not of the right kind or out of its range."));
  }

  void finish() const {
    for (const auto& [key, value] : params_.items()) {
      if (known_.count(key) == 0) {
        throw ConfigError(text::concat(type_, " was given \"", key,
                                       "\", which is not supported. It takes ", text::join(known_),
                                       "."));
      }
    }
  }

 private:
  std::string type_;
  const Json& params_;
  std::set<std::string> known_;
};

std::tuple<double, double> pair_of(Settings& settings, const char* key) {
  const auto values = settings.get<std::vector<double>>(key, {0.9, 0.999});
  if (values.size() != 2) settings.refuse(key, text::concat("[", text::join(values), "]"));
  return {values[0], values[1]};
}

/// Up from a first to a last rate, then as its kind has it.
class Warmup final : public Scheduler {
 public:
  enum class After { stay, linear, cosine };
  struct Shape {
    After after = After::stay;
    bool logarithmic = true;
    std::int64_t warmup_steps = 1000, total_steps = 0;
    double cosine_floor = 0.0;
    std::vector<double> low, high;
  };

  Warmup(torch::optim::Optimizer& optimizer, Shape shape)
      : Scheduler(optimizer), shape_(std::move(shape)) {
    apply();
  }

 protected:
  double rate(std::size_t group, std::int64_t step) const override {
    // DeepSpeed counts from -1, at which the rate is that of 0.
    const double done = static_cast<double>(std::max<std::int64_t>(0, step - 1));
    const auto warmup = static_cast<double>(shape_.warmup_steps);
    const auto total = static_cast<double>(shape_.total_steps);
    const double low = shape_.low[group], high = shape_.high[group];
    if (shape_.after == After::cosine && step == 0) return 0.0;
    if (done < warmup) {
      const double part =
          shape_.logarithmic ? std::log(done + 1.0) / std::log(warmup) : done / warmup;
      return low + (high - low) * part;
    }
    switch (shape_.after) {
      case After::stay:
        return high;
      case After::linear:
        return low + (high - low) * std::max(0.0, (total - done) / std::max(1.0, total - warmup));
      case After::cosine: {
        const double part = std::min(1.0, (done - warmup + 1.0) / std::max(1.0, total - warmup));
        const double wave = (1.0 + std::cos(std::numbers::pi * part)) / 2.0;
        return high * std::max(0.0, shape_.cosine_floor + (1.0 - shape_.cosine_floor) * wave);
      }
    }
    return high;
  }

 private:
  Shape shape_;
};

}  // namespace

std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const std::string& type, const Json& params, const std::vector<OptimizerParamGroup>& groups,
    const std::optional<OffloadOptions>& offload) {
  const std::string name = text::to_lower(type);
  Settings settings(type, params);
  const auto in_place_only = [&] {
    if (offload) {
      throw UnsupportedError("The state of " + type +
                             " cannot be offloaded. Use AdamW, or leave offload_optimizer out.");
    }
  };
  const double lr = settings.get<double>("lr", 1e-3);
  const double weight_decay = settings.get<double>("weight_decay", 0.0);
  if (name == "adam" || name == "adamw") {
    const auto betas = pair_of(settings, "betas");
    const double eps = settings.get<double>("eps", 1e-8);
    if (!settings.get<bool>("bias_correction", true)) settings.refuse("bias_correction", "false");
    const bool of_torch = settings.get<bool>("torch_adam", false);
    const bool decoupled = settings.get<bool>("adam_w_mode", !of_torch) || name == "adamw";
    const bool amsgrad = settings.get<bool>("amsgrad", false);
    settings.finish();
    if (decoupled || weight_decay == 0.0) {
      const auto options =
          FusedAdamWOptions(lr).betas(betas).eps(eps).weight_decay(weight_decay).amsgrad(amsgrad);
      if (offload) return std::make_unique<OffloadedAdamW>(groups, options, *offload);
      return std::make_unique<FusedAdamW>(groups, options);
    }
    in_place_only();
    return std::make_unique<torch::optim::Adam>(groups, torch::optim::AdamOptions(lr)
                                                            .betas(betas)
                                                            .eps(eps)
                                                            .weight_decay(weight_decay)
                                                            .amsgrad(amsgrad));
  }
  if (name == "sgd") {
    const auto options = FusedSGDOptions(lr)
                             .momentum(settings.get<double>("momentum", 0.0))
                             .dampening(settings.get<double>("dampening", 0.0))
                             .weight_decay(weight_decay)
                             .nesterov(settings.get<bool>("nesterov", false));
    settings.finish();
    in_place_only();
    return std::make_unique<FusedSGD>(groups, options);
  }
  throw ConfigError("There is no optimizer \"" + type +
                    "\" here by name. Adam, AdamW and SGD are; make another in the program.");
}

std::unique_ptr<Scheduler> make_schedule(const std::string& type, const Json& params,
                                         torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  Settings settings(type, params);
  Warmup::Shape shape;
  if (type == "WarmupLR" || type == "WarmupDecayLR") {
    shape.after = type == "WarmupLR" ? Warmup::After::stay : Warmup::After::linear;
    shape.low = settings.each("warmup_min_lr", std::vector<double>(rates.size(), 0.0));
    // DeepSpeed's defaults: the groups' own rates, or 0.001 where it decays.
    shape.high = settings.each("warmup_max_lr", shape.after == Warmup::After::stay
                                                    ? rates
                                                    : std::vector<double>(rates.size(), 1e-3));
  } else if (type == "WarmupCosineLR") {
    shape.after = Warmup::After::cosine;
    shape.high = rates;
    shape.cosine_floor = settings.get<double>("cos_min_ratio", 1e-4);
    const double ratio = settings.get<double>("warmup_min_ratio", 0.0);
    for (const double rate : rates) shape.low.push_back(rate * ratio);
  } else {
    throw ConfigError("There is no schedule \"" + type +
                      "\" here by name. WarmupLR, WarmupDecayLR and WarmupCosineLR are; make "
                      "another in the program.");
  }
  const auto warmup = settings.get<std::int64_t>("warmup_num_steps", 1000);
  if (warmup < 1) settings.refuse("warmup_num_steps", std::to_string(warmup));
  shape.warmup_steps = std::max<std::int64_t>(2, warmup);  // as there: its logarithm divides
  if (shape.after != Warmup::After::stay) {
    shape.total_steps = settings.get<std::int64_t>("total_num_steps", 0);
    if (shape.total_steps < 1)
      settings.refuse("total_num_steps", std::to_string(shape.total_steps));
  }
  const auto kind = settings.get<std::string>("warmup_type", "log");
  if (kind != "log" && kind != "linear") settings.refuse("warmup_type", kind);
  shape.logarithmic = kind == "log";
  const auto done = settings.get<std::int64_t>("last_batch_iteration", -1);
  if (done != -1) settings.refuse("last_batch_iteration", std::to_string(done));
  settings.finish();
  return std::make_unique<Warmup>(optimizer, std::move(shape));
}

}  // namespace accelerate::optim
