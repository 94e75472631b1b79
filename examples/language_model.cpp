// Trains a small GPT-style decoder on the characters of a text, on one process or many:
//
//   build/bin/language_model --max-steps 200
//   build/bin/accelerate-cpp launch -n 2 build/bin/language_model --layers 4 --width 128
//   mpirun -n 4 build/bin/language_model

#include "support/decoder.hpp"
#include "support/trainer.hpp"

#include <accelerate/accelerate.hpp>
#include <accelerate/base/progress.hpp>
#include <accelerate/optim/schedules.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cmath>

namespace {

struct Batch {
  torch::Tensor tokens, next, ids;
};

/// The text as the ranks of its characters, in order of their codes.
struct Text {
  explicit Text(const std::string& path) {
    const std::string text = trainer::read_file(path);
    std::array<int64_t, 256> rank{};
    for (const unsigned char c : text) rank[c] = 1;
    for (auto& r : rank) r = r != 0 ? vocabulary++ : -1;
    if (static_cast<int64_t>(text.size()) < 20 * (trainer::kContext + 1)) {
      throw accelerate::DataError(accelerate::text::concat(
          "The text in ", path, " has ", text.size(), " characters, and at least ",
          20 * (trainer::kContext + 1), " are needed. Name a longer one with --data."));
    }
    std::vector<int64_t> codes;
    for (const unsigned char c : text) codes.push_back(rank[c]);
    characters = torch::tensor(codes);
  }

  torch::Tensor characters;
  int64_t vocabulary = 0;
};

/// Pieces of the text of trainer::kContext characters; every tenth is held out.
class Pieces {
 public:
  enum class Part { training, held_out };

  Pieces(const Text& text, Part part) : characters_(text.characters) {
    const int64_t count = (characters_.size(0) - 1) / trainer::kContext;
    for (int64_t i = 0; i < count; ++i) {
      if ((i % 10 == 9) == (part == Part::held_out)) pieces_.push_back(i);
    }
  }

  Batch get_batch(torch::ArrayRef<size_t> indices) {
    std::vector<torch::Tensor> tokens, next;
    std::vector<int64_t> ids;
    for (const auto index : indices) {
      ids.push_back(pieces_.at(index));
      tokens.push_back(characters_.narrow(0, ids.back() * trainer::kContext, trainer::kContext));
      next.push_back(characters_.narrow(0, ids.back() * trainer::kContext + 1, trainer::kContext));
    }
    return {torch::stack(tokens), torch::stack(next), torch::tensor(ids)};
  }
  torch::optional<size_t> size() const { return pieces_.size(); }

 private:
  torch::Tensor characters_;
  std::vector<int64_t> pieces_;
};

}  // namespace

template <>
struct accelerate::TreeTraits<Batch> {
  template <class Self, class Visitor>
  static void visit(Self& batch, Visitor&& visitor) {
    visitor("tokens", batch.tokens);
    visitor("next", batch.next);
    visitor("ids", batch.ids);
  }
};

namespace {

int train(int argc, char** argv) {
  trainer::Flags defaults;
  defaults.batch_size = 16;
  defaults.data = "examples/data/pentateuch.txt";
  const auto flags = trainer::parse(argc, argv, "Trains a character-level language model.",
                                    defaults, /*has_layers=*/true);
  if (!flags) return 0;
  if (flags->width % trainer::kHeadSize != 0) {
    throw accelerate::ConfigError(
        accelerate::text::concat("--width is ", flags->width, ", and a multiple of ",
                                 trainer::kHeadSize, " is needed, the size of an attention head."));
  }
  accelerate::tracking::count_cpu_tensors();

  accelerate::Accelerator accelerator(flags->accelerator_options());
  accelerate::set_seed(flags->seed);
  const Text text(flags->data);
  trainer::Decoder decoder(text.vocabulary, flags->layers, flags->width, flags->dropout);
  decoder->to(flags->scalar_type());
  auto adam = trainer::make_optimizer(*flags, decoder->parameters());

  Pieces pieces(text, Pieces::Part::training);
  const int64_t global_batch = flags->batch_size * accelerator.data_parallel_size() *
                               accelerator.gradient_accumulation_steps();
  const int64_t steps_per_epoch = static_cast<int64_t>(*pieces.size()) / global_batch;
  auto schedule = accelerate::optim::cosine_schedule_with_warmup(
      *adam, /*warmup_steps=*/steps_per_epoch / 20, flags->epochs * steps_per_epoch);

  auto options =
      torch::data::DataLoaderOptions().batch_size(flags->batch_size).workers(flags->workers);
  auto [model, optimizer, scheduler, loader, held_out] = accelerator.prepare(
      decoder, std::move(adam), schedule,
      accelerate::data::loader(std::move(pieces), options).drop_last_global(true),
      accelerate::data::loader(Pieces(text, Pieces::Part::held_out),
                               torch::data::samplers::SequentialSampler(0), options));

  trainer::Recorder recorder(accelerator, *flags, decoder->parameters());
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
      auto loss =
          torch::nn::functional::cross_entropy(model(batch.tokens).transpose(1, 2), batch.next);
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
      if (recorder.steps() % 10 == 0)
        progress.text(accelerate::text::concat("loss ", recorder.last_loss()));
      if (checkpoints.after_step()) return accelerate::kStoppedExitCode;
      if (recorder.steps() == last_step) break;
    }
  }
  progress.close();
  checkpoints.finish();

  model.eval();
  torch::NoGradGuard no_grad;
  double loss_sum = 0;
  int64_t samples = 0;
  for (auto& batch : held_out) {
    // One row a piece, so that pieces repeated to fill the last batch are not counted twice.
    const auto scores = model(batch.tokens).transpose(1, 2);
    const auto losses = torch::nn::functional::cross_entropy(
        scores, batch.next,
        torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kNone));
    const auto rows = accelerator.gather_for_metrics(losses.mean(1));
    loss_sum += rows.to(torch::kDouble).sum().item<double>();
    samples += rows.size(0);
  }
  const double loss = loss_sum / static_cast<double>(samples);
  const accelerate::Json eval{{"loss", loss}, {"perplexity", std::exp(loss)}, {"samples", samples}};
  trainer::write_summary(accelerator, *flags, recorder.finish(model, eval));
  accelerator.print("loss ", loss, " (", std::exp(loss), " choices a character) on ", samples,
                    " held-out pieces, after ", recorder.steps(), " steps on ",
                    accelerator.num_processes(), " process(es)");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return accelerate::run([&] { return train(argc, argv); });
}
