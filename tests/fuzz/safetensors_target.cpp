#include <accelerate/base/error.hpp>
#include <accelerate/io/safetensors.hpp>

#include <stdexcept>

#include "fuzz/memory_file.hpp"
#include "fuzz/targets.hpp"

namespace accelerate::fuzz {

namespace st = io::safetensors;

namespace {

volatile std::byte last_byte{};

void read(const std::filesystem::path& path) {
  bool mapped = false;
  try {
    const st::Reader reader(path);
    mapped = true;
    std::uint64_t bytes = 0;
    for (const st::TensorInfo& info : reader.header().tensors()) {
      for (const std::byte byte : reader.bytes(info)) last_byte = byte;
      bytes += info.bytes();
      if (reader.header().find(info.name) != &info)
        throw std::logic_error("a tensor is not found by its name");
    }
    if (bytes != reader.header().data_bytes())
      throw std::logic_error("the tensors do not cover the data");
    // What was read can be written, and read again as the same.
    const st::Header written(reader.header().tensors(), reader.header().metadata());
    const std::string& text = written.text();
    const st::Header again =
        st::Header::parse(std::string_view(text).substr(8), written.data_bytes(), path);
    if (again.metadata() != reader.header().metadata() ||
        again.tensors().size() != reader.header().tensors().size()) {
      throw std::logic_error("what was read and written again is something else");
    }
  } catch (const CheckpointError&) {
  }
  // The other way to read a header comes to the same conclusion.
  try {
    st::Header::read(path);
    if (!mapped) throw std::logic_error("read and mapped, a file is not judged alike");
  } catch (const CheckpointError&) {
    if (mapped) throw std::logic_error("read and mapped, a file is not judged alike");
  }
}

void read_index(const std::filesystem::path& path) {
  try {
    const st::Index index = st::Index::read(path);
    for (const auto& [tensor, file] : index.weight_map) {
      if (file.empty() || file.front() == '/')
        throw std::logic_error("an index leads out of its folder");
    }
    index.text();
  } catch (const CheckpointError&) {
  }
}

}  // namespace

void safetensors(std::span<const std::uint8_t> input) {
  static MemoryFile file("fuzz.safetensors");
  file.fill(input);
  read(file.path());
  read_index(file.path());
}

}  // namespace accelerate::fuzz
