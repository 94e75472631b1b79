#include <programs/plain.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>

namespace programs {

namespace {

// Each once, under the first of its names.
void add(std::vector<std::pair<std::string, at::Tensor>>& all, const std::string& name,
         const at::Tensor& tensor) {
  const auto same = [&](const auto& one) { return one.second.is_same(tensor); };
  if (std::none_of(all.begin(), all.end(), same)) all.emplace_back(name, tensor);
}

}  // namespace

PlainTensors tensors_of(const torch::nn::Module& module) {
  PlainTensors all;
  for (const auto& entry : module.named_parameters())
    add(all.parameters, entry.key(), entry.value());
  for (const auto& entry : module.named_buffers()) add(all.buffers, entry.key(), entry.value());
  return all;
}

PlainTensors tensors_of(const torch::jit::Module& module) {
  PlainTensors all;
  for (const auto& entry : module.named_parameters()) add(all.parameters, entry.name, entry.value);
  for (const auto& entry : module.named_buffers()) add(all.buffers, entry.name, entry.value);
  return all;
}

PlainAutocast::PlainAutocast(accelerate::MixedPrecision precision)
    : on_(precision != accelerate::MixedPrecision::no) {
  if (!on_) return;
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(
      at::kCPU, precision == accelerate::MixedPrecision::bf16 ? at::kBFloat16 : at::kHalf);
}

PlainAutocast::~PlainAutocast() {
  if (!on_) return;
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
}

Plain::Plain(const accelerate::AcceleratorOptions& options, accelerate::comm::Group world)
    : options_(options),
      world_(std::move(world)),
      precision_(options.mixed_precision().value_or(accelerate::MixedPrecision::no)),
      steps_(options.gradient_accumulation_steps().value_or(1)) {}

void Plain::backward(const at::Tensor& loss) { run_backward(loss / steps_); }

void Plain::backward(const at::Tensor& loss_sum, double count) {
  if (fresh_window_) count_ = 0;
  counted_ = true;
  count_ += count;
  run_backward(loss_sum);
}

void Plain::run_backward(const at::Tensor& loss) {
  fresh_window_ = false;
  values_.note(accelerate::text::concat("loss ", losses_++), loss);
  loss.backward();
  if (sync_ && !local_) average();
}

void Plain::average() {
  const at::NoGradGuard no_grad;
  for (const Module& module : modules_) {
    if (!module.trained || module.alive.expired()) continue;
    for (const auto& [name, parameter] : module.tensors().parameters) {
      if (!parameter.requires_grad() && !parameter.grad().defined()) continue;
      // A mean over all ranks, with nothing where a rank has none; none where nobody has one.
      at::Tensor gradient = parameter.grad().defined()
                                ? parameter.grad().detach().to_dense().clone()
                                : at::zeros_like(parameter);
      const at::Tensor used = at::full({1}, parameter.grad().defined() ? 1.0 : 0.0, at::kDouble);
      world_.all_reduce(used).wait();
      if (used.item<double>() == 0 || gradient.numel() == 0) continue;
      gradient = gradient.contiguous();
      world_.all_reduce(gradient.is_complex() ? at::view_as_real(gradient) : gradient).wait();
      gradient.div_(world_.size());
      if (parameter.grad().defined() && parameter.grad().layout() == at::kStrided)
        parameter.grad().copy_(gradient);
      else
        at::Tensor(parameter).mutable_grad() = gradient;
    }
  }
}

void Plain::unscale_gradients() {
  if (!counted_) return;
  counted_ = false;
  const at::NoGradGuard no_grad;
  const at::Tensor total = at::full({1}, count_, at::kDouble);
  world_.all_reduce(total).wait();
  const double factor = world_.size() / total.item<double>();
  for (const Module& module : modules_) {
    if (module.alive.expired()) continue;
    for (const auto& [name, parameter] : module.tensors().parameters)
      if (parameter.grad().defined()) parameter.grad().mul_(factor);
  }
  count_ = 0;
}

void Plain::discard_gradients() {
  for (const Module& module : modules_) {
    if (module.alive.expired()) continue;
    for (const auto& [name, parameter] : module.tensors().parameters)
      at::Tensor(parameter).mutable_grad().reset();
  }
  counted_ = false;
  count_ = 0;
  finish_window();
}

at::Tensor Plain::clip_norm(const std::vector<at::Tensor>& parameters, double limit, double p) {
  unscale_gradients();
  return at::scalar_tensor(torch::nn::utils::clip_grad_norm_(parameters, limit, p), at::kDouble);
}

void Plain::clip_value(const std::vector<at::Tensor>& parameters, double limit) {
  unscale_gradients();
  torch::nn::utils::clip_grad_value_(parameters, limit);
}

at::Tensor Plain::gather(const at::Tensor& tensor) const {
  const at::NoGradGuard no_grad;
  const at::Tensor mine =
      tensor.detach().dim() == 0 ? tensor.detach().reshape({1}) : tensor.detach();
  // Each rank's rows at its place, and zeros elsewhere.
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < world_.size(); ++rank)
    parts.push_back(rank == world_.rank() ? mine : at::zeros_like(mine));
  const at::Tensor all = at::cat(parts).contiguous();
  world_.all_reduce(all).wait();
  return all;
}

