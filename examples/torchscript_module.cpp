// Trains a module that Python exported, sharded over all processes, without a line of C++ about it:
//
//   python examples/export_module.py net.pt
//   build/bin/accelerate-cpp launch -n 2 build/bin/torchscript_module net.pt

#include <torch/script.h>
#include <torch/torch.h>

#include <accelerate/accelerate.hpp>
#include <accelerate/accelerator/prepared_script_module.hpp>

#include <fstream>
#include <iostream>
#include <sstream>

/// Lines of 64 pixels from 0 to 16, then the digit.
struct Digits : torch::data::datasets::Dataset<Digits> {
  std::vector<torch::Tensor> images, digits;
  explicit Digits(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw accelerate::DataError("The data file " + path + " cannot be read.");
    for (std::string line; std::getline(file, line);) {
      std::istringstream fields(line);
      std::vector<float> row;
      for (std::string field; std::getline(fields, field, ',');) row.push_back(std::stof(field));
      digits.push_back(torch::full({}, static_cast<int64_t>(row.at(64))));
      row.pop_back();
      images.push_back(torch::tensor(row) / 8 - 1);
    }
  }
  torch::data::Example<> get(size_t i) override { return {images[i], digits[i]}; }
  torch::optional<size_t> size() const override { return images.size(); }
};

int train(const std::string& module_path, const std::string& data_path) {
  accelerate::Accelerator accelerator(
      accelerate::AcceleratorOptions().fsdp(accelerate::FsdpOptions()));
  accelerate::set_seed(0);
  if (!std::ifstream(module_path))
    throw accelerate::DataError("The module " + module_path +
                                " cannot be read. Export it first: examples/export_module.py.");
  auto module = torch::jit::load(module_path);
  // Each parameter once: `module.parameters()` gives a tied one under each of its names.
  const accelerate::ModuleRecord record(module);
  std::vector<torch::Tensor> parameters;
  for (const auto& [name, parameter] : record.parameters()) parameters.push_back(parameter);
  torch::optim::AdamW adam(parameters, 3e-3);
  auto plan = accelerate::data::loader(Digits(data_path).map(torch::data::transforms::Stack<>()),
                                       torch::data::DataLoaderOptions().batch_size(32));
  auto [model, optimizer, loader] = accelerator.prepare(module, adam, plan);

  for (int epoch = 0; epoch < 8; ++epoch) {
    torch::Tensor right = torch::zeros({}, accelerator.device());
    int64_t samples = 0;
    for (auto& batch : loader) {
      auto scores = model(batch.data).toTensor();
      accelerator.backward(torch::cross_entropy_loss(scores, batch.target));
      optimizer.step();
      optimizer.zero_grad();
      right += scores.argmax(1).eq(batch.target).sum();
      samples += batch.target.size(0);
    }
    const auto share =
        accelerator.reduce(right).item<double>() / (samples * accelerator.data_parallel_size());
    accelerator.print("epoch ", epoch, " accuracy ", 100 * share, " % while training");
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3 || std::string(argv[1]) == "--help") {
    std::cerr << "usage: torchscript_module MODULE.pt [examples/data/digits.csv]\n";
    return argc == 2 ? 0 : 1;
  }
  return accelerate::run(
      [&] { return train(argv[1], argc == 3 ? argv[2] : "examples/data/digits.csv"); });
}
