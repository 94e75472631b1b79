// How much of the gradient all-reduce hides behind backward: run on several processes. Three kinds
// of step are timed in turn: without communication (no_sync), as data parallelism does it, and with
// all of the gradients reduced after backward, one all-reduce a bucket. Prints one line of JSON.

#include "measure.hpp"
#include "support/decoder.hpp"

#include <accelerate/accelerate.hpp>

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <iostream>

int main() {
  using measure::median;
  torch::set_num_threads(1);
  // Gradients live in the buckets, so that no copy back counts as communication.
  accelerate::Accelerator accelerator(
      accelerate::AcceleratorOptions().ddp(accelerate::DdpOptions().gradient_as_bucket_view(true)));
  torch::manual_seed(0);
  trainer::Decoder decoder(60, 4, 256, 0.0);
  auto model = accelerator.prepare(decoder);
  const auto tokens = torch::randint(60, {4, trainer::kContext});
  const auto next = torch::randint(60, {4, trainer::kContext});
  const auto backward = [&] {
    accelerator.backward(torch::nn::functional::cross_entropy(model(tokens).transpose(1, 2), next));
  };
  const auto clear = [&] {
    for (auto& parameter : decoder->parameters()) parameter.mutable_grad().reset();
  };
  std::vector<double> silent_ms, overlapped_ms, after_ms;
  const auto time = [&](std::vector<double>& into, const std::function<void()>& step) {
    accelerator.wait_for_everyone();
    into.push_back(measure::time(step).count() * 1e3);
    clear();
  };
  for (int round = 0; round < 22; ++round) {
    time(silent_ms, [&] {
      auto local = accelerator.no_sync(model);
      backward();
    });
    time(overlapped_ms, backward);
    time(after_ms, [&] {
      {
        auto local = accelerator.no_sync(model);
        backward();
      }
      std::vector<torch::Tensor> flat;
      for (auto& parameter : decoder->parameters()) flat.push_back(parameter.grad().reshape({-1}));
      auto bucket = torch::cat(flat);
      accelerator.world().all_reduce(bucket, accelerate::comm::ReduceOp::avg).wait();
      int64_t offset = 0;
      for (auto& parameter : decoder->parameters()) {
        parameter.mutable_grad().copy_(
            bucket.narrow(0, offset, parameter.numel()).view_as(parameter));
        offset += parameter.numel();
      }
    });
    // Buckets are laid out anew after the first step.
    if (round == 1) silent_ms.clear(), overlapped_ms.clear(), after_ms.clear();
  }
  if (!accelerator.is_main_process()) return 0;
  const double exposed = median(overlapped_ms) - median(silent_ms);
  const double whole = median(after_ms) - median(silent_ms);
  std::cout << accelerate::Json{{"benchmark", "gradient overlap"},
                                {"processes", accelerator.num_processes()},
                                {"silent_ms", median(silent_ms)},
                                {"overlapped_ms", median(overlapped_ms)},
                                {"after_backward_ms", median(after_ms)},
                                {"exposed_ms", exposed},
                                {"all_reduce_ms", whole}}
                   .dump()
            << std::endl;
}