at::Tensor Plain::mean(const at::Tensor& tensor) const {
  const at::NoGradGuard no_grad;
  const at::Tensor all = tensor.detach().clone().reshape({-1});
  world_.all_reduce(all).wait();
  return all.div(world_.size()).reshape(tensor.sizes());
}

std::filesystem::path Plain::save_state(const std::filesystem::path& folder) {
  Saved saved;
  for (const Module& module : modules_) {
    auto& tensors = saved.modules.emplace_back();
    if (module.alive.expired()) continue;
    const PlainTensors all = module.tensors();
    for (const auto* named : {&all.parameters, &all.buffers})
      for (const auto& [name, tensor] : *named) tensors.push_back(tensor.detach().clone());
  }
  for (const Optimizer& optimizer : optimizers_) {
    std::ostringstream stream;
    if (const auto alive = optimizer.alive.lock()) torch::save(*alive, stream);
    saved.optimizers.push_back(stream.str());
  }
  saved.generator = at::detail::getDefaultCPUGenerator().get_state();
  saved.micro_batches = micro_batches_;
  saved_[folder.string()] = std::move(saved);
  return folder;
}

std::filesystem::path Plain::load_state(const std::filesystem::path& folder) {
  const at::NoGradGuard no_grad;
  const Saved& saved = saved_.at(folder.string());
  for (std::size_t i = 0; i < saved.modules.size(); ++i) {
    if (modules_[i].alive.expired()) continue;
    const PlainTensors all = modules_[i].tensors();
    std::size_t next = 0;
    for (const auto* named : {&all.parameters, &all.buffers})
      for (const auto& [name, tensor] : *named) at::Tensor(tensor).copy_(saved.modules[i][next++]);
  }
  for (std::size_t i = 0; i < saved.optimizers.size(); ++i) {
    const auto alive = optimizers_[i].alive.lock();
    if (!alive) continue;
    std::istringstream stream(saved.optimizers[i]);
    alive->state().clear();  // LibTorch leaves what the file has nothing for
    torch::load(*alive, stream);
  }
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(saved.generator);
  micro_batches_ = saved.micro_batches;
  return folder;
}

void Plain::check() {
  const std::string check = accelerate::text::concat("check ", checks_++, ": ");
  for (std::size_t m = 0; m < modules_.size(); ++m) {
    if (modules_[m].alive.expired()) continue;
    const std::string module = accelerate::text::concat(check, "module ", m, " ");
    const PlainTensors all = modules_[m].tensors();
    for (const auto& [name, tensor] : all.parameters) {
      values_.note(module + name, tensor);
      for (std::size_t o = 0; o < optimizers_.size(); ++o) {
        if (const auto optimizer = optimizers_[o].alive.lock())
          values_.note_state(accelerate::text::concat(module, name, " optimizer ", o), *optimizer,
                             tensor);
      }
    }
    if (!is_main_process()) continue;
    for (const auto& [name, tensor] : all.buffers) values_.note(module + name, tensor);
  }
}

}  // namespace programs
