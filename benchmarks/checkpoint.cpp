// save_state and load_state against moving the same bytes with plain large sequential I/O, the
// memory that they need, what an asynchronous save holds training up, and what skipping batches
// costs.
//
//   checkpoint FOLDER [GIGABYTES]        one process
//   accelerate-cpp launch -n 2 checkpoint FOLDER [GIGABYTES]        two, sharded
//
// The first process prints a line of JSON for each figure: medians of three rounds in which both
// sides took turns. On several processes both sides move each process' share.
//
// What must be moved at the least, for each byte of state. Saving: one read of memory and one write
// to the page cache, as plain writing; besides, one checksum (XXH3), and a CRC32 in optimizer.bin,
// which Python's format wants: threads beside those that write. Loading into what is in use:
// everything is read and checksummed, and only then read again from the page cache, for nothing may
// change before all is verified. From a cold cache that is 1/disk + 1/memory where plain reading
// takes 1/disk. Loading into a new run: what an optimizer has no state for yet, which is two thirds
// with AdamW, is read once.
#include <accelerate/accelerate.hpp>
#include <accelerate/io/checksum.hpp>

#include <fcntl.h>
#include <torch/data/dataloader_options.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <optional>

#include "measure.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::io::File;

constexpr std::size_t kCall = std::size_t{16} << 20;
constexpr std::int64_t kWidth = 2048;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(int layers) {
    for (int i = 0; i < layers; ++i) {
      all.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : all) x = layer(x);
    return x;
  }
  std::vector<torch::nn::Linear> all;
};
TORCH_MODULE(Net);

struct Numbers {
  at::Tensor get_batch(c10::ArrayRef<std::size_t> indices) {
    return at::tensor(std::vector<std::int64_t>(indices.begin(), indices.end()));
  }
  std::optional<std::size_t> size() const { return 4'000'000; }
};

auto prepare(accelerate::Accelerator& accelerator, Net& net, torch::optim::AdamW& adam) {
  return accelerator.prepare(
      net, adam,
      accelerate::data::loader(Numbers(), torch::data::DataLoaderOptions().batch_size(4)));
}

// A program that has prepared, and not taken a step.
struct Run {
  Run(const accelerate::AcceleratorOptions& options, int layers)
      : accelerator(options),
        net(layers),
        adam(net->parameters(), 1e-3),
        prepared(prepare(accelerator, net, adam)) {}
  accelerate::Accelerator accelerator;
  Net net;
  torch::optim::AdamW adam;
  decltype(prepare(accelerator, net, adam)) prepared;
};

// By how many bytes this process grew at most while it worked.
double growth(const std::function<void()>& work) {
  const auto kilobytes = [](const std::string& key) {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
      if (word == key) {
        double value = 0;
        status >> value;
        return value;
      }
    }
    throw accelerate::StateError("/proc/self/status has no " + key);
  };
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak begins anew
  const double before = kilobytes("VmRSS:");
  work();
  return (kilobytes("VmHWM:") - before) * 1024;
}

void make_cold(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator(folder)) {
    File file = File::open_writable(entry.path());
    file.sync();
    ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
  }
}

void plain_write(const fs::path& path, const at::Tensor& bytes) {
  File file = File::create(path);
  for (std::size_t at = 0; at < bytes.nbytes(); at += kCall) {
    file.write(static_cast<const char*>(bytes.const_data_ptr()) + at,
               std::min(kCall, bytes.nbytes() - at), at);
  }
  file.sync();
  file.close();
}

void plain_read(const fs::path& path, const at::Tensor& into, bool check, std::size_t from = 0) {
  const File file = File::open(path);
  auto* data = static_cast<std::byte*>(into.mutable_data_ptr());
  for (std::size_t at = 0; at < into.nbytes(); at += kCall) {
    const std::size_t next = std::min(kCall, into.nbytes() - at);
    file.read(data + at, next, from + at);
    if (check) accelerate::io::block_checksums({data + at, next});
  }
}

