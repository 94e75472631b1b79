// Trains a small convolutional network on 8x8 images of handwritten digits, on one process or many:
//
//   build/bin/image_classifier --epochs 20
//   build/bin/accelerate-cpp launch -n 2 build/bin/image_classifier --epochs 20
//   mpirun -n 4 build/bin/image_classifier --epochs 20

#include "support/trainer.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/base/progress.hpp>
#include <accelerate/optim/schedules.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <sstream>

namespace {

struct NetImpl : torch::nn::Module {
  explicit NetImpl(double dropout)
      : conv1(register_module("conv1",
                              torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1)))),
        conv2(register_module(
            "conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).stride(2).padding(1)))),
        hidden(register_module("hidden", torch::nn::Linear(32 * 4 * 4, 64))),
        drop(register_module("drop", torch::nn::Dropout(dropout))),
        classes(register_module("classes", torch::nn::Linear(64, 10))) {}

  torch::Tensor forward(torch::Tensor images) {
    images = torch::relu(conv2(torch::relu(conv1(images))));
    return classes(drop(torch::relu(hidden(images.flatten(1)))));
  }

  torch::nn::Conv2d conv1, conv2;
  torch::nn::Linear hidden;
  torch::nn::Dropout drop;
  torch::nn::Linear classes;
};
TORCH_MODULE(Net);

struct Batch {
  torch::Tensor images, digits, ids;
};

/// Rows of a CSV file: 64 pixels from 0 to 16, then the digit. Every fifth row is held out.
class Digits {
 public:
  enum class Part { training, held_out };

  Digits(const std::string& path, Part part, torch::ScalarType dtype) {
    std::istringstream file(trainer::read_file(path));
    std::vector<float> pixels;
    std::vector<int64_t> digits, ids;
    std::string line;
    for (int64_t row = 0; std::getline(file, line); ++row) {
      const auto fields = accelerate::text::split(line, ',');
      std::vector<float> numbers;
      for (const auto& field : fields) {
        const auto number = accelerate::text::to_double(field);
        if (number && std::isfinite(*number)) numbers.push_back(static_cast<float>(*number));
      }
      const float digit = numbers.empty() ? -1 : numbers.back();
      if (numbers.size() != 65 || fields.size() != 65 || digit < 0 || digit > 9 ||
          digit != std::floor(digit)) {
        throw accelerate::DataError(accelerate::text::concat(
            path, " has a line ", row + 1, " that is not 64 pixels and a digit from 0 to 9: \"",
            line.substr(0, 60), "\"."));
      }
      if ((row % 5 == 4) != (part == Part::held_out)) continue;
      pixels.insert(pixels.end(), numbers.begin(), numbers.end() - 1);
      digits.push_back(static_cast<int64_t>(digit));
      ids.push_back(row);
    }
    images_ = torch::tensor(pixels).view({-1, 1, 8, 8}).div(8).sub(1).to(dtype);
    digits_ = torch::tensor(digits);
    ids_ = torch::tensor(ids);
  }

  Batch get_batch(torch::ArrayRef<size_t> indices) {
    const auto rows = torch::tensor(std::vector<int64_t>(indices.begin(), indices.end()));
    return {images_.index_select(0, rows), digits_.index_select(0, rows),
            ids_.index_select(0, rows)};
  }
  torch::optional<size_t> size() const { return digits_.size(0); }

 private:
  torch::Tensor images_, digits_, ids_;
};

}  // namespace

template <>
struct accelerate::TreeTraits<Batch> {
  template <class Self, class Visitor>
  static void visit(Self& batch, Visitor&& visitor) {
    visitor("images", batch.images);
    visitor("digits", batch.digits);
    visitor("ids", batch.ids);
  }
};

