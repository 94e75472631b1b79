// Loading a checkpoint against reading its file, and a forward with all weights on disk against its
// computation and the copying alone. One line of JSON each.
//
//   big_model [GIGABYTES] [FOLDER] [load | forward]     default: 2, the temporary folder, both
//
// "Reading the file" has two figures, each the better of one and several threads with large
// sequential reads into memory of the file's size. Into memory that was used before it is what the
// file and the memory bus give. Into memory just allocated, as vectors and tensors are, it is what
// any program pays that wants the contents: the kernel clears each new page first, which no library
// can avoid. Loading into new memory is judged by the second, all else by the first. "faults"
// counts the new pages that one loading met.
//
// A forward leaves one core to the thread that copies. "copying" is the file read by one thread
// into two buffers of a weight's size in turn; "beside copying" is the computation with weights in
// memory while such a thread, which has nothing to do with it, copies: cores share a memory bus,
// and often more. Fastest of five each, taken in turn. Where all cores compute, none is left to
// copy, and no order of work can be faster than the work of both over the number of cores: that is
// "over_work_of_all_cores".

#include <accelerate/big_model/init_empty.hpp>
#include <accelerate/big_model/load.hpp>
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/io/file.hpp>
#include <accelerate/tracking/tensor_bytes.hpp>

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <iostream>
#include <memory>
#include <thread>
#include <tuple>
#include <vector>

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

// Pages of memory that this process touched for the first time.
std::int64_t faults() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

constexpr std::uint64_t kPiece = std::uint64_t{16} << 20;

// The whole file by so many threads.
void read_file(const accelerate::io::File& file, char* memory, unsigned threads) {
  const std::uint64_t size = file.size();
  std::atomic<std::uint64_t> next{0};
  const auto work = [&] {
    for (std::uint64_t at; (at = next.fetch_add(kPiece)) < size;)
      file.read(memory + at, std::min(kPiece, size - at), at);
  };
  std::vector<std::thread> others;
  for (unsigned t = 1; t < threads; ++t) others.emplace_back(work);
  work();
  for (auto& other : others) other.join();
}