void report(const accelerate::Accelerator& accelerator, const accelerate::Json& line) {
  if (accelerator.is_main_process()) std::cout << line.dump() << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "checkpoint FOLDER [GIGABYTES]\n";
    return 2;
  }
  accelerate::log::set_level(accelerate::log::Level::warning);
  const double gigabytes = argc > 2 ? std::atof(argv[2]) : 2.0;
  accelerate::AcceleratorOptions options;
  options.cpu(true);
  if (std::getenv("WORLD_SIZE") != nullptr) options.strategy(accelerate::StrategyKind::fsdp);
  const int layers = std::max(1, static_cast<int>(gigabytes * 1e9 / (3.0 * 4 * kWidth * kWidth)));
  const double bytes = layers * 3.0 * 4 * (kWidth * kWidth + kWidth);
  // What is read plainly, the checkpoint, and the one that replaces it.
  if (const auto free = static_cast<double>(accelerate::io::free_bytes(argv[1]));
      free < 3.1 * bytes) {
    std::cerr << "The disk of " << argv[1] << " has " << free / 1e9 << " GB free, and "
              << 3.1 * bytes / 1e9 << " GB are needed. Name another folder, or fewer gigabytes.\n";
    return 1;
  }
  Run run(options, layers);
  accelerate::Accelerator& accelerator = run.accelerator;
  auto& [model, optimizer, loader] = run.prepared;
  accelerator.backward(model(at::ones({1, kWidth})).sum());
  optimizer.step();
  optimizer.zero_grad();

  const std::string place = accelerator.world().broadcast_bytes(
      accelerator.is_main_process()
          ? accelerate::io::TemporaryFolder(argv[1], "checkpoint-").keep().string()
          : "");
  const fs::path folder = place, saved = folder / "saved", plain = folder / "plain";
  const fs::path own = plain / std::to_string(accelerator.process_index());
  if (accelerator.is_main_process()) fs::create_directories(plain);
  accelerator.wait_for_everyone();

  const at::Tensor share =
      at::ones({static_cast<std::int64_t>(bytes / accelerator.num_processes())}, at::kByte);
  const auto take_turns = [&](const char* name, const std::function<void()>& before,
                              const std::function<void()>& other,
                              const std::function<void()>& ours) {
    std::vector<double> other_s, ours_s, ratios;
    const auto timed = [&](const std::function<void()>& work) {
      before();
      accelerator.wait_for_everyone();
      return measure::time([&] {
               work();
               accelerator.wait_for_everyone();
             })
          .count();
    };
    for (int round = 0; round < 3; ++round) {
      other_s.push_back(timed(other));
      ours_s.push_back(timed(ours));
      ratios.push_back(other_s.back() / ours_s.back());
    }
    report(accelerator, {{"benchmark", name},
                         {"processes", accelerator.num_processes()},
                         {"plain_gb_per_s", bytes / 1e9 / measure::median(other_s)},
                         {"gb_per_s", bytes / 1e9 / measure::median(ours_s)},
                         {"ratio", measure::median(ratios)}});
  };

  take_turns(
      "save_state, synced",
      [&] {
        fs::remove(own);
        if (accelerator.is_main_process()) fs::remove_all(saved);
      },
      [&] { plain_write(own, share); }, [&] { accelerator.save_state(saved); });
  plain_write(own, share);
  const auto report_growth = [&](const char* name, const std::function<void()>& work) {
    double most = 0;
    for (const std::string& one :
         accelerator.world().all_gather_bytes(std::to_string(growth(work))))
      most = std::max(most, std::stod(one));
    report(accelerator, {{"benchmark", name},
                         {"processes", accelerator.num_processes()},
                         {"megabytes", most / 1e6},
                         {"ratio", most * accelerator.num_processes() / bytes}});
  };
  report_growth("peak extra memory of save_state", [&] { accelerator.save_state(saved); });
  report_growth("peak extra memory of load_state", [&] { accelerator.load_state(saved); });
  take_turns(
      "load_state, warm cache, over reading and checking", [] {},
      [&] { plain_read(own, share, true); }, [&] { accelerator.load_state(saved); });
  take_turns(
      "load_state, cold cache, over reading",
      [&] {
        if (!accelerator.is_main_process()) return;
        make_cold(plain);
        make_cold(saved);
      },
      [&] { plain_read(own, share, false); }, [&] { accelerator.load_state(saved); });

  std::optional<Run> fresh;
  take_turns(
      "load_state into a new run, cold cache, over reading",
      [&] {
        fresh.reset();
        fresh.emplace(options, layers);
        if (!accelerator.is_main_process()) return;
        make_cold(plain);
        make_cold(saved);
      },
      [&] {  // into new memory what a new optimizer has no memory for
        plain_read(own, share.narrow(0, 0, share.numel() / 3), false);
        const auto third = static_cast<std::size_t>(share.numel() / 3);
        plain_read(own, at::empty({share.numel() - share.numel() / 3}, at::kByte), false, third);
      },
      [&] { fresh->accelerator.load_state(saved); });
  fresh.reset();

  std::vector<double> stalls;
  for (int round = 0; round < 3; ++round) {
    const double copy = measure::time([&] { share.clone(); }).count();
    stalls.push_back(measure::time([&] {
                       accelerator.save_state(saved,
                                              accelerate::SaveStateOptions().asynchronous(true));
                     }).count() /
                     copy);
    accelerator.wait_for_checkpoint();
  }
  report(accelerator, {{"benchmark", "asynchronous save_state over one copy of the state"},
                       {"processes", accelerator.num_processes()},
                       {"ratio", measure::median(stalls)}});

  const auto first_batch_after = [&](std::int64_t batches) {
    std::vector<double> seconds;
    for (int round = 0; round < 5; ++round) {
      accelerate::data::skip_first_batches(loader, batches);
      seconds.push_back(measure::time([&] {
                          for (auto& batch : loader) {
                            if (batch.numel() > 0) break;
                          }
                        }).count());
    }
    return measure::median(seconds);
  };
  const double near = first_batch_after(1);
  const std::int64_t far = 1'000'000 / (4 * accelerator.num_processes());
  report(accelerator, {{"benchmark", "skip_first_batches, sample one million over sample one"},
                       {"processes", accelerator.num_processes()},
                       {"ratio", first_batch_after(far) / near}});
  accelerator.wait_for_everyone();
  if (accelerator.is_main_process()) fs::remove_all(folder);
  return 0;
}
