// Saving and loading tensors against moving the same bytes with plain large sequential I/O: same
// sizes of calls, same syncing.
//
//   file_io FOLDER [GIGABYTES]
//
// Prints a line of JSON for each figure: medians of three rounds in which both sides took turns.
#include <accelerate/checkpoint/tensor_file.hpp>
#include <accelerate/io/file.hpp>

#include <ATen/ops/empty.h>
#include <ATen/ops/randn.h>
#include <fcntl.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <vector>

#include "measure.hpp"

namespace {

namespace fs = std::filesystem;
using accelerate::NamedTensor;
using accelerate::io::File;

constexpr std::size_t kCall = std::size_t{16} << 20;

std::span<const std::byte> bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// Has the system forget what it keeps of a file.
void make_cold(const fs::path& path) {
  File file = File::open_writable(path);
  file.sync();
  ::posix_fadvise(file.descriptor(), 0, 0, POSIX_FADV_DONTNEED);
}

void plain_write(const fs::path& path, const std::vector<NamedTensor>& tensors) {
  File file = File::create(path);
  std::uint64_t at = 0;
  for (const NamedTensor& named : tensors) {
    for (auto left = bytes_of(named.tensor); !left.empty();) {
      const std::size_t next = std::min(left.size(), kCall);
      file.write(left.data(), next, at);
      at += next;
      left = left.subspan(next);
    }
  }
  file.sync();
  file.close();
}

void plain_read(const fs::path& path, const std::vector<NamedTensor>& into) {
  const File file = File::open(path);
  std::uint64_t at = 0;
  for (const NamedTensor& named : into) {
    file.read(named.tensor.mutable_data_ptr(), named.tensor.nbytes(), at);
    at += named.tensor.nbytes();
  }
}

// How long the two take in turn: the medians, and that of their ratios.
void compare(const std::string& name, double gigabytes, const std::function<void()>& before,
             const std::function<void()>& plain, const std::function<void()>& ours) {
  std::vector<double> plain_s, ours_s, ratios;
  for (int round = 0; round < 3; ++round) {
    before();
    plain_s.push_back(measure::time(plain).count());
    before();
    ours_s.push_back(measure::time(ours).count());
    ratios.push_back(plain_s.back() / ours_s.back());
  }
  std::cout << "{\"benchmark\": \"" << name
            << "\", \"plain_gb_per_s\": " << gigabytes / measure::median(plain_s)
            << ", \"gb_per_s\": " << gigabytes / measure::median(ours_s)
            << ", \"ratio\": " << measure::median(ratios) << "}" << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "file_io FOLDER [GIGABYTES]\n";
    return 2;
  }
  const double gigabytes = argc > 2 ? std::atof(argv[2]) : 2.0;
  const accelerate::io::TemporaryFolder folder(argv[1], "file_io-");
  const fs::path plain = folder.path() / "plain", ours = folder.path() / "model.safetensors";

  // As a model has them: some large, many small.
  std::vector<NamedTensor> state, into;
  std::int64_t left = static_cast<std::int64_t>(gigabytes * 1e9) / 4;
  for (int layer = 0; left > 0; ++layer) {
    for (const std::int64_t size : {4096 * 1024, 1024 * 1024, 4096, 1024}) {
      const std::int64_t count = std::min<std::int64_t>(left, size);
      if (count == 0) break;
      left -= count;
      state.push_back({"layers." + std::to_string(layer) + "." + std::to_string(state.size()),
                       at::randn({count})});
      into.push_back({state.back().name, at::empty({count}).zero_()});
    }
  }
  const auto nothing = [] {};
  // Into new files: freeing the pages of an old one takes as long as writing half of it.
  compare(
      "save, synced", gigabytes, [&] { fs::remove(plain), fs::remove(ours); },
      [&] { plain_write(plain, state); }, [&] { accelerate::checkpoints::save_file(state, ours); });
  plain_write(plain, state);
  compare(
      "load, warm cache", gigabytes, nothing, [&] { plain_read(plain, into); },
      [&] { accelerate::checkpoints::load_into(into, ours); });
  compare(
      "load, cold cache", gigabytes, [&] { make_cold(plain), make_cold(ours); },
      [&] { plain_read(plain, into); }, [&] { accelerate::checkpoints::load_into(into, ours); });
  for (std::size_t i = 0; i < state.size(); ++i) {
    if (!state[i].tensor.equal(into[i].tensor)) {
      std::cerr << state[i].name << " came back as something else\n";
      return 1;
    }
  }
  // For the comparison with Python: into tensors that are there, and only opened.
  into.clear();
  std::vector<double> filled, mapped;
  for (int round = 0; round < 3; ++round) {
    for (NamedTensor& named : state) named.tensor.zero_();
    filled.push_back(
        measure::time([&] { accelerate::checkpoints::load_into(state, ours); }).count());
    mapped.push_back(measure::time([&] { accelerate::checkpoints::load_file(ours); }).count());
  }
  std::cout << "{\"benchmark\": \"seconds\", \"fill\": " << measure::median(filled)
            << ", \"open\": " << measure::median(mapped) << "}" << std::endl;
  if (argc > 3) fs::rename(ours, argv[3]);  // for Python
  return 0;
}
