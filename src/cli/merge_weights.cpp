#include <accelerate/base/error.hpp>
#include <accelerate/base/text.hpp>
#include <accelerate/io/manifest.hpp>

#include <CLI/CLI.hpp>

#include "base/plain_text.hpp"
#include "cli/commands.hpp"

#include <algorithm>
#include <iostream>
#include <numeric>
#include <optional>

namespace accelerate::cli {
namespace {

namespace fs = std::filesystem;
namespace st = io::safetensors;

constexpr std::uint64_t kAtOnce = std::uint64_t{8} << 20;

/// Row-major bytes of a tensor whose dimensions lie in another order.
std::vector<std::byte> in_rows(const std::vector<std::byte>& bytes, const io::SavedTensor& tensor) {
  const std::size_t size = static_cast<std::size_t>(st::bits(tensor.dtype)) / 8;
  const std::size_t dims = tensor.shape.size();
  std::vector<std::int64_t> strides(dims);  // of each dimension, as the bytes lie
  std::int64_t stride = 1;
  for (std::size_t i = dims; i-- > 0;) {
    const auto d = static_cast<std::size_t>(tensor.order[i]);
    strides[d] = stride;
    stride *= tensor.shape[d];
  }
  std::vector<std::byte> rows(bytes.size());
  std::vector<std::int64_t> index(dims, 0);
  std::int64_t from = 0;
  for (std::size_t to = 0; to < rows.size(); to += size) {
    std::copy_n(
        bytes.begin() + static_cast<std::ptrdiff_t>(from) * static_cast<std::ptrdiff_t>(size), size,
        rows.begin() + static_cast<std::ptrdiff_t>(to));
    for (std::size_t d = dims; d-- > 0;) {
      from += strides[d];
      if (++index[d] < tensor.shape[d]) break;
      from -= strides[d] * tensor.shape[d];
      index[d] = 0;
    }
  }
  return rows;
}

void write_shard(const fs::path& path, std::vector<st::TensorInfo> infos,
                 const std::map<std::string, std::string>& metadata, const io::Manifest& manifest,
                 const std::string& group, io::PieceReader& reader) {
  st::Writer writer(path, st::Header(std::move(infos), metadata));
  std::vector<std::byte> buffer;
  for (const st::TensorInfo& info : writer.header().tensors()) {
    const io::SavedTensor& tensor = *manifest.find(group, info.name);
    const std::int64_t elements = tensor.elements();
    if (!tensor.order.empty()) {
      buffer.resize(tensor.bytes(elements));
      reader.read(tensor, 0, elements, buffer.data());
      writer.write(info, in_rows(buffer, tensor));
      continue;
    }
    const auto step =
        static_cast<std::int64_t>(kAtOnce * 8 / static_cast<std::uint64_t>(st::bits(tensor.dtype)));
    for (std::int64_t first = 0; first < elements; first += step) {
      const std::int64_t count = std::min(step, elements - first);
      buffer.resize(tensor.bytes(count));
      reader.read(tensor, first, count, buffer.data());
      writer.write(info, buffer, tensor.bytes(first));
    }
  }
  writer.finish();
}

void merge(const fs::path& checkpoint, const fs::path& out, const std::string& max_shard_size) {
  const fs::path in = io::replaced_folder(checkpoint);
  const std::uint64_t most = st::parse_size(max_shard_size);
  const io::Manifest manifest = io::Manifest::read(in);
  manifest.check_files(in);
  io::expect_no_checkpoint(out);  // before the checkpoint is verified, which may take long
  bool any = false;
  for (const auto& [group, tensors] : manifest.groups) {
    if (group != "model" && !group.starts_with("model_")) continue;
    // It becomes the beginning of file names.
    if (group != "model" && !text::to_int(std::string_view(group).substr(6))) {
      throw CheckpointError(
          text::concat("The checkpoint ", in.string(), " has weights of a model called '", group,
                       "', and models are called model, model_1 and so on."),
          in.string());
    }
    any = true;
    std::vector<bool> needed(manifest.files.size(), false);
    std::vector<st::TensorInfo> infos;
    for (const auto& [name, tensor] : tensors) {
      for (const io::Piece& piece : tensor.pieces) needed[piece.file] = true;
      infos.push_back({name, tensor.dtype, tensor.shape});
    }
    for (std::size_t f = 0; f < needed.size(); ++f) {
      if (!needed[f]) continue;
      std::vector<std::size_t> blocks(manifest.files[f].checksums.size());
      std::iota(blocks.begin(), blocks.end(), std::size_t{0});
      io::verify_blocks(in, manifest.files[f], blocks);
    }
    std::map<std::string, std::string> metadata{{"format", "pt"}};
    if (const auto aliases = manifest.aliases.find(group); aliases != manifest.aliases.end())
      metadata.insert(aliases->second.begin(), aliases->second.end());
    io::PieceReader reader(in, manifest);
    const auto files =
        st::write_shards(out, group, st::split(std::move(infos), most),
                         [&](const fs::path& path, const std::vector<st::TensorInfo>& shard) {
                           write_shard(path, shard, metadata, manifest, group, reader);
                         });
    for (const std::string& file : files)
      std::cout << "wrote " << text::printable((out / file).string()) << "\n";
  }
  if (!any) {
    throw CheckpointError("The checkpoint " + in.string() + " has no model in it.", in.string());
  }
}

struct Options {
  std::string in, out, max_shard_size = "10GB";
};

}  // namespace

void add_merge_weights(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "merge-weights",
      "Make one set of safetensors files, as Python reads them, of a checkpoint's weights");
  command->add_option("checkpoint", options->in, "the folder that save_state wrote")->required();
  command->add_option("output", options->out, "the folder to write to")->required();
  command->add_option("--max-shard-size", options->max_shard_size, "the most bytes of a file")
      ->capture_default_str();
  command->callback([options, &exit_code] {
    merge(options->in, options->out, options->max_shard_size);
    exit_code = 0;
  });
}

}  // namespace accelerate::cli