namespace {

int train(int argc, char** argv) {
  trainer::Flags defaults;
  defaults.epochs = 20;
  defaults.data = "examples/data/digits.csv";
  const auto flags =
      trainer::parse(argc, argv, "Trains a digit classifier.", defaults, /*has_layers=*/false);
  if (!flags) return 0;
  accelerate::tracking::count_cpu_tensors();

  accelerate::Accelerator accelerator(flags->accelerator_options());
  accelerate::set_seed(flags->seed);
  Net net(flags->dropout);
  net->to(flags->scalar_type());
  auto adam = trainer::make_optimizer(*flags, net->parameters());

  Digits digits(flags->data, Digits::Part::training, flags->scalar_type());
  const int64_t global_batch = flags->batch_size * accelerator.data_parallel_size() *
                               accelerator.gradient_accumulation_steps();
  const int64_t steps_per_epoch = static_cast<int64_t>(*digits.size()) / global_batch;
  auto schedule = accelerate::optim::cosine_schedule_with_warmup(
      *adam, /*warmup_steps=*/steps_per_epoch / 2, flags->epochs * steps_per_epoch);

  auto options =
      torch::data::DataLoaderOptions().batch_size(flags->batch_size).workers(flags->workers);
  auto [model, optimizer, scheduler, loader, held_out] = accelerator.prepare(
      net, std::move(adam), schedule,
      accelerate::data::loader(std::move(digits), options).drop_last_global(true),
      accelerate::data::loader(Digits(flags->data, Digits::Part::held_out, flags->scalar_type()),
                               torch::data::samplers::SequentialSampler(0), options));

  trainer::Recorder recorder(accelerator, *flags, net->parameters());
  trainer::Checkpoints checkpoints(accelerator, *flags, recorder);
  const int64_t planned = flags->epochs * steps_per_epoch;
  const int64_t last_step = flags->max_steps > 0 ? std::min(flags->max_steps, planned) : planned;
  accelerate::Progress progress(accelerate::ProgressOptions(last_step)
                                    .initial(recorder.steps())
                                    .description("training")
                                    .unit("steps")
                                    .enabled(accelerator.is_main_process() && !flags->quiet));
  while (recorder.steps() < last_step) {
    for (auto& batch : loader) {
      auto scope = accelerator.accumulate(model);
      recorder.phase("forward");
      auto loss = torch::nn::functional::cross_entropy(model(batch.images), batch.digits);
      recorder.phase("backward");
      accelerator.backward(loss);
      recorder.micro_batch(loss, batch.ids);
      if (!accelerator.sync_gradients()) continue;
      recorder.phase("step");
      const double limit =
          flags->clip_norm > 0 ? flags->clip_norm : std::numeric_limits<double>::infinity();
      recorder.step(accelerator.clip_grad_norm_(model, limit));
      optimizer.step();
      scheduler.step();
      optimizer.zero_grad();
      recorder.phase();
      progress.advance();
      if (checkpoints.after_step()) return accelerate::kStoppedExitCode;
      if (recorder.steps() == last_step) break;
    }
    progress.text(accelerate::text::concat("loss ", recorder.last_loss()));
  }
  progress.close();
  checkpoints.finish();

  model.eval();
  torch::NoGradGuard no_grad;
  int64_t right = 0;
  int64_t samples = 0;
  double loss_sum = 0;
  for (auto& batch : held_out) {
    const auto [scores, targets] =
        accelerator.gather_for_metrics(std::pair(model(batch.images), batch.digits));
    right += scores.argmax(1).eq(targets).sum().item<int64_t>();
    loss_sum += torch::nn::functional::cross_entropy(
                    scores, targets,
                    torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum))
                    .item<double>();
    samples += targets.size(0);
  }
  const double accuracy = static_cast<double>(right) / static_cast<double>(samples);
  const accelerate::Json eval{{"accuracy", accuracy},
                              {"loss", loss_sum / static_cast<double>(samples)},
                              {"samples", samples}};
  trainer::write_summary(accelerator, *flags, recorder.finish(model, eval));
  accelerator.print("accuracy ", 100 * accuracy, " % on ", samples, " held-out images, after ",
                    recorder.steps(), " steps on ", accelerator.num_processes(), " process(es)");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::run([&] { return train(argc, argv); });
}