// The whole file by one thread into two buffers in turn, as a forward brings it layer by layer.
void copy_file(const accelerate::io::File& file, std::vector<char>& buffers) {
  const std::uint64_t size = file.size(), half = buffers.size() / 2;
  for (std::uint64_t at = 0, i = 0; at < size; at += half, ++i)
    file.read(buffers.data() + i % 2 * half, std::min(half, size - at), at);
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

void load(const std::filesystem::path& path, int layers, bool cold) {
  const unsigned threads = std::min(4u, std::max(1u, std::thread::hardware_concurrency()));
  const auto file = accelerate::io::File::open(path);
  const std::uint64_t size = file.size();
  const auto before = [&] {
    if (cold) forget(path);
  };

  double reading = 1e9, reading_into_new = 1e9;
  for (const unsigned readers : {1u, threads}) {
    std::unique_ptr<char[]> memory;
    const auto read = [&] { read_file(file, memory.get(), readers); };
    const auto into_new = [&] {
      memory.reset(new char[size]);
      read();
    };
    const auto before_new = [&] {
      memory.reset();
      before();
    };
    reading_into_new = std::min(reading_into_new, best(5, into_new, before_new));
    reading = std::min(reading, best(5, read, before));
  }

  for (const char* into : {"new memory", "memory that is there", "the mapped file"}) {
    const bool is_there = into == std::string("memory that is there");
    const auto options = accelerate::LoadOptions().progress(false).memory_map(
        into == std::string("the mapped file"));
    nn::Sequential net = make(4096, is_there ? layers : 1);
    std::int64_t new_pages = 0;
    const auto load = [&] {
      const std::int64_t faults_before = faults();
      accelerate::load_checkpoint_in_model(net, path, {{"", accelerate::Place::cpu()}}, options);
      new_pages = faults() - faults_before;
    };
    const auto before_loading = [&] {
      if (!is_there) {
        net = make(4096, 1);  // pages that are mapped cannot be forgotten
        net = accelerate::init_empty_weights([&] { return make(4096, layers); });
      }
      before();
    };
    const double loading = best(5, load, before_loading);
    const double gigabytes = static_cast<double>(size) / 1e9;
    print({{"benchmark", "load"},
           {"into", into},
           {"cache", cold ? "cold" : "warm"},
           {"reading_gb_per_s", gigabytes / reading},
           {"reading_into_new_memory_gb_per_s", gigabytes / reading_into_new},
           {"loading_gb_per_s", gigabytes / loading},
           {"faults", new_pages},
           {"over_reading", reading / loading},
           {"over_reading_into_new_memory", reading_into_new / loading}});
  }
}

// While it lives, a thread copies the file over and over.
class Copying {
 public:
  Copying(const accelerate::io::File& file, std::vector<char>& buffers)
      : thread_([this, &file, &buffers] {
          while (!done_) copy_file(file, buffers);
        }) {}
  ~Copying() {
    done_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

void forward(const std::filesystem::path& path, int layers) {
  const torch::NoGradGuard no_grad;
  const auto quiet = accelerate::LoadOptions().progress(false);
  const accelerate::DeviceMap on_disk{{"", accelerate::Place::disk()}};
  nn::Sequential whole = accelerate::init_empty_weights([&] { return make(4096, layers); });
  // In memory of its own: large pages, from which products are faster than from a mapped file.
  accelerate::load_checkpoint_in_model(whole, path, {{"", accelerate::Place::cpu()}},
                                       accelerate::LoadOptions().progress(false).memory_map(false));
  const std::int64_t largest = 4096 * 4096 * 4, limit = 5 * largest / 2;
  const auto dispatch = [&](int prefetch) {
    return accelerate::load_checkpoint_and_dispatch(
        accelerate::init_empty_weights([&] { return make(4096, layers); }), path, on_disk, quiet,
        accelerate::OffloadOptions().prefetch(prefetch).resident_limit(limit));
  };
  std::vector<char> buffers(static_cast<std::size_t>(2 * largest), 1);
  const auto file = accelerate::io::File::open(path);
  const double copying = best(5, [&] { copy_file(file, buffers); });
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  // A core is left to the thread that copies; and then none, with copies ahead and without.
  for (const auto& [computing, prefetch, all_rows] :
       {std::tuple{std::max(1, cores - 1), 1, std::vector<std::int64_t>{1, 16, 64, 128, 512}},
        std::tuple{cores, 1, std::vector<std::int64_t>{1, 128, 512}},
        std::tuple{cores, 0, std::vector<std::int64_t>{1, 128, 512}}}) {
    auto model = dispatch(prefetch);
    at::set_num_threads(computing);
    for (const std::int64_t rows : all_rows) {
      const at::Tensor input = torch::randn({rows, 4096});
      whole->forward(input);
      model(input);
      accelerate::tracking::reset_peak();
      const std::int64_t before = accelerate::tracking::tensor_bytes().current;
      model(input);
      const std::int64_t peak = accelerate::tracking::tensor_bytes().peak - before;
      // In turn, so that a machine that grows slower or faster does so for both.
      double compute = 1e9, offloaded = 1e9;
      for (int i = 0; i < 5; ++i) {
        compute = std::min(compute, seconds([&] { whole->forward(input); }));
        offloaded = std::min(offloaded, seconds([&] { model(input); }));
      }
      double beside = 1e9;
      {
        const Copying other(file, buffers);
        beside = best(3, [&] { whole->forward(input); });
      }
      const double limit_s = (compute * computing + copying) / cores;
      print(
          {{"benchmark", "forward"},
           {"rows", rows},
           {"computing_cores", computing},
           {"all_cores", cores},
           {"prefetch", prefetch},
           {"compute_s", compute},
           {"compute_beside_copying_s", beside},
           {"copying_s", copying},
           {"offloaded_s", offloaded},
           {"over_larger_part", offloaded / std::max(compute, copying)},
           {"over_work_of_all_cores", offloaded / limit_s},
           {"peak_tensor_bytes", peak},
           {"peak_over_limit", static_cast<double>(peak) / static_cast<double>(limit + largest)}});
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  accelerate::tracking::count_cpu_tensors();
  const double gigabytes = argc > 1 ? std::atof(argv[1]) : 2;
  const accelerate::io::TemporaryFolder folder(argc > 2 ? std::filesystem::path(argv[2])
                                                        : std::filesystem::temp_directory_path());
  const int layers = std::max(1, static_cast<int>(gigabytes * 1e9 / (4096.0 * 4096 * 4)));
  const auto path = folder.path() / "model.safetensors";
  {
    nn::Sequential net = make(4096, layers);
    accelerate::checkpoints::save_file(accelerate::big_model::record_of(net).parameters(), path);
  }
  const std::string part = argc > 3 ? argv[3] : "";
  for (const bool cold : {false, true}) {
    if (part != "forward") load(path, layers, cold);
  }
  if (part != "load") forward(path, layers);
}
