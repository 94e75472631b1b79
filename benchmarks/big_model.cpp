// Loading a checkpoint against reading its file, and a forward with all weights on disk against its
// computation and the copying alone. One line of JSON each.
//
//   big_model [GIGABYTES] [FOLDER]     default: 2, the temporary folder

#include <accelerate/big_model/init_empty.hpp>
#include <accelerate/big_model/load.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/io/file.hpp>

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <thread>

namespace {

namespace nn = torch::nn;

double seconds(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double best(int times, const std::function<void()>& body,
            const std::function<void()>& before = {}) {
  double least = 1e9;
  for (int i = 0; i < times; ++i) {
    if (before) before();
    least = std::min(least, seconds(body));
  }
  return least;
}

// The whole file into one buffer, by as many threads as load it.
void read_file(const std::filesystem::path& path, std::vector<char>& buffer, unsigned threads) {
  const accelerate::io::File file = accelerate::io::File::open(path);
  const std::uint64_t size = file.size(), piece = buffer.size() / threads;
  std::vector<std::thread> readers;
  for (unsigned t = 0; t < threads; ++t) {
    readers.emplace_back([&, t] {
      for (std::uint64_t at = t * piece; at < size; at += threads * piece)
        file.read(buffer.data() + t * piece, std::min(piece, size - at), at);
    });
  }
  for (auto& reader : readers) reader.join();
}

void forget(const std::filesystem::path& path) {
  const int file = open(path.c_str(), O_RDONLY);
  fdatasync(file);
  posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  close(file);
}

void print(const nlohmann::ordered_json& line) { std::cout << line.dump() << std::endl; }

nn::Sequential make(std::int64_t width, int layers) {
  nn::Sequential net;
  for (int i = 0; i < layers; ++i) net->push_back(nn::Linear(width, width));
  return net;
}

enum class Into { mapped_file, new_memory, old_memory };

void load(const std::filesystem::path& path, int layers, Into into) {
  const unsigned threads = std::min(4u, std::max(1u, std::thread::hardware_concurrency()));
  const auto quiet =
      accelerate::LoadOptions().progress(false).memory_map(into == Into::mapped_file);
  std::vector<char> buffer(std::size_t{64} << 20);
  std::fill(buffer.begin(), buffer.end(), 1);
  const double gigabytes = static_cast<double>(std::filesystem::file_size(path)) / 1e9;
  nn::Sequential net = make(4096, into == Into::old_memory ? layers : 1);
  for (const bool cold : {false, true}) {
    // Pages that are mapped cannot be forgotten.
    if (into != Into::old_memory) net = make(4096, 1);
    const auto before = [&] {
      if (cold) forget(path);
    };
    const double one = best(
        3, [&] { read_file(path, buffer, 1); }, before);
    const double reading = best(
        3, [&] { read_file(path, buffer, threads); }, before);
    const double loading = best(
        3,
        [&] {
          accelerate::load_checkpoint_in_model(net, path, {{"", accelerate::Place::cpu()}}, quiet);
        },
        [&] {
          if (into != Into::old_memory)
            net = accelerate::init_empty_weights([&] { return make(4096, layers); });
          before();
        });
    print({{"benchmark", "load"},
           {"into", into == Into::mapped_file  ? "the mapped file"
                    : into == Into::new_memory ? "new memory"
                                               : "memory that is there"},
           {"cache", cold ? "cold" : "warm"},
           {"reading_gb_per_s", gigabytes / std::min(one, reading)},
           {"loading_gb_per_s", gigabytes / loading},
           {"ratio", std::min(one, reading) / loading}});
  }
}

void forward(const std::filesystem::path& path, int layers) {
  const torch::NoGradGuard no_grad;
  nn::Sequential whole = accelerate::init_empty_weights([&] { return make(4096, layers); });
  accelerate::load_checkpoint_in_model(whole, path, {{"", accelerate::Place::cpu()}},
                                       accelerate::LoadOptions().progress(false));
  nn::Sequential empty = accelerate::init_empty_weights([&] { return make(4096, layers); });
  auto model = accelerate::load_checkpoint_and_dispatch(
      empty, path, accelerate::DeviceMap{{"", accelerate::Place::disk()}},
      accelerate::LoadOptions().progress(false), accelerate::OffloadOptions().prefetch(1));
  std::vector<char> buffer(std::size_t{64} << 20);
  const double copying = best(3, [&] { read_file(path, buffer, 1); });
  // A core is left to the thread that copies: on cores that all compute nothing can be hidden.
  const int computing = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) - 1);
  at::set_num_threads(computing);
  for (const std::int64_t rows : {1, 16, 64, 128, 512}) {
    const at::Tensor input = torch::randn({rows, 4096});
    whole->forward(input);
    model(input);
    const double compute = best(3, [&] { whole->forward(input); });
    const double offloaded = best(3, [&] { model(input); });
    print({{"benchmark", "forward"},
           {"rows", rows},
           {"compute_s", compute},
           {"copying_s", copying},
           {"offloaded_s", offloaded},
           {"over_larger_part", offloaded / std::max(compute, copying)}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  const double gigabytes = argc > 1 ? std::atof(argv[1]) : 2;
  const accelerate::io::TemporaryFolder folder(argc > 2 ? std::filesystem::path(argv[2])
                                                        : std::filesystem::temp_directory_path());
  const int layers = std::max(1, static_cast<int>(gigabytes * 1e9 / (4096.0 * 4096 * 4)));
  const auto path = folder.path() / "model.safetensors";
  {
    nn::Sequential net = make(4096, layers);
    accelerate::checkpoints::save_file(accelerate::big_model::record_of(net).parameters(), path);
  }
  for (const Into into : {Into::mapped_file, Into::new_memory, Into::old_memory})
    load(path, layers, into);
  forward(path, layers);
}
